"""`mlfabric bench plan`: how long planning takes, and how that grows.

The instance follows from a seed: link rates from {1, 1/2, 1/4, 1/8} of nominal, up and down separately, racks of
32 hosts oversubscribed 4:1, two jobs with four shards each placed by bandwidth, one offer per host, every tenth
past its bound, aggregation and replication on. `full` plans all offers of both jobs from nothing;
`incremental-offer` adds one offer to a standing plan, `incremental-rate` changes one host's rate.
Times are processor time of this process, medians of interleaved repeats: planning is one thread without input
or output, so on an idle machine that is the time on the wall, and on a busy one it is not the neighbours' time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlfabric.plan.placement import place_shards
from mlfabric.plan.values import JobState, Offer
from mlfabric.scenario import uniform
from mlfabric.topology import Host, Network, Rack

NOMINAL_BYTES_PER_S = 1.25e9 * 1448 / 1514  # 10 Gb/s Ethernet
SHARES = (1.0, 0.5, 0.25, 0.125)
RACK_HOSTS = 32
OVERSUBSCRIPTION = 4
SHARDS = 4
JOBS = 2
UPDATE_BYTES = 100_000_000
LATE_SHARE = 0.1
GROWTH_OFFERS = (250, 500, 1000, 2000, 4000, 8000)


@dataclass(frozen=True, slots=True)
class Instance:
    network: Network
    jobs: list[tuple[JobState, list[Offer]]]


def make_instance(offers: int, hosts: int, seed: int = 1) -> Instance:
    """The benchmark's cluster with its waiting offers."""
    names = [f"h{i:05d}" for i in range(hosts)]

    def rate(name: str, way: str) -> float:
        return NOMINAL_BYTES_PER_S * SHARES[int(uniform(seed, "rate", name, way) * len(SHARES))]

    made = [
        Host(name, rate(name, "up"), rate(name, "down"), f"rack{i // RACK_HOSTS}")
        for i, name in enumerate(names)
    ]
    racks = []
    for first in range(0, hosts, RACK_HOSTS):
        inside = made[first : first + RACK_HOSTS]
        up = sum(host.up_bytes_per_s for host in inside) / OVERSUBSCRIPTION
        down = sum(host.down_bytes_per_s for host in inside) / OVERSUBSCRIPTION
        racks.append(Rack(f"rack{first // RACK_HOSTS}", up, down))
    network = Network.of(made, racks)
    jobs = []
    for number in range(JOBS):
        name = f"job{number}"
        own = names[number::JOBS]
        count = len(range(number, offers, JOBS))
        bound = 2 * count
        placed = 10 * count
        waiting = []
        for k in range(count):
            key = (seed, "offer", name, k)
            late = uniform(*key, "late") < LATE_SHARE
            behind = (
                bound + 1 + int(uniform(*key, "by") * count) if late else int(uniform(*key, "age") * count)
            )
            host = own[k % len(own)]
            waiting.append(
                Offer(
                    f"{name}-u{k:05d}",
                    f"{name}-w{k:05d}",
                    host,
                    UPDATE_BYTES,
                    placed - behind,
                    norm=uniform(*key, "norm"),
                    arrival=k,
                    job=name,
                )
            )
        job = JobState(
            name=name,
            placed_version=placed,
            max_delay=bound,
            concurrency=count,
            shards=place_shards(network, own, SHARDS, replicas=True),
            aggregators=tuple(own),
            weight=1.0 + number,
            divergence=0.1 * count,
        )
        jobs.append((job, waiting))
    return Instance(network, jobs)
