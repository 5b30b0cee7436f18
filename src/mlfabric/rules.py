"""The rules a server applies updates by: gradient descent as `torch.optim` defines it, in NumPy.

A rule makes one step per message. From the weighted sum of k gradients with total weight W it takes the mean
and a learning rate W times as large, and raises its decays to the power k, so that a sum moves the model as
far as its members would have moved it one by one. For a single gradient of weight one every rule is what
PyTorch's optimizer of the same name does. All work element by element, so a model may be cut anywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.messages import RulePiece, RuleSpec

Vector = NDArray[Any]


@dataclass(frozen=True, slots=True)
class GradientSum:
    """What a message brings: a weighted sum, its weight, of how many gradients; how many came before."""

    total: Vector
    weight: float
    members: int
    before: int

    @property
    def mean(self) -> Vector:
        return self.total if self.weight == 1 else self.total * self.total.dtype.type(1 / self.weight)

    @property
    def count(self) -> int:
        return self.before + self.members


class Rule(Protocol):
    """How a server turns a sum of gradients into a step. State vectors are as long as the weights."""

    @property
    def vectors(self) -> int: ...

    def spec(self) -> RuleSpec: ...

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        """The change of the weights and the state after it; neither argument is changed."""
        ...


class _Named:
    """A rule that is its name and its numbers."""

    def spec(self) -> RuleSpec:
        return RuleSpec(type(self).__name__, {f.name: getattr(self, f.name) for f in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sum(_Named):
    """Adds what it is sent: w += u. For counters, and for tests that want to see every update."""

    @property
    def vectors(self) -> int:
        return 0

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        return got.total, state


@dataclass(frozen=True)
class Average(_Named):
    """Moves towards what it is sent: w += (mean - w) share, member by member. For running statistics."""

    share: float = 1.0

    @property
    def vectors(self) -> int:
        return 0

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        left = (1 - self.share) ** got.members
        return (got.mean - weights) * weights.dtype.type(1 - left), state


@dataclass(frozen=True)
class SGD(_Named):
    """Gradient descent, with momentum and weight decay on request."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check(self.lr >= 0, f"SGD needs a learning rate of zero or more, not {self.lr}")
        _check(0 <= self.momentum < 1, f"SGD needs a momentum from 0 to below 1, not {self.momentum}")
        _check(self.weight_decay >= 0, f"SGD needs a weight decay of zero or more, not {self.weight_decay}")
        _check(not self.nesterov or self.momentum > 0, "SGD with nesterov needs a momentum above zero")

    @property
    def vectors(self) -> int:
        return 1 if self.momentum else 0

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        number = weights.dtype.type
        if not self.momentum and not self.weight_decay:
            return got.total * number(-self.lr), state
        gradient = _decayed(got.mean, weights, self.weight_decay)
        if not self.momentum:
            return gradient * number(-self.lr * got.weight), state
        decay = self.momentum**got.members
        # k gradients one by one would have added 1 + beta + ... + beta^(k-1) of their mean.
        gain = (1 - decay) / (1 - self.momentum)
        velocity = state[0] * number(decay) + gradient * number(gain)
        ahead = gradient + velocity * number(self.momentum) if self.nesterov else velocity
        return ahead * number(-self.lr * got.weight), [velocity]


@dataclass(frozen=True)
class Adam(_Named):
    """Adam with bias correction; decays count every member of a sum."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check(self.lr >= 0, f"{name} needs a learning rate of zero or more, not {self.lr}")
        _check(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, f"{name} needs betas from 0 to below 1")
        _check(self.weight_decay >= 0, f"{name} needs a weight decay of zero or more")

    @property
    def vectors(self) -> int:
        return 2

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        return self._moved(got, _decayed(got.mean, weights, self.weight_decay), state)

    def _moved(self, got: GradientSum, gradient: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        number = gradient.dtype.type
        decay1, decay2 = self.beta1**got.members, self.beta2**got.members
        first = state[0] * number(decay1) + gradient * number(1 - decay1)
        second = state[1] * number(decay2) + gradient * gradient * number(1 - decay2)
        scale = self.lr * got.weight / (1 - self.beta1**got.count)
        root = np.sqrt(second * number(1 / (1 - self.beta2**got.count))) + number(self.eps)
        return first * number(-scale) / root, [first, second]


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay goes past the moments."""

    weight_decay: float = 1e-2

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        moved, state = self._moved(got, got.mean, state)
        if self.weight_decay:
            moved = moved - weights * weights.dtype.type(self.lr * self.weight_decay * got.weight)
        return moved, state


@dataclass(frozen=True)
class Adagrad(_Named):
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    @property
    def vectors(self) -> int:
        return 1

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        number = weights.dtype.type
        gradient = _decayed(got.mean, weights, self.weight_decay)
        sofar = state[0] + gradient * gradient * number(got.members)
        rate = self.lr * got.weight / (1 + (got.count - 1) * self.lr_decay)
        root = np.sqrt(sofar + number(self.initial_accumulator_value)) + number(self.eps)
        return gradient * number(-rate) / root, [sofar]


@dataclass(frozen=True)
class RMSprop(_Named):
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0

    @property
    def vectors(self) -> int:
        return 2 if self.momentum else 1

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        number = weights.dtype.type
        gradient = _decayed(got.mean, weights, self.weight_decay)
        decay = self.alpha**got.members
        square = state[0] * number(decay) + gradient * gradient * number(1 - decay)
        scaled = gradient / (np.sqrt(square) + number(self.eps))
        if not self.momentum:
            return scaled * number(-self.lr * got.weight), [square]
        fade = self.momentum**got.members
        gain = (1 - fade) / (1 - self.momentum)
        velocity = state[1] * number(fade) + scaled * number(gain)
        return velocity * number(-self.lr * got.weight), [square, velocity]


@dataclass(frozen=True)
class Pieces:
    """Different rules for different elements of a shard; what is beyond the last piece does not move."""

    parts: tuple[tuple[int, int, Rule], ...]  # start, stop, rule

    @property
    def vectors(self) -> int:
        return max((rule.vectors for _, _, rule in self.parts), default=0)

    def spec(self) -> RuleSpec:
        pieces = []
        for start, stop, rule in self.parts:
            spec = rule.spec()
            pieces.append(RulePiece(start, stop, spec.name, spec.settings))
        return RuleSpec("Pieces", {}, tuple(pieces))

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        moved = np.zeros_like(weights)
        after = [vector.copy() for vector in state]
        for start, stop, rule in self.parts:
            here = slice(start, stop)
            part = GradientSum(got.total[here], got.weight, got.members, got.before)
            step, own = rule.step(part, weights[here], [v[here] for v in state[: rule.vectors]])
            moved[here] = step
            for vector, piece in zip(after, own, strict=False):
                vector[here] = piece
        return moved, after


@dataclass(frozen=True)
class Rounds:
    """One step per `every` gradients, by their mean: those before the last are gathered in the last vector
    of the state. A round that a fail-over interrupts makes its step by the gradients that survived."""

    every: int
    rule: Rule

    def __post_init__(self) -> None:
        _check(self.every >= 1, f"a step needs at least one gradient, not {self.every}")

    @property
    def vectors(self) -> int:
        return self.rule.vectors + 1

    def spec(self) -> RuleSpec:
        return msgspec.structs.replace(self.rule.spec(), every=self.every)

    def step(self, got: GradientSum, weights: Vector, state: list[Vector]) -> tuple[Vector, list[Vector]]:
        *inner, sofar = state
        total = sofar + got.total
        done = got.before % self.every + got.members
        if done < self.every:
            return np.zeros_like(weights), [*inner, total]
        mean = total * weights.dtype.type(1 / done)
        moved, after = self.rule.step(GradientSum(mean, 1.0, 1, got.before // self.every), weights, inner)
        return moved, [*after, np.zeros_like(weights)]

    def begun_anew(self, state: list[Vector]) -> list[Vector]:
        """What was gathered belongs to other weights than those that came."""
        return [*state[:-1], np.zeros_like(state[-1])]


RULES: Mapping[str, Any] = {
    rule.__name__: rule for rule in (SGD, Adam, AdamW, Adagrad, RMSprop, Sum, Average)
}


def make_rule(spec: RuleSpec, start: int = 0, count: int | None = None) -> Rule:
    """The rule of a name and settings, for the elements from `start` on that a shard holds."""
    if spec.every > 1:
        one = msgspec.structs.replace(spec, every=1)
        return Rounds(spec.every, make_rule(one, start, count))
    if spec.name == "Pieces":
        end = max((piece.stop for piece in spec.pieces), default=0) if count is None else start + count
        parts = [
            (max(p.start, start) - start, min(p.stop, end) - start, make_rule(RuleSpec(p.name, p.settings)))
            for p in spec.pieces
            if p.start < end and p.stop > start
        ]
        return Pieces(tuple(parts))
    if spec.name.startswith("torch."):
        rule: Rule = importlib.import_module("mlfabric.torch.rules").make(spec)
        return rule
    try:
        rule = RULES[spec.name](**spec.settings)
    except KeyError:
        raise FabricError(f"unknown rule {spec.name!r}; known are {', '.join(RULES)}") from None
    except TypeError:
        given = ", ".join(spec.settings)
        raise FabricError(f"rule {spec.name} does not take the settings {given}") from None
    return rule


def _decayed(gradient: Vector, weights: Vector, weight_decay: float) -> Vector:
    return gradient + weights * weights.dtype.type(weight_decay) if weight_decay else gradient


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise FabricError(sentence)
