"""Which hosts serve a model, and when others should."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mlfabric.plan.serving import (
    HEADROOM,
    SERVES_FROM,
    WORTH_MOVING_LEADS,
    deal,
    own_traffic,
    plan_leads,
    room,
    serving_shares,
    to_spare,
)
from mlfabric.topology import Host, Network, Rack

NOBODY: dict[int, str | None] = {}


def alike(**rates: float) -> Network:
    return Network.of([Host(name, rate, rate) for name, rate in rates.items()])


def test_the_fewest_fast_hosts_that_carry_what_is_wanted_serve() -> None:
    spare = {"a": 10.0, "b": 40.0, "c": 20.0, "d": 9.0}
    assert serving_shares(spare, 20.0, {}) == {"b": 1.0}
    assert serving_shares(spare, 30.0, {}) == pytest.approx({"b": 2 / 3, "c": 1 / 3})
    assert serving_shares(spare, 1e9, {}) == pytest.approx({"b": 4 / 7, "c": 2 / 7, "a": 1 / 7})
    assert serving_shares({}, 1.0, {}) == {}


def test_who_serves_and_how_much_by_random_cases() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        spare = {f"h{i}": rng.uniform(1.0, 100.0) for i in range(rng.randint(1, 12))}
        wanted = rng.uniform(1.0, 400.0)
        shares = serving_shares(spare, wanted, {})
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(spare[host] >= SERVES_FROM * max(spare.values()) for host in shares)
        assert min(spare[host] for host in shares) >= max(
            (left for host, left in spare.items() if host not in shares and left > 0), default=0.0
        )
        slowest = min(shares, key=lambda host: spare[host])
        assert sum(spare[host] for host in shares if host != slowest) < HEADROOM * wanted
        assert room(spare, shares) == pytest.approx(sum(spare[host] for host in shares))


def test_hosts_of_like_speed_serve_from_every_rack() -> None:
    spare = {f"{rack}{i}": 10.0 for rack in "xy" for i in range(4)}
    rack_of = {host: host[0] for host in spare}
    shares = serving_shares(spare, 12.0, rack_of, [Rack("x", 15.0, 15.0), Rack("y", 15.0, 15.0)])
    assert sorted(shares) == ["x0", "y0"]
    unknown = serving_shares(spare, 12.0, rack_of)  # racks whose links nobody knows
    assert sorted(unknown) == ["x0", "y0"]


def test_whole_shards_are_dealt_as_near_to_the_shares_as_they_come() -> None:
    assert deal({"a": 0.5, "b": 0.25, "c": 0.25}, 8) == {"a": 4, "b": 2, "c": 2}
    for seed in range(100):
        rng = random.Random(seed)
        weights = {f"h{i}": rng.uniform(0.1, 1.0) for i in range(rng.randint(1, 5))}
        count = rng.randint(1, 12)
        dealt = deal(weights, count)
        assert sum(dealt.values()) == count
        fullest = max(dealt[host] / weights[host] for host in weights)
        # No other host could take a shard of the fullest one and be less full than it.
        assert all((dealt[host] + 1) / weights[host] >= fullest - 1e-9 for host in weights)


def test_a_worker_sends_what_its_round_allows_and_leaves_the_rest_of_its_link() -> None:
    assert own_traffic(10.0, 10.0, 1.0, 2) == pytest.approx(10 / 3)
    assert own_traffic(0.0, 10.0, 1.0, 2) == 0.0
    assert to_spare(10.0, 4.0) == 6.0
    assert to_spare(10.0, 10.0) == pytest.approx(0.2)


def test_leads_leave_a_host_whose_link_degrades_and_as_few_as_possible_move() -> None:
    network = alike(a=1e6, b=10e6, c=10e6, d=10e6)
    spare = {"a": 1e6, "b": 10e6, "c": 10e6, "d": 10e6}
    led = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    planned = plan_leads(network, spare, 10e6, led, NOBODY, 1e5, 5.0)
    assert set(planned.moves) == {0, 1}
    assert set(planned.moves.values()) <= {"b", "c", "d"}
    assert "servers can take" in planned.reason


def test_nothing_moves_where_the_gain_is_small_or_the_move_costs_more() -> None:
    led = {0: "a", 1: "b"}
    close = {"a": 10e6, "b": 10e6, "c": 10.5e6}
    assert not plan_leads(alike(**close), close, 1e9, led, NOBODY, 1e5, 5.0).moves
    far = {"a": 1e6, "b": 10e6, "c": 10e6}
    assert plan_leads(alike(**far), far, 1e9, led, NOBODY, 1e5, 5.0).moves == {0: "c"}
    assert not plan_leads(alike(**far), far, 1e9, led, NOBODY, 1e7, 5.0).moves
    # To where the state is already, nothing is carried.
    assert plan_leads(alike(**far), far, 1e9, led, {0: "c"}, 1e7, 5.0).moves == {0: "c"}


def test_nothing_moves_where_more_than_is_wanted_could_be_taken_already() -> None:
    spare = {"a": 10e6, "b": 100e6}
    assert not plan_leads(alike(**spare), spare, 10e6 / HEADROOM, {0: "a"}, NOBODY, 1e3, 5.0).moves


def test_leads_of_a_job_with_replicas_move_to_them_only() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        spare = {f"h{i}": rng.choice([1e6, 2e6, 4e6, 8e6]) for i in range(rng.randint(2, 6))}
        names = sorted(spare)
        led = {shard: rng.choice(names) for shard in range(rng.randint(1, 8))}
        followed: dict[int, str | None] = {shard: rng.choice([*names, None]) for shard in led}
        planned = plan_leads(alike(**spare), spare, 1e9, led, followed, 1e5, 5.0, only_to_replicas=True)
        assert all(followed[shard] == host for shard, host in planned.moves.items())
        if planned.moves:
            before, after = (
                room(spare, {host: n / len(led) for host, n in Counter(leads.values()).items()})
                for leads in (led, {**led, **planned.moves})
            )
            assert after >= WORTH_MOVING_LEADS * before
