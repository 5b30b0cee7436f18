"""The values that planning takes and gives: offers and a job's state in, a plan with its reasons out.

Times are seconds on the scheduler's clock, sizes payload bytes, rates payload bytes per second. Hosts are
named as in the network view. Every entry of a plan carries a reason that a person understands.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Offer:
    """An update that waits at its worker for leave to be sent."""

    update: str
    worker: str
    host: str  # where its bytes are
    size_bytes: int
    base_version: int  # of the model it was computed from
    norm: float = 0.0
    arrival: int = 0  # order of arrival at the scheduler, unique
    drops_in_row: int = 0  # how often its worker was dropped just before
    job: str = "job"


@dataclass(frozen=True, slots=True)
class Reserved:
    """A transfer under way: what it still has to move, and the rate it was granted."""

    source: str  # host
    target: str  # host
    remaining_bytes: float
    rate_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of a job's model: who leads it, who follows, which share of an update's bytes it gets."""

    index: int
    server: str  # host
    replica: str | None = None  # host
    share: float = 1.0
    pending_norm: float = 0.0  # movement its replicas have not got
    more_replicas: tuple[str, ...] = ()  # hosts that follow besides; each keeps the bound by itself


@dataclass(frozen=True, slots=True)
class JobState:
    """What the scheduler knows of a job when it plans."""

    name: str = "job"
    placed_version: int = 0  # updates applied plus updates granted and still on their way
    max_delay: int | None = None  # tau_max in updates; None: unbounded
    concurrency: int = 1  # workers with an update in flight; weights shrink beyond it
    shards: tuple[Shard, ...] = ()
    aggregators: tuple[str, ...] = ()  # hosts that may sum
    policy: str = "mlfabric"
    weight: float = 1.0
    max_rate_bytes_per_s: float | None = None  # that it may send from any one host
    last_served: str = ""  # the worker whose turn was last, for round robin
    objective: str = "mean"  # of completion times; "last" for synchronous steps
    chunk_bytes: int | None = None  # aggregators may forward chunk by chunk (chains); None: store and forward
    levels: int = 1  # of store-and-forward aggregation; 2: sums may be summed again
    search_transfers: int = 300  # laid out on trial to improve a small plan: 10 ms; ten times that gains 5 %
    divergence: float | None = None  # most movement a replica may lack, in the unit of the offers' norms


# The entries of a plan are structs and not dataclasses: plans hold thousands of them, and these are made ten
# times as fast. They never refer back to what holds them, so the collector of cycles need not look at them.


class Part(msgspec.Struct, frozen=True, gc=False):
    """One shard's part of a placed update: a transfer to the server, or to the aggregator of a group."""

    shard: int
    target: str  # host the bytes go to first
    size_bytes: int
    start_s: float
    finish_s: float
    rate_bytes_per_s: float
    group: str | None = None


class Placed(msgspec.Struct, frozen=True, gc=False):
    """An update with a place in the order of application."""

    update: str
    position: int  # 0 is the next to be placed
    delay_updates: int  # that it will have when applied at this position
    weight: float
    parts: tuple[Part, ...]
    finish_s: float  # when its last part, or its group's, is at the server
    reason: str


class Group(msgspec.Struct, frozen=True, gc=False):
    """Updates that are summed at one host and arrive as one. Members are a contiguous run of the order."""

    group: str
    shard: int
    aggregator: str  # host
    members: tuple[str, ...]
    size_bytes: int
    ready_s: float  # when the last member is there
    start_s: float
    finish_s: float  # when the sum is at the server
    rate_bytes_per_s: float
    reason: str
    target: str = ""  # host the sum goes to: the server, or the aggregator of the parent group
    parent: str | None = None  # group that this group's sum is a member of
    chain: tuple[str, ...] = ()  # hosts in order if chunks are forwarded as they are summed, last to server


class PlannedDrop(msgspec.Struct, frozen=True, gc=False):
    update: str
    reason: str


class ReplicaMessage(msgspec.Struct, frozen=True, gc=False):
    """A transfer from a server to its replica; it covers every step applied before it starts."""

    shard: int
    server: str
    replica: str
    size_bytes: int
    start_s: float
    finish_s: float
    rate_bytes_per_s: float
    covers: tuple[str, ...]
    reason: str


class HeldStep(msgspec.Struct, frozen=True, gc=False):
    """A step that waits for the replica."""

    step: str
    shard: int
    until_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a batch of offers. Positions of `placed` are 0, 1, 2, ... in order."""

    placed: tuple[Placed, ...] = ()
    groups: tuple[Group, ...] = ()
    drops: tuple[PlannedDrop, ...] = ()
    replication: tuple[ReplicaMessage, ...] = ()
    held: tuple[HeldStep, ...] = ()

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.group == name)
