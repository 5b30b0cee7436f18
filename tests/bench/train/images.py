"""Images that are easy to tell apart, in the form of Fashion-MNIST's files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def write_easy_images(folder: Path) -> None:
    """Ten classes that differ by where a bright square is."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("train", 640), ("t10k", 200)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[row * 8 : row * 8 + 7, column * 7 : column * 7 + 6] = 250
        with gzip.open(folder / f"{name}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack("!4I", 0x803, count, 28, 28) + images.tobytes())
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack("!2I", 0x801, count) + labels.tobytes())
