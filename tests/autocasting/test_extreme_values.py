"""Random programs at inputs from 2^-12 to 2^12, in float16 with a loss scale of 2^16."""

import pytest

from testbed import extreme_values
from tests.commands import in_full

PROGRAMS, AT_ONCE = 300, 20


@pytest.mark.usefixtures("users_rank_promotion")
@pytest.mark.parametrize("first", in_full(range(0, PROGRAMS, AT_ONCE), first=1))
@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")
def test_what_the_reference_can_autocast_can_or_skips(first):
    found = {}
    for number in range(first, first + AT_ONCE):
        case = extreme_values.case(number)
        errors = extreme_values.errors(case)
        if errors is not None and extreme_values.is_fault(case, errors):
            found[number] = (case, errors)
    assert not found
