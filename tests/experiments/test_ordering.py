"""The ordering experiment's laws: the exact sum of delays, and what theory says of spread and stability."""

from __future__ import annotations

import math

import numpy as np
import pytest
from experiments.ordering.run import (
    SETTINGS,
    WORKERS,
    Order,
    delay_identity,
    largest_stable_on_quadratic,
    make_order,
)


@pytest.mark.parametrize("policy", ["arrival", "oldest", "round-robin", "shortest"])
def test_delays_sum_to_what_they_must_in_any_order(policy: str) -> None:
    for sends, computes in SETTINGS.values():
        got, must = delay_identity(make_order(policy, None, sends, computes))
        assert got == must


def test_our_order_has_less_spread_and_tail_than_arrival_at_equal_throughput() -> None:
    sends, computes = SETTINGS["two slow computers"]
    arrival = make_order("arrival", None, sends, computes)
    ours = make_order("mlfabric", 2 * WORKERS, sends, computes)
    assert ours.seconds == pytest.approx(arrival.seconds, rel=0.01)
    assert np.std(ours.delays) < 0.5 * np.std(arrival.delays)
    assert max(ours.delays) <= 2 * WORKERS < max(arrival.delays)


def test_largest_stable_step_of_a_constant_delay_is_the_closed_form() -> None:
    for delay in (0, 2, 5):
        order = Order([0] * 800, [max(version - delay, 0) for version in range(800)], 0, 0.0)
        closed = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
        assert largest_stable_on_quadratic(order) == pytest.approx(closed, rel=0.02)
