"""Equations that autocast goes inside, one file each; importing this package registers them."""

from jmp.autocasting.kinds import calls, conditional, custom_derivatives, scan, while_loop

__all__ = ["calls", "conditional", "custom_derivatives", "scan", "while_loop"]
