"""In which order updates are applied, and that a plan does not depend on what the clock shows."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.plan.forest import lay_out
from mlfabric.plan.jobs import plan_jobs
from mlfabric.plan.numbering import Arrival, applied_s, number_arrivals, plan_cost
from mlfabric.plan.ordering import POLICIES, position_deadline
from mlfabric.plan.planner import lay_plan, plan_updates
from mlfabric.plan.reservation import open_ledger
from mlfabric.plan.values import JobState, Offer, Plan, Reserved, Shard
from mlfabric.topology import Host, Network
from tests.plan.cases import odd_case, random_case

seeds = st.integers(0, 10**6)
Case = tuple[Network, list[Reserved], JobState, list[Offer]]


def drawn_case(seed: int) -> Case:
    """Bounds that bind, several links in the way, sums of one and two levels, chains."""
    draw = random.Random(seed)
    if draw.random() < 0.3:
        return odd_case(seed)
    network, moving, job, offers = random_case(
        seed,
        workers=draw.randint(2, 24),
        idle=draw.randint(0, 3),
        shards=draw.randint(1, 3),
        racks=draw.choice((0, 2, 3)),
        bound=draw.choice((None, draw.randint(15, 40))),
    )
    job = replace(
        job,
        levels=draw.choice((1, 2)),
        chunk_bytes=draw.choice((None, 250_000)),
        objective=draw.choice(("mean", "last")),
        divergence=draw.choice((None, 0.0, 3.0)),
    )
    return network, moving, job, offers


def messages_of(plan: Plan) -> list[list[int]]:
    """Positions that arrive as one, in the order of application."""
    outermost = {}
    for group in plan.groups:
        top = group
        while top.parent is not None:
            top = plan.group(top.parent)
        outermost[group.group] = top.group
    messages: dict[str, list[int]] = {}
    for placed in plan.placed:
        inside = placed.parts[0].group if placed.parts else None
        key = f"update {placed.update}" if inside is None else outermost[inside]
        messages.setdefault(key, []).append(placed.position)
    return list(messages.values())


@settings(max_examples=150, deadline=None)
@given(seeds, st.sampled_from(sorted(POLICIES)))
def test_no_neighbours_stand_against_their_completion_unless_a_deadline_wants_it(
    seed: int, policy: str
) -> None:
    network, moving, job, offers = drawn_case(seed)
    job = replace(job, policy=policy)
    plan = plan_updates(network, moving, job, offers, 0.0)
    deadline = {offer.update: position_deadline(offer, job) for offer in offers}
    messages = messages_of(plan)
    for before, behind in itertools.pairwise(messages):
        assert before == list(range(before[0], before[0] + len(before)))
        early, late = plan.placed[behind[0]], plan.placed[before[0]]
        if late.finish_s > early.finish_s:
            limits = sorted(deadline[plan.placed[position].update] for position in before)
            swapped = [limit < place + len(behind) for limit, place in zip(limits, before, strict=True)]
            assert any(swapped), f"{late.update} could be applied after {early.update}"
            assert "before others that arrive earlier" in late.reason


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 9), st.integers(0, 12)), max_size=6))
def test_numbering_finds_an_order_in_time_if_there_is_one(raw: list[tuple[int, float, int]]) -> None:
    arrivals = [
        Arrival(tuple([k] * size), finish_s, max(last, size - 1), k)
        for k, (size, finish_s, last) in enumerate(raw)
    ]

    def in_time(order: tuple[Arrival, ...]) -> bool:
        ends = itertools.accumulate(len(arrival.members) for arrival in order)
        return all(end - 1 <= arrival.last_position for arrival, end in zip(order, ends, strict=True))

    feasible = any(in_time(order) for order in itertools.permutations(arrivals))
    if feasible:
        assert in_time(tuple(number_arrivals(arrivals)))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 7)), max_size=6))
def test_no_order_in_time_lets_single_updates_be_applied_sooner(raw: list[tuple[float, int]]) -> None:
    arrivals = [Arrival((k,), finish_s, last, k) for k, (finish_s, last) in enumerate(raw)]
    in_time = [
        order
        for order in itertools.permutations(arrivals)
        if all(position <= arrival.last_position for position, arrival in enumerate(order))
    ]
    if in_time:
        best = min(sum(applied_s(order)) for order in in_time)
        assert sum(applied_s(number_arrivals(arrivals))) <= best * (1 + 1e-12)


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_no_plan_costs_more_than_sending_all_straight_in_order(seed: int) -> None:
    """Counted by when updates are applied: waiting at the server for an older one is waiting too."""
    network, moving, job, offers = drawn_case(seed)
    laid = lay_plan(open_ledger(network, moving, 0.0), job, offers, 0.0)
    if not laid.kept:
        return
    straight = range(len(laid.kept))
    ledger = open_ledger(network, moving, 0.0)
    if job.max_rate_bytes_per_s is not None:
        ledger = ledger.limited(job.max_rate_bytes_per_s)
    finishes = lay_out(ledger, laid.cargo, straight, 0.0).finishes
    ours = plan_cost(laid.layout.nodes, laid.layout.finishes, laid.cargo, 0.0)
    assert ours <= plan_cost(straight, finishes, laid.cargo, 0.0) * (1 + 1e-9)
    if job.objective == "mean":
        waited = itertools.accumulate((placed.finish_s for placed in laid.plan.placed), max)
        assert ours == pytest.approx(sum(waited) / len(laid.kept))


def test_slow_update_that_others_wait_for_is_sent_first() -> None:
    """Of seven updates the slow one may be third at most, so four wait for it however early they arrive."""
    rate = 1e8
    hosts = [Host("s", rate, rate), Host("slow", rate / 4, rate / 4)]
    hosts += [Host(f"w{i}", rate, rate) for i in range(6)]
    names = tuple(host.name for host in hosts[1:])
    job = JobState(placed_version=10, max_delay=9, shards=(Shard(0, "s"),), aggregators=names)
    offers = [Offer(f"u-{name}", name, name, 10**8, 10 if name != "slow" else 3) for name in names]
    plan = plan_updates(Network.of(hosts), [], job, offers, 0.0)
    (slow,) = [placed for placed in plan.placed if placed.update == "u-slow"]
    assert slow.position <= 2
    assert slow.finish_s == pytest.approx(4.0)  # its own link's time: nobody is in its way
    waited = list(itertools.accumulate((placed.finish_s for placed in plan.placed), max))
    assert sum(waited) / 7 < 3.7


def shifted(entry: Any, by_s: float) -> Any:
    """An entry of a plan with all its times later."""
    if isinstance(entry, tuple) and entry and isinstance(entry[0], msgspec.Struct):
        return tuple(shifted(each, by_s) for each in entry)
    if not isinstance(entry, msgspec.Struct):
        return entry
    changes = {}
    for name in entry.__struct_fields__:
        value = getattr(entry, name)
        changes[name] = value + by_s if name.endswith("_s") and "per_s" not in name else shifted(value, by_s)
    return msgspec.structs.replace(entry, **changes)


@settings(max_examples=80, deadline=None)
@given(seeds, st.sampled_from(sorted(POLICIES)), st.sampled_from([1e-3, 7.25, 1e6, 1.7e9]))
def test_plan_does_not_depend_on_what_the_clock_shows(seed: int, policy: str, now: float) -> None:
    network, moving, job, offers = drawn_case(seed)
    job = replace(job, policy=policy)
    at_zero = plan_updates(network, moving, job, offers, 0.0)
    later = plan_updates(network, moving, job, offers, now)
    for name in ("placed", "groups", "drops", "replication", "held"):
        assert getattr(later, name) == shifted(getattr(at_zero, name), now), name


def test_jobs_together_do_not_depend_on_what_the_clock_shows() -> None:
    network = Network.of([Host("s", 1e8, 1e8), *(Host(f"w{i}", 1e8, 3e7) for i in range(4))])
    jobs = []
    for name, weight in (("a", 1.0), ("b", 3.0)):
        offers = [Offer(f"{name}{i}", f"{name}{i}", f"w{i}", 10**7, 0, job=name) for i in range(4)]
        jobs.append((JobState(name, shards=(Shard(0, "s"),), weight=weight), offers))
    for policy in ("interleave", "weights"):
        at_zero = plan_jobs(network, [], jobs, 0.0, policy)
        later = plan_jobs(network, [], jobs, 1e6, policy)
        for name, plan in at_zero.items():
            assert later[name].placed == shifted(plan.placed, 1e6)


def test_update_whose_bound_is_near_goes_before_one_that_arrives_earlier() -> None:
    """The old one is slow: applied by arrival it would be second, and too old."""
    network = Network.of([Host("s", 1e8, 1e8), Host("fast", 1e8, 1e8), Host("slow", 1e7, 1e7)])
    job = JobState(placed_version=10, max_delay=5, shards=(Shard(0, "s"),))
    offers = [Offer("old", "slow", "slow", 10**7, 5), Offer("new", "fast", "fast", 10**7, 10)]
    plan = plan_updates(network, [], job, offers, 0.0)
    assert [placed.update for placed in plan.placed] == ["old", "new"]
    assert plan.placed[0].finish_s == pytest.approx(1.0)
    assert "before others that arrive earlier, later would break it" in plan.placed[0].reason
    relaxed = plan_updates(network, [], replace(job, max_delay=6), offers, 0.0)
    assert [placed.update for placed in relaxed.placed] == ["new", "old"]
