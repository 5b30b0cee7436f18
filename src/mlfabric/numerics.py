"""The arithmetic of a model: arrays as one vector, the rules a server applies updates by, a shard's values.

A rule makes one step per message: from the weighted sum of k gradients with total weight W it takes the
mean and a learning rate W times as large, and raises its decays to the power k, so that a sum moves the
model as far as its members would have moved it one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError, ShapeMismatch
from mlfabric.messages import ArraySpec, RuleSpec

Vector = NDArray[Any]


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

    def pack(self, arrays: Mapping[str, Any], copy: bool = True) -> Vector:
        """The arrays as one vector; without `copy` a single array that fits is used as it is."""
        self.check(arrays)
        if not copy and len(self.specs) == 1:
            only = np.asarray(arrays[self.specs[0].name])
            if only.dtype == self.dtype and only.flags.c_contiguous:
                return only.reshape(-1)
        vector = np.empty(self.elements, self.dtype)
        at = 0
        for spec, size in zip(self.specs, self.sizes, strict=True):
            vector[at : at + size] = np.asarray(arrays[spec.name]).reshape(-1)
            at += size
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


class Rule(Protocol):
    """How a server turns a sum of gradients into a step. State vectors are as long as the weights."""

    @property
    def vectors(self) -> int: ...

    def spec(self) -> RuleSpec: ...

    def step(
        self, total: Vector, weight: float, members: int, state: list[Vector], count: int
    ) -> tuple[Vector, list[Vector]]:
        """The change of the weights and the state after it; `count` updates were applied before."""
        ...


@dataclass(frozen=True)
class Sum:
    """Adds what it is sent: w += u. For counters, and for tests that want to see every update."""

    vectors: int = 0

    def spec(self) -> RuleSpec:
        return RuleSpec("Sum")

    def step(
        self, total: Vector, weight: float, members: int, state: list[Vector], count: int
    ) -> tuple[Vector, list[Vector]]:
        return total, state


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with heavy-ball momentum on request."""

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lr > 0, f"SGD needs a learning rate above zero, not {self.lr}")
        _check(0 <= self.momentum < 1, f"SGD needs a momentum from 0 to below 1, not {self.momentum}")

    @property
    def vectors(self) -> int:
        return 1 if self.momentum else 0

    def spec(self) -> RuleSpec:
        return RuleSpec("SGD", {"lr": self.lr, "momentum": self.momentum})

    def step(
        self, total: Vector, weight: float, members: int, state: list[Vector], count: int
    ) -> tuple[Vector, list[Vector]]:
        if not self.momentum:
            return total * total.dtype.type(-self.lr), state
        decay = self.momentum**members
        # k gradients one by one would have added 1 + beta + ... + beta^(k-1) of their mean.
        gain = (1 - decay) / (1 - self.momentum)
        velocity = state[0] * state[0].dtype.type(decay) + total * total.dtype.type(gain / weight)
        return velocity * velocity.dtype.type(-self.lr * weight), [velocity]


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction; decays count every member of a sum."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    vectors: int = 2

    def __post_init__(self) -> None:
        _check(self.lr > 0, f"Adam needs a learning rate above zero, not {self.lr}")
        _check(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "Adam needs betas from 0 to below 1")

    def spec(self) -> RuleSpec:
        settings = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}
        return RuleSpec("Adam", settings)

    def step(
        self, total: Vector, weight: float, members: int, state: list[Vector], count: int
    ) -> tuple[Vector, list[Vector]]:
        number = total.dtype.type
        mean = total * number(1 / weight)
        decay1, decay2 = self.beta1**members, self.beta2**members
        first = state[0] * number(decay1) + mean * number(1 - decay1)
        second = state[1] * number(decay2) + mean * mean * number(1 - decay2)
        done = count + members
        scale = self.lr * weight / (1 - self.beta1**done)
        root = np.sqrt(second * number(1 / (1 - self.beta2**done))) + number(self.epsilon)
        return first * number(-scale) / root, [first, second]


RULES = {"SGD": SGD, "Adam": Adam, "Sum": Sum}


def make_rule(spec: RuleSpec) -> Rule:
    try:
        rule: Rule = RULES[spec.name](**spec.settings)
    except KeyError:
        raise FabricError(f"unknown rule {spec.name!r}; known are {', '.join(RULES)}") from None
    except TypeError:
        given = ", ".join(spec.settings)
        raise FabricError(f"rule {spec.name} does not take the settings {given}") from None
    return rule


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise FabricError(sentence)


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

    def stage(self, total: Vector, weight: float, members: int) -> None:
        step, state = self.rule.step(total, weight, members, self.state, self.count)
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
        self.count = count

    def snapshot(self, with_state: bool, with_staged: bool) -> Vector:
        weights, state = self.weights, self.state
        if with_staged:
            assert self._staged is not None
            weights, state = weights + self._staged[0], self._staged[1]
        return np.concatenate([weights, *state]) if with_state else weights.copy()
