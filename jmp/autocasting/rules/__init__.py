"""The op table's rows, one file per category; importing this package fills the registry."""

from jmp.autocasting.rules import as_written, follow, full, low, widest

__all__ = ["as_written", "follow", "full", "low", "widest"]
