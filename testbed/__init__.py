"""Programs and compilers that tests and benchmarks share."""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]  # of the repository
