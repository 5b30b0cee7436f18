"""What workers would send, from the time between the end of their waits and their next offers."""

from __future__ import annotations

import pytest

from mlfabric.roles.demand import Demand

SIZE, RATE = 10.0, 5.0


def wanted(step_s: float) -> float:
    return SIZE / (step_s + 2 * SIZE / RATE)


def do_steps(demand: Demand, *steps_s: float) -> None:
    now = 100.0
    for seconds in steps_s:
        demand.waits_no_more("w0", now)
        now += seconds
        demand.offered("w0", now)


def test_the_first_step_may_have_waited_for_others_and_does_not_count() -> None:
    demand = Demand()
    do_steps(demand, 60.0)
    assert demand.own_traffic(RATE, SIZE) == pytest.approx(wanted(0.0))
    do_steps(demand, 2.0)
    assert demand.own_traffic(RATE, SIZE) == pytest.approx(wanted(2.0))


def test_a_straggling_step_changes_nothing() -> None:
    demand = Demand()
    do_steps(demand, 1.0, 2.0, 2.0, 50.0, 2.0)
    assert demand.own_traffic(RATE, SIZE) == pytest.approx(wanted(2.0))


def test_who_is_forgotten_begins_anew() -> None:
    demand = Demand()
    do_steps(demand, 1.0, 2.0)
    demand.forget("w0")
    assert demand.own_traffic(RATE, SIZE) == pytest.approx(wanted(0.0))
