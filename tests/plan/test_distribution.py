"""The model's way down: shared, relayed, once per rack."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.plan.distribution import Pull, plan_distribution, share_pulls
from mlfabric.plan.reservation import Ledger
from mlfabric.topology import Host, Network, Rack
from tests.plan.cases import equal_network, random_network

SIZE = 10**8


def wants(names: list[str]) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in names}


@pytest.mark.parametrize("workers", [1, 3, 7, 15, 31])
def test_copies_double_with_every_transfer_time(workers: int) -> None:
    network = equal_network(workers)
    names = [name for name in network.hosts if name != "s"]
    relays = plan_distribution(Ledger(network), "s", 0, 5, SIZE, wants(names), 0.0)
    assert max(relay.finish_s for relay in relays) == pytest.approx(math.log2(workers + 1))


def test_chain_of_chunks_costs_little_more_than_one_transfer() -> None:
    network = equal_network(30)
    names = [name for name in network.hosts if name != "s"]
    relays = plan_distribution(Ledger(network), "s", 0, 5, SIZE, wants(names), 0.0, chunk_bytes=SIZE // 40)
    assert max(relay.finish_s for relay in relays) == pytest.approx(1 + 29 / 40)


def test_one_copy_enters_a_rack() -> None:
    hosts = [Host("s", 1e8, 1e8), *(Host(f"h{i}", 1e8, 1e8, "r") for i in range(6))]
    network = Network.of(hosts, [Rack("r", 5e7, 5e7)])
    names = [f"h{i}" for i in range(6)]
    relays = plan_distribution(Ledger(network), "s", 0, 1, SIZE, wants(names), 0.0)
    assert sum(1 for relay in relays if relay.source == "s") == 1


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_everybody_is_served_once_by_someone_who_has_it(seed: int, chunked: bool) -> None:
    draw = random.Random(seed)
    network = random_network(draw, draw.randint(2, 12), racks=draw.choice((0, 3)))
    server, *names = list(network.hosts)
    ledger = Ledger(network)
    chunk = SIZE // 20 if chunked else None
    relays = plan_distribution(ledger, server, 0, 1, SIZE, wants(names), 0.0, chunk)
    assert sorted(relay.target for relay in relays) == sorted(names)
    assert ledger.overbooked() == []
    arrived = {server: (0.0, 0.0)}
    for relay in relays:
        arrived[relay.target] = (relay.start_s, relay.finish_s)
    for relay in relays:
        begins, has = arrived[relay.source]
        if chunked and len(names) > 1:
            assert relay.start_s >= begins
            assert relay.finish_s >= has - 1e-9
        else:
            assert relay.start_s >= has - 1e-9
        assert relay.reason


def test_pulls_of_one_version_share_a_transfer() -> None:
    pulls = [Pull("w0", "a", 0, 3), Pull("w1", "a", 0, 5), Pull("w2", "b", 0, 4), Pull("w3", "c", 0, 9)]
    assert share_pulls(pulls, 5) == {0: {"a": ("w0", "w1"), "b": ("w2",)}}
