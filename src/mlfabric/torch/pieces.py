"""An optimizer whose parameters are stepped part by part, where parts of the flat model come one by one.

Optimizers that work element by element do not mind where a tensor is cut. So each part of the flat vector has
an optimizer of its own, of the same kind and groups, whose parameters are the pieces of the model's that lie
in that part. The user's own instance keeps the settings, which schedules change; it gets the state when
somebody asks for it (`hand_over`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlfabric.numerics import Vector
from mlfabric.torch.flat import FlatModel
from mlfabric.torch.optimizers import empty_like
from mlfabric.torch.plainstate import read_state, set_state


@dataclass(frozen=True, slots=True)
class _Part:
    start: int  # of the trained elements
    stop: int
    optimizer: torch.optim.Optimizer
    pieces: list[torch.Tensor]  # in the flat vector's order


class PieceOptimizer:
    """`cuts` are the bounds of the parts, of which the trained elements are the first."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, flat: FlatModel, vectors: int, cuts: Sequence[int]
    ) -> None:
        self._own, self._flat, self._vectors = optimizer, flat, vectors
        bounds = [min(cut, flat.trained) for cut in cuts]
        self._parts = [self._cut_out(start, stop) for start, stop in itertools.pairwise(bounds)]
        self.take_over(*read_state(optimizer, flat.parameters, vectors, flat.trained))

    def _cut_out(self, start: int, stop: int) -> _Part:
        places: dict[int, torch.Tensor] = {}  # by parameter
        at = 0
        for parameter in self._flat.parameters:
            first, last = max(at, start), min(at + parameter.numel(), stop)
            if first < last:
                places[id(parameter)] = self._flat.values[first:last]
            at += parameter.numel()
        groups = [[places[id(p)] for p in group["params"] if id(p) in places] for group in self._groups()]
        return _Part(start, stop, empty_like(self._own, groups), list(places.values()))

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._own.param_groups
        return groups

    def step(self, part: int, gradient: Vector) -> None:
        """Step a part by its gradient; the settings are those that the user's instance has now."""
        held = self._parts[part]
        gradients = torch.from_numpy(gradient)
        for group, own in zip(held.optimizer.param_groups, self._groups(), strict=True):
            group.update({key: own[key] for key in self._own.defaults if key in own})
        at = 0
        for piece in held.pieces:
            piece.grad = gradients[at : at + piece.numel()]
            at += piece.numel()
        held.optimizer.step()

    def read(self) -> tuple[list[Vector], list[int]]:
        """The optimizer's vectors, of the whole model, and how often each part was stepped."""
        found = [
            read_state(part.optimizer, part.pieces, self._vectors, part.stop - part.start)
            for part in self._parts
        ]
        vectors = [np.concatenate([held[number] for held, _ in found]) for number in range(self._vectors)]
        return vectors, [steps for _, steps in found]

    def take_over(self, vectors: Sequence[Vector], steps: int | Sequence[int]) -> None:
        counts = [steps] * len(self._parts) if isinstance(steps, int) else steps
        for part, count in zip(self._parts, counts, strict=True):
            held = [vector[part.start : part.stop] for vector in vectors]
            set_state(part.optimizer, part.pieces, held, count)

    def hand_over(self) -> None:
        """Have the user's instance hold the state."""
        vectors, steps = self.read()
        set_state(self._own, self._flat.parameters, vectors, max(steps))
