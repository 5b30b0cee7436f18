"""Ordering under a delay bound, against every possible order and against the assignment optimum."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.errors import FabricError
from mlfabric.plan.ordering import POLICIES, estimate_duration, estimate_durations, order_updates
from mlfabric.plan.values import JobState, Offer, Shard
from mlfabric.topology import Host, Network
from tests.plan.cases import odd_case
from tests.plan.oracles import best_assignment, completions, feasible, ordering_case


def offer(name: str, base_version: int = 0, arrival: int = 0, drops_in_row: int = 0) -> Offer:
    return Offer(f"u-{name}", name, name, 100, base_version, arrival=arrival, drops_in_row=drops_in_row)


@pytest.mark.parametrize("block", range(4))
def test_drops_are_minimal_and_the_order_of_the_kept_is_optimal(block: int) -> None:
    for seed in range(block * 750, (block + 1) * 750):
        offers, job, durations = ordering_case(seed)
        ordered = order_updates(offers, job, durations)
        assert feasible(ordered.kept, job), seed
        assert len(ordered.kept) + len(ordered.drops) == len(offers), seed
        most = max(
            size
            for size in range(len(offers) + 1)
            if any(feasible(o, job) for o in itertools.permutations(offers, size))
        )
        assert len(ordered.kept) == most, seed
        ours = completions(ordered.kept, durations)
        best = min(
            completions(o, durations) for o in itertools.permutations(ordered.kept) if feasible(o, job)
        )
        assert ours <= best * (1 + 1e-12), seed
        least_link_time = min(
            sum(durations[o.update] for o in subset)
            for subset in itertools.combinations(offers, most)
            if any(feasible(o, job) for o in itertools.permutations(subset))
        )
        assert sum(durations[o.update] for o in ordered.kept) <= least_link_time * (1 + 1e-12), seed


def test_kept_set_is_near_the_assignment_optimum() -> None:
    ratios = []
    for seed in range(2000):
        offers, job, durations = ordering_case(seed, most=9)
        ordered = order_updates(offers, job, durations)
        if ordered.kept:
            best = best_assignment(len(ordered.kept), offers, job, durations)
            ratios.append(completions(ordered.kept, durations) / best)
    assert min(ratios) >= 1 - 1e-12
    assert np.median(ratios) <= 1.05
    assert max(ratios) <= 1.6  # the worst is in docs/planning.md


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(POLICIES)), st.randoms(use_true_random=False))
def test_order_does_not_depend_on_the_sequence_of_the_offers(
    seed: int, policy: str, shuffler: random.Random
) -> None:
    offers, job, durations = ordering_case(seed, most=12)
    job = replace(job, policy=policy)
    shuffled = list(offers)
    shuffler.shuffle(shuffled)
    assert order_updates(offers, job, durations) == order_updates(shuffled, job, durations)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_our_order_does_not_depend_on_who_arrived_first(seed: int, shuffler: random.Random) -> None:
    offers, job, durations = ordering_case(seed, most=12)
    numbers = list(range(len(offers)))
    shuffler.shuffle(numbers)
    renumbered = [replace(o, arrival=k) for o, k in zip(offers, numbers, strict=True)]
    ours = [o.update for o in order_updates(offers, job, durations).kept]
    assert ours == [o.update for o in order_updates(renumbered, job, durations).kept]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["mlfabric", "arrival", "oldest", "round-robin"]))
def test_bounded_policies_never_exceed_the_bound_and_say_why_they_drop(seed: int, policy: str) -> None:
    offers, job, durations = ordering_case(seed, most=12)
    ordered = order_updates(offers, replace(job, policy=policy), durations)
    assert feasible(ordered.kept, job)
    for drop in ordered.drops:
        delay, bound = drop.reason.removeprefix("delay would be ").split(", bound ")
        assert int(delay.split()[0]) > job.max_delay  # type: ignore[operator]
        assert int(bound.split()[0].strip(":,")) == job.max_delay


def test_late_update_is_dropped_with_reason() -> None:
    job = JobState(placed_version=30, max_delay=16)
    ordered = order_updates([offer("w0", 11), offer("w1", 20)], job, {"u-w0": 1.0, "u-w1": 1.0})
    assert [drop.reason for drop in ordered.drops] == ["delay would be 19 even if sent next, bound 16"]


def test_equal_durations_drop_the_worker_with_fewer_recent_drops() -> None:
    job = JobState(placed_version=5, max_delay=5)
    offers = [offer("w0", 0, drops_in_row=0), offer("w1", 0, drops_in_row=1)]
    ordered = order_updates(offers, job, {"u-w0": 1.0, "u-w1": 1.0})
    assert [o.worker for o in ordered.kept] == ["w1"]


def test_worker_dropped_three_times_goes_first_once() -> None:
    job = JobState(placed_version=5, max_delay=5)
    slow = {"u-w0": 1.0, "u-w1": 9.0}
    twice = [offer("w0", 0), offer("w1", 0, drops_in_row=2)]
    assert [o.worker for o in order_updates(twice, job, slow).kept] == ["w0"]
    thrice = [offer("w0", 0), offer("w1", 0, drops_in_row=3)]
    assert [o.worker for o in order_updates(thrice, job, slow).kept] == ["w1"]


def test_policies_order_as_they_are_named() -> None:
    offers = [offer("w0", 3, arrival=2), offer("w1", 2, arrival=0), offer("w2", 4, arrival=1)]
    durations = {"u-w0": 1.0, "u-w1": 3.0, "u-w2": 2.0}

    def order(policy: str, last_served: str = "") -> list[str]:
        job = JobState(placed_version=4, policy=policy, last_served=last_served)
        return [o.worker for o in order_updates(offers, job, durations).kept]

    assert order("arrival") == ["w1", "w2", "w0"]
    assert order("oldest") == ["w1", "w0", "w2"]
    assert order("shortest") == ["w0", "w2", "w1"]
    assert order("mlfabric") == ["w0", "w2", "w1"]
    assert order("round-robin", "w0") == ["w1", "w2", "w0"]


def test_round_robin_serves_each_worker_once_a_round() -> None:
    offers = [replace(offer("w0"), update=f"u{k}", arrival=k) for k in range(2)] + [offer("w1", arrival=9)]
    job = JobState(policy="round-robin")
    ordered = order_updates(offers, job, {o.update: 1.0 for o in offers})
    assert [o.update for o in ordered.kept] == ["u0", "u-w1", "u1"]


def test_unknown_policy_is_named() -> None:
    with pytest.raises(FabricError, match="unknown policy 'best'; known are arrival"):
        order_updates([], JobState(policy="best"), {})


def test_duration_is_that_of_the_narrowest_link() -> None:
    network = Network.of([Host("w", 50, 100), Host("s0", 100, 10), Host("s1", 100, 100)])
    one = Offer("u", "w", "w", 100, 0)
    assert estimate_duration(network, (Shard(0, "s1"),), one) == 2.0
    halves = (Shard(0, "s0", share=0.5), Shard(1, "s1", share=0.5))
    assert estimate_duration(network, halves, one) == 5.0
    assert estimate_duration(network, (Shard(0, "w"),), one) == 0.0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_durations_of_many_offers_are_those_of_each(seed: int) -> None:
    network, _, job, offers = odd_case(seed)
    known = [o for o in offers if o.host in network.hosts]
    if known:  # one host without any way out
        name = known[0].host
        network = network.with_host(replace(network.hosts[name], up_bytes_per_s=0.0))
    together = estimate_durations(network, job.shards, known)
    for one in known:
        assert together[one.update] == pytest.approx(estimate_duration(network, job.shards, one)), one
