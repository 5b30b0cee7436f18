"""Flow reports in virtual time: nodes look at their transfers as between real hosts and tell the scheduler.

Whoever wants a simulated job to learn rates makes one of these; without it the planner keeps to what members
said when they joined.
"""

from __future__ import annotations

from collections import Counter

from mlfabric.events import FlowsMeasured
from mlfabric.roles.flows import HEADROOM, RAISE, TICK_S, BulkState, FlowWatch
from mlfabric.sim.engine import Simulation


class FlowReports:
    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._watches: dict[str, FlowWatch] = {}  # by node
        sim.headroom = HEADROOM
        sim.at(sim.now + TICK_S, self._look)

    def _look(self) -> None:
        sim = self._sim
        sim.at(sim.now + TICK_S, self._look)
        states: dict[str, list[tuple[str, BulkState]]] = {}
        for source, target, flow in sim.bulk_flows():
            use = sim.sent[source, target]
            state = BulkState(int(use.acked_bytes), round(use.busy_s * 1e6), 0, flow.pace, waiting=True)
            states.setdefault(source, []).append((target, state))
            self._watches.setdefault(source, FlowWatch())
            self._watches.setdefault(target, FlowWatch())
        out, into = self._counts()
        raised = False
        for name, watch in self._watches.items():
            for peer in watch.look(sim.now, states.get(name, []), False, (out[name], into[name])):
                raised = True
                sim.raise_pace(name, peer, RAISE)
            news, (up, down) = watch.news(sim.now), watch.totals(sim.now)
            node = sim.nodes[name]
            if (news or up is not None or down is not None) and node.alive:
                event = FlowsMeasured(tuple((n.peer, n.bytes_per_s, n.limited) for n in news), up, down)
                node.do(lambda node=node, event=event: node.node.post("member", event))  # type: ignore[misc]
        if raised:
            sim.share_again()

    def _counts(self) -> tuple[Counter[str], Counter[str]]:
        """Bytes that each node ever sent to other hosts, and received from them."""
        out: Counter[str] = Counter()
        into: Counter[str] = Counter()
        for (source, target), use in self._sim.sent.items():
            if self._sim.nodes[source].host != self._sim.nodes[target].host:
                out[source] += int(use.acked_bytes)
                into[target] += int(use.acked_bytes)
        return out, into
