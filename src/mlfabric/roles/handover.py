"""Leads that move while their leader lives: to a better link (`roles.replacing` says which), or because its
host is to leave.

The leader stops where it is, brings who takes over level, and yields; what was on its way is sent once more,
to the new leader and in the same order. What is granted meanwhile sends its other parts; the part of a shard
that is changing hands is held back until that is done.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mlfabric.messages import (
    DrainAnswered,
    DrainBegun,
    DrainWanted,
    LeadYielded,
    Promote,
    ShardRange,
    StepDown,
    YieldLead,
)
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.domain import Domain, Job, Move
from mlfabric.roles.failover import FailOver
from mlfabric.roles.placing import Placing, by_suitability


class Handover:
    def __init__(self, domain: Domain, placing: Placing, failover: FailOver) -> None:
        self._domain = domain
        self._placing = placing
        self._failover = failover

    def move_leads(self, job: Job, targets: Mapping[int, str], why: str) -> list[Action]:
        """Have other nodes lead these shards: their replicas, or whoever is to follow just for this."""
        assert job.book is not None
        actions: list[Action] = []
        for index, target in sorted(targets.items()):
            if index not in job.promoting and index not in job.moving:
                job.moving[index] = Move(target, why)
                leader = job.book.shards[index].range.leader
                actions.append(Note("moving-lead", f"shard {index} from {leader} to {target}: {why}"))
        return [*actions, *self.ask_to_yield(job)]

    def ask_to_yield(self, job: Job) -> list[Action]:
        """Once nobody is being asked about dropping updates, and no checkpoint is being taken: both need
        all shards to stay where they are."""
        assert job.book is not None
        if job.book.withdrawing.is_dropping() or any(pulling.with_state for pulling in job.pulls.values()):
            return []
        actions: list[Action] = []
        usable = self._domain.usable(job)
        job.moving = {index: move for index, move in job.moving.items() if move.told or move.target in usable}
        for index, move in job.moving.items():
            if not move.told:
                move.told = True
                actions += self._follow(job, index, move.target)
                range_ = job.book.shards[index].range
                order = YieldLead(index, move.why, move.target)
                actions.append(Send(range_.leader, f"server.{index}", order))
        return actions

    def _follow(self, job: Job, index: int, target: str) -> list[Action]:
        """Whoever is to lead a shard follows it first."""
        assert job.book is not None
        shard = job.book.shards[index]
        if shard.range.replica == target:
            return []
        actions: list[Action] = []
        if shard.range.replica is not None:
            why = f"shard {index} is followed by {target} now"
            actions.append(
                Send(shard.range.replica, "member", StepDown(f"replica.{index}", why, orderly=True))
            )
        shard.range = msgspec.structs.replace(shard.range, replica=target)
        shard.replica_filled = False
        return [*actions, self._placing.follow_order(job, shard.range)]

    def lead_yielded(self, job: Job, sender: str, message: LeadYielded) -> list[Action]:
        assert job.book is not None
        range_ = job.book.shards[message.shard].range
        if message.shard not in job.moving or (sender, message.epoch) != (range_.leader, range_.epoch):
            return []
        move = job.moving.pop(message.shard)
        assert range_.replica == move.target
        job.promoting[message.shard] = (move.target, move.why)
        promote = Promote(message.shard, range_.epoch + 1, move.why, orderly=True)
        return [Send(move.target, f"replica.{message.shard}", promote)]

    def drain(
        self, wanted: DrainWanted, ask: bool = False, own: bool = False
    ) -> tuple[DrainAnswered, list[Action]]:
        """Have a node, or all nodes of a host, leave once nothing needs them. One whose `own` wish it is may
        wait for those who need it to leave too; others are not made to."""
        target = wanted.target
        members = self._domain.members
        named = {n: m for n, m in members.items() if n == target or (m.host == target and not own)}
        nodes = tuple(sorted(n for n, m in named.items() if wanted.job in (None, m.job)))
        if not nodes:
            return DrainAnswered((), f"no member is called {target} and none runs on a host of that name"), []
        for node in nodes:
            error = "" if own else self._undrainable(node, nodes)
            if error:
                return DrainAnswered((), error), []
        if ask:
            return DrainAnswered(nodes), []
        actions: list[Action] = []
        for node in nodes:
            if node not in self._domain.draining:
                self._domain.draining[node] = f"{node} is being drained"
                actions.append(Send(node, "member", DrainBegun(self._domain.draining[node])))
        return DrainAnswered(nodes), actions

    def _undrainable(self, node: str, leaving: tuple[str, ...]) -> str:
        job = self._domain.job_of(node)
        if job is None or job.book is None or job.failed is not None:
            return ""
        led = [index for index, shard in job.book.shards.items() if shard.range.leader == node]
        stay = {n: m for n, m in self._domain.usable(job).items() if n not in leaving}
        if led and not by_suitability(stay, "replica"):
            return f"nobody else can lead shard {led[0]} of job {job.name}; add a member that can first"
        return ""

    def hand_on(self, job: Job, node: str, now: float) -> list[Action]:
        assert job.book is not None
        usable = self._domain.usable(job)
        actions: list[Action] = []
        for index, shard in job.book.shards.items():
            range_ = shard.range
            if range_.leader not in self._domain.members:
                continue  # its heir takes over first
            if range_.replica == node and index not in job.promoting:
                other = self._placing.choose_replica(job, range_)
                if other is not None:
                    moving = job.moving.pop(index, None)
                    shard.range = msgspec.structs.replace(range_, replica=other)
                    shard.replica_filled = False
                    actions += self._placing.assign_replica(job, shard.range)
                    if moving is not None and moving.told:
                        actions += self._failover.lead_stayed(job, index, now)
            elif range_.leader == node and range_.replica is None:
                actions += self._placing.find_replicas(job)
            elif range_.leader == node and shard.replica_filled and range_.replica in usable:
                actions += self.move_leads(job, {index: range_.replica}, self._domain.draining[node])
        return actions

    def is_needed(self, job: Job, node: str) -> bool:
        if job.book is None or not job.ready or job.failed is not None:
            return False
        if job.book.entries.has_open(node):
            return True
        if not self._is_used(job):
            return False
        return any(self._keeps(job, shard.range, node) for shard in job.book.shards.values())

    def _keeps(self, job: Job, range_: ShardRange, node: str) -> bool:
        """Whether a node has to hold this shard until somebody else does."""
        if range_.leader == node:
            return True
        if range_.replica != node:
            return False
        if range_.leader not in self._domain.members:
            return range_.index in job.promoting
        return self._placing.choose_replica(job, range_) is not None

    def _is_used(self, job: Job) -> bool:
        """Whether anybody who stays would miss the model: where all leave, the last of them take it along."""
        assert job.book is not None
        stays = any("worker" in m.roles or "replica" in m.roles for m in self._domain.usable(job).values())
        return stays or any(job.book.entries.has_open(name) for name in self._domain.members_of(job))
