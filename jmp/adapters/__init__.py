"""Adapters make an unmodified model of a framework compute by a policy; one framework a file.

`jmp.adapters.linen` and `jmp.adapters.nnx` need flax. Nothing is imported here, so that
each adapter asks for its own framework alone.
"""
