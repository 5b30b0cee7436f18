"""A training job on the fabric's own roles in virtual time: the scenario's links, steps and stragglers.

The policies of `mlfabric sim` are the planner's decisions at flow level; here the nodes of a real job decide,
with what they learned or with what they are told. No gradients are computed: it is about time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mlfabric.client import Committed
from mlfabric.events import RatesMeasured
from mlfabric.messages import JobSettings
from mlfabric.rules import SGD, Rounds, Rule
from mlfabric.scenario import RateChange, Scenario
from mlfabric.sim.engine import Process, SimNode, Simulation
from mlfabric.sim.reports import FlowReports
from mlfabric.steptimes import step_factor
from mlfabric.units import goodput

# Members have joined and hold the model by then, as in a lab; the scenario begins.
BEGIN_S = 5.0
LATENCY_S = 1e-3


@dataclass(slots=True)
class Hosted:
    """What became of a hosted run, from the beginning of the scenario on."""

    delays: list[int] = field(default_factory=list)  # of committed updates
    steps_s: list[float] = field(default_factory=list)  # when the model of each step was first pulled
    dropped: int = 0
    push_s: list[float] = field(default_factory=list)  # from a gradient to its outcome
    pull_s: list[float] = field(default_factory=list)  # from there to the next model
    believed: list[float] = field(default_factory=list)  # shares of the true rates, looked at twice a second
    warnings: list[str] = field(default_factory=list)


class HostedRun:
    def __init__(
        self,
        scenario: Scenario,
        alongside: bool = False,
        told: bool = False,
        settings: JobSettings | None = None,
    ) -> None:
        """`told`: hosts know the rates of their links at once; else they learn them from their transfers."""
        self._scenario, self._job = scenario, scenario.jobs[0]
        self._nominal_s = scenario.compute_s(self._job)
        self._alongside = alongside
        self._settings = settings or JobSettings(shards=0, divergence=None)
        self._elements = int(scenario.size_bytes(self._job)) // 4
        self.hosts = [link.name for link in scenario.host_links()]
        self.sim = Simulation(scenario.planned_network(), LATENCY_S)
        self.result = Hosted()
        self.sim.add_scheduler("scheduler", self.hosts[0])
        for host in self.hosts:
            node = self.sim.add_node(f"on-{host}", host, "scheduler", expected=len(self.hosts))
            self.sim.spawn(self._work(host, node), node)
        if not told:
            FlowReports(self.sim)
        for change in scenario.rate_changes():
            self.sim.at(BEGIN_S + change.at_s, lambda c=change: self._change(c, told))  # type: ignore[misc]
        self.sim.at(BEGIN_S, self._compare)

    def run(self, seconds: float) -> Hosted:
        self.sim.run(BEGIN_S + seconds)
        self.result.warnings = [text for node in self.sim.nodes.values() for text in node.warnings]
        return self.result

    def _work(self, host: str, node: SimNode) -> Process:
        assert node.joined is not None
        yield node.joined
        model = {"model": np.zeros(self._elements, np.float32)}
        rule: Rule = SGD(0.05, 0.9)
        if self._settings.wait_for > 1:
            rule = Rounds(self._settings.wait_for, rule)
        yield node.client.publish(model, rule, self._settings)
        _, versions = yield node.client.pull()[1]
        yield max(BEGIN_S - self.sim.now, 0.0)
        gradient = {"model": np.ones(self._elements, np.float32)}
        step = 0
        while True:
            yield self._nominal_s * step_factor(self._scenario, self._job, host, step)
            step += 1
            computed_s = self.sim.now
            _, ticket = node.client.push(gradient, bases=versions)
            pulling = node.client.pull()[1] if self._alongside else None
            outcome = yield ticket
            settled_s = self.sim.now
            _, versions = yield pulling or node.client.pull()[1]
            self._has_stepped(min(version.count for version in versions))
            self.result.push_s.append(settled_s - computed_s)
            self.result.pull_s.append(self.sim.now - settled_s)
            if isinstance(outcome, Committed):
                self.result.delays.append(outcome.delay_updates)
            else:
                self.result.dropped += 1

    def _has_stepped(self, version: int) -> None:
        steps = version // max(self._settings.wait_for, 1)
        more = steps - len(self.result.steps_s)
        self.result.steps_s += [self.sim.now - BEGIN_S] * max(more, 0)

    def _change(self, change: RateChange, told: bool) -> None:
        up, down = goodput(change.up_bps), goodput(change.down_bps)
        self.sim.set_rate(change.host, up, down)
        if told:
            node = self.sim.nodes[f"on-{change.host}"]
            node.do(lambda: node.node.post("member", RatesMeasured(up, down)))

    def _compare(self) -> None:
        """How near beliefs are to the truth."""
        self.sim.at(self.sim.now + 0.5, self._compare)
        scheduler = self.sim.nodes["scheduler"].node.roles["scheduler"]
        for believed in scheduler.status(self.sim.now).members:  # type: ignore[attr-defined]
            true = self.sim.network.hosts[believed.host]
            self.result.believed.append(believed.up_bytes_per_s / true.up_bytes_per_s)
            self.result.believed.append(believed.down_bytes_per_s / true.down_bytes_per_s)
