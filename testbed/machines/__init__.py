"""Compiles programs for an H200 without a GPU, and programs that are compiled for it."""
