"""Adam on plain arrays: step by step what torch's makes, for whoever holds weights without a module.

It keeps its arrays from step to step, since a server of a contender steps between two messages and should not
lose that time to fresh memory.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from mlfabric.bench.train.settings import SECOND_MOMENT, StepSize
from mlfabric.numerics import Vector

EPSILON: Final = 1e-8  # torch's


class ArrayAdam:
    def __init__(self, size: StepSize, elements: int) -> None:
        self._size = size
        self._first, self._second, self._scratch = np.zeros((3, elements), np.float32)
        self._steps = 0

    def step(self, gradient: Vector, scale: float = 1.0) -> Vector:
        """What to add to the weights, in an array of its own; `scale` is of the learning rate alone."""
        self._steps += 1
        first, second, scratch = self._first, self._second, self._scratch
        beta = self._size.momentum
        first *= np.float32(beta)
        first += np.multiply(gradient, np.float32(1 - beta), out=scratch)
        np.multiply(gradient, gradient, out=scratch)
        scratch *= np.float32(1 - SECOND_MOMENT)
        second *= np.float32(SECOND_MOMENT)
        second += scratch
        np.sqrt(second, out=scratch)
        scratch *= np.float32(1 / math.sqrt(1 - SECOND_MOMENT**self._steps))
        scratch += np.float32(EPSILON)
        displacement: Vector = first / scratch
        displacement *= np.float32(-self._size.lr * scale / (1 - beta**self._steps))
        return displacement
