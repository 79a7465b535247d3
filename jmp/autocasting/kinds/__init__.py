"""Equations that autocast goes inside, by sort; importing this package registers them."""

from jmp.autocasting.kinds import calls, custom_derivatives, loops

__all__ = ["calls", "custom_derivatives", "loops"]
