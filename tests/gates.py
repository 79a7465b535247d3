"""Bounds of what compiled programs cost."""

from testbed.machines.training_steps import compile_step, ratios


def assert_at_most(name, measured, bounds):
    """Prints figures, which pytest shows of a test that fails, and compares each with its bound."""
    print(f"{name}: " + " ".join(f"{figure:.3f}" for figure in measured))
    for figure, bound in zip(measured, bounds, strict=True):
        assert figure <= bound, f"{measured} exceeds {bounds}"


def assert_leaner_than_by_hand(model, sizes, at_most, machine="h200", half="float16"):
    """Compares a step under autocast with the step by hand; returns the programs of both.

    `at_most` are bounds of the bytes moved, of temporary memory and of kernels, as ratios.
    """
    by_hand, autocast = (
        compile_step(model, way, sizes, machine, half) for way in ("by hand", "autocast")
    )
    name = f"{machine} {model.name}: bytes, temp, kernels"
    assert_at_most(name, ratios(autocast, by_hand), at_most)
    return by_hand, autocast
