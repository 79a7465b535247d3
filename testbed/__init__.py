"""Programs and compilers that tests and benchmarks share."""
