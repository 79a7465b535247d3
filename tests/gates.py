"""Bounds of what compiled programs cost."""


def assert_at_most(name, measured, bounds):
    """Prints figures, which pytest shows of a test that fails, and compares each with its bound."""
    print(f"{name}: " + " ".join(f"{figure:.3f}" for figure in measured))
    for figure, bound in zip(measured, bounds, strict=True):
        assert figure <= bound, f"{measured} exceeds {bounds}"
