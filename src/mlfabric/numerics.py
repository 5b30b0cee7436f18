"""The arithmetic of a model: arrays as one vector, and the values of a shard of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlfabric.errors import ShapeMismatch
from mlfabric.messages import ArraySpec
from mlfabric.rules import GradientSum, Rounds, Rule
from mlfabric.rules import Vector as Vector


class Layout:
    """How named arrays lie in one vector. The vector is float32, or float64 where any array is."""

    def __init__(self, specs: Sequence[ArraySpec]) -> None:
        self.specs = tuple(specs)
        self.sizes = [int(np.prod(spec.shape, dtype=np.int64)) for spec in specs]
        self.elements = sum(self.sizes)
        wide = any(spec.dtype == "float64" for spec in specs)
        self.dtype = np.dtype(np.float64 if wide else np.float32)

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Layout:
        if not arrays:
            raise ShapeMismatch("a model needs at least one array; publish({name: array, ...})")
        specs = []
        for name, value in arrays.items():
            array = np.asarray(value)
            if array.dtype not in (np.float16, np.float32, np.float64):
                raise ShapeMismatch(
                    f"array {name!r} is of {array.dtype}; a model's arrays are float16, float32 or float64"
                )
            specs.append(ArraySpec(str(name), tuple(array.shape), str(array.dtype)))
        layout = cls(specs)
        if layout.elements == 0:
            raise ShapeMismatch("all arrays of the model are empty; there is nothing to train")
        return layout

    def as_it_is(self, arrays: Mapping[str, Any]) -> Vector | None:
        """A single array that fits is the vector already; None: the arrays have to be packed."""
        self.check(arrays)
        if len(self.specs) == 1:
            only = np.asarray(arrays[self.specs[0].name])
            if only.dtype == self.dtype and only.flags.c_contiguous:
                return only.reshape(-1)
        return None

    def pack_into(self, arrays: Mapping[str, Any], vector: Vector) -> None:
        """Put the arrays into a vector, one after the other."""
        self.check(arrays)
        at = 0
        for spec, size in zip(self.specs, self.sizes, strict=True):
            vector[at : at + size] = np.asarray(arrays[spec.name]).reshape(-1)
            at += size

    def pack(self, arrays: Mapping[str, Any]) -> Vector:
        """The arrays as one vector of its own."""
        vector = np.empty(self.elements, self.dtype)
        self.pack_into(arrays, vector)
        return vector

    def unpack(self, vector: Vector) -> dict[str, Vector]:
        arrays = {}
        at = 0
        for spec, size in zip(self.specs, self.sizes, strict=True):
            part = vector[at : at + size].reshape(spec.shape)
            arrays[spec.name] = part.astype(spec.dtype, copy=False)
            at += size
        return arrays

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Raise ShapeMismatch unless the arrays have the published names and shapes."""
        expected = {spec.name: spec for spec in self.specs}
        for name in arrays:
            if name not in expected:
                raise ShapeMismatch(f"array {name!r} is not part of the published model")
        for name, spec in expected.items():
            if name not in arrays:
                raise ShapeMismatch(f"the update lacks array {name!r} of the published model")
            shape = np.shape(arrays[name])
            if tuple(shape) != spec.shape:
                raise ShapeMismatch(
                    f"array {name!r} has shape {list(shape)}, the published model has {list(spec.shape)}"
                )
            given = np.asarray(arrays[name]).dtype
            if given.kind not in "fiub":
                raise ShapeMismatch(f"array {name!r} is of {given}, not of real numbers")


class ShardStore:
    """A shard's weights and optimizer state, the step that is staged, and what the replica holds."""

    def __init__(self, elements: int, dtype: str, rule: Rule, weights: Vector | None = None) -> None:
        self.rule = rule
        self.weights = np.zeros(elements, dtype) if weights is None else weights
        self.state: list[Vector] = [np.zeros(elements, dtype) for _ in range(rule.vectors)]
        self.count = 0
        self.image: Vector | None = None  # what the replica has acknowledged
        self.coming_image: Vector | None = None  # what is on its way to it
        self._staged: tuple[Vector, list[Vector], int] | None = None

    def stage(self, total: Vector, weight: float, members: int, rule: Rule | None = None) -> None:
        """Compute a step by the shard's rule, or by one with other settings that came with the update."""
        got = GradientSum(total, weight, members, self.count)
        step, state = (rule or self.rule).step(got, self.weights, self.state)
        self._staged = (step, state, members)

    def measure(self) -> tuple[float, float, float]:
        """(norm of the staged step, relative divergence after it, norm of the weights after it)."""
        assert self._staged is not None
        step = self._staged[0]
        after = self.weights + step
        norm = float(np.linalg.norm(after))
        apart = max(
            (float(np.linalg.norm(after - image)) for image in self._images()),
            default=0.0,
        )
        return float(np.linalg.norm(step)), apart / norm if norm > 0 else float(apart > 0), norm

    def _images(self) -> list[Vector]:
        return [image for image in (self.image, self.coming_image) if image is not None]

    def commit(self) -> None:
        assert self._staged is not None
        step, self.state, members = self._staged
        self.weights += step
        self.count += members
        self._staged = None

    def fill(self, values: Vector, with_state: bool, count: int) -> None:
        size = len(self.weights)
        self.weights[:] = values[:size]
        if with_state:
            self.state = [values[i * size : (i + 1) * size].copy() for i in range(1, 1 + self.rule.vectors)]
        elif isinstance(self.rule, Rounds):
            self.state = self.rule.begun_anew(self.state)
        self.count = count

    def snapshot(self, with_state: bool, with_staged: bool) -> Vector:
        weights, state = self.weights, self.state
        if with_staged:
            assert self._staged is not None
            weights, state = weights + self._staged[0], self._staged[1]
        return np.concatenate([weights, *state]) if with_state else weights.copy()
