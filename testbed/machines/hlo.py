"""Reads scheduled HLO programs: which kernels they launch, and the bytes that these move.

How the figures are counted. A *computation* is a list of *instructions*; the program starts in the
one marked ENTRY.

* An instruction that launches work is one kernel: it reads each distinct operand once and writes
  its result once. A fusion is one kernel, whatever it holds. Caches, workspaces of cuBLAS and cuDNN
  and the insides of library calls are not counted. A call of cuDNN's attention for a gradient reads
  and writes the statistics of the softmax, a number a row, and never the matrix of probabilities;
  how large its workspace is the compiler asks the device alone, so that `temp_bytes` is without it.
* A fusion that only slices or gathers from an operand reads what it takes, not the whole, also
  behind casts and arithmetic; one that updates a slice of an operand in place writes that slice
  only. A scatter counts whole.
* Parameters, constants, tuples, bitcasts and the like name bytes already there: they are free.
* The condition and the body of a loop count once, not once a turn.
* One branch of a conditional runs: `bytes_moved` takes the one that moves most. The counts of
  instructions are over the whole text, all branches included.
* An asynchronous pair is one kernel: `-start` reads the operands, or a slice of one, and `-done`
  writes the result.
* Arrays in a TPU's vector memory, which XLA fetches before a kernel runs, are free: only the fetch
  reads them from memory. XLA's own count of bytes counts the fetch and then the kernel.
"""

import dataclasses
import itertools
import re

NAMES_FOR_BYTES = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency",
    "opt-barrier", "partition-id", "replica-id",
})  # fmt: skip
CALLERS = frozenset({"while", "conditional", "call"})
SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# What a fusion computes of one operand element by element, only where its result is needed.
POINTWISE = frozenset({
    "abs", "add", "and", "compare", "convert", "divide", "exponential", "log", "maximum", "minimum",
    "multiply", "negate", "or", "power", "reduce-precision", "rsqrt", "select", "sqrt", "subtract",
    "tanh",
})  # fmt: skip


def count(text: str) -> dict[str, int]:
    """Returns `bytes_moved`, `kernels`, `copies` and `conditionals` of a scheduled HLO program."""
    computations, entry = parse_program(text)
    opcodes = [
        instruction.opcode
        for name in _scheduled(entry, computations)
        for instruction in computations[name]
    ]
    return {
        "bytes_moved": _bytes_moved_by(_launched(entry, computations)),
        "kernels": sum(_launches(opcode) and not opcode.endswith("-done") for opcode in opcodes),
        "copies": sum(opcode in ("copy", "copy-start") for opcode in opcodes),
        "conditionals": opcodes.count("conditional"),
    }


# Reading the text.


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation, such as `%sum = f32[8]{0} fusion(%a, %b), calls=%add`.

    Here `shape` is the text `f32[8]{0}`, `operands` the names `("a", "b")`, and `attributes` all
    the text after the opcode.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


Computations = dict[str, list[Instruction]]

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
REFERENCE = re.compile(r"%([\w.\-]+)")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
BITS_IN_NAME = re.compile(r"(?:bf|f|s|u|c)(\d+)")
BITS_IN_LAYOUT = re.compile(r"E\((\d+)\)")
CALLED = re.compile(
    r"(?:to_apply|condition|body|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
FUSED = re.compile(r"calls=%([\w.\-]+)")
SLICE = re.compile(r"slice=\{[^}]*\}")
IN_VECTOR_MEMORY = "S(1)"  # in a layout
ALLOCATES = re.compile(r'custom_call_target="AllocateBuffer"')
LIBRARY_CALL = re.compile(r'custom_call_target="__cu(?:blas|dnn)')


def parse_program(text: str) -> tuple[Computations, str]:
    """Returns the instructions of every computation by its name, and the name of the ENTRY."""
    computations: Computations = {}
    current: list[Instruction] = []
    entry = None
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif NAME.match(line):
            current.append(parse_instruction(line))
    if entry is None:
        raise ValueError(
            "Got a text without an ENTRY computation; expected an HLO program. "
            f"The text starts with {text[:80]!r}."
        )
    return computations, entry


def parse_instruction(line: str) -> Instruction:
    """Reads one line; parentheses nest in tuples, layouts and operands, so they are matched."""
    name = NAME.match(line)
    if name is None:
        raise ValueError(f"Got {line!r}; expected an instruction such as '  %x = f32[] add(...)'.")
    start = name.end()
    shape_end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = OPCODE.match(line, shape_end)
    if opcode is None:
        raise ValueError(
            f"Got {line!r}; expected an opcode after the shape {line[start:shape_end]}."
        )
    operands_end = _closing(line, opcode.end() - 1)
    return Instruction(
        name=name[1],
        shape=line[start:shape_end],
        opcode=opcode[1],
        operands=tuple(REFERENCE.findall(line[opcode.end() : operands_end])),
        attributes=line[opcode.end() :],
    )


def _closing(line: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(line)):
        depth += (line[position] == "(") - (line[position] == ")")
        if depth == 0:
            return position + 1
    raise ValueError(f"Got a line whose parentheses do not close: {line!r}.")


def array_bytes(shape: str) -> list[int]:
    """Returns the bytes of every array in a shape, tuples flattened, in order.

    >>> array_bytes("(f16[2,3]{1,0}, pred[], /*index=2*/s4[5]{0:E(4)}, token[])")
    [12, 1, 3, 0]
    """
    sizes = []
    for dtype, dimensions, layout in ARRAY.findall(shape):
        elements = 1
        for dimension in dimensions.split(","):
            elements *= int(dimension.lstrip("<=") or 1)
        sizes.append((elements * _bits(dtype, layout) + 7) // 8)
    return sizes


def bytes_in_memory(shape: str) -> list[int]:
    """Returns the same as `array_bytes`, with nothing for arrays in a TPU's vector memory.

    >>> bytes_in_memory("(f32[2]{0}, f32[2]{0:T(128)S(1)})")
    [8, 0]
    """
    layouts = (layout for _, _, layout in ARRAY.findall(shape))
    sizes = zip(array_bytes(shape), layouts, strict=True)
    return [0 if IN_VECTOR_MEMORY in layout else size for size, layout in sizes]


def _bits(dtype: str, layout: str) -> int:
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    width = BITS_IN_NAME.match(dtype)
    if width is None:
        raise ValueError(
            f"Got an array of dtype {dtype!r}; expected one of HLO's, such as 'f16', 's32', 'pred'."
        )
    # The layout E(4) packs two elements of four bits in a byte; without it each takes a byte.
    packed = BITS_IN_LAYOUT.search(layout)
    return int(packed[1]) if packed else max(8, int(width[1]))


# Counting.


def _launches(opcode: str) -> bool:
    return opcode not in NAMES_FOR_BYTES and opcode not in CALLERS


def called_by(instruction: Instruction) -> list[str]:
    """Returns the names of the computations a loop, a conditional or a call runs."""
    if instruction.opcode not in CALLERS:
        return []
    return REFERENCE.findall(" ".join(CALLED.findall(instruction.attributes)))


def _scheduled(computation: str, computations: Computations) -> list[str]:
    """Returns `computation` and what it calls, each as often as it is called from the text."""
    names = [computation]
    for instruction in computations[computation]:
        for name in called_by(instruction):
            names += _scheduled(name, computations)
    return names


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that launches work.

    Attributes:
      instruction: as in the text; of an asynchronous pair both halves are here.
      operands: the shapes of its operands, in order.
      bytes_moved: bytes read and written.
    """

    instruction: Instruction
    operands: tuple[str, ...]
    bytes_moved: int


def kernels(text: str) -> list[Kernel]:
    """Returns what a scheduled HLO program launches; of branches those of the one that moves most.

    The kernels of a loop are there once.
    """
    computations, entry = parse_program(text)
    return _launched(entry, computations)


def bytes_of_turns(text: str) -> int:
    """Returns the bytes that the outermost loops of a scheduled HLO program move, one turn each."""
    computations, entry = parse_program(text)
    bodies = [
        name
        for instruction in computations[entry]
        if instruction.opcode == "while"
        for name in called_by(instruction)
    ]
    return sum(_bytes_moved_by(_launched(name, computations)) for name in bodies)


def _launched(computation: str, computations: Computations) -> list[Kernel]:
    instructions = computations[computation]
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    found: list[Kernel] = []
    for instruction in instructions:
        called = [_launched(name, computations) for name in called_by(instruction)]
        if instruction.opcode == "conditional":
            found += max(called, key=_bytes_moved_by)
        elif _launches(instruction.opcode):
            if instruction.opcode == "fusion":
                (fused,) = FUSED.findall(instruction.attributes)
                moved = _bytes_moved_by_fusion(instruction, computations[fused])
            else:
                moved = _bytes_moved_by_kernel(instruction, shapes)
            operands = tuple(shapes[name] for name in instruction.operands)
            found.append(Kernel(instruction, operands, moved))
        else:
            found += itertools.chain.from_iterable(called)
    return found


def _bytes_moved_by(launched: list[Kernel]) -> int:
    return sum(kernel.bytes_moved for kernel in launched)


def _bytes_moved_by_kernel(instruction: Instruction, shapes: dict[str, str]) -> int:
    written = bytes_in_memory(instruction.shape)
    if instruction.opcode.endswith("-done"):
        return sum(written)
    read = sum(sum(bytes_in_memory(shapes[name])) for name in set(instruction.operands))
    if instruction.opcode in ("slice-start", "dynamic-slice-start"):
        return min(read, array_bytes(instruction.shape)[1])
    if instruction.opcode.endswith("-start"):
        return read
    if ALLOCATES.search(instruction.attributes):
        return 0
    if LIBRARY_CALL.search(instruction.attributes) and len(written) > 1:
        written.pop()  # the last result of a cuBLAS or cuDNN call is its workspace
    return read + sum(written)


def _bytes_moved_by_fusion(fusion: Instruction, fused: list[Instruction]) -> int:
    """Counts the parameters and results of a fusion, save what its slices leave untouched."""
    sizes = {instruction.name: sum(array_bytes(instruction.shape)) for instruction in fused}
    producers = {instruction.name: instruction for instruction in fused}

    def parts_read(name: str) -> dict[str, float]:
        """Returns the parts of an array that are read, by their place, as fractions of it."""
        parts: dict[str, float] = {}
        users = [user for user in fused if name in user.operands]
        for user in users:
            if user.opcode == "bitcast" or user.opcode in POINTWISE:
                parts |= parts_read(user.name)
            elif user.opcode in SLICES and name not in user.operands[1:]:
                place = SLICE.search(user.attributes)
                parts[place[0] if place else user.name] = sizes[user.name] / sizes[name]
            elif not updates_in_place(user) or name in user.operands[1:]:
                parts["whole"] = 1
        return parts if users else {"whole": 1}

    def bytes_read(parameter: Instruction) -> int:
        size = sum(bytes_in_memory(parameter.shape))
        return size and round(size * min(1, sum(parts_read(parameter.name).values())))

    def updates_in_place(instruction: Instruction) -> bool:
        return target_of(instruction) is not None

    def target_of(instruction: Instruction) -> Instruction | None:
        """Returns the parameter of which an instruction updates a slice in place."""
        if instruction.opcode != "dynamic-update-slice":
            return None
        target = producers[instruction.operands[0]]
        while target.opcode == "bitcast":
            target = producers[target.operands[0]]
        return target if target.opcode == "parameter" else None

    read = sum(bytes_read(parameter) for parameter in fused if parameter.opcode == "parameter")
    untouched = sum(
        sizes[update.name] - sizes[update.operands[1]]
        for update in fused
        if (target := target_of(update))
        and all(sum(bytes_in_memory(shape)) for shape in (target.shape, update.shape))
    )
    return read + sum(bytes_in_memory(fusion.shape)) - untouched
