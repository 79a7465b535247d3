"""Diagnostics: what a program computes where, in which dtype, and why.

`precision_report` reads the plan of an autocast program; `assert_products_in` is for users' tests.
"""

from jmp.diagnostics._assertions import assert_products_in
from jmp.diagnostics._precision_report import PrecisionReport, precision_report

__all__ = ["PrecisionReport", "assert_products_in", "precision_report"]
