"""A worker's side of pulls: parts of the model that come from those who hold its shards.

What comes with the names of others is passed on to them as it comes, whether it is wanted here or not. It
belongs to the transfer that brings it: if that breaks off, so does what is passed on of it, and the
scheduler hears of every part that will not arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from mlfabric.events import TransferArriving
from mlfabric.messages import ModelPart, PullServed, PullWanted, ShardRange, Version, split_onward
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    CancelTransfer,
    FreeBuffer,
    PassOn,
    RefuseTransfer,
    ResolvePull,
    Send,
)


@dataclass(slots=True)
class _Pull:
    wanted: PullWanted
    versions: dict[int, Version] = field(default_factory=dict)
    transfers: dict[str, tuple[int, Version]] = field(default_factory=dict)
    retry_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Passing:
    """A part on its way from us to somebody else."""

    source: str  # transfer that brings it
    ours: str  # pull that it is for, here
    pull: str  # and there
    shard: int
    attempt: int


class Fetching:
    def __init__(self, scheduler: str, shards: Mapping[int, ShardRange]) -> None:
        self._scheduler = scheduler
        self._shards = shards  # the worker's: as it knows them
        self._pulls: dict[str, _Pull] = {}
        self._passing: dict[str, _Passing] = {}  # by transfer
        self._unwanted: set[str] = set()  # transfers that are only passed on
        self._sent = 0
        self.pulled_at = 0  # updates that had an outcome when the last model was asked for
        self.has_model = False

    def begin(self, wanted: PullWanted) -> list[Action]:
        self._pulls[wanted.pull] = _Pull(wanted)
        return [self._ask(wanted.pull)]

    def _ask(self, pull: str, shards: tuple[int, ...] = ()) -> Send:
        wanted = msgspec.structs.replace(self._pulls[pull].wanted, shards=shards)
        return Send(self._scheduler, "scheduler", wanted)

    def refused(self, pull: str, reason: str) -> list[Action]:
        if self._pulls.pop(pull, None) is None:
            return []
        return [ResolvePull(pull, error=reason)]

    def accept(self, event: TransferArriving, about: ModelPart) -> list[Action]:
        pull = self._pulls.get(about.pull)
        known = self._shards.get(about.shard)
        if known is None or about.version.epoch < known.epoch or (pull is None and not about.onward):
            return [RefuseTransfer(event.transfer, f"pull {about.pull} is not waited for")]
        if pull is None or about.shard in pull.versions:
            if not about.onward:
                return [
                    RefuseTransfer(event.transfer, f"shard {about.shard} of {about.pull} is here already")
                ]
            self._unwanted.add(event.transfer)
            buffer = _passing_buffer(event.transfer)
        else:
            # Asked for twice, after a fault: the second copy takes the first one's place.
            pull.transfers = {t: of for t, of in pull.transfers.items() if of[0] != about.shard}
            pull.transfers[event.transfer] = (about.shard, about.version)
            buffer = _pull_buffer(about.pull, about.shard)
        return [AcceptTransfer(event.transfer, buffer, onward=self._pass_on(event.transfer, about))]

    def _pass_on(self, transfer: str, about: ModelPart) -> tuple[PassOn, ...]:
        onward = []
        for hop, below in split_onward(about.onward):
            self._sent += 1
            version = f"{about.version.epoch}.{about.version.count}"
            name = f"{hop.pull}/{about.shard}/{version}/{about.pull}.{self._sent}"
            self._passing[name] = _Passing(transfer, about.pull, hop.pull, about.shard, hop.attempt)
            part = msgspec.structs.replace(about, pull=hop.pull, onward=below)
            onward.append(PassOn(name, hop.node, "worker", part, hop.rate_bytes_per_s, about.chunk_bytes))
        return tuple(onward)

    def passed_on(self, transfer: str, failed: bool = False) -> list[Action]:
        """What we passed on has left, or failed to."""
        passing = self._passing.pop(transfer, None)
        if passing is None:
            return []
        served = PullServed(passing.pull, passing.shard, failed, passing.attempt)
        return [Send(self._scheduler, "scheduler", served)]

    def came(self, transfer: str) -> list[Action]:
        """Nothing more comes of it. The driver holds what is still being passed on."""
        if transfer not in self._unwanted:
            return []
        self._unwanted.discard(transfer)
        return [FreeBuffer(_passing_buffer(transfer))]

    def arrived(self, transfer: str) -> ResolvePull | None:
        """The pull that is complete by it, if one is."""
        for name, pull in self._pulls.items():
            if transfer not in pull.transfers:
                continue
            shard, version = pull.transfers.pop(transfer)
            pull.versions[shard] = version
            if len(pull.versions) < len(self._shards):
                return None
            versions = tuple(pull.versions[index] for index in sorted(pull.versions))
            self.pulled_at = max(self.pulled_at, pull.wanted.clock)
            del self._pulls[name]
            self.has_model = True
            lent = any(passing.ours == name for passing in self._passing.values())
            return ResolvePull(name, versions, lent=lent)
        return None

    def failed(self, transfer: str, retry_at: float) -> list[Action]:
        if transfer in self._passing:
            return self.passed_on(transfer, failed=True)
        actions = self.came(transfer)
        for name in [name for name, passing in self._passing.items() if passing.source == transfer]:
            actions += [CancelTransfer(name, "what it was to pass on broke off"), *self.passed_on(name, True)]
        for pull in self._pulls.values():
            gone = pull.transfers.pop(transfer, None)
            if gone is not None:
                moved = gone[1].epoch < self._shards[gone[0]].epoch  # another leads by now: it can be asked
                pull.retry_at = 0.0 if moved else retry_at
        return actions

    def leader_silent(self, led: set[int], retry_at: float) -> None:
        for pull in self._pulls.values():
            if led - pull.versions.keys():
                pull.retry_at = retry_at

    def begin_again(self) -> list[Action]:
        """After a fail-over, or for a new scheduler: from the first shard on."""
        return [action for name, pull in self._pulls.items() for action in self._begin_again(name, pull)]

    def _begin_again(self, name: str, pull: _Pull) -> list[Action]:
        freed: list[Action] = [FreeBuffer(_pull_buffer(name, shard)) for shard in pull.versions]
        pull.versions.clear()
        pull.transfers.clear()
        pull.retry_at = None
        return [*freed, self._ask(name)]

    def lead_moved(self, shard: int) -> list[Action]:
        """What is not on its way from the old leader comes from the new one. The parts of a checkpoint belong
        together: it begins again."""
        actions: list[Action] = []
        for name, pull in self._pulls.items():
            if pull.wanted.with_state:
                actions += self._begin_again(name, pull)
            elif shard not in pull.versions and all(of != shard for of, _ in pull.transfers.values()):
                pull.retry_at = None
                actions.append(self._ask(name, (shard,)))
        return actions

    def retry(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, pull in self._pulls.items():
            if pull.retry_at is not None and now >= pull.retry_at:
                pull.retry_at = None
                coming = {shard for shard, _ in pull.transfers.values()}
                lacking = tuple(sorted(self._shards.keys() - pull.versions.keys() - coming))
                if not lacking:
                    continue
                actions.append(self._ask(name, () if pull.wanted.with_state else lacking))
        return actions

    def deadlines(self) -> list[float]:
        return [pull.retry_at for pull in self._pulls.values() if pull.retry_at is not None]


def _passing_buffer(transfer: str) -> str:
    return f"passing/{transfer}"


def _pull_buffer(pull: str, shard: int) -> str:
    """The driver hands these to the application when the pull is resolved."""
    return f"pull/{pull}/{shard}"
