"""Figures that are read on a phone too."""

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# On a phone of 390 pixels a page has 358 for a figure. There 8 points of 4.4 inches are 9 pixels.
WIDTH, FONT = 4.4, 8


def narrow(height: float, label: str) -> tuple[Any, Any]:
    """Returns a figure of `height` inches, and its axes with a grid and what x is."""
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    axes.tick_params(labelsize=FONT)
    axes.set_xlabel(label, fontsize=FONT, x=1, ha="right")
    axes.grid(axis="x", alpha=0.3)
    return figure, axes
