"""A module's parameters and running statistics as one flat vector, without copies where it can be.

Parameters and buffers become views of one tensor, so that a pulled model is one copy. Gradients are where a
backward pass puts them until they are collected in a vector, which is one copy: to have it add them to zeros
in that vector would be to write and read them three times. Two such vectors take turns: one is on its way
while the next is filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlfabric.errors import FabricError
from mlfabric.numerics import Vector


class FlatModel:
    def __init__(self, model: torch.nn.Module, empty: Callable[[int], Vector]) -> None:
        """`empty` makes the vectors: in memory that the fabric's engine can read, where it has any."""
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        if not self.parameters:
            raise FabricError("the model has no parameter that is trained")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (
                parameter.device.type != "cpu" or parameter.dtype != torch.float32
            ):
                raise FabricError(
                    f"parameter {name} is {parameter.dtype} on {parameter.device}; "
                    "asynchronous training takes float32 parameters on the CPU"
                )
        averaged = {n: b for n, b in model.named_buffers() if b.dtype == torch.float32 and b.numel()}
        self.buffers = list(averaged.values())
        # Names and shapes, in their order.
        self.parts = {name: tuple(tensor.shape) for name, tensor in (*named.items(), *averaged.items())}
        self.trained: int = sum(p.numel() for p in self.parameters)
        self.averaged: int = sum(b.numel() for b in self.buffers)
        self.values = torch.from_numpy(empty(self.elements))
        self._gradients = [torch.from_numpy(empty(self.elements)) for _ in range(2)]
        self._turn = 0
        with torch.no_grad():
            at = 0
            for tensor in (*self.parameters, *self.buffers):
                place = self.values[at : at + tensor.numel()].view_as(tensor)
                place.copy_(tensor)
                tensor.data = place
                at += tensor.numel()
        self.clear_gradients()

    @property
    def elements(self) -> int:
        return self.trained + self.averaged

    def clear_gradients(self) -> None:
        """Let backward passes begin anew."""
        for parameter in self.parameters:
            parameter.grad = None

    def ready_gradients(self, clip_norm: float | None, scale: float = 1.0) -> torch.Tensor:
        """The gradients in one vector, scaled, then clipped; the parameters' own are that vector's parts."""
        vector = self._gradients[self._turn]
        self._collect(vector)
        gradients = vector[: self.trained]
        if scale != 1.0:
            gradients.mul_(scale)
        if clip_norm is not None:
            norm = float(torch.linalg.vector_norm(gradients))
            if norm > clip_norm:
                gradients.mul_(clip_norm / norm)
        return vector

    def take_update(self, clip_norm: float | None, scale: float = 1.0) -> Vector:
        """The gradients, ready, with the running statistics behind them; the next ones go elsewhere."""
        vector = self.ready_gradients(clip_norm, scale)
        vector[self.trained :] = self.values[self.trained :]
        self._turn = 1 - self._turn
        self.clear_gradients()
        update: Vector = vector.numpy()
        return update

    def _collect(self, vector: torch.Tensor) -> None:
        """Put gradients into place; zeros for a parameter that has none."""
        at = 0
        for parameter in self.parameters:
            place = vector[at : at + parameter.numel()].view_as(parameter)
            if parameter.grad is None:
                place.zero_()
            elif parameter.grad.data_ptr() != place.data_ptr():
                place.copy_(parameter.grad)
            parameter.grad = place
            at += parameter.numel()

    def set_gradients(self, vector: Vector) -> None:
        """Have these as the parameters' gradients, which are parts of the vector until they are cleared."""
        gradients = torch.from_numpy(vector)
        at = 0
        for parameter in self.parameters:
            parameter.grad = gradients[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def load(self, vector: Vector) -> None:
        np.copyto(self.values.numpy(), vector)

    def copy(self) -> Vector:
        values: Any = self.values.numpy()
        copied: Vector = values.copy()
        return copied
