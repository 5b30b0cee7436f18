"""Leads that follow the bandwidth: whenever rates are learned, the scheduler looks whether other hosts should
lead (`plan.serving` decides, `roles.handover` moves).

A job with replicas moves leads to them alone, where the state is. It has to fill new ones afterwards, and
until then a loss of the new leader would end it: so it moves them rarely, and only for much.
"""

from __future__ import annotations

from mlfabric.plan.serving import WORTH_MOVING_LEADS, plan_leads
from mlfabric.roles.actions import Action, Note
from mlfabric.roles.domain import Domain, Job
from mlfabric.roles.handover import Handover
from mlfabric.roles.leads import Leads

# Rates are expected to hold for so long; moves have to pay within it.
HORIZON_S = 5.0
# Leads that have moved stay for so long at least.
SETTLED_S = 1.0
# With replicas.
SETTLED_FILLING_S = 10.0
WORTH_FILLING = 2.0
# Values and one vector of optimizer state are what most rules keep of each element.
STATE_COPIES = 2


class Replacing:
    def __init__(self, domain: Domain, leads: Leads, handover: Handover) -> None:
        self._domain = domain
        self._leads = leads
        self._handover = handover

    def look(self, job: Job, now: float) -> list[Action]:
        """Have other hosts lead where that pays, by the rates of now."""
        book, published = job.book, job.published
        if book is None or published is None or not job.ready or job.failed is not None:
            return []
        if job.moving or job.promoting or self._domain.draining:
            job.look_at = now + SETTLED_S
            return []
        if now < job.settled_at:
            job.look_at = job.settled_at
            return []
        replicated = published.settings.divergence is not None
        members = self._domain.members
        ranges = {index: shard.range for index, shard in book.shards.items()}
        if any(range_.leader not in members for range_ in ranges.values()):
            return []
        followed: dict[int, str | None] = {}
        for index, range_ in ranges.items():
            replica = members.get(range_.replica or "")
            filled = replica is not None and book.shards[index].replica_filled
            followed[index] = replica.host if replica is not None and filled else None
        places = self._leads.places(job)
        spare, wanted = self._leads.spare(
            job, 4.0 * published.elements, {*places, *(host for host in followed.values() if host)}
        )
        planned = plan_leads(
            self._domain.network,
            spare,
            wanted,
            {index: members[range_.leader].host for index, range_ in ranges.items()},
            followed,
            STATE_COPIES * 4.0 * published.elements / len(ranges),
            HORIZON_S,
            only_to_replicas=replicated,
            worth=WORTH_FILLING if replicated else WORTH_MOVING_LEADS,
        )
        if not planned.moves:
            return []
        job.settled_at = now + (SETTLED_FILLING_S if replicated else SETTLED_S)
        targets = {}
        for index, host in planned.moves.items():
            replica_here = followed[index] == host
            targets[index] = (ranges[index].replica or "") if replica_here else places[host]
        note = Note("placed-anew", f"{len(targets)} of {len(ranges)} shards: {planned.reason}")
        return [note, *self._handover.move_leads(job, targets, planned.reason)]
