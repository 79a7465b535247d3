"""The axes that pictures are drawn on. matplotlib is optional: imported when one is asked for."""

from typing import Any


def axes_or_new(axes: Any, caller: str, width: float, height: float) -> Any:
    """Returns `axes`, or those of a new figure of that size in inches if it is None.

    Raises: ImportError without matplotlib.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib, which is not installed: pip install 'jmp[examples]'."
        ) from error
    if axes is not None:
        return axes
    return plt.subplots(figsize=(width, height), layout="constrained")[1]
