"""A job learns from its transfers how fast links are, in virtual time: down, up, and who was to blame."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from mlfabric.messages import JobSettings
from mlfabric.roles.scheduler import Scheduler
from mlfabric.rules import Sum
from mlfabric.sim.engine import SimNode, Simulation
from mlfabric.sim.reports import FlowReports
from mlfabric.topology import Host, Network

RATE = 2.4e6
SIZE = 1_000_000
WORKERS = 6


class Job:
    """Workers that push one update after the other; all links alike in the beginning, and known."""

    def __init__(self, pull: bool = False) -> None:
        self.sim = Simulation(Network.of(Host(f"h{k}", RATE, RATE) for k in range(WORKERS + 1)), 1e-3)
        self.sim.add_scheduler("scheduler", "h0")
        self.pull = pull
        for index in range(WORKERS + 1):
            roles = ("worker", "server") if index == 0 else ("worker", "aggregator")
            node = self.sim.add_node(f"n{index}", f"h{index}", "scheduler", roles, expected=WORKERS + 1)
            self.sim.spawn(self.work(index, node), node)
        FlowReports(self.sim)
        self.sim.run(10.0)

    def work(self, index: int, node: SimNode) -> Generator[Any, Any, None]:
        model = {"model": np.zeros(SIZE // 4, np.float32)}
        yield node.joined
        yield node.client.publish(model, Sum(), JobSettings(unbounded=True))
        while index > 0:
            yield node.client.push(model)[1]
            if self.pull:
                yield node.client.pull()[1]

    def believed(self) -> dict[str, tuple[float, float]]:
        scheduler = self.sim.nodes["scheduler"].node.roles["scheduler"]
        assert isinstance(scheduler, Scheduler)
        status = scheduler.status(self.sim.now)
        return {m.host: (m.up_bytes_per_s, m.down_bytes_per_s) for m in status.members}


def test_right_beliefs_stay_right() -> None:
    job = Job(pull=True)
    job.sim.run(30.0)
    for rates in job.believed().values():
        assert rates == pytest.approx((RATE, RATE), rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.25])
def test_an_uplink_that_got_slow_is_found_and_nobody_else_is_blamed(factor: float) -> None:
    job = Job()
    job.sim.set_rate("h3", factor * RATE, RATE)
    job.sim.run(job.sim.now + 15.0)
    believed = job.believed()
    assert believed.pop("h3")[0] == pytest.approx(factor * RATE, rel=0.1)
    assert all(up == pytest.approx(RATE, rel=0.12) for up, _ in believed.values())
    assert believed["h0"][1] == pytest.approx(RATE, rel=0.1)


def test_the_servers_downlink_is_found_within_seconds_and_so_is_its_recovery() -> None:
    job = Job()
    job.sim.set_rate("h0", RATE, RATE / 4)
    job.sim.run(job.sim.now + 3.0)
    assert job.believed()["h0"][1] == pytest.approx(RATE / 4, rel=0.1)
    assert all(job.believed()[f"h{k}"][0] > RATE / 2 for k in range(1, WORKERS + 1))
    job.sim.set_rate("h0", RATE, RATE)
    job.sim.run(job.sim.now + 3.0)
    assert job.believed()["h0"][1] == pytest.approx(RATE, rel=0.1)


def test_links_that_got_faster_than_ever_are_noticed() -> None:
    job = Job()
    for host in job.believed():
        job.sim.set_rate(host, 3 * RATE, 3 * RATE)
    job.sim.run(job.sim.now + 6.0)
    assert job.believed()["h0"][1] == pytest.approx(3 * RATE, rel=0.1)
    assert sum(up > 2.5 * RATE for up, _ in job.believed().values()) >= 3


def test_a_server_that_could_take_more_than_one_worker_sends_is_noticed() -> None:
    job = Job()
    job.sim.set_rate("h0", 3 * RATE, 3 * RATE)
    job.sim.run(job.sim.now + 30.0)
    assert job.believed()["h0"][1] == pytest.approx(3 * RATE, rel=0.1)
