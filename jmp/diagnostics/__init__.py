"""Diagnostics: what a program computes where, in which dtype, and why.

`precision_report` reads the plan of an autocast program; `assert_products_in` is for users' tests.
`gradient_report` and `range_report` say what underflows or overflows. `compare` measures the error
of a policy, `logprob_gap` how far training and generation lie apart. `find_float32` finds the
scopes that must stay in float32 or out of float8. `metrics` and `check_skips` watch a training run.
`find_nonfinite` names the operation that made a NaN. `memory_report` and `compare_memory` say what
a training step keeps.
"""

from jmp.diagnostics._comparison import Comparison, LogprobGap, compare, logprob_gap
from jmp.diagnostics._find_float32 import Float32Scopes, find_float32
from jmp.diagnostics._gradient_report import gradient_report
from jmp.diagnostics._memory_report import MemoryReport, compare_memory, memory_report
from jmp.diagnostics._nonfinite import NonFinite, find_nonfinite
from jmp.diagnostics._precision_report import PrecisionReport, assert_products_in, precision_report
from jmp.diagnostics._ranges import Range, RangeReport, range_report
from jmp.diagnostics._skipped_steps import check_skips, metrics

__all__ = [
    "Comparison",
    "Float32Scopes",
    "LogprobGap",
    "MemoryReport",
    "NonFinite",
    "PrecisionReport",
    "Range",
    "RangeReport",
    "assert_products_in",
    "check_skips",
    "compare",
    "compare_memory",
    "find_float32",
    "find_nonfinite",
    "gradient_report",
    "logprob_gap",
    "memory_report",
    "metrics",
    "precision_report",
    "range_report",
]
