"""Where shards and leads sit, and when they move."""

from __future__ import annotations

import random

import pytest

from mlfabric.errors import FabricError
from mlfabric.plan.placement import host_bandwidth, place_shards, plan_moves
from mlfabric.plan.values import Shard
from mlfabric.topology import Host, Network, Rack
from tests.plan.cases import random_network


def network(**rates: float) -> Network:
    return Network.of([Host(name, rate, rate) for name, rate in rates.items()])


def test_shards_go_to_the_fastest_hosts_in_proportion() -> None:
    shards = place_shards(network(a=1e8, b=4e8, c=2e8), ["a", "b", "c"], 2)
    assert [s.server for s in shards] == ["b", "c"]
    assert [s.share for s in shards] == pytest.approx([2 / 3, 1 / 3])


def test_leads_are_spread_over_racks_whose_links_they_would_share() -> None:
    hosts = [Host(f"{rack}{i}", 1e8, 1e8, rack) for rack in "abc" for i in range(4)]
    racks = [Rack(name, 1.5e8, 1.5e8) for name in "ab"] + [Rack("c", 0.5e8, 0.5e8)]
    shards = place_shards(Network.of(hosts, racks), [host.name for host in hosts], 3)
    assert [s.server for s in shards] == ["a0", "b0", "a1"]
    assert [s.share for s in shards] == pytest.approx([0.75 / 2.5, 1 / 2.5, 0.75 / 2.5])


def test_placement_is_that_of_the_fastest_where_no_rack_is_shared() -> None:
    for seed in range(100):
        drawn = random_network(random.Random(seed), 12)
        names = list(drawn.hosts)
        shards = place_shards(drawn, names, 5)
        fastest = sorted(names, key=lambda name: (-host_bandwidth(drawn, name), name))
        assert [s.server for s in shards] == fastest[:5], seed


def test_replica_sits_in_another_rack() -> None:
    hosts = [Host("a", 1e8, 1e8, "r0"), Host("b", 1e8, 1e8, "r0"), Host("c", 5e7, 5e7, "r1")]
    shards = place_shards(
        Network.of(hosts, [Rack("r0", 1e9, 1e9), Rack("r1", 1e9, 1e9)]), ["a", "b", "c"], 1, replicas=True
    )
    assert (shards[0].server, shards[0].replica) == ("a", "c")


def test_replica_is_never_its_own_server() -> None:
    for shard in place_shards(network(a=1, b=2, c=3), ["a", "b", "c"], 3, replicas=True):
        assert shard.replica not in (None, shard.server)


def test_too_few_hosts_are_refused() -> None:
    with pytest.raises(FabricError, match="3 shards need"):
        place_shards(network(a=1, b=1), ["a", "b"], 3)


def test_lead_moves_to_its_replica_when_the_link_degrades() -> None:
    shards = (Shard(0, "a", "b"),)
    moves = plan_moves(network(a=1e7, b=1e8, c=1e8), shards, ["a", "b", "c"], 10**8, 5.0)
    assert (moves[0].target, moves[0].moved_bytes) == ("b", 0)
    assert "its replica" in moves[0].reason


def test_shard_moves_only_if_the_bytes_pay() -> None:
    shards = (Shard(0, "a"),)
    slow = network(a=5e7, b=1e8)
    assert plan_moves(slow, shards, ["b"], 10**9, 5.0) == ()
    moves = plan_moves(slow, shards, ["b"], 10**7, 5.0)
    assert moves[0].moved_bytes == 10**7


def test_leads_do_not_pile_up_on_one_host() -> None:
    shards = (Shard(0, "a", share=0.5), Shard(1, "b", share=0.5))
    moves = plan_moves(network(a=1e7, b=1e7, c=1e8, d=9e7), shards, ["c", "d"], 10**6, 5.0)
    assert sorted(move.target for move in moves) == ["c", "d"]


def test_nothing_moves_on_a_calm_network() -> None:
    shards = place_shards(network(a=1e8, b=1e8, c=1e8), ["a", "b", "c"], 2, replicas=True)
    assert plan_moves(network(a=1e8, b=1e8, c=1e8), shards, ["a", "b", "c"], 10**6, 5.0) == ()


def test_lead_leaves_a_rack_whose_link_is_full() -> None:
    hosts = [Host(f"{rack}{i}", 1e8, 1e8, rack) for rack in "ab" for i in range(3)]
    crowded = Network.of(hosts, [Rack("a", 1e8, 1e8), Rack("b", 1e8, 1e8)])
    shards = tuple(Shard(k, f"a{k}", share=0.5) for k in range(2))
    moves = plan_moves(crowded, shards, [host.name for host in hosts], 10**6, 5.0)
    assert [(move.source, move.target) for move in moves] == [("a0", "b0")]
    roomy = Network.of(hosts, [Rack("a", 1e9, 1e9), Rack("b", 1e9, 1e9)])
    assert plan_moves(roomy, shards, [host.name for host in hosts], 10**6, 5.0) == ()
