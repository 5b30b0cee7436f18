"""A job of a scenario at flow level: where its hosts are, how long its steps take, what its updates became.

Which transfers happen, and when, is the policies' business (`sim.asynchronous`, `sim.stepwise`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Protocol

import msgspec
import numpy as np

from mlfabric.errors import ScenarioError
from mlfabric.scenario import JobSpec, RateChange, Scenario, uniform
from mlfabric.sim.estimate import Estimator
from mlfabric.sim.fluid import Floats, Fluid, Ints
from mlfabric.topology import Host, Link, Network
from mlfabric.units import goodput

_NORMAL = NormalDist()
# Beyond this many workers rates are worked out again only so many times per nominal transfer of a model.
EXACT_WORKERS = 128
SHARINGS_PER_TRANSFER = 16


class Learner(Protocol):
    """Real gradients under the virtual clock; a job without one only counts."""

    def read(self, worker: int) -> None:
        """The worker gets the model as it is now."""
        ...

    def compute(self, worker: int) -> None:
        """The worker's gradient at the model it read last."""
        ...

    def apply(self, workers: list[int], weights: list[float], now: float) -> None:
        """One step with the gradients of these workers."""
        ...


class _NoLearner:
    def read(self, worker: int) -> None:
        pass

    def compute(self, worker: int) -> None:
        pass

    def apply(self, workers: list[int], weights: list[float], now: float) -> None:
        pass


def resize(scenario: Scenario, workers: int) -> Scenario:
    """The same scenario with `workers` hosts in its groups, and racks to match; single hosts stay."""
    total = len(scenario.host_names())
    if workers < 2:
        raise ScenarioError(f"{workers} workers make no cluster; give at least 2")
    groups = [i for i, spec in enumerate(scenario.hosts) if spec.count is not None]
    if not groups:
        raise ScenarioError(
            "this scenario names each host by itself; only groups with 'count' can be resized"
        )
    single = len(scenario.hosts) - len(groups)
    hosts = list(scenario.hosts)
    factor = workers / (total - single)
    at = {scenario.hosts[i].name: 0 for i in groups}
    for i in groups:
        spec = scenario.hosts[i]
        count = max(1, round((spec.count or 0) * factor))
        if i == groups[-1]:
            count = max(1, workers - sum(hosts[j].count or 0 for j in groups[:-1]))
        hosts[i] = msgspec.structs.replace(spec, count=count, first=at[spec.name])
        at[spec.name] += count
    racks = tuple(
        spec
        if spec.count is None
        else msgspec.structs.replace(spec, count=max(2, round(spec.count * factor)))
        for spec in scenario.racks
    )
    return msgspec.structs.replace(scenario, hosts=tuple(hosts), racks=racks)


def build_world(scenario: Scenario) -> Fluid:
    """Links, their trace and the traffic of others."""
    network = scenario.planned_network()
    jobs = scenario.jobs or (JobSpec(),)
    grain_s = 0.0
    if len(network.hosts) > EXACT_WORKERS:
        fastest = max(min(h.up_bytes_per_s, h.down_bytes_per_s) for h in network.hosts.values())
        grain_s = min(scenario.size_bytes(job) for job in jobs) / fastest / SHARINGS_PER_TRANSFER
    world = Fluid(network, grain_s)
    for change in scenario.rate_changes():
        world.at(change.at_s, partial(_change_rate, world, change))
    for stream in scenario.background:
        path = network.path(stream.source, stream.target)
        links = np.array([world.index[link] for link in path], dtype=np.intp)
        lasts = float(stream.stop or scenario.duration) - float(stream.start)
        pace = goodput(float(stream.rate))

        def begin(links: Ints = links, size: float = pace * lasts, pace: float = pace) -> None:
            world.send(links, np.ones(len(links)), size, pace)

        world.at(float(stream.start), begin)
    return world


def _change_rate(world: Fluid, change: RateChange) -> None:
    world.set_capacity(Link(change.host, "up"), goodput(change.up_bps))
    world.set_capacity(Link(change.host, "down"), goodput(change.down_bps))


@dataclass(slots=True)
class Tally:
    """What became of a job's updates."""

    committed: int = 0
    dropped: int = 0
    steps: int = 0  # messages applied: one per update, or one per sum of many
    moved_bytes: float = 0.0  # of the model, when shards were placed anew
    delays: array[int] = field(default_factory=lambda: array("l"))
    busy: list[float] = field(default_factory=list)  # samples of how full the servers' links are
    by_worker: dict[int, int] = field(default_factory=dict)


class JobRun:
    """One job under way: its hosts by number, its clock of versions, its books."""

    def __init__(
        self,
        world: Fluid,
        scenario: Scenario,
        spec: JobSpec,
        estimator: Estimator,
        learner: Learner | None = None,
    ) -> None:
        self.world = world
        self.scenario = scenario
        self.spec = spec
        self.estimator = estimator
        self.learner: Learner = learner or _NoLearner()
        self.size_bytes = scenario.size_bytes(spec)
        self.nominal_s = scenario.compute_s(spec)
        self.mean_compute_s = self.nominal_s * (
            1 + sum(s.probability * (s.delay[0] + s.delay[1]) / 2 for s in scenario.stragglers)
        )
        places = scenario.places(spec)
        self.names = list(places.workers)
        # Hosts by number: the workers, then servers that are none.
        self.hosts = [*self.names, *(name for name in places.servers if name not in places.workers)]
        self.number = {name: number for number, name in enumerate(self.hosts)}
        self.tally = Tally()
        self.version = 0
        self.serving: Ints = np.zeros(0, dtype=np.intp)  # links whose load is the servers'
        network = scenario.planned_network()
        self._racks = {name: network.hosts[name].rack for name in self.hosts}
        self._network = network
        self.up: Ints = np.array([world.index[Link(name, "up")] for name in self.hosts], dtype=np.intp)
        self.down: Ints = np.array([world.index[Link(name, "down")] for name in self.hosts], dtype=np.intp)
        if self.nominal_s <= 0:
            raise ScenarioError(
                f"job {spec.name} computes in no time; give 'compute' or 'compute_transfers' to simulate it"
            )

    def __len__(self) -> int:
        return len(self.names)

    # --- time -------------------------------------------------------------------------------------------

    def compute_s(self, worker: int, step: int) -> float:
        """How long this step of this worker takes: nominal, its jitter, and what straggling adds."""
        name = self.names[worker]
        factor = 1.0
        if self.spec.compute_jitter > 0:
            draw = uniform(self.scenario.seed, "jitter", self.spec.name, name, step)
            factor = math.exp(self.spec.compute_jitter * _NORMAL.inv_cdf(min(max(draw, 1e-12), 1 - 1e-12)))
        return self.nominal_s * (factor + self.scenario.straggler_delay(name, step))

    # --- paths ------------------------------------------------------------------------------------------

    def spread(self, worker: int, shares: Mapping[int, float], way: str) -> tuple[Ints, Floats]:
        """Links and weights of a worker's push ("push") to shards on hosts, or of its pull from them."""
        mine, theirs = (self.up, self.down) if way == "push" else (self.down, self.up)
        out, back = ("up", "down") if way == "push" else ("down", "up")
        weights: dict[int, float] = {}
        here = self._racks[self.hosts[worker]]
        for server, share in shares.items():
            if server == worker or share <= 0:
                continue
            weights[int(mine[worker])] = weights.get(int(mine[worker]), 0.0) + share
            weights[int(theirs[server])] = share
            there = self._racks[self.hosts[server]]
            if here != there:
                for rack, direction in ((here, out), (there, back)):
                    if rack is not None:
                        link = self.world.index[Link(rack, direction)]
                        weights[link] = weights.get(link, 0.0) + share
        return np.array(list(weights), dtype=np.intp), np.array(list(weights.values()))

    def loads(self, loads: Mapping[Link, float]) -> tuple[Ints, Floats]:
        """Links and weights of a planned exchange between many hosts."""
        used = [(self.world.index[link], load) for link, load in loads.items() if load > 0]
        return np.array([u[0] for u in used], dtype=np.intp), np.array([u[1] for u in used])

    # --- beliefs ----------------------------------------------------------------------------------------

    def believed_network(self, workers: list[int] | None = None) -> Network:
        """The network as the scheduler believes it to be now."""
        believed = self.estimator.believed
        chosen = range(len(self)) if workers is None else workers
        return Network.of(
            (
                Host(
                    self.names[w],
                    float(believed[self.up[w]]),
                    float(believed[self.down[w]]),
                    self._racks[self.names[w]],
                )
                for w in chosen
            ),
            self._network.racks.values(),
        )

    # --- books ------------------------------------------------------------------------------------------

    def commit(self, workers: list[int], bases: list[int], weights: list[float] | None = None) -> None:
        """One message with the updates of these workers is applied."""
        self.tally.steps += 1
        for worker, base in zip(workers, bases, strict=True):
            self.tally.delays.append(self.version - base)
            self.tally.by_worker[worker] = self.tally.by_worker.get(worker, 0) + 1
        self.tally.committed += len(workers)
        self.version += len(workers)
        self.learner.apply(workers, weights or [1.0] * len(workers), self.world.now)

    def sample_busy(self) -> None:
        if len(self.serving):
            links = self.serving
            self.tally.busy.append(float((self.world.used[links] / self.world.capacity[links]).mean()))
