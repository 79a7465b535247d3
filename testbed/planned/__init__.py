"""Programs whose plans are written down, each for one thing that the planner decides.

`tests/autocasting/test_plans.py` compares the plans with those of `plan_listings/` beside it.
"""

from testbed.planned import basics, exact, islands, nested, values

MODULES = {"basics": basics, "exact": exact, "islands": islands, "nested": nested, "values": values}
