"""Whether workers that want the model wait for others, to share a transfer with them.

Whoever asks first waits a moment for as many as came the last time. Who comes while the leaders send to
others waits until they have: it would only share their uplinks with those. Where nothing is gained by
company, as where every host leads a part, nobody waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from mlfabric.plan.distribution import WORTH
from mlfabric.roles.domain import Domain, Job

# Whoever asks for the model waits for others this share of the time it takes, and no longer than this: that
# is what it loses if nobody comes. A model that is there sooner than the least is not worth a relay.
WAIT_SHARE = 0.05
WAIT_MOST_S = 0.1
LEAST_S = 0.01
# A leader that sends models at more than this share of what its uplink can is busy.
BUSY_SHARE = 0.5


class Sharing:
    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def waits(self, job: Job, now: float) -> bool:
        """Whether those who want the model should wait for others: as many as came together the last time.
        While a leader is busy sending to somebody else there is no hurry either: it would only be shared."""
        workers = len(self._domain.workers(job))
        if job.gather_until is None:
            sender, _ = next(iter(job.gathering.values()))
            alone_s = self._alone_s(job, sender, workers)
            job.gather_until = (now + min(WAIT_SHARE * alone_s, WAIT_MOST_S), now + alone_s)
        company_until, free_until = job.gather_until
        if now < free_until and self._leaders_are_busy(job):
            return True
        return now < company_until and len(job.gathering) < min(job.together or workers, workers)

    def _alone_s(self, job: Job, sender: str, workers: int) -> float:
        """How long the model takes to one worker; zero where nobody would gain by company."""
        assert job.book is not None
        if not job.book.entries.settings.aggregate:
            return 0.0
        network, members = self._domain.network, self._domain.members
        here = members[sender].host
        from_hosts: Counter[str] = Counter()
        for shard in job.book.shards.values():
            if shard.range.leader in members:
                from_hosts[members[shard.range.leader].host] += shard.range.count * 4
        del from_hosts[here]
        alone_s = max((size / network.rate(host, here) for host, size in from_hosts.items()), default=0.0)
        alone_s = max(alone_s, sum(from_hosts.values()) / network.hosts[here].down_bytes_per_s)
        all_s = [workers * size / network.hosts[host].up_bytes_per_s for host, size in from_hosts.items()]
        return 0.0 if alone_s < LEAST_S or WORTH * max(all_s) <= alone_s else alone_s

    def _leaders_are_busy(self, job: Job) -> bool:
        """Whether an uplink of theirs is taken by models on their way."""
        assert job.book is not None
        members, network = self._domain.members, self._domain.network
        leaders = (shard.range.leader for shard in job.book.shards.values())
        hosts = {members[leader].host for leader in leaders if leader in members}
        taken: dict[str, float] = defaultdict(float)
        for fetch in job.pulls.values():
            for reserved, _ in fetch.reserved.values():
                taken[reserved.source] += reserved.rate_bytes_per_s
        return any(taken[host] > BUSY_SHARE * network.hosts[host].up_bytes_per_s for host in hosts)

    def deadlines(self, job: Job) -> list[float]:
        if job.gather_until is None:
            return []
        company_until, free_until = job.gather_until
        return [free_until if self._leaders_are_busy(job) else company_until]
