"""The scheduler's side of pulls: who sends to whom and how fast, and what that leaves to replicas."""

from __future__ import annotations

from mlfabric.messages import AppliedReport, PullFailed, PullWanted, Replicate, ServePull
from mlfabric.plan.values import Reserved
from mlfabric.roles.actions import Action, Send
from mlfabric.roles.domain import Domain, Fetch, Job
from mlfabric.roles.release import MAX_RATE

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
        if any(job.book.shards[index].range.leader not in self._domain.members for index in job.promoting):
            return []  # the new leader's announcement makes the worker ask again
        if job.book.entries.has_open(sender):
            job.demand.alongside = True
        actions: list[Action] = []
        reserved: dict[int, tuple[Reserved, float]] = {}
        after = job.book.entries.last_number() if message.with_state else None
        asked = {index for index in job.book.shards if not message.shards or index in message.shards}
        for index, shard in sorted(job.book.shards.items()):
            if index not in asked or index in job.promoting:
                continue  # where the lead moves, the worker asks again for that shard
            leader = shard.range.leader
            rate = self._spare_rate(leader, sender)
            source, target = self._domain.members[leader].host, self._domain.members[sender].host
            size = float(shard.range.count * 4)
            if source != target:
                reserved[index] = (Reserved(source, target, size, rate), now + size / rate)
            order = ServePull(message.pull, sender, index, rate, message.with_state, after)
            actions.append(Send(leader, f"server.{index}", order))
        pulling = job.pulls.setdefault(message.pull, Fetch(sender, set(), message.with_state, {}))
        pulling.shards |= asked
        pulling.reserved |= reserved
        return actions

    def lead_moved(self, job: Job, shard: int, now: float) -> None:
        """Parts that the old leader is still sending end without its word."""
        for name in list(job.pulls):
            self.pull_served(job, name, shard, now)

    def pull_served(self, job: Job, pull: str, shard: int, now: float) -> None:
        pulling = job.pulls.get(pull)
        if pulling is not None:
            pulling.shards.discard(shard)
            pulling.reserved.pop(shard, None)
            if not pulling.shards:
                del job.pulls[pull]
                job.demand.waits_no_more(pulling.node, now)

    def _spare_rate(self, source: str, target: str) -> float:
        """What the path has left beside other pulls; never less than a fair part of it."""
        here, there = self._domain.members[source].host, self._domain.members[target].host
        if here == there:
            return MAX_RATE
        path = self._domain.network.path(here, there)
        rate = float("inf")
        for link in path:
            users = 1
            for job in self._domain.jobs.values():
                for pulling in job.pulls.values():
                    users += sum(
                        link in self._domain.network.path(r.source, r.target)
                        for r, _ in pulling.reserved.values()
                    )
            rate = min(rate, self._domain.network.capacity(link) / users)
        return rate

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
