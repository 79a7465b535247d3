"""Small data for the examples that train on files: images as those of CIFAR-10, and a text."""

import pickle
import struct

import numpy as np

FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]


class Python2Pickler(pickle._Pickler):
    """Writes bytes and text as Python 2 did, which wrote the original files."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        value = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_string


def write_images(folder, images=16):
    """Writes files as the originals are but for the number of images, which follow their labels."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in FILES:
        labels = random.integers(0, 10, images)
        noise = random.integers(0, 60, (images, 3072))
        content = {
            b"data": (noise + 19 * labels[:, None]).astype(np.uint8),
            b"labels": labels.tolist(),
        }
        if name == "batches.meta":
            content = {b"label_names": [b"class %d" % number for number in range(10)]}
        with (folder / name).open("wb") as file:
            Python2Pickler(file, protocol=2).dump(content)
        # The module's name before NumPy 2.
        written = (folder / name).read_bytes().replace(b"numpy._core.", b"numpy.core.")
        (folder / name).write_bytes(written)
    return folder


def write_text(folder):
    """Writes a small text in four files, one folder down, and a file that is no text."""
    (folder / "inner").mkdir(parents=True)
    for number in range(4):
        lines = [f"value_{i} = {i * (number + 1)}\n" for i in range(60)]
        (folder / "inner" / f"part{number}.txt").write_text("".join(lines))
    (folder / "noise.bin").write_bytes(bytes(10_000))
    return folder
