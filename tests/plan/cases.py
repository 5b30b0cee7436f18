"""Random networks, jobs and offers for the planner's tests; everything follows from the seed."""

from __future__ import annotations

import random

from mlfabric.plan.values import JobState, Offer, Reserved, Shard
from mlfabric.topology import Host, Network, Rack

SHARES = (1.0, 0.5, 0.25, 0.125)
RATE = 1e8


def equal_network(workers: int) -> Network:
    """A server `s` and workers w000, w001, ... over equal links."""
    return Network.of(
        [Host("s", RATE, RATE), *(Host(f"w{i:03d}", RATE, RATE) for i in range(workers))],
    )


def equal_offers(workers: int, size_bytes: int = 100_000_000) -> list[Offer]:
    return [Offer(f"u{i:03d}", f"w{i:03d}", f"w{i:03d}", size_bytes, 0, arrival=i) for i in range(workers)]


def random_network(draw: random.Random, hosts: int, racks: int = 0) -> Network:
    names = [f"r{k}" for k in range(racks)]
    made = [
        Host(
            f"h{i:02d}",
            RATE * draw.choice(SHARES),
            RATE * draw.choice(SHARES),
            draw.choice(names) if names else None,
        )
        for i in range(hosts)
    ]
    links = []
    for name in names:
        inside = [host for host in made if host.rack == name]
        up = max(sum(host.up_bytes_per_s for host in inside) / 4, RATE / 8)
        down = max(sum(host.down_bytes_per_s for host in inside) / 4, RATE / 8)
        links.append(Rack(name, up, down))
    return Network.of(made, links)


def random_case(
    seed: int, workers: int, idle: int = 2, shards: int = 1, racks: int = 0, bound: int | None = None
) -> tuple[Network, list[Reserved], JobState, list[Offer]]:
    """Servers on the first hosts, then workers with one offer each, then idle hosts."""
    draw = random.Random(seed)
    network = random_network(draw, shards + workers + idle, racks)
    names = list(network.hosts)
    job = JobState(
        placed_version=40,
        max_delay=bound,
        concurrency=workers,
        shards=tuple(Shard(k, names[k], share=1 / shards) for k in range(shards)),
        aggregators=tuple(names),
    )
    offers = [
        Offer(f"u{i:02d}", f"w{i:02d}", host, 10_000_000, 40 - draw.randint(0, 20), arrival=i)
        for i, host in enumerate(names[shards : shards + workers])
    ]
    moving = [
        Reserved(draw.choice(names), draw.choice(names), draw.uniform(1e5, 1e7), RATE * draw.choice(SHARES))
        for _ in range(draw.randint(0, 3))
    ]
    return network, moving, job, offers


def odd_case(seed: int) -> tuple[Network, list[Reserved], JobState, list[Offer]]:
    """What a cluster can come to: workers beside servers, two on a host, empty updates, hosts gone."""
    draw = random.Random(seed)
    network = random_network(draw, draw.randint(1, 8), draw.choice((0, 0, 2, 3)))
    names = list(network.hosts)
    shards = []
    for k in range(draw.randint(1, 4)):
        server, replica = draw.choice(names), draw.choice([None, *names])
        shards.append(
            Shard(k, server, replica if replica != server else None, share=draw.choice((1, 0.5, 0.1)))
        )
    job = JobState(
        placed_version=40,
        max_delay=draw.choice((None, 5, 20, 40)),
        concurrency=draw.randint(1, 9),
        shards=tuple(shards),
        aggregators=tuple(draw.sample(names, draw.randint(0, len(names)))),
        objective=draw.choice(("mean", "last")),
        chunk_bytes=draw.choice((None, None, 1000, 10**6, 10**9)),
        levels=draw.choice((1, 2, 3)),
        divergence=draw.choice((None, 0.0, 1.0, 5.0)),
        max_rate_bytes_per_s=draw.choice((None, None, 3e7)),
    )
    offers = [
        Offer(
            f"u{i}",
            f"w{i // 2}",
            draw.choice([*names, "gone"]) if draw.random() < 0.1 else draw.choice(names),
            draw.choice((10**7, 10**7, 5 * 10**6, 0, 1, 3)),
            40 - draw.randint(0, 20),
            norm=draw.random(),
            arrival=i,
            drops_in_row=draw.choice((0, 0, 1, 3)),
        )
        for i in range(draw.randint(0, 14))
    ]
    moving = [
        Reserved(draw.choice(names), draw.choice(names), draw.uniform(0, 1e7), draw.choice((0.0, 1e6, RATE)))
        for _ in range(draw.randint(0, 4))
    ]
    return network, moving, job, offers
