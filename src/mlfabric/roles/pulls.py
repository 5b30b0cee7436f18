"""The scheduler's side of pulls: who sends to whom and how fast, and what that leaves to replicas.

The model comes from the leaders. A worker's first one comes, while others train, from whoever holds it
nearest by: the leader or its replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mlfabric.messages import AppliedReport, PullFailed, PullWanted, Replicate, ServePull
from mlfabric.plan.values import Reserved
from mlfabric.roles.actions import Action, Send
from mlfabric.roles.domain import Domain, Fetch, Job
from mlfabric.roles.entries import ShardBook
from mlfabric.roles.pace import Pace
from mlfabric.roles.release import MAX_RATE
from mlfabric.topology import Link

# A replica is brought up to date in spare time once it has used up this share of its bound.
SPARE_SHARE = 0.5


class Pulls:
    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def pull(self, job: Job, sender: str, message: PullWanted, now: float) -> list[Action]:
        if job.failed is not None:
            return [Send(sender, "worker", PullFailed(message.pull, job.failed))]
        if job.book is None or not job.ready:
            job.early_pulls.append((sender, message))
            return []
        if message.shards:  # the rest of a pull that is under way
            held = job.pace is not None and job.pace.holds(message.pull)
            return [] if held else self._serve(job, sender, message, now)
        if job.book.entries.has_open(sender):
            job.demand.alongside = True
        if job.pace is None:
            job.pace = Pace(job.book.entries.settings)
        if not job.pace.binds:
            return self._serve(job, sender, message, now)
        job.pace.ask(sender, message)
        return self.serve_due(job, now)

    def serve_due(self, job: Job, now: float) -> list[Action]:
        """Give the model to those whose next step may begin, where steps are bound to each other."""
        if job.pace is None or not job.pace.binds or job.book is None or job.failed is not None:
            return []
        version = min(shard.version for shard in job.book.shards.values())
        due = job.pace.due(version)
        return [action for node, pull in due for action in self._serve(job, node, pull, now)]

    def _serve(self, job: Job, sender: str, message: PullWanted, now: float) -> list[Action]:
        assert job.book is not None
        lost = any(job.book.shards[index].range.leader not in self._domain.members for index in job.promoting)
        if lost or job.ending is not None:
            return []  # the new leader's announcement makes the worker ask again; or the job ends
        actions: list[Action] = []
        moving = job.taking_over()
        users = self._users()
        fetch = Fetch(sender, {}, {}, message.with_state)
        after = job.book.entries.last_number() if message.with_state else None
        for index, shard in sorted(job.book.shards.items()):
            if message.shards and index not in message.shards:
                continue
            if index in moving:  # the worker asks again for it when it hears of the new leader
                fetch.held.add(index)
                continue
            holder = self._nearest(job, shard, sender) if message.first else shard.range.leader
            rate = self._spare_rate(holder, sender, users)
            source, target = self._domain.members[holder].host, self._domain.members[sender].host
            size = float(shard.range.count * 4)
            if source != target:
                fetch.reserved[index] = (Reserved(source, target, size, rate), now + size / rate)
            fetch.sources[index] = holder
            order = ServePull(message.pull, sender, index, rate, message.with_state, after)
            role = "server" if holder == shard.range.leader else "replica"
            actions.append(Send(holder, f"{role}.{index}", order))
        known = job.pulls.setdefault(message.pull, fetch)
        known.sources |= fetch.sources
        known.reserved |= fetch.reserved
        known.held |= fetch.held
        return actions

    def lead_stayed(self, job: Job, shard: int, now: float) -> list[Action]:
        """It did not move after all: what was held back comes from who leads it still."""
        actions: list[Action] = []
        for name, fetch in job.pulls.items():
            if shard in fetch.held:
                fetch.held.discard(shard)
                wanted = PullWanted(name, fetch.with_state, shards=(shard,))
                actions += self._serve(job, fetch.node, wanted, now)
        return actions

    def lead_moved(self, job: Job, shard: int, now: float) -> None:
        """Parts that the old leader is still sending end without its word."""
        for name in list(job.pulls):
            job.pulls[name].held.discard(shard)
            self.pull_served(job, name, shard, now)

    def _nearest(self, job: Job, shard: ShardBook, sender: str) -> str:
        """The leader, or its replica where that is nearer and not far behind: updates would come too late."""
        assert job.book is not None
        leader, replica = shard.range.leader, shard.range.replica
        if replica is None or replica not in self._domain.members or not shard.replica_filled:
            return leader
        here = self._domain.members[sender]
        lag = len(shard.undurable)
        if lag and ("worker" not in here.roles or not any(job.book.entries.open_counts())):
            return leader  # who looks at what came of the training wants all of it
        bound = job.book.entries.max_delay(len(self._domain.workers(job)))
        if bound is not None and 2 * lag > bound:
            return leader

        def nearness(node: str) -> tuple[bool, bool, float, bool]:
            member = self._domain.members[node]
            same_rack = member.rack is not None and member.rack == here.rack
            return member.host == here.host, same_rack, self._spare_rate(node, sender), node == leader

        return max((leader, replica), key=nearness)

    def source_lost(self, job: Job, node: str) -> list[Action]:
        """Who is gone sends nothing any more: what a replica had yet to send comes from the leaders."""
        known = self._domain.network.hosts
        for each in self._domain.jobs.values():
            for fetch in each.pulls.values():
                fetch.reserved = {
                    index: (reserved, finish_s)
                    for index, (reserved, finish_s) in fetch.reserved.items()
                    if reserved.source in known and reserved.target in known
                }
        if job.book is None:
            return []
        actions: list[Action] = []
        for pull, fetch in job.pulls.items():
            for index in [index for index, source in fetch.sources.items() if source == node]:
                leader = job.book.shards[index].range.leader
                if leader == node or leader not in self._domain.members:
                    continue  # its successor's announcement makes the worker ask again
                fetch.sources[index] = leader
                rate = self._spare_rate(leader, fetch.node)
                order = ServePull(pull, fetch.node, index, rate, False)
                actions.append(Send(leader, f"server.{index}", order))
        return actions

    def pull_served(self, job: Job, pull: str, shard: int, now: float) -> None:
        fetch = job.pulls.get(pull)
        if fetch is not None:
            fetch.sources.pop(shard, None)
            fetch.reserved.pop(shard, None)
            if not fetch.sources and not fetch.held:
                del job.pulls[pull]
                job.demand.waits_no_more(fetch.node, now)

    def _spare_rate(self, source: str, target: str, users: Mapping[Link, int] | None = None) -> float:
        """What the path has left beside other pulls; never less than a fair part of it."""
        here, there = self._domain.members[source].host, self._domain.members[target].host
        if here == there:
            return MAX_RATE
        users = self._users() if users is None else users
        network = self._domain.network
        return min(network.capacity(link) / (1 + users.get(link, 0)) for link in network.path(here, there))

    def _users(self) -> Counter[Link]:
        """How many pulls each link serves; the parts that one host sends another follow each other."""
        network = self._domain.network
        ways = [
            {(reserved.source, reserved.target) for reserved, _ in pulling.reserved.values()}
            for job in self._domain.jobs.values()
            for pulling in job.pulls.values()
        ]
        return Counter(link for each in ways for way in each for link in network.path(*way))

    def spare_replication(self, job: Job, report: AppliedReport) -> list[Action]:
        """Use a moment's spare capacity before the bound makes the server wait."""
        assert job.book is not None
        assert job.published is not None
        bound = job.published.settings.divergence
        shard = job.book.shards[report.shard]
        replica = shard.range.replica
        if not bound or replica not in self._domain.members or report.replica_version is None:
            return []
        if report.replica_version >= report.version or report.divergence < SPARE_SHARE * bound:
            return []
        rate = self._spare_rate(shard.range.leader, replica)
        why = f"divergence {report.divergence:.3g} of {bound:.3g}"
        return [Send(shard.range.leader, f"server.{report.shard}", Replicate(report.shard, rate, why))]
