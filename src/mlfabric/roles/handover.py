"""Leads that move while their leader lives: to a better link, or because its host is to leave."""

from __future__ import annotations

import msgspec

from mlfabric.messages import DrainAnswered, DrainBegun, DrainWanted, LeadYielded, Promote, YieldLead
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.domain import Domain, Job
from mlfabric.roles.placing import Placing, by_suitability

# A lead moves to a replica whose link is so many times better, and not again before so long.
BETTER_LINK = 2.0
SETTLED_S = 10.0


class Handover:
    def __init__(self, domain: Domain, placing: Placing) -> None:
        self._domain = domain
        self._placing = placing

    def _move_lead(self, job: Job, index: int, why: str) -> list[Action]:
        """Let what is on its way arrive, then have the replica take over: nothing is lost by it."""
        assert job.book is not None
        shard = job.book.shards[index]
        ready = shard.replica_filled and shard.range.replica in self._domain.usable(job)
        if not ready or index in job.promoting or index in job.moving:
            return []
        job.moving[index] = (why, False)
        note = Note("moving-lead", f"shard {index} from {shard.range.leader} to {shard.range.replica}: {why}")
        return [note, *self.ask_to_yield(job)]

    def ask_to_yield(self, job: Job) -> list[Action]:
        assert job.book is not None
        actions: list[Action] = []
        for index, (why, told) in job.moving.items():
            if not told and job.book.entries.is_idle(index):
                job.moving[index] = (why, True)
                leader = job.book.shards[index].range.leader
                actions.append(Send(leader, f"server.{index}", YieldLead(index, why)))
        return actions

    def lead_yielded(self, job: Job, sender: str, message: LeadYielded) -> list[Action]:
        assert job.book is not None
        range_ = job.book.shards[message.shard].range
        if message.shard not in job.moving or (sender, message.epoch) != (range_.leader, range_.epoch):
            return []
        why, _ = job.moving.pop(message.shard)
        assert range_.replica is not None
        job.promoting[message.shard] = (range_.replica, why)
        promote = Promote(message.shard, range_.epoch + 1, why)
        return [Send(range_.replica, f"replica.{message.shard}", promote)]

    def better_links(self, node: str, now: float) -> list[Action]:
        """After news of a host's rates: a lead moves where its replica is much better linked."""
        job = self._domain.job_of(node)
        if job is None or job.book is None or not job.ready:
            return []
        actions: list[Action] = []
        for index, shard in job.book.shards.items():
            replica = self._domain.members.get(shard.range.replica or "")
            leader = self._domain.members.get(shard.range.leader)
            if replica is None or leader is None or now < job.moved_at.get(index, -SETTLED_S) + SETTLED_S:
                continue
            here, there = (self._domain.network.hosts[member.host] for member in (leader, replica))
            rate = min(here.up_bytes_per_s, here.down_bytes_per_s)
            other = min(there.up_bytes_per_s, there.down_bytes_per_s)
            if other >= BETTER_LINK * rate:
                why = f"the link of {there.name} carries {other / rate:.1f} times as much"
                moves = self._move_lead(job, index, why)
                if moves:
                    job.moved_at[index] = now
                actions += moves
        return actions

    def drain(self, wanted: DrainWanted, ask: bool = False) -> tuple[DrainAnswered, list[Action]]:
        """Have a node, or all nodes of a host, leave once nothing needs them."""
        target = wanted.target
        named = {n: m for n, m in self._domain.members.items() if target in (n, m.host)}
        nodes = tuple(sorted(n for n, m in named.items() if wanted.job in (None, m.job)))
        if not nodes:
            return DrainAnswered((), f"no member is called {target} and none runs on a host of that name"), []
        for node in nodes:
            error = self._undrainable(node, nodes)
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

    def hand_on(self, job: Job, node: str) -> list[Action]:
        assert job.book is not None
        actions: list[Action] = []
        for index, shard in job.book.shards.items():
            range_ = shard.range
            if range_.replica == node and index not in job.promoting:
                other = self._placing.choose_replica(job, range_)
                if other is not None:
                    shard.range = msgspec.structs.replace(range_, replica=other)
                    shard.replica_filled = False
                    actions += self._placing.assign_replica(job, shard.range)
            elif range_.leader == node and range_.replica is None:
                actions += self._placing.find_replicas(job)
            elif range_.leader == node:
                actions += self._move_lead(job, index, self._domain.draining[node])
        return actions

    def is_needed(self, job: Job, node: str) -> bool:
        if job.book is None or not job.ready or job.failed is not None:
            return False
        ranges = [shard.range for shard in job.book.shards.values()]
        return job.book.entries.has_open(node) or any(
            range_.leader == node
            or (range_.replica == node and self._placing.choose_replica(job, range_) is not None)
            for range_ in ranges
        )
