"""A small classifier of handwritten digits in plain NumPy: two hidden layers, softmax, cross-entropy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from mlfabric.errors import FabricError
from mlfabric.numerics import Vector

LAYERS = (64, 512, 256, 10)
TRAINING_IMAGES = 1500

Arrays = dict[str, Vector]


def load_digits(folder: Path) -> Path:
    """Write the 1,797 digits that scikit-learn carries into a file that every process reads; its path."""
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError:
        raise FabricError(
            "the demo trains on the digits that scikit-learn carries; pip install 'mlfabric[demo]'"
        ) from None
    images, labels = bundled(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    path = folder / "digits.npz"
    np.savez(path, images=(images[order] / 16).astype(np.float32), labels=labels[order].astype(np.int64))
    return path


class Digits:
    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            images, labels = file["images"], file["labels"]
        self.images, self.labels = images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]
        self.test_images, self.test_labels = images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:]


def first_weights(seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(LAYERS)):
        scale = np.sqrt(2 / fan_in)
        arrays[f"w{layer}"] = (rng.standard_normal((fan_in, fan_out)) * scale).astype(np.float32)
        arrays[f"b{layer}"] = np.zeros(fan_out, np.float32)
    return arrays


def _forward(weights: Arrays, images: Vector) -> list[Vector]:
    """The activations of every layer, the last one before the softmax."""
    activations = [images]
    for layer in range(len(LAYERS) - 1):
        sums = activations[-1] @ weights[f"w{layer}"] + weights[f"b{layer}"]
        activations.append(np.maximum(sums, 0) if layer < len(LAYERS) - 2 else sums)
    return activations


def gradient(weights: Arrays, images: Vector, labels: Vector) -> tuple[Arrays, float]:
    """Gradient and loss of one batch."""
    activations = _forward(weights, images)
    scores = activations[-1] - activations[-1].max(axis=1, keepdims=True)
    chances = np.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(chances[rows, labels] + 1e-12).mean())
    delta = chances
    delta[rows, labels] -= 1
    delta /= len(labels)
    arrays: Arrays = {}
    for layer in reversed(range(len(LAYERS) - 1)):
        arrays[f"w{layer}"] = activations[layer].T @ delta
        arrays[f"b{layer}"] = delta.sum(axis=0)
        if layer:
            delta = (delta @ weights[f"w{layer}"].T) * (activations[layer] > 0)
    return arrays, loss


def accuracy(weights: Arrays, images: Vector, labels: Vector) -> float:
    return float((_forward(weights, images)[-1].argmax(axis=1) == labels).mean())
