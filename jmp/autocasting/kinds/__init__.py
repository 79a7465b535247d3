"""Equations that autocast goes inside, one file each; importing this package registers them."""

from jmp.autocasting.kinds import calls, custom_derivatives, scan, while_loop

__all__ = ["calls", "custom_derivatives", "scan", "while_loop"]
