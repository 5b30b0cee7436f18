"""The vocabulary of all messages: versions, shards, arrays, rules and the settings of a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

# What a member may be used for.
MEMBER_ROLES: Final = ("worker", "aggregator", "server", "replica")
# Stands for whoever schedules now; each node knows who that is, and only its member role asks.
SCHEDULER: Final = "@scheduler"


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What every record on the wire derives from; its tag is the class name."""


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    epoch: int
    count: int

    def __str__(self) -> str:
        return str(self.count) if self.epoch == 0 else f"{self.epoch}:{self.count}"


def count_at(base: Version, fail_overs: Iterable[Version]) -> int:
    """The count an update was computed from; what a later fail-over undid counts as where it began."""
    return min((base.count, *(start.count for start in fail_overs if start.epoch > base.epoch)))


class ShardRange(msgspec.Struct, frozen=True):
    """One shard as workers see it: which elements, who leads, since which epoch."""

    index: int
    start: int  # first element
    count: int  # elements
    leader: str  # node
    epoch: int = 0
    replica: str | None = None  # node


class JobSettings(msgspec.Struct, frozen=True):
    """How a job wants its updates treated; the publisher's count for everybody."""

    max_delay: int | None = None  # None: chosen from the number of workers ("auto")
    unbounded: bool = False  # no delay bound at all
    divergence: float | None = None  # None: no replica
    shards: int = 1  # 0: chosen from the model's size and the number of hosts ("auto")
    in_flight: int = 1
    aggregate: bool = True  # members sum each other's updates and pass the model on to each other
    weigh: bool = True  # updates that are very late count less
    policy: str = "mlfabric"
    codec: str = "float32"  # how updates travel from workers
    staleness: int | None = None  # steps a worker may be ahead of the slowest; None: any
    wait_for: int = 0  # gradients that make one step, the first of those that are offered; 0: no such steps
    way: str = ""  # how workers make their updates, in the words of those who compare it


class ArraySpec(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str


class RulePiece(msgspec.Struct, frozen=True):
    """The rule of some elements of a model."""

    start: int
    stop: int
    name: str
    settings: dict[str, bool | int | float] = {}


class RuleSpec(msgspec.Struct, frozen=True):
    """The rule a server applies updates by: a name of `mlfabric.rules` and plain settings."""

    name: str
    settings: dict[str, bool | int | float] = {}
    pieces: tuple[RulePiece, ...] = ()  # of the rule "Pieces"
    every: int = 1  # gradients that make one step


class StepSettings(msgspec.Struct, frozen=True):
    """What an update is to be applied by where that is not what was published: schedules change it."""

    version: int  # the step of its worker from which on it holds
    rule: RuleSpec


class AppliedIds(msgspec.Struct, frozen=True):
    """Per worker: all below `floor` are settled; of those above, exactly the listed are applied."""

    floor: dict[str, int] = {}
    above: dict[str, tuple[int, ...]] = {}


def update_id(label: str, number: int) -> str:
    return f"{label}#{number}"


def split_update_id(update: str) -> tuple[str, int]:
    label, _, number = update.rpartition("#")
    return label, int(number)
