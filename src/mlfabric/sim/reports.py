"""Flow reports in virtual time: senders look at their transfers as between real hosts and tell the scheduler.

Whoever wants a simulated job to learn rates makes one of these; without it the planner keeps to what members
said when they joined.
"""

from __future__ import annotations

from mlfabric.events import FlowsMeasured
from mlfabric.roles.flows import HEADROOM, RAISE, TICK_S, BulkState, FlowWatch
from mlfabric.sim.engine import Simulation


class FlowReports:
    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._watches: dict[str, FlowWatch] = {}  # by node
        self._left: dict[str, float] = {}  # by transfer, at the last look
        self._acked: dict[tuple[str, str], float] = {}  # by source and target node
        self._looks = 0
        sim.at(sim.now + TICK_S, self._look)

    def _look(self) -> None:
        sim = self._sim
        sim.at(sim.now + TICK_S, self._look)
        self._looks += 1
        flows = sim.bulk_flows()
        paces: dict[str, dict[str, float]] = {}
        for source, target, flow in flows:
            if flow.name not in self._left:
                flow.pace *= HEADROOM
            self._acked.setdefault((source, target), 0.0)
            self._acked[source, target] += self._left.get(flow.name, flow.remaining) - flow.remaining
            paces.setdefault(source, {})[target] = flow.pace
        self._left = {flow.name: flow.remaining for _, _, flow in flows}
        raised = False
        for source in {*self._watches, *paces}:
            watch = self._watches.setdefault(source, FlowWatch())
            busy_us = round(self._looks * TICK_S * 1e6)
            states = [
                (target, BulkState(int(self._acked[source, target]), busy_us, 0, pace, waiting=True))
                for target, pace in paces.get(source, {}).items()
            ]
            for peer in watch.look(sim.now, states, shared=False):
                raised = True
                for of, to, flow in flows:
                    if (of, to) == (source, peer):
                        flow.pace *= RAISE
            news = watch.news(sim.now)
            node = sim.nodes[source]
            if news and node.alive:
                event = FlowsMeasured(tuple((n.peer, n.bytes_per_s, n.limited) for n in news))
                node.do(lambda node=node, event=event: node.node.post("member", event))  # type: ignore[misc]
        if raised or flows:
            sim.share_again()
