"""What is trained: a small convolutional network on Fashion-MNIST, with the batches every contender sees.

The model has 1.27 million parameters, most of them in one layer, so that a gradient is 5 MB and yet takes six
milliseconds of one processor: eight workers share two of them. It is normalised by image, never by batch: no
statistics travel, and steps may be as large as the noise of the gradients allows.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from mlfabric.errors import FabricError
from mlfabric.numerics import Vector

DEBIAN_FOLDER: Final = Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = 0.2860, 0.3530  # of the training images' pixels
# More would not stay in memory between passes: with 500, half of the time goes into fresh pages.
EVALUATE_AT_ONCE: Final = 100
QUARTERS: Final = 4  # of the test images


class Fashion:
    """Images as bytes, scaled when they are used, and labels."""

    def __init__(self, folder: Path) -> None:
        self.images = _images(folder / "train-images-idx3-ubyte.gz")
        self.labels = _labels(folder / "train-labels-idx1-ubyte.gz")
        self.test_images = _images(folder / "t10k-images-idx3-ubyte.gz")
        self.test_labels = _labels(folder / "t10k-labels-idx1-ubyte.gz")


def find_data(given: Path | None) -> Path:
    """Where Fashion-MNIST is; a sentence says how to get it."""
    folder = given or DEBIAN_FOLDER
    if not (folder / "train-images-idx3-ubyte.gz").exists():
        raise FabricError(
            f"{folder} does not hold Fashion-MNIST; install Debian's package dataset-fashion-mnist, "
            "or name a folder with its four files by --data"
        )
    return folder


class ChannelsLast(torch.nn.Module):  # type: ignore[misc]
    """The same images in memory pixel by pixel: a gradient takes a tenth less, by faster pooling."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.contiguous(memory_format=torch.channels_last)


def make_model(seed: int) -> Any:
    """The same first weights for the same seed."""
    nn = torch.nn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            ChannelsLast(),
            nn.MaxPool2d(2),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.MaxPool2d(2),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1568, 800),
            nn.LayerNorm(800),
            nn.ReLU(),
            nn.Linear(800, 10),
        )


class Batches:
    """A worker's batches: all images in an order of its own, again and again, whoever carries its updates."""

    def __init__(self, seed: int, worker: int, images: int, batch: int) -> None:
        self._seed, self._worker = seed, worker
        self._images, self._batch = images, batch
        self._epoch = -1
        self._order: Vector = np.zeros(0, np.int64)

    def indices(self, step: int) -> Any:
        in_epoch = self._images // self._batch
        epoch, place = divmod(step, in_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self._seed, self._worker, epoch)).permutation(self._images)
            self._epoch = epoch
        return torch.from_numpy(self._order[place * self._batch : (place + 1) * self._batch])


def loss_of(module: Any, data: Fashion, indices: Any) -> Any:
    return torch.nn.functional.cross_entropy(module(_scaled(data.images[indices])), data.labels[indices])


def _scaled(images: Any) -> Any:
    return images.float().div_(255 * DEVIATION).sub_(MEAN / DEVIATION)


def flat_weights(model: Any) -> Vector:
    """All parameters in one array of their own."""
    with torch.no_grad():
        weights: Vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    return weights


def load_weights(model: Any, weights: Vector) -> None:
    at = 0
    with torch.no_grad():
        for parameter in model.parameters():
            piece = torch.from_numpy(weights[at : at + parameter.numel()])
            parameter.copy_(piece.view_as(parameter))
            at += parameter.numel()


def accuracy(model: Any, data: Fashion, quarter: int | None = None) -> float:
    """The share of test images it gets right; of a quarter of them, every fourth: the first are easier."""
    chosen = slice(None) if quarter is None else slice(quarter, None, QUARTERS)
    pictures, labels = data.test_images[chosen], data.test_labels[chosen]
    right = 0
    with torch.no_grad():
        for at in range(0, len(labels), EVALUATE_AT_ONCE):
            found = model(_scaled(pictures[at : at + EVALUATE_AT_ONCE])).argmax(1)
            right += int((found == labels[at : at + EVALUATE_AT_ONCE]).sum())
    return right / len(labels)


def _images(path: Path) -> Any:
    return torch.from_numpy(np.frombuffer(_read(path), np.uint8, offset=16).reshape(-1, 1, 28, 28).copy())


def _labels(path: Path) -> Any:
    return torch.from_numpy(np.frombuffer(_read(path), np.uint8, offset=8).astype(np.int64))


def _read(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read()
    except OSError as error:
        raise FabricError(f"can't read {path}: {error}") from None
