"""Whole plans: every promise that holds for any network, any offers, any policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.plan.ordering import POLICIES, WITHOUT_BOUND
from mlfabric.plan.planner import plan_on_ledger, plan_updates, split_bytes
from mlfabric.plan.reservation import open_ledger
from mlfabric.plan.values import JobState, Offer, Reserved, Shard
from mlfabric.topology import Host, Network
from tests.plan.cases import equal_network, equal_offers, odd_case, random_case

seeds = st.integers(0, 10**6)
policies = st.sampled_from(sorted(POLICIES))


def drawn_case(seed: int) -> tuple[Network, list[Reserved], JobState, list[Offer]]:
    draw = random.Random(seed)
    return random_case(
        seed,
        workers=draw.randint(1, 12),
        idle=draw.randint(0, 3),
        shards=draw.randint(1, 3),
        racks=draw.choice((0, 2)),
        bound=draw.choice((None, draw.randint(5, 30))),
    )


@settings(max_examples=60, deadline=None)
@given(seeds, policies)
def test_every_offer_is_placed_or_dropped_and_every_entry_says_why(seed: int, policy: str) -> None:
    network, moving, job, offers = drawn_case(seed)
    plan = plan_updates(network, moving, replace(job, policy=policy), offers, 3.0)
    named = [placed.update for placed in plan.placed] + [drop.update for drop in plan.drops]
    assert sorted(named) == sorted(offer.update for offer in offers)
    reasons = [entry.reason for entry in plan.placed] + [entry.reason for entry in plan.groups]
    reasons += [entry.reason for entry in plan.drops]
    assert all(len(reason.split()) >= 5 for reason in reasons)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_positions_are_numbered_and_no_delay_exceeds_the_bound(seed: int) -> None:
    network, moving, job, offers = drawn_case(seed)
    plan = plan_updates(network, moving, job, offers, 3.0)
    by_name = {offer.update: offer for offer in offers}
    for position, placed in enumerate(plan.placed):
        assert placed.position == position
        assert placed.delay_updates == 40 + position - by_name[placed.update].base_version
        if job.max_delay is not None:
            assert placed.delay_updates <= job.max_delay
        assert placed.weight == min(1.0, job.concurrency / max(placed.delay_updates, 1))


@settings(max_examples=60, deadline=None)
@given(seeds, policies)
def test_no_link_is_planned_above_its_capacity(seed: int, policy: str) -> None:
    network, moving, job, offers = drawn_case(seed)
    ledger = open_ledger(network, moving, 3.0)
    plan_on_ledger(ledger, replace(job, policy=policy), offers, 3.0)
    assert ledger.overbooked() == []


@settings(max_examples=60, deadline=None)
@given(seeds, st.randoms(use_true_random=False))
def test_equal_inputs_give_equal_plans_whatever_the_arrival_order(seed: int, shuffler: random.Random) -> None:
    network, moving, job, offers = drawn_case(seed)
    numbers = list(range(len(offers)))
    shuffler.shuffle(numbers)
    again = [replace(offer, arrival=number) for offer, number in zip(offers, numbers, strict=True)]
    shuffler.shuffle(again)
    shuffler.shuffle(moving)
    assert plan_updates(network, moving, job, offers, 3.0) == plan_updates(network, moving, job, again, 3.0)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_groups_and_parts_agree(seed: int) -> None:
    network, moving, job, offers = drawn_case(seed)
    plan = plan_updates(network, moving, job, offers, 3.0)
    hosts = {offer.update: offer.host for offer in offers}
    order = [placed.update for placed in plan.placed]
    sizes = {offer.update: offer.size_bytes for offer in offers}
    for placed in plan.placed:
        assert [part.shard for part in placed.parts] == [shard.index for shard in job.shards]
        assert sum(part.size_bytes for part in placed.parts) == sizes[placed.update]
        for part in placed.parts:
            assert 3.0 <= part.start_s <= part.finish_s
            if part.group is None:
                assert part.target == job.shards[part.shard].server
                assert placed.finish_s >= part.finish_s
            else:
                group = plan.group(part.group)
                assert placed.update in group.members
                assert part.target == group.aggregator
                assert part.finish_s <= group.ready_s <= group.start_s <= group.finish_s <= placed.finish_s
    for group in plan.groups:
        places = sorted(order.index(member) for member in group.members)
        assert places == list(range(places[0], places[0] + len(places)))
        assert len(group.members) >= 2
        assert group.aggregator in job.aggregators
        assert group.target == job.shards[group.shard].server
    assert hosts


@settings(max_examples=80, deadline=None)
@given(seeds, policies, st.randoms(use_true_random=False))
def test_odd_clusters_get_plans_that_keep_every_promise(
    seed: int, policy: str, shuffler: random.Random
) -> None:
    network, moving, job, offers = odd_case(seed)
    job = replace(job, policy=policy)
    ledger = open_ledger(network, moving, 1.0)
    plan = plan_on_ledger(ledger, job, offers, 1.0)
    assert ledger.overbooked() == []
    named = [placed.update for placed in plan.placed] + [drop.update for drop in plan.drops]
    assert sorted(named) == sorted(offer.update for offer in offers)
    for position, placed in enumerate(plan.placed):
        assert placed.position == position
        if job.max_delay is not None and policy not in WITHOUT_BOUND:
            assert placed.delay_updates <= job.max_delay
        for part in placed.parts:
            assert 1.0 <= part.start_s <= part.finish_s <= placed.finish_s + 1e-9
            assert part.group is None or placed.update in plan.group(part.group).members
    again = plan_updates(network, moving, job, offers, 1.0)
    shuffler.shuffle(offers)
    shuffler.shuffle(moving)
    assert plan_updates(network, moving, job, offers, 1.0) == again


@pytest.mark.parametrize(("workers", "transfer_times"), [(8, 4), (15, 5), (30, 8), (64, 11), (100, 14)])
def test_equal_updates_gather_on_the_way(workers: int, transfer_times: int) -> None:
    network = equal_network(workers)
    names = tuple(name for name in network.hosts if name != "s")
    job = JobState(shards=(Shard(0, "s"),), aggregators=names, objective="last")
    plan = plan_updates(network, [], job, equal_offers(workers), 0.0)
    assert max(placed.finish_s for placed in plan.placed) <= transfer_times * (1 + 1e-9)


def test_no_aggregation_where_it_does_not_pay() -> None:
    """One sender is the bottleneck: the server's link is wide, so a detour only costs."""
    hosts = [Host("s", 1e9, 1e9), *(Host(f"w{i}", 1e8, 1e8) for i in range(6))]
    job = JobState(shards=(Shard(0, "s"),), aggregators=tuple(f"w{i}" for i in range(6)))
    offers = [Offer(f"u{i}", f"w{i}", f"w{i}", 10**8, 0) for i in range(6)]
    plan = plan_updates(Network.of(hosts), [], job, offers, 0.0)
    assert plan.groups == ()
    assert all(placed.finish_s == pytest.approx(1.0) for placed in plan.placed)


def test_head_of_the_order_avoids_a_link_that_is_taken() -> None:
    network = equal_network(3)
    job = JobState(shards=(Shard(0, "s"),))
    busy = [Reserved("w000", "w001", 5e8, 1e8)]
    plan = plan_updates(network, busy, job, equal_offers(3), 0.0)
    assert [placed.update for placed in plan.placed] == ["u001", "u002", "u000"]


def test_offer_from_an_unknown_host_is_dropped_by_name() -> None:
    job = JobState(shards=(Shard(0, "s"),))
    plan = plan_updates(equal_network(1), [], job, [Offer("u", "w9", "w9", 1, 0)], 0.0)
    assert plan.drops[0].reason == "host w9 is not in the network"


def test_empty_update_over_a_dead_link_is_dropped_by_name() -> None:
    network = Network.of([Host("s", 1e8, 1e8), Host("w", 0.0, 1e8)])
    plan = plan_updates(network, [], JobState(shards=(Shard(0, "s"),)), [Offer("u", "w", "w", 0, 0)], 0.0)
    assert [drop.reason for drop in plan.drops] == ["no bandwidth from w to its servers"]


def test_job_without_servers_drops_by_reason() -> None:
    plan = plan_updates(equal_network(1), [], JobState(), equal_offers(1), 0.0)
    assert plan.drops[0].reason == "its job has no server for it"


def test_job_with_a_rate_limit_stays_below_it() -> None:
    job = JobState(shards=(Shard(0, "s"),), max_rate_bytes_per_s=2e7)
    plan = plan_updates(equal_network(2), [], job, equal_offers(2), 0.0)
    assert [part.rate_bytes_per_s for placed in plan.placed for part in placed.parts] == [2e7, 2e7]


def test_rate_limit_counts_all_transfers_of_a_host_together() -> None:
    network = Network.of([*(Host(f"s{k}", 1e8, 1e8) for k in range(4)), Host("w", 1e8, 1e8)])
    shards = tuple(Shard(k, f"s{k}", share=0.25) for k in range(4))
    job = JobState(shards=shards, max_rate_bytes_per_s=2e7)
    plan = plan_updates(network, [], job, [Offer("u", "w", "w", 10**8, 0)], 0.0)
    assert plan.placed[0].finish_s == pytest.approx(5.0)
    edges = sorted({part.start_s for part in plan.placed[0].parts})
    for at_s in edges:
        busy = [p.rate_bytes_per_s for p in plan.placed[0].parts if p.start_s <= at_s < p.finish_s]
        assert sum(busy) <= 2e7 * (1 + 1e-9)


def test_fair_share_moves_all_at_once() -> None:
    job = JobState(shards=(Shard(0, "s"),), policy="fair-share")
    plan = plan_updates(equal_network(4), [], job, equal_offers(4), 0.0)
    assert [placed.finish_s for placed in plan.placed] == pytest.approx([4.0] * 4)
    assert {part.start_s for placed in plan.placed for part in placed.parts} == {0.0}


@given(st.integers(0, 10**9), st.lists(st.floats(0.01, 1), min_size=1, max_size=8))
def test_parts_of_an_update_add_up(size: int, shares: list[float]) -> None:
    parts = split_bytes(size, [Shard(k, "s", share=share) for k, share in enumerate(shares)])
    assert sum(parts) == size
    assert min(parts) >= 0


def test_no_offers_give_an_empty_plan() -> None:
    plan = plan_updates(equal_network(1), [], JobState(shards=(Shard(0, "s"),)), [], 0.0)
    assert (plan.placed, plan.groups, plan.drops) == ((), (), ())
