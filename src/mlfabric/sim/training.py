"""Real gradients under the virtual clock: a small classifier of digits, trained as the simulated job goes.

The network carries the scenario's model; what learns is the small one. Every policy is given the same few
learning rates at once and is judged by the first to reach the target, as each way of exchanging updates wants
its own. A sum of many gradients is one step at the rate of them all together, but of no more than
`LARGEST_SUM` of them, beyond which no rate is stable.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from mlfabric.demo.classifier import Arrays, Digits, accuracy, first_weights, gradient, load_digits
from mlfabric.numerics import Vector

RATES: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
BATCH: Final = 16
LARGEST_SUM: Final = 8.0
# Accuracy is looked at after so many gradients.
LOOK_EVERY: Final = 16


def read_digits() -> Digits:
    with tempfile.TemporaryDirectory() as folder:
        return Digits(load_digits(Path(folder)))


class DigitsLearner:
    """One model per learning rate; all see the same batches and the same delays."""

    def __init__(self, digits: Digits, target: float, seed: int) -> None:
        self._digits = digits
        self._target = target
        self._rng = np.random.default_rng(seed)
        self._models: list[Arrays] = [first_weights() for _ in RATES]
        self._before = list(self._models)  # the last step
        self._since = 0
        self.done = False  # the first model is at the target; the rest of the run only counts
        self.reached: list[float | None] = [None] * len(RATES)
        self.curves: list[list[tuple[float, float]]] = [[] for _ in RATES]

    def read(self, ahead: float = 0.0) -> list[Arrays]:
        # Steps replace arrays and never change them in place, so the old ones may be kept as they are.
        if self.done or ahead == 0:
            return [] if self.done else list(self._models)
        far = np.float32(ahead)
        with np.errstate(all="ignore"):
            return [
                {name: part + far * (part - before[name]) for name, part in model.items()}
                for model, before in zip(self._models, self._before, strict=True)
            ]

    def compute(self, model: list[Arrays], steps: int = 1) -> list[Arrays]:
        """By learning rate the sum of the gradients of `steps` steps, each from where the last one led."""
        if self.done or not model:
            return []
        batches = [self._rng.integers(0, len(self._digits.labels), BATCH) for _ in range(steps)]
        with np.errstate(all="ignore"):  # a rate that is too large ends in infinities, and is out then
            return [
                self._descend(weights, np.float32(rate), batches) if weights else {}
                for rate, weights in zip(RATES, model, strict=True)
            ]

    def _descend(self, weights: Arrays, rate: np.float32, batches: list[Vector]) -> Arrays:
        total: Arrays = {}
        for number, batch in enumerate(batches):
            images, labels = self._digits.images[batch], self._digits.labels[batch]
            step, _ = gradient(weights, images, labels)
            total = step if not total else {name: total[name] + part for name, part in step.items()}
            if number + 1 < len(batches):
                weights = {name: part - rate * step[name] for name, part in weights.items()}
        return total

    def apply(self, gradients: list[list[Arrays]], weights: list[float], now: float) -> None:
        if self.done:
            return
        whole = sum(weights)
        scale = min(whole, LARGEST_SUM) / whole
        self._before = list(self._models)
        for number, rate in enumerate(RATES):
            model = dict(self._models[number])
            if not model:
                continue
            with np.errstate(all="ignore"):
                for parts, weight in zip(gradients, weights, strict=True):
                    for name, part in (parts[number] if parts else {}).items():
                        model[name] = model[name] - np.float32(rate * weight * scale) * part
            self._models[number] = model
        self._since += len(gradients)
        if self._since >= LOOK_EVERY:
            self._since = 0
            self._look(now)

    def _look(self, now: float) -> None:
        for number, model in enumerate(self._models):
            if not model:
                continue
            if not all(np.isfinite(part).all() for part in model.values()):
                self._models[number] = {}
                continue
            with np.errstate(all="ignore"):
                right = accuracy(model, self._digits.test_images, self._digits.test_labels)
            self.curves[number].append((now, right))
            if right >= self._target:
                self.reached[number] = now
                self.done = True

    def best(self) -> tuple[float, float | None, tuple[tuple[float, float], ...]]:
        """(learning rate, seconds to the target, accuracy against time) of the rate that did best."""

        def merit(number: int) -> tuple[float, float]:
            at = self.reached[number]
            last = max((right for _, right in self.curves[number]), default=0.0)
            return (at if at is not None else float("inf"), -last)

        number = min(range(len(RATES)), key=merit)
        return RATES[number], self.reached[number], tuple(self.curves[number])
