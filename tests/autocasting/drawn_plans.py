"""What autocast makes of some 400 drawn programs, as it is written down.

`plan_listings/` shows the plans of programs that were written to show one thing. These are drawn,
so that what no listing shows does not change unseen: a line has the equations and the casts of what
autocast emits, those of its gradient, and a digest of both and of the precision report.

`python -m tests.autocasting.drawn_plans` writes `drawn_plans.txt` anew. To see what has changed in
the programs themselves: `python -m benchmarks.plan_sample compare --base main`.
"""

import functools
import hashlib
import itertools
import pathlib
import re
from collections.abc import Iterator

from benchmarks import plan_sample
from benchmarks._plan_sources import Drawn, Program, drawn_programs
from benchmarks._program_texts import names_of_package, without_lines, without_names
from testbed import random_attentions

LIST = pathlib.Path(__file__).with_suffix(".txt")
# Sources that draw no parameters of models: a tenth of a second for each program.
SOURCES = "planned operations chains graphs nests sharded positions float8".split()
COUNT, SEED = 300, 7
TOGETHER = 10  # in one test
# Of the numbers of an array that a program holds: what is drawn at random differs by processor.
NUMBERS = re.compile(r"#[0-9a-f]{12}\b")
# Of random attentions: their policy, numbers and length.
RANDOM = {"gpu": ("mixed_float16", range(60), 14), "tpu": ("mixed_bfloat16", range(60, 100), 128)}


@functools.cache
def drawn() -> list[Drawn]:
    """The programs in their order, and then random attentions."""
    found = list(drawn_programs(COUNT, SEED, SOURCES))
    for platform, (policy, numbers, length) in RANDOM.items():
        options = {"attention": "fused", "platform": platform}
        floats, masks = random_attentions.arrays(length)
        for number in numbers:
            program = Program(random_attentions.attention(number), (*floats, *masks))
            source = f"random-attention-{platform}"
            found.append(Drawn(source, str(number), program, policy, options, True))
    return found


def parts() -> list[str]:
    """The parts that tests take: a source, and the number of its first program."""
    counted = itertools.groupby(drawn(), lambda program: program.source)
    return [
        f"{source} {first}"
        for source, programs in counted
        for first in range(0, len(list(programs)), TOGETHER)
    ]


def lines_of(part: str) -> Iterator[str]:
    """The lines of a part's programs, as they are now."""
    source, first = part.split()
    programs = [program for program in drawn() if program.source == source]
    names = set(names_of_package())
    for program in programs[int(first) : int(first) + TOGETHER]:
        record = plan_sample.record(program)
        texts = [without_lines(without_names(text, names)) for text in record.values()]
        digest = hashlib.sha256(NUMBERS.sub("", "\0".join(texts)).encode()).hexdigest()[:8]
        sizes = [f"{text.count(' = ')} {text.count(' = convert_')}" for text in texts[:2]]
        yield f"{source} {program.name}: {', '.join(sizes)}, {digest}"


def written() -> dict[str, list[str]]:
    """The lines that are written down, by part."""
    blocks = LIST.read_text().rstrip("\n").split("\n\n")
    return {title: lines for title, *lines in (block.split("\n") for block in blocks)}


if __name__ == "__main__":
    blocks = ("\n".join([part, *lines_of(part)]) for part in parts())
    LIST.write_text("\n\n".join(blocks) + "\n")
