"""Who may lead a job's shards, and who would best: by bandwidth, as `plan.serving` deals it.

Where some members only serve, only those lead; else any that may.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlfabric.messages import PublishWanted
from mlfabric.plan.serving import deal, serving_shares, to_spare
from mlfabric.roles.domain import Domain, Job

# "auto": so many shards per host that may lead, so that leads can be dealt by bandwidth; but not more in all,
# as each costs messages with every update, and none smaller than this.
SHARDS_PER_HOST = 2
MOST_SHARDS = 32
LEAST_SHARD_BYTES = 256 * 1024


class Leads:
    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def places(self, job: Job) -> dict[str, str]:
        """Hosts that may lead, and the node that would do it there."""
        able = [m for m in self._domain.usable(job).values() if "server" in m.roles]
        if any("worker" not in member.roles for member in able):
            able = [member for member in able if "worker" not in member.roles]
        return {member.host: member.node for member in sorted(able, key=lambda m: m.node, reverse=True)}

    def spare(self, job: Job, size_bytes: float, hosts: Iterable[str]) -> tuple[dict[str, float], float]:
        """Bytes per second that hosts have to serve with, and what all workers together would send."""
        hosts = sorted(hosts)
        network = self._domain.network
        working: dict[str, int] = {}
        for member in self._domain.members_of(job).values():
            if "worker" in member.roles:
                working[member.host] = working.get(member.host, 0) + 1
        own = {}
        rates = {}
        for name in sorted({*working, *hosts}):
            host, workers = network.hosts[name], working.get(name, 0)
            rates[name] = min(host.up_bytes_per_s, host.down_bytes_per_s)
            each = job.demand.own_traffic(rates[name] / workers, size_bytes) if workers else 0.0
            own[name] = workers * each
        return {name: to_spare(rates[name], own[name]) for name in hosts}, sum(own.values())

    def count(self, job: Job, wanted: PublishWanted) -> int:
        """How many shards a model is cut into."""
        if wanted.settings.shards:
            return min(wanted.settings.shards, wanted.elements)
        hosts = len(self.places(job))
        most = min(SHARDS_PER_HOST * hosts if hosts > 1 else 1, MOST_SHARDS)
        return max(min(most, 4 * wanted.elements // LEAST_SHARD_BYTES), 1)

    def first(self, job: Job, wanted: PublishWanted, count: int) -> list[str]:
        """The node that leads each of the shards to begin with."""
        network, places = self._domain.network, self.places(job)
        spare, demand = self.spare(job, 4.0 * wanted.elements, places)
        rack_of = {host: network.hosts[host].rack for host in spare}
        dealt = deal(serving_shares(spare, demand, rack_of, network.racks.values()), count)
        return [places[host] for host in sorted(dealt) for _ in range(dealt[host])]
