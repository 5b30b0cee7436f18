"""PyTorch's optimizers as rules that servers apply: names, settings and parameter groups, read or refused.

A server steps element by element, so an optimizer must too. Settings that would change nothing are taken as
they are; settings that a rule does not know are refused with a sentence, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from mlfabric.errors import FabricError
from mlfabric.rules import RULES, Average, Pieces, Rule

OptimizerWish: TypeAlias = (
    tuple[str, Mapping[str, Any]]
    | torch.optim.Optimizer
    | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
)

NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")
# Settings that only say how PyTorch computes, not what.
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Settings that rules do not know, with the value at which they change nothing.
_NEUTRAL: Mapping[str, Any] = {
    "dampening": 0,
    "maximize": False,
    "amsgrad": False,
    "centered": False,
    "decoupled_weight_decay": False,
}


def load_stepping() -> None:
    """Load what PyTorch loads at a process's first step of any optimizer: its compiler, for seconds.

    Whoever steps together would wait for the last one to be through with it.
    """
    scratch = torch.nn.Parameter(torch.zeros(1))
    scratch.grad = torch.zeros(1)
    torch.optim.SGD([scratch], lr=0.0).step()


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of the flat model and the settings they are stepped by."""

    start: int
    stop: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadOptimizer:
    name: str
    segments: tuple[Segment, ...]
    instance: torch.optim.Optimizer  # for what happens at the worker: schedules, local steps

    def rule(self, elements: int, buffers: int, workers: int) -> Rule:
        """For `elements` parameters followed by `buffers` elements of running statistics."""
        parts: list[tuple[int, int, Rule]] = [
            (segment.start, segment.stop, as_rule(self.name, segment.settings)) for segment in self.segments
        ]
        if len(parts) == 1 and not buffers and parts[0][:2] == (0, elements):
            return parts[0][2]
        if buffers:
            parts.append((elements, elements + buffers, Average(1 / max(workers, 1))))
        return Pieces(tuple(parts))


def read_optimizer(wish: OptimizerWish, parameters: Sequence[torch.nn.Parameter]) -> ReadOptimizer:
    """What was asked for, by parameter: a (name, settings) pair, an optimizer, or what makes one."""
    instance = make_optimizer(wish, parameters)
    name = type(instance).__name__
    if name not in NAMES:
        raise FabricError(
            f"servers can't step by {name}: it does not work element by element, or is unknown here; "
            f"known are {', '.join(NAMES)}; mode='sync' steps by any optimizer"
        )
    places: dict[int, tuple[int, int]] = {}
    at = 0
    for parameter in parameters:
        places[id(parameter)] = (at, at + parameter.numel())
        at += parameter.numel()
    segments: list[Segment] = []
    for group in instance.param_groups:
        settings = _settings(instance, group)
        for parameter in group["params"]:
            if id(parameter) in places:
                segments.append(Segment(*places.pop(id(parameter)), settings))
    if places:
        raise FabricError(f"{len(places)} trained parameters of the model are in no group of the optimizer")
    return ReadOptimizer(name, _joined(sorted(segments, key=lambda segment: segment.start)), instance)


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a schedule may have changed."""
    return [_settings(optimizer, group) for group in optimizer.param_groups]


def _settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings, without what schedules keep there for themselves."""
    return {key: value for key, value in group.items() if key in optimizer.defaults and key not in _HOW}


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].stop == segment.start and joined[-1].settings == segment.settings:
            joined[-1] = Segment(joined[-1].start, segment.stop, segment.settings)
        else:
            joined.append(segment)
    return tuple(joined)


def make_optimizer(wish: OptimizerWish, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(wish, torch.optim.Optimizer):
        return wish
    if isinstance(wish, tuple):
        if len(wish) != 2 or not isinstance(wish[0], str):
            raise FabricError(
                "optimizer is a pair like ('SGD', {'lr': 0.1}), an optimizer, or what makes one"
            )
        kind = getattr(torch.optim, wish[0], None)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise FabricError(f"torch.optim has no optimizer {wish[0]!r}")
        try:
            return _made(kind, list(parameters), wish[1])
        except (TypeError, ValueError) as error:
            raise FabricError(f"torch.optim.{wish[0]} refuses its settings: {error}") from None
    made = wish(list(parameters))
    if not isinstance(made, torch.optim.Optimizer):
        raise FabricError(f"the optimizer's factory made a {type(made).__name__}, not an optimizer")
    return made


def empty_like(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.Tensor]]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind, its groups with the same settings and these tensors, without state."""
    written = [
        {**{key: group[key] for key in optimizer.defaults if key in group}, "params": list(tensors)}
        for group, tensors in zip(optimizer.param_groups, groups, strict=True)
    ]
    made = _made(type(optimizer), written, {})
    made.defaults = dict(optimizer.defaults)  # of which Adagrad begins its sums
    return made


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's optimizers without what keeps torch.compile out of it. That loads the compiler at
    the first call, a second of a worker's start that counts when it comes back."""
    plain: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return plain


def _made(
    kind: type[torch.optim.Optimizer], parameters: list[Any], settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    lighter = type(kind.__name__, (kind,), {"add_param_group": uncompiled(kind.add_param_group)})
    made: torch.optim.Optimizer = lighter(parameters, **settings)
    made.__class__ = kind
    made.__setstate__({})  # the class's own step gets its hooks, as after unpickling
    return made


def as_rule(name: str, settings: Mapping[str, Any]) -> Rule:
    plain: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "betas":
            plain["beta1"], plain["beta2"] = float(value[0]), float(value[1])
        elif key in _NEUTRAL:
            if value is None or value == _NEUTRAL[key] or (name, key) == ("AdamW", "decoupled_weight_decay"):
                continue
            raise FabricError(f"servers can't step by {name} with {key}={value!r}; leave it out")
        else:
            plain[key] = float(value) if not isinstance(value, bool | int) else value
    try:
        rule: Rule = RULES[name](**plain)
    except TypeError:
        raise FabricError(f"servers can't step by {name} with the settings {', '.join(plain)}") from None
    return rule
