"""The order of application at flow level: slack, overtaking, waiting, drops."""

from __future__ import annotations

import random

import pytest

from mlfabric.sim.order import ApplicationOrder, Numbered


def test_each_overtaking_costs_a_slack_and_none_is_left_in_the_end() -> None:
    order = ApplicationOrder(bound=3)
    late = order.give_number((0,), 1.0)  # alone it would have delay 0: slack 3
    others = [order.give_number((0,), 1.0) for _ in range(3)]
    for other in others:
        assert order.arrive(other).applied == [other]
    last = order.give_number((3,), 1.0)
    assert order.arrive(last).applied == []  # one more would put the late one beyond its bound
    assert order.blockers() == [late]
    assert order.arrive(late).applied == [late, last]


def test_a_drop_lets_those_go_that_waited() -> None:
    order = ApplicationOrder(bound=0)
    late = order.give_number((0,), 1.0)
    waits = order.give_number((1,), 1.0)
    assert order.arrive(waits).applied == []
    assert order.drop(late).applied == [waits]
    assert order.placed == order.version == 1


def test_an_update_beyond_its_bound_gets_no_number() -> None:
    order = ApplicationOrder(bound=1)
    order.give_number((0,), 1.0)
    order.give_number((0,), 1.0)
    with pytest.raises(ValueError, match="1 beyond its bound"):
        order.give_number((0,), 1.0)


@pytest.mark.parametrize("seed", range(60))
def test_delays_stay_within_the_bound_and_nothing_is_lost(seed: int) -> None:
    """Sums of up to three, any order of arrival, drops now and then; against plain counting."""
    rng = random.Random(seed)
    bound = rng.randint(2, 12)
    order = ApplicationOrder(bound)
    on_the_way: list[Numbered] = []
    applied: list[Numbered] = []
    dropped = numbered = 0
    for _ in range(6000 if seed == 0 else 300):  # once beyond what the order remembers at a time
        done: list[Numbered] = []
        if on_the_way and rng.random() < 0.5:
            entry = on_the_way.pop(rng.randrange(len(on_the_way)))
            if rng.random() < 0.1:
                dropped += len(entry.bases)
                done = order.drop(entry).applied
            else:
                done = order.arrive(entry).applied
        else:
            members = rng.randint(1, 3)
            bases = tuple(order.version - rng.randint(0, 2) for _ in range(members))
            if all(order.placed + k - base <= bound for k, base in enumerate(bases)):
                on_the_way.append(order.give_number(bases, 0.0))
                numbered += members
        version = order.version - sum(len(entry.bases) for entry in done)
        for entry in done:
            for base in entry.bases:
                assert version - base <= bound, f"seed {seed}"
                version += 1
        applied += done
    for entry in on_the_way:
        applied += order.arrive(entry).applied
    assert order.waiting == 0
    assert sum(len(entry.bases) for entry in applied) == numbered - dropped == order.version
    assert len(set(map(id, applied))) == len(applied)
