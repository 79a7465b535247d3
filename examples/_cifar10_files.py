"""Reads CIFAR-10 from its standard python-version files."""

import pathlib
import pickle
from typing import Any

import numpy as np

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
FILES = (*TRAIN_FILES, "test_batch", "batches.meta")
WAY_OUT = (
    'Get "CIFAR-10 python version" from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it and '
    "give its folder as --data-dir; nothing is downloaded here."
)


class PlainUnpickler(pickle.Unpickler):
    """Reads arrays and plain containers, and refuses whatever else a pickle asks to be called."""

    arrays = np.empty(0).__reduce_ex__(2)[0]
    admitted = {
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "numpy.core.multiarray._reconstruct": arrays,
        "numpy._core.multiarray._reconstruct": arrays,
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.admitted:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")
        return self.admitted[f"{module}.{name}"]


def read_pickle(path: pathlib.Path, *keys: bytes) -> list[Any]:
    """Returns what the pickled dict in a file has under `keys`."""
    try:
        with path.open("rb") as file:
            content = PlainUnpickler(file, encoding="bytes").load()
        return [content[key] for key in keys]
    except Exception as error:  # bytes that are no such pickle raise nearly anything
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}); expected a pickled dict "
            f"with {' and '.join(map(str, keys))}. {WAY_OUT}"
        ) from error


def read_images(path: pathlib.Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns uint8[n, 32, 32, 3] images and int32[n] labels."""
    pixels, labels = map(np.asarray, read_pickle(path, b"data", b"labels"))
    known = np.isin(labels, np.arange(classes)).all()
    if pixels.dtype != np.uint8 or pixels.shape != (*labels.shape, 3072) or not known:
        raise ValueError(
            f"{path} holds data {pixels.dtype}{[*pixels.shape]} and labels {[*labels.shape]}; "
            f"expected uint8[n, 3072] and n labels from 0 to {classes - 1}. {WAY_OUT}"
        )
    # A row is all red, then all green, then all blue values of an image.
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.astype(np.int32)


def load_data(data_dir: pathlib.Path | None) -> tuple[dict[str, np.ndarray], int]:
    """Returns images, labels, mean and deviation of each colour; and how many classes there are."""
    if data_dir is None:
        raise ValueError(f"--data-dir is missing; expected {[*FILES]} there. {WAY_OUT}")
    folder = data_dir / FOLDER if (data_dir / FOLDER).is_dir() else data_dir
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {missing}; expected {[*FILES]} there. {WAY_OUT}")
    classes = len(*read_pickle(folder / "batches.meta", b"label_names"))
    parts = [read_images(folder / name, classes) for name in TRAIN_FILES]
    images, labels = map(np.concatenate, zip(*parts, strict=True))
    test_images, test_labels = read_images(folder / "test_batch", classes)
    return {
        "train_images": images,
        "train_labels": labels,
        "test_images": test_images,
        "test_labels": test_labels,
        "mean": images.mean(axis=(0, 1, 2)).astype(np.float32),
        "std": np.array([images[..., i].std() for i in range(3)], np.float32),
    }, classes
