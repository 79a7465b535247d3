"""Reads a folder of text as bytes, some of them held out."""

import argparse
import pathlib
import sysconfig

import numpy as np

HELD_OUT = 0.1


def load_text(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes to train on and those held out.

    Raises: ValueError if there is too little text.
    """
    folder = arguments.data_dir or pathlib.Path(sysconfig.get_paths()["stdlib"])
    # Beside Python's own library lie packages that somebody installed: others on every machine.
    foreign = set() if arguments.data_dir else {"site-packages", "dist-packages"}
    if not folder.is_dir():
        raise ValueError(f"--data-dir {folder} is no folder; expected one that holds text files.")
    paths = [path for path in sorted(folder.rglob(arguments.pattern)) if path.is_file()]
    paths = [path for path in paths if not foreign & set(path.relative_to(folder).parts)]
    if not paths:
        raise ValueError(
            f"{folder} holds no files {arguments.pattern}, nor do the folders in it; give the "
            "folder of your text as --data-dir, and what its files are called as --pattern."
        )
    # In the alphabet's order the held-out end would be other kinds of text than the beginning.
    order = np.random.default_rng(0).permutation(len(paths))
    text = np.frombuffer(b"\n".join(paths[i].read_bytes() for i in order), np.uint8)
    held_out = int(HELD_OUT * len(text))
    # Random windows may overlap, but a text smaller than one batch of them is surely a mistake.
    window = arguments.length + 1
    needed = max(arguments.batch_size * window / (1 - HELD_OUT), window / HELD_OUT)
    if len(text) < needed + 1:
        raise ValueError(
            f"{folder} holds {len(text)} bytes in {len(paths)} files {arguments.pattern}; expected "
            f"{int(needed) + 1} or more for one batch of {arguments.batch_size} x {window} bytes "
            "beside what is held out. Give more text, or a smaller --batch-size or --length."
        )
    return text[: len(text) - held_out], text[len(text) - held_out :]
