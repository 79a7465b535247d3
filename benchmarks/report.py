"""Turns the files of `results/` into figures, and the numbers and tables on all pages.

    python -m benchmarks.report

Run it after whatever renewed a file: `make bench`, or an example with `--output-dir results`.
"""

from benchmarks import figures, pages


def main() -> None:
    figures.draw()
    pages.write()
    print(f"Wrote the drawings in {figures.FOLDER}, and the numbers and tables on pages.")


if __name__ == "__main__":
    main()
