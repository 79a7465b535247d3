"""Long checks of what a short test cannot see; `python -m benchmarks.soak` runs them all.

A check is a module of this folder and a row in `CHECKS`. It has `add_options(parser)`, and
`run(arguments, console)`, which returns what is written into the results: plain JSON, of which
`passed` says whether the check found everything as it must be.
"""

import types

from benchmarks.soak import extremes, faults, float8, float8_programs, kills, mutants

CHECKS: dict[str, types.ModuleType] = {
    "extremes": extremes,
    "faults": faults,
    "float8": float8,
    "float8_programs": float8_programs,
    "kills": kills,
    "mutants": mutants,
}
