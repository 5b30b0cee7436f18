"""The modes of training, and which settings belong to which; one that has no meaning in a mode is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from mlfabric.errors import FabricError

Mode = Literal["async", "ssp", "backup", "sync", "fastest", "rolling", "local"]
Pull = Literal["after", "alongside", "overlapped"]
Bound = int | Literal["auto", "none"]
PULLS: Final = ("after", "alongside", "overlapped")

_SERVED = frozenset({"divergence", "shards", "codec"})
# What each mode takes beside clip_norm, which all do.
TAKES: Final[Mapping[str, frozenset[str]]] = {
    "async": _SERVED | {"max_delay", "pull"},
    "ssp": _SERVED | {"staleness"},
    "backup": _SERVED | {"wait_for"},
    "sync": frozenset(),
    "fastest": frozenset({"max_delay", "pull"}),
    "rolling": frozenset({"max_delay", "codec", "ahead", "local_steps"}),
    "local": _SERVED | {"max_delay", "pull", "local_steps", "outer"},
}
# Why, where it is not plain.
_BECAUSE: Final[Mapping[tuple[str, str], str]] = {
    ("ssp", "max_delay"): "staleness= bounds how far workers are apart, in steps",
    ("backup", "max_delay"): "what is not of the current step is dropped",
    ("ssp", "pull"): "a worker's next model has to come after its update",
    ("backup", "pull"): "the next model is there when the step is complete",
    ("rolling", "pull"): "no worker waits for a model there",
}
# Running statistics are averaged as they are; these take values for changes.
LOSSY_FOR_STATISTICS: Final = ("int8", "topk")
# Numbers that can be added as they travel.
ROLLING_CODECS: Final = ("float32", "float16")


class Unset(Enum):
    """Stands for a setting that was not given."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a worker trains, with what was left out filled in."""

    mode: Mode
    max_delay: Bound = "auto"
    staleness: int = 2
    wait_for: int | None = None  # None: all workers but one
    divergence: float | None = 0.02
    shards: int | None = None  # None: by size and hosts
    codec: str = "float32"
    pull: Pull = "after"
    clip_norm: float | None = None
    local_steps: int | None = None  # None: 8, or none in mode rolling
    # Learning rate and Nesterov momentum of the servers' step; by default changes are averaged.
    outer: tuple[float, float] = (1.0, 0.0)
    ahead: bool = True  # compute where the model will be when the gradient is applied

    @property
    def steps_of_its_own(self) -> int:
        """In mode local, between two updates."""
        return self.local_steps if self.local_steps is not None else 8

    def gradients_per_step(self, workers: int) -> int:
        if self.wait_for is not None:
            return self.wait_for
        return max(workers - 1, 1)


def fitting(mode: str, given: Mapping[str, Any]) -> Wishes:
    """The settings that were given, if they belong to the mode; FabricError names the first that does not."""
    if mode not in TAKES:
        raise FabricError(f"unknown mode {mode!r}; modes are {', '.join(TAKES)}")
    settings = {name: value for name, value in given.items() if value is not UNSET}
    for name in settings:
        if name != "clip_norm" and name not in TAKES[mode]:
            others = ", ".join(other for other, taken in TAKES.items() if name in taken)
            why = _BECAUSE.get((mode, name), f"it belongs to mode {others}")
            raise FabricError(f"{name}= has no meaning in mode {mode}: {why}")
    wishes = Wishes(mode, **settings)  # type: ignore[arg-type]
    _check(wishes)
    return wishes


def _check(wishes: Wishes) -> None:
    if wishes.pull not in PULLS:
        raise FabricError(f"unknown pull {wishes.pull!r}; it is one of {', '.join(PULLS)}")
    if wishes.mode == "fastest" and wishes.pull == "alongside":
        raise FabricError("pull='alongside' has no meaning in mode fastest: there is no model to pull")
    if wishes.mode in ("fastest", "rolling") and (
        wishes.max_delay == "none" or (isinstance(wishes.max_delay, int) and wishes.max_delay < 0)
    ):
        raise FabricError(f"max_delay= is a number of steps in mode {wishes.mode}, not {wishes.max_delay!r}")
    if wishes.mode == "rolling" and wishes.codec not in ROLLING_CODECS:
        raise FabricError(
            f"sums in mode rolling travel as {' or '.join(ROLLING_CODECS)}, not by codec {wishes.codec!r}"
        )
    if wishes.local_steps is not None and wishes.local_steps < 1:
        raise FabricError(f"local_steps is at least 1, not {wishes.local_steps}")
    if wishes.staleness < 0:
        raise FabricError(f"staleness counts steps, so {wishes.staleness} is too small; zero or more")
    if wishes.wait_for is not None and wishes.wait_for < 1:
        raise FabricError(f"a step waits for at least one gradient, so wait_for is not {wishes.wait_for}")
    if wishes.clip_norm is not None and not wishes.clip_norm > 0:
        raise FabricError(f"clip_norm is a norm above zero, not {wishes.clip_norm}")
    if not (wishes.outer[0] > 0 and 0 <= wishes.outer[1] < 1):
        raise FabricError(
            f"outer is a learning rate above 0 and a momentum from 0 to below 1, not {wishes.outer}"
        )


def check_fits(wishes: Wishes, workers: int, statistics: int) -> None:
    """What can be judged once the model and the number of workers are known (0: they are not)."""
    if wishes.wait_for is not None and 0 < workers < wishes.wait_for:
        raise FabricError(
            f"a step that waits for {wishes.wait_for} gradients needs more than {workers} workers"
        )
    if statistics and wishes.codec in LOSSY_FOR_STATISTICS:
        raise FabricError(
            f"codec {wishes.codec} would spoil the model's running statistics; take bfloat16 or float16"
        )
