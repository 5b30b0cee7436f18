"""A job of a scenario at flow level: where its hosts are, how long its steps take, what its updates became.

Which transfers happen, and when, is the policies' business (`sim.asynchronous`, `sim.stepwise`,
`sim.backup`, `sim.rolling`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mlfabric.errors import ScenarioError
from mlfabric.plan.jobs import split_network
from mlfabric.scenario import JobSpec, Scenario
from mlfabric.sim.estimate import Estimator
from mlfabric.sim.fluid import Fluid, Process
from mlfabric.sim.streams import Floats, Ints, Path, Stream
from mlfabric.sim.trouble import Crosses, Trouble
from mlfabric.steptimes import step_factor
from mlfabric.topology import Host, Link, Network
from mlfabric.units import goodput

# Beyond this many hosts rates are worked out again only so many times per nominal transfer of a model; in
# large clusters half as often.
EXACT_HOSTS = 32
LARGE_HOSTS = 256
SHARINGS_PER_TRANSFER = 16


class Learner(Protocol):
    """Real gradients under the virtual clock; a job without one only counts."""

    def read(self, ahead: float = 0.0) -> Any:
        """The model, where it is expected to be so many steps later: moved on by so many times what its
        last step changed.
        """
        ...

    def compute(self, model: Any, steps: int = 1) -> Any:
        """The gradient of a fresh batch at this model; of several steps that go on from it, their sum."""
        ...

    def apply(self, gradients: list[Any], weights: list[float], now: float) -> None:
        """One step with these gradients."""
        ...


class _NoLearner:
    def read(self, ahead: float = 0.0) -> None:
        return None

    def compute(self, model: None, steps: int = 1) -> None:
        return None

    def apply(self, gradients: list[None], weights: list[float], now: float) -> None:
        pass


def build_world(scenario: Scenario) -> tuple[Fluid, Trouble]:
    """Links, their trace, faults, and the traffic of others."""
    network = scenario.planned_network()
    grain_s = 0.0
    if len(network.hosts) > EXACT_HOSTS:
        fastest = max(min(h.up_bytes_per_s, h.down_bytes_per_s) for h in network.hosts.values())
        sharings = SHARINGS_PER_TRANSFER / (2 if len(network.hosts) > LARGE_HOSTS else 1)
        grain_s = min(map(scenario.size_bytes, scenario.jobs)) / fastest / sharings
    world = Fluid(network, grain_s)
    trouble = Trouble(world, scenario)
    for stream in scenario.background:
        crossed = network.path(stream.source, stream.target)
        path = Path(np.array([world.index[link] for link in crossed], dtype=np.intp), np.ones(len(crossed)))
        pace = goodput(float(stream.rate))
        size = pace * (float(stream.stop or scenario.duration) - float(stream.start))
        ends = (stream.source, stream.target)

        def begin(path: Path = path, size: float = size, pace: float = pace, ends: Any = ends) -> None:
            sent = world.send(path, size, pace)
            trouble.watch(sent, lambda source, target: (source, target) == ends)

        world.at(float(stream.start), begin)
    return world, trouble


@dataclass(slots=True)
class Tally:
    """What became of a job's updates."""

    committed: int = 0
    within: int = 0  # of them, no older than the bound
    dropped: int = 0  # before any byte was sent
    dropped_late: int = 0  # on the way: overtaken, and their lease was over
    lost: int = 0  # with the host they were on
    steps: int = 0  # messages applied: one per update, or one per sum of many
    summed: int = 0  # updates that arrived as part of a sum
    moved_bytes: float = 0.0  # of the model, when shards were placed anew
    delays: array[int] = field(default_factory=lambda: array("l"))
    busy: list[float] = field(default_factory=list)  # samples of how full the servers' links are
    by_worker: dict[int, int] = field(default_factory=dict)


class JobRun:
    """One job under way: its hosts by number, its clock of versions, its books."""

    def __init__(
        self,
        world: Fluid,
        trouble: Trouble,
        scenario: Scenario,
        spec: JobSpec,
        estimator: Estimator,
        learner: Learner | None = None,
    ) -> None:
        self.world = world
        self.trouble = trouble
        self.scenario = scenario
        self.spec = spec
        self.estimator = estimator
        self.learner: Learner = learner or _NoLearner()
        self.size_bytes = scenario.size_bytes(spec)
        self.nominal_s = scenario.compute_s(spec)
        fastest = max(min(link.up_bps, link.down_bps) for link in scenario.host_links())
        self.transfer_s = self.size_bytes / goodput(fastest)
        if self.nominal_s <= 0:
            raise ScenarioError(
                f"job {spec.name} computes in no time; give 'compute' or 'compute_transfers' to simulate it"
            )
        self.mean_compute_s = self.nominal_s * (
            1 + sum(s.probability * (s.delay[0] + s.delay[1]) / 2 for s in scenario.stragglers)
        )
        places = scenario.places(spec)
        self.names = list(places.workers)
        # Hosts by number: the workers, then servers that are none.
        self.hosts = [*self.names, *(name for name in places.servers if name not in places.workers)]
        self.number = {name: number for number, name in enumerate(self.hosts)}
        self.first_server = self.number[places.servers[0]] if places.servers else 0
        self.tally = Tally()
        self.version = 0
        self.counted_bound = self.bound()  # that "within the bound" is counted by
        self.serving: Ints = np.zeros(0, dtype=np.intp)  # links whose load is the servers'
        self.gone: set[int] = set()  # workers whose host is known to be dead
        self._network = scenario.planned_network()
        self.racks = [self._network.hosts[name].rack for name in self.hosts]
        self.workers_in_rack = Counter(rack for rack in self.racks[: len(self.names)] if rack is not None)
        self.up: Ints = np.array([world.index[Link(name, "up")] for name in self.hosts], dtype=np.intp)
        self.down: Ints = np.array([world.index[Link(name, "down")] for name in self.hosts], dtype=np.intp)
        self.delay_s = {link.name: link.delay_s for link in scenario.host_links()}
        self.part = _part_of_links(scenario, spec, self.hosts)
        self.limits = self._limit_rates()

    def __len__(self) -> int:
        return len(self.names)

    def _limit_rates(self) -> dict[int, int]:
        """The link number of each host's `max_rate`, by that of its uplink: crossed together with it."""
        if self.spec.max_rate is None:
            return {}
        most = goodput(float(self.spec.max_rate))
        return {
            int(up): self.world.add_link(Link(f"{self.spec.name} at {name}", "limit"), most)
            for name, up in zip(self.hosts, self.up, strict=True)
        }

    # --- time -------------------------------------------------------------------------------------------

    def compute_s(self, worker: int, step: int) -> float:
        """How long this step of this worker takes: nominal, its jitter, and what straggling adds."""
        return self.nominal_s * step_factor(self.scenario, self.spec, self.names[worker], step)

    def computing(self, worker: int, step: int, steps: int = 1) -> Process:
        """The time of these steps, longer if the host is paused meanwhile."""
        seconds = sum(self.compute_s(worker, step + k) for k in range(steps))
        return self.trouble.sleep(self.names[worker], seconds)

    # --- paths ------------------------------------------------------------------------------------------

    def path(self, loads: Mapping[Link, float], latency_s: float = 0.0) -> Path:
        """The way of something that crosses these links with these weights, the job's limits among them."""
        weights: dict[int, float] = {}
        for link, load in loads.items():
            if load > 0:
                number = self.world.index[link]
                weights[number] = weights.get(number, 0.0) + load
                if number in self.limits:
                    weights[self.limits[number]] = load
        return Path(
            np.array(list(weights), dtype=np.intp), np.array(list(weights.values())), latency_s=latency_s
        )

    def send(self, path: Path, size_bytes: float, crosses: Crosses, priority: float = 1.0) -> Stream:
        stream = self.world.send(path, size_bytes, priority=priority)
        self.trouble.watch(stream, crosses)
        return stream

    # --- beliefs ----------------------------------------------------------------------------------------

    def rates(self) -> tuple[Floats, Floats]:
        """Bytes per second up and down that this job may count on at each of its hosts, as believed."""
        believed = self.estimator.believed
        up, down = believed[self.up] * self.part, believed[self.down] * self.part
        if self.spec.max_rate is not None:
            up = np.minimum(up, goodput(float(self.spec.max_rate)))
        for host in self.gone:
            up[host] = down[host] = 0.0
        return up, down

    def believed_network(self, workers: list[int] | None = None) -> Network:
        """The network as the scheduler believes it to be now, this job's part of it."""
        up, down = self.rates()
        chosen = range(len(self)) if workers is None else workers
        return Network.of(
            (Host(self.hosts[w], float(up[w]), float(down[w]), self.racks[w]) for w in chosen),
            self._network.racks.values(),
        )

    # --- books ------------------------------------------------------------------------------------------

    def bound(self, in_flight: int | None = None) -> int | None:
        """The delay bound in force: "auto" is twice the updates in flight, as in the fabric itself."""
        written = self.spec.max_delay
        if written == "auto":
            return 2 * len(self) * (in_flight or self.spec.in_flight)
        return None if written == "none" else written

    def commit(self, members: list[tuple[int, int, Any, float]], in_order: bool = False) -> None:
        """One message is applied: of each member its worker, base version, gradient and weight.

        Members of a sum count as applied one after the other if `in_order`, else as one step.
        """
        tally = self.tally
        tally.steps += 1
        if len(members) > 1:
            tally.summed += len(members)
        for place, (worker, base, _, _) in enumerate(members):
            delay = self.version - base + (place if in_order else 0)
            tally.delays.append(delay)
            tally.within += self.counted_bound is None or delay <= self.counted_bound
            tally.by_worker[worker] = tally.by_worker.get(worker, 0) + 1
        tally.committed += len(members)
        self.version += len(members)
        self.learner.apply([m[2] for m in members], [m[3] for m in members], self.world.now)

    def sample_busy(self) -> None:
        if len(self.serving):
            rates = self.world.capacity[self.serving]
            used = self.world.used[self.serving]
            self.tally.busy.append(float((used / np.maximum(rates, 1.0)).mean()))


def _part_of_links(scenario: Scenario, spec: JobSpec, hosts: list[str]) -> Floats:
    """Which part of its links each host has for this job: by the weights of the jobs that use it."""
    users = {}
    for job in scenario.jobs:
        places = scenario.places(job)
        users[job.name] = {*places.workers, *places.servers}
    whole = scenario.planned_network()
    mine = split_network(whole, {job.name: job.weight for job in scenario.jobs}, users)[spec.name]
    return np.array([mine.hosts[name].up_bytes_per_s / whole.hosts[name].up_bytes_per_s for name in hosts])
