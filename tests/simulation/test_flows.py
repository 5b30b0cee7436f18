"""Max-min fair rates: the three properties that define them, and an independent way to find them."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.sim.flows import Flow, share_rates
from mlfabric.topology import Link

INF = float("inf")


def random_flows(seed: int, most: int) -> tuple[list[Flow], dict[Link, float]]:
    draw = random.Random(seed)
    links = [Link(f"h{i}", way) for i in range(draw.randint(1, 5)) for way in ("up", "down")]
    capacity = {link: draw.choice([1.0, 2.0, 5.0, 10.0, draw.uniform(0.1, 100.0)]) for link in links}
    flows = []
    for number in range(draw.randint(1, most)):
        path = tuple(draw.sample(links, draw.randint(1, min(4, len(links)))))
        pace = draw.choice([INF, INF, draw.uniform(0.01, 20.0), 1.0])
        flows.append(Flow(f"f{number}", path, 1.0, pace))
    return flows, capacity


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_rates_are_max_min_fair(seed: int) -> None:
    flows, capacity = random_flows(seed, most=12)
    share_rates(flows, capacity)
    load = {link: sum(flow.rate for flow in flows if link in flow.path) for link in capacity}
    for link, used in load.items():
        assert used <= capacity[link] * (1 + 1e-6), f"{link} carries {used} of {capacity[link]}"
    for flow in flows:
        assert flow.rate <= flow.pace * (1 + 1e-6)
        at_pace = flow.rate >= flow.pace * (1 - 1e-6)
        stopped = any(
            load[link] >= capacity[link] * (1 - 1e-6)
            and all(flow.rate >= other.rate * (1 - 1e-6) for other in flows if link in other.path)
            for link in flow.path
        )
        assert at_pace or stopped, f"{flow.name} could go faster than {flow.rate}"


def lexicographic_rates(flows: list[Flow], capacity: dict[Link, float]) -> list[Fraction]:
    """The fair rates in exact numbers: over and over, the constraint that binds first for those not yet
    fixed (every pace is a link of one flow) fixes its flows."""
    limits = [
        (Fraction(capacity[link]), {i for i, f in enumerate(flows) if link in f.path}) for link in capacity
    ]
    limits += [(Fraction(f.pace), {i}) for i, f in enumerate(flows) if f.pace != INF]
    rates: dict[int, Fraction] = {}
    while len(rates) < len(flows):
        levels = []
        for limit, users in limits:
            free = users - rates.keys()
            if free:
                levels.append(
                    ((limit - sum((rates[i] for i in users & rates.keys()), Fraction(0))) / len(free), free)
                )
        level = min(level for level, _ in levels)
        for each, free in levels:
            if each == level:
                rates.update(dict.fromkeys(free, level))
    return [rates[i] for i in range(len(flows))]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_rates_equal_those_found_in_exact_numbers(seed: int) -> None:
    flows, capacity = random_flows(seed, most=6)
    share_rates(flows, capacity)
    expected = lexicographic_rates(flows, capacity)
    assert [flow.rate for flow in flows] == pytest.approx([float(rate) for rate in expected], rel=1e-6)


def test_small_cases_agree_with_trying_every_division() -> None:
    """On a grid of rates, the fair one is the largest when the sorted rates are compared from the lowest."""
    a, b = Link("a", "up"), Link("b", "down")
    for paths in itertools.product([(a,), (b,), (a, b)], repeat=3):
        flows = [Flow(str(i), path, 1.0) for i, path in enumerate(paths)]
        capacity = {a: 6.0, b: 12.0}
        share_rates(flows, capacity)
        grid = [
            rates
            for rates in itertools.product(range(13), repeat=3)
            if all(
                sum(rate for rate, path in zip(rates, paths, strict=True) if link in path) <= capacity[link]
                for link in capacity
            )
        ]
        best = max(grid, key=sorted)
        assert sorted(flow.rate for flow in flows) == pytest.approx(sorted(best))


def test_the_order_of_flows_does_not_matter() -> None:
    for seed in range(50):
        flows, capacity = random_flows(seed, most=10)
        share_rates(flows, capacity)
        rates = {flow.name: flow.rate for flow in flows}
        random.Random(seed).shuffle(flows)
        share_rates(flows, capacity)
        assert {flow.name: flow.rate for flow in flows} == pytest.approx(rates), f"seed {seed}"


def test_nobody_is_asked_to_share_with_nobody() -> None:
    share_rates([], {Link("a", "up"): 1.0})
    lone = Flow("f", (Link("a", "up"),), 1.0, pace=0.25)
    share_rates([lone], {Link("a", "up"): 1.0})
    assert lone.rate == 0.25


def test_what_is_passed_on_stays_a_chunk_behind_and_is_no_faster() -> None:
    up, down, other = Link("a", "up"), Link("b", "up"), Link("c", "up")
    first = Flow("first", (up,), 100.0, pace=2.0)
    second = Flow("second", (down,), 100.0, ahead=first, chunk=10.0)
    third = Flow("third", (other,), 100.0, ahead=second, chunk=10.0)
    flows, capacity = [first, second, third], {up: 4.0, down: 8.0, other: 1.0}
    share_rates(flows, capacity)
    assert [flow.rate for flow in flows] == [2.0, 0.0, 0.0]
    assert second.changes_in_s() == pytest.approx(5.0)
    first.remaining = 90.0
    share_rates(flows, capacity)
    assert [flow.rate for flow in flows] == [2.0, 2.0, 0.0]
    first.remaining, second.remaining = 50.0, 80.0  # it fell behind: it may catch up
    share_rates(flows, capacity)
    assert [flow.rate for flow in flows] == [2.0, 8.0, 1.0]
    assert second.changes_in_s() == pytest.approx(20.0 / 6.0)
    share_rates(flows[1:], capacity)  # the first has broken off
    second.remaining = 60.0
    share_rates(flows[1:], capacity)
    assert second.rate == 0.0
