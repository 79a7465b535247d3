"""Islands: float32 arithmetic between half values.

An island is a connected set of fusible nodes of one depth that holds a *seed*: a node that requires
float32. It reads half values, computes in float32 inside one fusion, and writes half values
where a product follows. Islands come from the dataflow; no module's name is asked.

Most islands are recomputed: they keep only their half inputs, and are computed again in the
backward pass. Such are norms and softmax (XLA computes a whole row in one kernel) and expensive
functions (gelu): what they would keep is larger than what they read, and a fused island costs no
time beside its traffic. Others may keep their float32 values: small ones, and those that normalise
over the batch, where the backward pass needs two passes anyway.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value, downstream
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting._precision import NEVER_HALF
from jmp.autocasting._registry import Category
from jmp.autocasting._steps import Island, Read, Step
from jmp.dtypes import FLOAT32

# Islands whose largest value has fewer elements run plain: a recomputation would launch kernels to
# save less than 32 KiB.
# A small GPT's step moves 4 % fewer bytes in 11 % more kernels with 2**8 (width 64, 32 tokens), and
# 5 % more bytes in 8 % fewer kernels with 2**16 (width 128, 2 x 64 tokens).
SMALL = 1 << 14


def group(nodes: Iterable[Node], cuts: Set[Node]) -> list[list[Node]]:
    """Returns the connected components of fusible, non-neutral nodes of one depth.

    Args:
      nodes: in program order.
    """
    components: dict[Node | None, list[Node]] = {}  # of each node so far
    for node in nodes:
        components[node] = [node]
        # Places that are computed together do not join what is looked up there.
        values = node.inexact if node.rule.looks_up else node.inputs
        for producer in (value.producer for value in values):
            joined = None if producer in cuts else components.get(producer)
            if joined is not None and joined is not components[node]:
                joined += components[node]
                components.update(dict.fromkeys(components[node], joined))
    distinct = {id(component): component for component in components.values()}.values()
    return [sorted(component, key=lambda node: node.index) for component in distinct]


def plan_component(nodes: Sequence[Node], level: Level) -> list[Step]:
    """Returns the steps of a component: islands, with half operations between them.

    It also decides in which dtypes their results are stored (`Level.store`), so that steps are made
    in program order. A part of the component has reasons of its own: what stands in front of it is
    decided by then.

    Args:
      nodes: in program order, whose magnitudes are known.
      level: what is decided of values from outside.
    """
    why = reasons_for(nodes, level)
    single = half_between(nodes, why, level) if why else set()
    single |= factors_in_half(nodes, why, single, level) if why else set()
    if not single:
        return _front_and_island(nodes, why, level)
    steps: list[Step] = []
    for stage in stages(nodes, single):
        for part in group((node for node in stage if node not in single), level.facts.cuts):
            steps += _front_and_island(part, reasons_for(part, level), level)
        steps += [level.by_itself(node) for node in stage if node in single]
    return steps


# Why an operation that is no product is computed in float32, in words.

OFFSET = "beside the number that is added a half type has few digits left"
TAKEN_AWAY = "what is added is taken away again"
LARGE_INPUT = "an operand is a float32 input as large as the result"
DIVIDES = "it divides by an input, whose size nothing bounds"
UNBOUNDED = "nothing bounds the size of an operand: a half type may not hold it"


def why_region(node: Node) -> str:
    """Returns what the user said of the place a node stands in."""
    if node.region.is_decided:
        return "an inner autocast decided here"
    return "the user asked for float32 here" if node.region.in_float32 else ""


def reasons_for(nodes: Sequence[Node], level: Level) -> dict[Node, str]:
    """Returns the nodes of a component that require float32, each with the reason."""
    inside = set(nodes)
    return {node: why for node in nodes if (why := why_float32(node, inside, level))}


def why_float32(node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why a node requires float32.

    Args:
      inside: the nodes of its component, whose results are not decided yet.
      level: what is decided of values from outside.
    """
    rule = node.rule
    if node.region.in_float32:
        return why_region(node)
    if rule.category is Category.FULL:
        return rule.reason
    if rule.category is Category.AS_WRITTEN:
        return rule.reason if node.outputs[0].is_float32 else ""
    if rule.category is Category.WIDEST:  # else the user said otherwise
        if bounded := _beside_one(node):
            if not level.is_half(bounded):
                return "near its bound, 1 minus a bounded function has few digits left"
        elif node.is_square:
            return "a square, whose range a half type does not hold"
    for value in node.inputs:
        if why := _why_operand(value, node, inside, level):
            return why
    return why_digits(node, inside, level)


def _why_operand(value: Value, node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why an operand makes a node float32."""
    half, facts = level.half, level.facts
    if not value.is_float32:
        has_no_half = str(value.dtype) in NEVER_HALF and any(v.is_float32 for v in node.outputs)
        return f"an operand is {value.dtype}" if has_no_half else ""
    if value.producer in inside:
        return ""
    if value.constant is not None:
        return f"{half} does not hold the constant {value.constant:g}" if value.is_extreme else ""
    if value.is_extreme:
        return f"{half} does not hold an array of the program"
    if value in facts.dependent:
        return "an operand is float32" if level.dtypes[value] == FLOAT32 else ""
    if value.fits_half:
        return ""
    magnitude = level.magnitudes[value]
    if magnitude.exceeds_half or magnitude.degree < 0:
        return UNBOUNDED
    # A degree above zero: it grows with its inputs, and so is as large as these are.
    if node.name == "div" and value is node.inputs[1] and magnitude.degree > 0:
        return DIVIDES
    # A callback has no result.
    if value.source_size >= max((result.size for result in node.outputs), default=0):
        return LARGE_INPUT
    if facts.feeds.isdisjoint(node.outputs):
        return "an operand is a float32 input, and no product reads the result"
    return ""


def why_digits(node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why a sum or difference has few digits in half, beside an offset; "" if it has all.

    Args:
      inside: the component of the node.
    """
    rule = node.rule
    if rule.category is not Category.WIDEST or not rule.linear:
        return ""
    if level.magnitudes[node.outputs[0]].has_large_offset:
        return OFFSET
    return TAKEN_AWAY if _is_taken_away(node, inside, level) else ""


def _beside_one(node: Node) -> Value | None:
    """Returns the bounded function's result that a node adds to one, or subtracts; None for none.

    Near the end of its range nothing is left of that: float16's 1 - tanh(4) is off by a quarter,
    bfloat16's is zero. So are derivatives written, such as s * (1 - s).
    """
    results = [value.root for value in node.inputs if value.constant not in (1, -1)]
    if len(results) != 1 or not (node.rule.linear or node.name == "one_minus_square"):
        return None
    (result,), made_by = results, results[0].producer
    is_bounded = made_by is not None and made_by.rule.bounded and made_by.is_fusible
    return result if is_bounded else None


def _is_taken_away(node: Node, inside: Set[Node], level: Level) -> bool:
    """Returns whether an input that a node adds is subtracted elsewhere in its component.

    So data are denormalised and normalised again. Nobody subtracts a bias.
    """
    dependent = level.facts.dependent
    added = node.inputs if node.name == "add" and not dependent.isdisjoint(node.inputs) else ()
    return any(
        reader.name == "sub" and reader.inputs[1] is moved and reader in inside
        for value in added
        if value not in dependent and value.constant is None
        for moved in value.root.moved()
        for reader in moved.users
    )


# Half operations between two islands.


def half_between(nodes: Sequence[Node], why: Mapping[Node, str], level: Level) -> set[Node]:
    """Returns the large nodes of a component that are better computed by themselves, in half.

    An island hands its results on rounded. If another island reads one, it widens it again: XLA
    takes that pair of casts away, and writes float32 numbers. A half operation leaves no pair. So
    these are half operations, as they are by hand:

    - The sum of a residual stream, which was read in front of a barrier too, and a branch that ends
      in tanh, say. The next norm reads it, and the next such sum. Without this, 8 such layers move
      35 % more bytes, and hold 43 % more memory. It does not matter who reads the sum, so that a
      prefill, which needs only caches, is rounded as in training. A stream may begin with an input.
    - What the component and, behind a barrier, more than products read, such as a mean and a gate.

    Operands are rounded once more for it: not statistics, such as a mean, nor a bias, nor what
    nothing bounds.

    Args:
      nodes: of the component, in program order.
      why: reasons of those that require float32.
      level: what is decided of values from outside.
    """
    inside, found = set(nodes), set[Node]()
    restoring = {each for node in nodes for each in _restoring(node)}

    def may_be_half(value: Value, result: Value) -> bool:
        """Returns whether an operand loses nothing that matters if it is rounded once more."""
        is_whole = value.source_size >= result.size
        if value.producer in found:
            return True
        if value.producer in inside:
            return is_whole and not level.is_out_of_range(value, value.users)
        is_input = value not in level.facts.dependent and value.varies
        return not value.is_float32 or level.is_half(value) or (is_input and is_whole)

    def is_stream(node: Node) -> bool:
        """Returns whether a node adds to what was read in front of a barrier."""
        depths = level.facts.depths
        earlier = (u for v in node.inputs for u in v.users if depths.get(u, 0) < depths[node])
        return node.rule.linear and any(user in depths for user in earlier)

    def crosses(result: Value) -> bool:
        """Returns whether the component reads a result, and more than products behind a barrier."""
        others = [user for user in result.users if user not in inside]
        return len(others) < len(result.users) and not level.is_multiplied(result, others)

    for node in nodes:
        if (
            len(node.outputs) != 1
            or not node.rule.affine
            or why.get(node) not in (None, LARGE_INPUT)
            or node in restoring
        ):
            continue  # it would lose digits
        (result,) = node.outputs
        if result.size < _least(level) or not level.leaves_half(result, inside):
            continue  # nothing is saved
        if not is_stream(node) and not crosses(result):
            continue  # one fusion computes it and reads it
        if all(may_be_half(value, result) for value in node.inputs):
            found.add(node)
    return found


def _restoring(node: Node) -> list[Node]:
    """Returns a sum that adds what a difference took away, and the difference; none for others.

    Together they are what is left, rounded once, as the y of x + stop_gradient(y - x). A gate
    between them, as in x + gate * (y - x), leaves another number.
    """
    pairs = zip(node.inputs, reversed(node.inputs), strict=True) if node.name == "add" else ()
    found = [
        made_by
        for value, other in pairs
        if (made_by := value.root.producer) is not None
        and made_by.name == "sub"
        and made_by.inputs[1].root is other.root
    ]
    return [node, *found] if found else []


def _least(level: Level) -> int:
    """Returns from which size on a half operation saves something; only "auto" asks for sizes."""
    return SMALL if level.recompute == "auto" else 0


def factors_in_half(
    nodes: Sequence[Node], why: Mapping[Node, str], single: Set[Node], level: Level
) -> set[Node]:
    """Returns the bounded functions of derivatives whose slopes are no more than factors.

    Such is the slope (1 - y) * (1 + y) of y = tanh(x). Each order of derivatives reads it, behind
    products, and XLA would store the float32 y: a step of an MLP that is differentiated under
    autocast moves 28 % more bytes, and holds twice the memory. Computed from the half y, it has the
    digits that it has by hand, and where JAX differentiates an autocast function.

    Args:
      why: reasons of those that require float32.
      single: half operations of their component.
    """
    if max(v.size for node in nodes for v in node.outputs) < _least(level):
        return set()
    return {
        node
        for node in nodes
        if node.rule.bounded
        and not node.rule.wraps  # the slope of a cosine is a sine, and an angle has digits
        and node not in why
        and _jax_compat.is_differentiated(node.stack)
        and _is_factor(node.outputs[0], single, level)
    }


def _is_factor(result: Value, single: Set[Node], level: Level) -> bool:
    """Returns whether only multiplications read what a bounded result leaves of one.

    Sums and products follow, up to matrix products. A logarithm or a quotient would need the
    digits, and so may what reads an output.
    """

    def ends(user: Node) -> bool:
        # The gradient of a bias. Another sum may be a loss, or a logarithm may read it.
        is_gradient = user.name == "reduce_sum" and _jax_compat.is_backward(user.stack)
        return user.is_product or user in single or (is_gradient and not user.reduces_rows)

    def goes_on(user: Node) -> bool:
        rule, power = user.rule, user.params.get("y", 1)
        is_affine = rule.affine and (user.name != "div" or _is_scaling(user))
        is_sum = is_affine or user.name in ("neg", "reduce_sum")
        is_power = user.name in ("square", "integer_pow", "one_minus_square") and power > 0
        return user.is_fusible and (is_sum or is_power or rule.holds_operands)

    left = [user for v in result.moved() for user in v.users if _beside_one(user)]
    is_same = lambda user: user.rule.moves or _is_scaling(user)  # but for a number
    scaled = [v for node in left for v in downstream(node.outputs[0], is_same)]
    if not left or not all(u.rule.affine or u.rule.moves for v in scaled for u in v.users):
        return False
    values = set(downstream(result, lambda user: goes_on(user) and not ends(user)))
    is_inside = values.isdisjoint(level.graph.outputs)
    return is_inside and all(ends(user) or goes_on(user) for v in values for user in v.users)


def stages(nodes: Sequence[Node], single: Set[Node]) -> list[list[Node]]:
    """Returns the nodes of a component by how many single ones stand in front of them."""
    numbers: dict[Node, int] = {}
    found: list[list[Node]] = []
    for node in nodes:
        before = (value.producer for value in node.inputs if value.producer in numbers)
        number = max((numbers[p] + (p in single) for p in before if p is not None), default=0)
        numbers[node] = number
        found += [[] for _ in range(number + 1 - len(found))]
        found[number].append(node)
    return found


# Recomputation, and half operations in front of an island.


def _front_and_island(nodes: Sequence[Node], why: Mapping[Node, str], level: Level) -> list[Step]:
    """Returns an island, and the half operations in front of it; only these without a reason."""
    if not why:
        return [level.by_itself(node) for node in nodes]
    front, rest, is_recomputed = with_front(nodes, level)
    in_front = [level.by_itself(node) for node in front]
    return [*in_front, _island(rest, why, is_recomputed, level)]


def with_front(nodes: Sequence[Node], level: Level) -> tuple[Sequence[Node], Sequence[Node], bool]:
    """Returns the nodes of an island that run before it in half, the rest, and if it is recomputed.

    See `peel`. A bias in front of an island that is recomputed runs in half, even if no product
    reads its sum. Where an island is kept, is large and a product follows, only what is exact, or
    adds a bias, is better half: XLA would store the bias's cotangent in float32. An island that is
    linear throughout stays what it is.
    """
    is_recomputed = choose_recompute(nodes, level)
    if is_recomputed or (feed(nodes, level) and not is_small(nodes, level)):
        front, rest = peel(nodes, level, is_recomputed)
        added = {value for node in front for value in node.inputs} - level.facts.dependent
        gains = is_recomputed or any(map(_keeps_numbers, front)) or any(v.varies for v in added)
        if front and rest and gains:
            return front, rest, is_recomputed
    return [], nodes, is_recomputed


def choose_recompute(nodes: Sequence[Node], level: Level) -> bool:
    """Decides if an island is computed again, from its reductions and sizes (see `is_small`)."""
    asked, times, cuts = level.recompute, level.context.times, level.facts.cuts
    # Each order of derivatives would compute again what is part of one.
    if any(_jax_compat.is_differentiated(node.stack) for node in nodes):
        return False
    reduces_rows = any(node.rule.reduces and node.reduces_rows for node in nodes)
    expensive = [node for node in nodes if node.rule.expensive]
    if asked == "all":
        # An island that is computed again keeps what it reads. XLA would write looked-up rows for
        # it, which it otherwise looks up in each reader: a graph network moves 65 % more.
        producers = (value.producer for value in values_entering(nodes))
        reads_rows = any(node and node.rule.looks_up for node in producers)
        return reduces_rows or bool(expensive) or not reads_rows
    if asked == "none" or is_small(nodes, level):
        return False
    sums = [node for node in nodes if node.name == "reduce_sum"]
    if not cuts.isdisjoint(nodes):
        over_batch = any(0 in node.params["axes"] for node in sums if not node.reduces_rows)
        return not over_batch
    return reduces_rows or any(times * v.size >= SMALL for x in expensive for v in x.outputs)


def is_small(nodes: Iterable[Node], level: Level) -> bool:
    """Returns whether an island is too small to save much in another form.

    Inside a loop what is kept is kept for every turn, so that sizes count so many times.
    """
    return level.context.times * max(v.size for node in nodes for v in node.outputs) < SMALL


def feed(nodes: Iterable[Node], level: Level) -> bool:
    """Returns whether a product follows nodes: they are not the end of a network."""
    return any(not level.facts.feeds.isdisjoint(node.outputs) for node in nodes)


class Cone(NamedTuple):
    """A function that loses little in half: the nodes that compute it, and what enters."""

    nodes: frozenset[Node]
    entering: frozenset[Value]


def peel(nodes: Sequence[Node], level: Level, is_recomputed: bool) -> tuple[list[Node], list[Node]]:
    """Splits nodes off the entry of an island where no more values enter the rest then.

    A residual addition in front of a LayerNorm: two half values enter before, their sum after; and
    the sum is needed in half anyway, for the next addition. A bias in front of a gelu: as many
    values enter, and the cotangent is rounded before the bias adds it up, so that XLA need not
    store it in float32 for two readers. Without peeling a U-Net moves 18 % more bytes, a GPT 14 %.

    A concatenation of half values is stored once, and not widened by each reader: a Swin moves 2 %
    fewer bytes. So is a relu of a half value, if the island is kept: a DenseNet moves 2 % fewer.

    So is a tanh of a biased half product, if nothing else in the island is costly: in front of a
    float32 sum XLA would store it once more, in float32. A neural ODE moves 13 % fewer bytes.

    Args:
      nodes: of the island, in program order.
      level: what is decided of values from outside.
      is_recomputed: whether the island is.

    Returns: the nodes in front, to run in half, and the rest.
    """
    inside = set(nodes)
    # An addend of an attention's scores may be a mask over the keys.
    takes_biases = not (_is_softmax(nodes) and feed(nodes, level))
    costly = [node for node in nodes if node.rule.expensive or node.rule.reduces]
    bounded = costly if all(map(_is_bounded, costly)) else []
    cones: dict[Node, Cone | None] = {}
    front: frozenset[Node] = frozenset()
    for node in nodes:
        rule, cone = node.rule, None
        loses_little = rule.linear or rule.hands_on or _keeps_numbers(node) or node in bounded
        is_float32 = rule.category is Category.FULL or node.region.in_float32
        if loses_little and not is_float32 and not why_digits(node, inside, level):
            cone = _cone(node, cones, level, takes_biases)
        cones[node] = cone
        if cone is None:
            continue
        ends_here = [
            value
            for value in cone.entering
            if all(user in cone.nodes or user not in inside for user in value.users)
        ]
        is_relu = _keeps_numbers(node) and len(cone.nodes) == 1  # of a value that is half
        is_half = rule.linear or rule.rearranges or node in bounded
        is_half |= is_relu and not is_recomputed
        if is_half and sum(v.size for v in ends_here) >= node.outputs[0].size:
            front |= cone.nodes
    return [n for n in nodes if n in front], [n for n in nodes if n not in front]


def _keeps_numbers(node: Node) -> bool:
    """Returns whether a result holds the numbers of operands in other places, or the largest."""
    if node.insides:  # such as relu
        return all(_keeps_numbers(each) for inside in node.insides for each in inside.graph.nodes)
    return node.rule.rearranges or node.name in ("max", "min")


def _is_scaling(node: Node) -> bool:
    """Returns whether a node multiplies or divides by a number."""
    is_number = [value.constant is not None for value in node.inputs]
    return any(is_number) and (node.name == "mul" or (node.name == "div" and is_number[1]))


def _is_bounded(node: Node) -> bool:
    """Returns whether a result has enough digits in half: it is bounded, and only added up.

    It, and what it is added to, may be scaled by numbers and read by products. Anything else may
    take it away again, as `1 - y` does. Nor may its operand be read elsewhere, as by a silu.
    """

    def adds(user: Node) -> bool:
        is_sum = user.name in ("add", "add_any")
        return _is_scaling(user) or (is_sum and all(v.constant is None for v in user.inputs))

    sums = downstream(node.outputs[0], adds)
    is_added = all(user.is_product or adds(user) for value in sums for user in value.users)
    return node.rule.bounded and len(node.inputs[0].users) == 1 and is_added


def _cone(
    node: Node, cones: Mapping[Node, Cone | None], level: Level, takes_biases: bool
) -> Cone | None:
    """Returns the cone of a node of an island, given those of the nodes before; None for none."""
    nodes: set[Node] = {node}
    entering: set[Value] = set()
    for value in node.inputs:
        producer = value.producer
        if producer is not None and producer in cones:
            cone = cones[producer]
            if cone is None:
                return None
            nodes |= cone.nodes
            # A part of a value counts as a value by itself: the gates of an LSTM.
            entering |= {value} if producer.rule.selects else cone.entering
        elif value in level.facts.dependent and level.is_half(value):
            entering.add(value)
        elif not _goes_along(value, node, level, takes_biases):
            return None
    return Cone(frozenset(nodes), frozenset(entering))


def _goes_along(value: Value, node: Node, level: Level, takes_biases: bool) -> bool:
    """Returns whether a value may be rounded for a half operation: a bias, the zero of a relu.

    A mask, a row that no gradient flows into, such as a target of a loss, or an input as large as
    the result may not.
    """
    if value in level.facts.dependent:
        return False
    if value.constant is not None:
        return _keeps_numbers(node) and not value.is_extreme
    held = level.magnitudes[value]  # of `1 / scale`, say
    is_bias = value.is_vector and takes_biases and value.source_size < node.outputs[0].size
    return is_bias and value.varies and not (held.exceeds_half or held.degree < 0)


# Facts of an island that its step holds.


def _island(
    nodes: Sequence[Node], why: Mapping[Node, str], is_recomputed: bool, level: Level
) -> Island:
    """Returns the step, and decides how what leaves the island is stored."""
    outputs, own = set(level.graph.outputs), set(nodes)
    leaving = [v for n in nodes for v in n.outputs if v in outputs or not own.issuperset(v.users)]
    entering = values_entering(nodes)
    numbers = repeated_numbers(entering)
    # All readers of an input of a norm over rows, or of a loss, share one cast, so that its
    # cotangents add up in float32 (4 % of the gradient error of an RMSNorm transformer). XLA then
    # stores no float32 value of a loss (18 % of the bytes of two layers and the square of a silu).
    # Elsewhere each has its own, and the cotangents add up in half: XLA takes a pair of casts away,
    # and would store the float32 sum (2 % of a U-Net's bytes, 10 % of a GPT's).
    return Island(
        nodes=tuple(nodes),
        why={node: why[node] for node in nodes if node in why},
        is_recomputed=is_recomputed,
        shares_casts=is_recomputed and adds_up(nodes, level.facts.cuts),
        common_scopes=common_scopes_of(nodes),
        numbers=tuple(numbers),
        reads=tuple(Read(v, level.dtypes[v]) for v in entering if v not in numbers),
        writes=tuple(level.write_of(value, own) for value in leaving),
    )


def values_entering(nodes: Sequence[Node]) -> list[Value]:
    """Returns the values that nodes read from outside, each once."""
    inside = set(nodes)
    values = dict.fromkeys(value for node in nodes for value in node.inputs)
    return [v for v in values if v.producer not in inside and v.literal is None]


def repeated_numbers(values: Iterable[Value]) -> list[Value]:
    """Returns the large arrays of one number among those that enter, such as the zeros of an elu.

    The island makes them itself: a recomputation would read them from memory.
    """
    return [
        value
        for value in values
        if value.constant is not None
        and value.is_float32
        and not has_symbols(shape_of(value))
        and not _jax_compat.has_named_axes(value)
        and value.size >= SMALL
    ]


def common_scopes_of(nodes: Sequence[Node]) -> int:
    """Returns how many name scopes all nodes stand in together."""
    stacks = [node.stack.stack for node in nodes]
    count = len(stacks[0])
    while any(stack[:count] != stacks[0][:count] for stack in stacks):
        count -= 1
    return count


def adds_up(nodes: Iterable[Node], cuts: Set[Node]) -> bool:
    """Returns whether an island adds up rows, as a LayerNorm, or all its numbers, as a loss.

    A softmax does not count, nor does an island that ends in a cut.
    """
    sums = any(n.reduces_rows or n.outputs[0].size == 1 for n in nodes if n.name == "reduce_sum")
    return sums and cuts.isdisjoint(nodes) and not _is_softmax(nodes)


def _is_softmax(nodes: Iterable[Node]) -> bool:
    return any(node.name == "reduce_max" and node.reduces_rows for node in nodes)
