"""Whether the scheduler hears enough of a job's members to decide anything, and whom it may give up."""

from __future__ import annotations

from mlfabric.roles.actions import Action, Note
from mlfabric.roles.domain import Domain, Job

# A silent leader that nobody can replace is waited for so much longer: giving it up ends the job.
IRREPLACEABLE_S = 10.0
# For how long it need not count them again.
COUNTED_S = 0.05


class Company:
    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def may_give_up(self, node: str, now: float) -> bool:
        """Whether enough others are heard, and its loss would not end the job for a moment's silence."""
        job = self._domain.job_of(node)
        if job is None:
            return True
        if self._is_irreplaceable(job, node) and self._domain.leases.silent_s(node, now) < IRREPLACEABLE_S:
            return False
        members = self._domain.members_of(job)
        fresh = sum(1 for name in members if self._domain.leases.fresh(name, now))
        # Where most have just fallen silent together, it is us who can't hear.
        return self.hears_enough(job, now) and 2 * fresh >= len(members) + self._given_up(job, now)

    def _given_up(self, job: Job, now: float) -> int:
        """Those given up a moment ago still count, or a cut would let us give up one half after the other."""
        job.given_up = {name: until for name, until in job.given_up.items() if now < until}
        return len(job.given_up.keys() - self._domain.members.keys())

    def hears_enough(self, job: Job, now: float) -> bool:
        """At least half of the job's members: then no other scheduler can have more than half."""
        if now < job.enough[0]:
            return job.enough[1]
        members = self._domain.members_of(job)
        heard = sum(1 for name in members if self._domain.leases.alive(name, now))
        enough = 2 * heard >= len(members) + self._given_up(job, now)
        job.enough = (now + COUNTED_S, enough)
        return enough

    def heard_until(self, job: Job, now: float) -> float:
        """Until when enough are heard if nobody speaks from now on. Before that no other scheduler has begun:
        those who would vote for one still count on this one."""
        untils = sorted(
            (self._domain.leases.until_s(name) for name in self._domain.members_of(job)), reverse=True
        )
        needed = (len(untils) + self._given_up(job, now) + 1) // 2
        return untils[needed - 1] if 0 < needed <= len(untils) else now

    def _is_irreplaceable(self, job: Job, node: str) -> bool:
        if job.book is None or not job.ready or job.failed is not None:
            return False
        return any(
            shard.range.leader == node
            and not (shard.replica_filled and shard.range.replica in self._domain.members)
            for shard in job.book.shards.values()
        )

    def check_company(self, job: Job, now: float) -> list[Action]:
        alone = not self.hears_enough(job, now)
        if alone == job.alone:
            return []
        job.alone = alone
        count = len(self._domain.members_of(job))
        if not alone:
            return [Note("decides-again", f"at least half of the {count} members are heard", loud=True)]
        reason = f"fewer than half of the {count} members of job {job.name} are heard; nothing is decided"
        return [Note("undecided", reason, loud=True)]
