"""A whole job in virtual time whose final model shows exactly which updates are in it.

Update k adds 1 to its own coordinate under a plain-sum server: 1 for a committed one, 0 for a dropped or
lost one, never 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlfabric.client import Committed, Dropped, Outcome
from mlfabric.data import ArrayData
from mlfabric.errors import FabricError
from mlfabric.eventlog import MemoryLog
from mlfabric.events import RatesMeasured
from mlfabric.messages import MEMBER_ROLES, JobSettings
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Note
from mlfabric.rules import Sum
from mlfabric.sim.engine import Process, SimNode, Simulation
from mlfabric.topology import Host, Network, Rack


@dataclass
class LedgerRun:
    """A job of `workers` that push `steps` updates each, with faults at given times."""

    workers: int = 4
    steps: int = 6
    aggregators: int = 2
    shards: int = 1
    servers: int = 1
    replicas: int = 2
    divergence: float | None = 0.5
    max_delay: int | None = None
    compute_s: float = 0.02
    rates: tuple[float, ...] = (1e6, 2e6, 3e6)
    elements: int = 2000
    racks: int = 0  # that they are dealt over
    aggregate: bool = True
    # (seconds after the model is in place, a fault of `Simulation`, node, how long it lasts)
    faults: tuple[tuple[Any, ...], ...] = ()
    # (seconds after the model is in place, node, bytes per second its links have from now on, and it learns)
    news: tuple[tuple[float, str, float], ...] = ()
    told: bool = True  # whether the scheduler hears of it
    embed: bool = False  # the first worker's process schedules too
    everywhere: bool = False  # every member may be used for everything, as under torchrun
    seconds: float = 60.0
    pull_each: bool = True
    longer: int = 0  # each worker makes so many steps more than the one before; negative: less
    leaves: bool = False  # who is through hands on what it serves and ends, as a script does

    log: MemoryLog = field(default_factory=MemoryLog)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    offered: dict[str, int] = field(default_factory=dict)  # update -> coordinate
    unanswered: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    _struck: set[str] = field(default_factory=set)
    _last_fault_ends: float = 0.0
    ready_at: float = 0.0

    def run(self) -> LedgerRun:
        names = [f"w{i}" for i in range(self.workers)]
        helpers = [f"a{i}" for i in range(self.aggregators)]
        servers = [f"s{i}" for i in range(self.servers)]
        replicas = [f"r{i}" for i in range(self.replicas)]
        everybody = [*names, *helpers, *servers, *replicas]
        rates = [self.rates[i % len(self.rates)] for i in range(len(everybody))]
        places = [f"rack{i % self.racks}" if self.racks else None for i in range(len(everybody))]
        network = Network.of(
            (Host(n, r, r, place) for n, r, place in zip(everybody, rates, places, strict=True)),
            (Rack(place, 1e9, 1e9) for place in dict.fromkeys(places) if place is not None),
        )
        self.sim = Simulation(network, log=self.log)
        self.scheduler = "w0" if self.embed else "sched"
        self.sim.add_scheduler(self.scheduler, "w0")
        self.nodes: dict[str, SimNode] = {}
        for name in everybody:
            roles = {"w": ("worker", "aggregator"), "a": ("aggregator",), "s": ("server", "replica")}
            mine = MEMBER_ROLES if self.everywhere else roles.get(name[0], ("replica",))
            self.nodes[name] = self.sim.add_node(name, name, self.scheduler, mine, expected=len(everybody))
        for index, name in enumerate(names):
            self.sim.spawn(self._work(index, self.nodes[name]), self.nodes[name])
        while self.sim.now < self.seconds and len(self._done) < self._living(names):
            self.sim.run(self.sim.now + 0.5)
        # Silence is noticed after three seconds at most, and who was paused comes back.
        self.sim.run(max(self.sim.now, self._last_fault_ends) + 5.0)
        return self

    def _begin_faults(self) -> None:
        if not self.ready_at:
            self.ready_at = self.sim.now
        news, self.news = self.news, ()
        for at, name, rate in news:
            self.sim.at(self.sim.now + at, lambda n=name, r=rate: self._learn(n, r))  # type: ignore[misc]
        faults, self.faults = self.faults, ()
        for at, what, name, *more in faults:
            self._struck.add(name)
            ends = self.sim.now + at + (more[0] if more else 0.0)
            self._last_fault_ends = max(self._last_fault_ends, ends)
            do = self._reset if what == "reset" else getattr(self.sim, what)
            self.sim.at(self.sim.now + at, lambda d=do, n=name, m=more: d(n, *m))  # type: ignore[misc]

    def _reset(self, name: str) -> None:
        """Its connections break, and are made anew at once."""
        self.sim._break_transfers(name, "connection reset by peer", both=True)
        self.sim.send_again(name)

    def _learn(self, name: str, rate: float) -> None:
        self.sim.set_rate(name, rate, rate)
        node = self.nodes[name]
        if self.told:
            node.do(lambda: node.node.post("member", RatesMeasured(rate, rate)))

    def _living(self, names: list[str]) -> int:
        return sum(1 for name in names if self.nodes[name].alive or name in self._done)

    def _work(self, index: int, node: SimNode) -> Process:
        assert node.joined is not None
        yield node.joined
        settings = JobSettings(
            max_delay=self.max_delay,
            divergence=self.divergence,
            shards=self.shards,
            aggregate=self.aggregate,
        )
        try:
            yield node.client.publish({"w": self.initial()}, Sum(), settings)
            self._begin_faults()
            yield node.client.pull()[1]
            for step in range(self.steps_of(index)):
                yield self.compute_s * (1 + 0.1 * index)
                name, answer = node.client.push({"w": self.update(index, step)})
                self.offered[name] = index * self.steps + step
                self.unanswered.add(name)
                self.outcomes[name] = yield answer
                self.unanswered.discard(name)
                if self.pull_each:
                    yield node.client.pull()[1]
            if self.leaves:
                yield from self._leave(node)
        except FabricError as error:
            self.failures.append(str(error))
        self._done.add(node.name)

    def _leave(self, node: SimNode) -> Process:
        """The last one stays, so that its model can be looked at."""
        if len(self.left) + 1 == self.workers:
            return
        node.client.drain()
        while not node.client.gone.is_set():
            yield 0.01
        self.left.add(node.name)
        node.client.leave()
        if len(self.left) < self.workers:
            self.sim.at(self.sim.now + 0.05, lambda: self.sim.kill(node.name))

    def steps_of(self, index: int) -> int:
        """At most `steps`."""
        before = self.workers - 1 - index if self.longer > 0 else index
        return self.steps - abs(self.longer) * before

    def initial(self) -> Vector:
        return np.zeros((self.shards, self.elements), np.float32)

    def update(self, index: int, step: int) -> Vector:
        """The update of a worker's step: 1 at its own coordinate of every shard."""
        ones = np.zeros((self.shards, self.elements), np.float32)
        ones[:, index * self.steps + step] = 1.0
        return ones

    def lost(self, shard: int | None = None) -> set[str]:
        """As the workers say, and the scheduler for those that died; of one shard or of any."""
        told = self._noted("lost", shard)
        if shard is None:
            assert {update for node in self.nodes.values() for update in node.client.lost} <= told
        return told

    def _noted(self, what: str, shard: int | None = None) -> set[str]:
        notes = [note for note in self.notes(what) if shard is None or shard in note.shards]
        return {update for note in notes for update in note.updates}

    def leader(self, shard: int) -> SimNode:
        leaders = [n for n in self.nodes.values() if n.alive and f"server.{shard}" in n.node.roles]
        assert len(leaders) == 1, f"shard {shard} has {len(leaders)} living leaders"
        return leaders[0]

    def weights(self, shard: int) -> Vector:
        data = self.leader(shard).node.data
        assert isinstance(data, ArrayData)
        return data.shards[shard].weights

    def check_ledger(self) -> None:
        """Every coordinate is what its update's outcome says. Open ones (their worker died) are 0 or 1; so
        are dropped ones that a shard had applied: a fail-over may have lost them since."""
        for shard in range(self.shards):
            weights = self.weights(shard)
            lost = self.lost(shard)
            applied = self._noted("partly-applied", shard)
            for update, coordinate in self.offered.items():
                value = weights[coordinate]
                outcome = self.outcomes.get(update)
                if outcome is None or self._nobody_left_to_tell(update) or update in applied:
                    assert value in (0.0, 1.0), f"{update}: {value}"
                elif isinstance(outcome, Dropped) or update in lost:
                    assert value == 0.0, f"{update} {outcome} lost={update in lost}: {value}"
                else:
                    assert value == 1.0, f"{update} {outcome}: {value}"
            others = np.delete(weights, list(self.offered.values()))
            assert not others.any()

    def _nobody_left_to_tell(self, update: str) -> bool:
        """A dead worker's loss is told by the scheduler, unless that one had not seen it committed."""
        node = self.nodes.get(update.split("#")[0])
        return self.scheduler in self._struck and node is not None and not node.alive

    def notes(self, what: str) -> list[Note]:
        records = (record.record for record in self.log.records)
        return [record for record in records if isinstance(record, Note) and record.what == what]

    def check_everything(self) -> None:
        assert not self.failures, self.failures
        self.check_ledger()
        dead = {name for name, node in self.nodes.items() if not node.alive}
        for update in self.unanswered:
            assert update.split("#")[0] in dead, f"{update} of a living worker never got an outcome"
        for node in self.sim.nodes.values():
            if node.alive:
                for role in node.node.roles.values():
                    role.validate()

    def committed(self) -> list[Committed]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, Committed)]
