"""Adapters make an unmodified model of a framework compute by a policy; one framework a file.

They rest on `jmp.autocast`. `linen` and `nnx` need flax, `equinox` and `haiku` theirs. Nothing
is imported here, so that each adapter asks for its own framework alone.
"""
