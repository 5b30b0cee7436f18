"""The model's way down: shared, relayed, once per rack."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.plan.distribution import (
    Pull,
    Wanted,
    expected_times,
    plan_distribution,
    relay_or_not,
    share_pulls,
)
from mlfabric.plan.reservation import Ledger
from mlfabric.plan.values import Reserved
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


def everybody(network: Network, server: str, size: int = SIZE, shard: int = 0) -> Wanted:
    return Wanted(shard, 0, server, size, wants([name for name in network.hosts if name != server]))


@pytest.mark.parametrize("workers", [2, 8, 30])
def test_relays_are_chosen_where_one_server_serves_many(workers: int) -> None:
    network = equal_network(workers)
    (relays,) = relay_or_not(network, [], [everybody(network, "s")])
    assert sorted(relay.target for relay in relays) == sorted(n for n in network.hosts if n != "s")
    assert max(relay.finish_s for relay in relays) < 1.3


def test_one_receiver_needs_no_relay() -> None:
    network = equal_network(1)
    assert relay_or_not(network, [], [everybody(network, "s")]) == []


def test_nothing_is_gained_where_every_host_serves_a_part() -> None:
    network = equal_network(7)
    wanted = [everybody(network, name, SIZE // 8, shard) for shard, name in enumerate(network.hosts)]
    assert relay_or_not(network, [], wanted) == []


def test_nothing_is_gained_by_passing_on_what_is_there_in_a_moment() -> None:
    network = equal_network(4)
    assert relay_or_not(network, [], [everybody(network, "s", 1000)]) == []


def test_a_host_that_can_hardly_send_comes_last() -> None:
    hosts = [Host("s", 1e8, 1e8), Host("a", 1e6, 1e8), *(Host(f"h{i}", 1e8, 1e8) for i in range(5))]
    network = Network.of(hosts)
    (relays,) = relay_or_not(network, [], [everybody(network, "s")])
    assert relays[-1].target == "a"


def test_a_chain_enters_a_rack_once_and_its_own_first() -> None:
    hosts = [Host("s", 1e8, 1e8, "r0")]
    hosts += [Host(f"h{i}", 1e8 * (1 + i / 10), 1e8, f"r{i % 3}") for i in range(9)]
    network = Network.of(hosts, [Rack(f"r{i}", 3e8, 3e8) for i in range(3)])
    (relays,) = relay_or_not(network, [], [everybody(network, "s")])
    racks = [network.hosts[relay.target].rack for relay in relays]
    assert racks == ["r0"] * 3 + ["r1"] * 3 + ["r2"] * 3


def test_copies_that_share_a_link_share_its_time() -> None:
    network = equal_network(3)
    wanted = everybody(network, "s")
    (relays,) = relay_or_not(network, [], [wanted])
    alone = expected_times(network, [], relays)
    busy = expected_times(network, [Reserved("s", relays[0].target, SIZE, 1e8)], relays)
    assert alone[0] == pytest.approx(1.0)
    assert busy[0] == pytest.approx(2.0)
    assert all(later > earlier for earlier, later in itertools.pairwise(alone))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_relay_has_the_shard_before_it_passes_it_on(seed: int) -> None:
    draw = random.Random(seed)
    network = random_network(draw, draw.randint(3, 12), racks=draw.choice((0, 3)))
    servers = draw.sample(sorted(network.hosts), draw.randint(1, 2))
    wanted = [everybody(network, server, SIZE, shard) for shard, server in enumerate(servers)]
    for each, relays in zip(wanted, relay_or_not(network, [], wanted), strict=False):
        have = {each.server}
        for relay in relays:
            assert relay.source in have
            assert relay.target not in have
            have.add(relay.target)
        assert have == {each.server, *each.hosts}
