"""Rounds in which all workers push at about the same time end when the planner says, whoever offers first."""

from __future__ import annotations

import numpy as np
import pytest

from mlfabric.bench.prediction import predict_push
from mlfabric.messages import JobSettings
from mlfabric.rules import Sum
from mlfabric.scenario import uniform
from mlfabric.sim.engine import Process, SimNode, Simulation
from mlfabric.topology import Host, Network

RATE = 2.4e6
SIZE = 1_000_000
BEGIN_S = 20.0


def round_s(workers: int, spread_s: float) -> tuple[float, float]:
    """(seconds from the first offer possible to the last outcome, what the planner says)"""
    network = Network.of(Host(f"h{k}", RATE, RATE) for k in range(workers + 1))
    sim = Simulation(network, latency_s=1e-3)
    sim.add_scheduler("scheduler", "h0")
    ends: list[float] = []
    model = {"model": np.zeros(SIZE // 4, np.float32)}

    def work(index: int, node: SimNode) -> Process:
        assert node.joined is not None
        yield node.joined
        yield node.client.publish(model, Sum(), JobSettings(unbounded=True))
        yield BEGIN_S + uniform(1, "offer", index) * spread_s - sim.now
        if index > 0:
            yield node.client.push(model)[1]
            ends.append(sim.now)

    for index in range(workers + 1):
        roles = ("worker", "server") if index == 0 else ("worker", "aggregator")
        node = sim.add_node(f"n{index}", f"h{index}", "scheduler", roles, expected=workers + 1)
        sim.spawn(work(index, node), node)
    sim.run(BEGIN_S + 60.0)
    assert len(ends) == workers
    predicted_s = predict_push(network, "h0", [f"h{k}" for k in range(1, workers + 1)], SIZE)
    return max(ends) - BEGIN_S, predicted_s


@pytest.mark.parametrize("spread_s", [0.0, 0.06, 0.2])
def test_a_round_of_thirty_ends_within_fifteen_percent_of_the_plan(spread_s: float) -> None:
    measured_s, predicted_s = round_s(30, spread_s)
    assert predicted_s == pytest.approx(8 * SIZE / RATE, rel=0.01)
    assert measured_s <= 1.15 * predicted_s
