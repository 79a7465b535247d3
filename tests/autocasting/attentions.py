"""What autocast makes of the attentions in a function."""

from jmp.autocasting._autocast import make_program
from jmp.autocasting._steps import Fused, Nested, Plan, Single
from testbed.machines.gpus import as_if_cudnn


def plans_of(plan):
    yield plan
    for step in plan.steps:
        for inside in step.insides if isinstance(step, Nested) else ():
            if isinstance(inside, Plan):
                yield from plans_of(inside)


def attentions(function, *args, policy="mixed_float16", **options):
    """Returns the fused attentions of a function, and why others are not fused."""
    with as_if_cudnn():
        plan = make_program(function, policy, attention="fused", **options).trace(args, {}).plan
    plans = list(plans_of(plan))
    fused = [step.lowering for p in plans for step in p.steps if isinstance(step, Fused)]
    singles = [step for p in plans for step in p.steps if isinstance(step, Single)]
    notes = [note for step in singles for note in step.notes]
    return fused, [note for note in notes if note.startswith("attention, left as it is")]
