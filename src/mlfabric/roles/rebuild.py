"""What a new scheduler gathers before it decides anything: members, shards and the job, as they report.

Nothing comes from the host of the old scheduler. Leaders tell version, epoch and applied ids; replicas what
they hold; workers how they know the job. Offers and wishes that come meanwhile wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from mlfabric.events import Event
from mlfabric.messages import (
    JobKnown,
    JobReady,
    PublishWanted,
    ReplicaReport,
    ShardRange,
    ShardReport,
)
from mlfabric.roles.entries import ShardBook

Reports = dict[int, list[tuple[str, ShardReport]]]  # by shard: (node, what it said)
Holdings = dict[int, list[tuple[str, ReplicaReport]]]


@dataclass(slots=True)
class JobReports:
    """What the members of one job said."""

    ready: JobReady | None = None
    servers: Reports = field(default_factory=dict)
    replicas: Holdings = field(default_factory=dict)
    epochs: dict[str, dict[int, int]] = field(default_factory=dict)  # worker -> shard -> epoch it knows

    def note(self, sender: str, message: JobKnown | ShardReport | ReplicaReport) -> None:
        match message:
            case JobKnown(ready=ready):
                self.epochs[sender] = {shard.index: shard.epoch for shard in ready.shards}
                self.ready = ready if self.ready is None else _later(self.ready, ready)
            case ShardReport(shard=shard):
                self.servers.setdefault(shard.index, []).append((sender, message))
            case ReplicaReport(shard=index):
                self.replicas.setdefault(index, []).append((sender, message))

    def forget(self, node: str) -> None:
        """It registers a second time, and tells all again."""
        self.epochs.pop(node, None)
        for reports in self.servers.values():
            reports[:] = [entry for entry in reports if entry[0] != node]
        for holdings in self.replicas.values():
            holdings[:] = [entry for entry in holdings if entry[0] != node]

    def publication(self) -> PublishWanted:
        """The model as its publisher would have described it."""
        ready = self.ready
        assert ready is not None
        elements = sum(shard.count for shard in ready.shards)
        return PublishWanted(
            ready.arrays, ready.rule, ready.settings, elements, ready.dtype, 0, ready.version, ready.parts
        )

    def shard(self, range_: ShardRange) -> ShardBook:
        """The shard as its leader of the highest epoch tells it; without one, as its best replica would
        take it over."""
        index = range_.index
        leaders = self.servers.get(index, [])
        followers = self.replicas.get(index, [])
        if leaders:
            node, report = max(leaders, key=lambda entry: (entry[1].shard.epoch, entry[1].version, entry[0]))
            follows = any(name == report.replica for name, _ in followers)
            range_ = msgspec.structs.replace(
                range_,
                leader=node,
                epoch=report.shard.epoch,
                replica=report.replica if follows else None,
            )
            filled = follows and report.replica_version is not None
            return ShardBook(range_, report.version, True, filled, list(report.fail_overs))
        filled_ones = [entry for entry in followers if entry[1].version >= 0]
        if not filled_ones:
            return ShardBook(msgspec.structs.replace(range_, replica=None), ready=True)
        node, held = max(filled_ones, key=lambda entry: (entry[1].epoch, entry[1].version, entry[0]))
        range_ = msgspec.structs.replace(range_, replica=node, epoch=max(range_.epoch, held.epoch))
        return ShardBook(range_, held.version, True, True)

    def is_led(self, index: int) -> bool:
        return bool(self.servers.get(index))

    def leader_report(self, book: ShardBook) -> ShardReport:
        index, leader = book.range.index, book.range.leader
        return next(report for name, report in self.servers[index] if name == leader)


def _later(one: JobReady, other: JobReady) -> JobReady:
    """The two put together, shard by shard what is of the higher epoch."""
    shards = tuple(
        max(pair, key=lambda shard: shard.epoch) for pair in zip(one.shards, other.shards, strict=True)
    )
    return msgspec.structs.replace(one, shards=shards)


class Rebuilding:
    def __init__(self, awaited: Iterable[str], wait_s: float) -> None:
        self.awaited = set(awaited)
        self._asked = len(self.awaited)
        self.jobs: dict[str, JobReports] = {}
        self.later: list[Event] = []
        self._wait_s = wait_s
        self._overdue = False
        self.until: float | None = None

    def begin(self, now: float) -> None:
        if self.until is None:
            self.until = now + self._wait_s

    def complete(self, now: float) -> bool:
        """All have reported, or the others have had their time and at least half are here."""
        if not self.awaited:
            return True
        if self.until is None or now < self.until:
            return False
        if self._enough():
            return True
        self.until, self._overdue = now + self._wait_s, True
        return False

    def _enough(self) -> bool:
        return 2 * len(self.awaited) <= self._asked

    def answers(self) -> bool:
        """Whether members may count on this scheduler: not where most have been waited for in vain."""
        return not self._overdue or self._enough()

    def reports(self, job: str) -> JobReports:
        return self.jobs.setdefault(job, JobReports())
