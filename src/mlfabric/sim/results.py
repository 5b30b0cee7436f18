"""Runs a scenario under a policy at flow level and says what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from mlfabric.errors import FabricError
from mlfabric.scenario import Scenario
from mlfabric.sim.asynchronous import SSP_SLACK, AsyncRun, AsyncSettings
from mlfabric.sim.backup import BackupRun
from mlfabric.sim.estimate import Estimator
from mlfabric.sim.resizing import with_a_job, with_own_server
from mlfabric.sim.rolling import RollingRun
from mlfabric.sim.stepwise import LOCAL_STEPS, StepRun
from mlfabric.sim.workload import JobRun, Learner, build_world


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A way to exchange updates, by name."""

    about: str
    asynchronous: AsyncSettings | None = None  # None: step by step
    steps: str = ""
    own_server: bool = False  # its server is one more host, where no worker runs
    oracle: bool = False  # is told the links' rates of now; everybody else learns them

    @property
    def learns(self) -> bool:
        """Does it look at what links carry, and ask those that are idle?"""
        if self.asynchronous is not None:
            return self.asynchronous.planned
        return self.steps not in ("ring", "alone")

    @property
    def bounded(self) -> bool:
        """Does it keep a delay bound?"""
        planned = self.asynchronous is not None and self.asynchronous.planned
        return planned or self.steps == "backup"


POLICIES: Final[dict[str, PolicySpec]] = {
    "mlfabric": PolicySpec(
        "shards by bandwidth, ordered, bounded, paced", AsyncSettings("bandwidth", planned=True)
    ),
    "mlfabric-alongside": PolicySpec(
        "the same with pulls beside pushes", AsyncSettings("bandwidth", planned=True, alongside=True)
    ),
    "mlfabric-overlap": PolicySpec(
        "the same, and computing goes on meanwhile: two updates of a worker in flight",
        AsyncSettings("bandwidth", planned=True, alongside=True, in_flight=2),
    ),
    "oracle": PolicySpec(
        "mlfabric-alongside told the rates of now",
        AsyncSettings("bandwidth", planned=True, alongside=True),
        oracle=True,
    ),
    "backup": PolicySpec("planned all-reduce among the fastest", steps="backup"),
    "rolling": PolicySpec(
        "planned all-reduces of whatever is ready, one after the other, while all compute", steps="rolling"
    ),
    "allreduce": PolicySpec("all-reduce with planned shares, all take part", steps="allreduce"),
    "ring": PolicySpec("ring all-reduce, all take part", steps="ring"),
    "fcfs-1": PolicySpec("first come, one server, on a worker's host", AsyncSettings("first")),
    "fcfs-1-dedicated": PolicySpec(
        "first come, one server on one more host of its own", AsyncSettings("first"), own_server=True
    ),
    "uniform-shards": PolicySpec("first come, every host serves 1/N", AsyncSettings("uniform")),
    "ssp": PolicySpec("uniform shards, at most 3 steps ahead", AsyncSettings("uniform", slack=SSP_SLACK)),
    "local": PolicySpec("each worker goes 8 steps by itself, then models are averaged", steps="local"),
    "alone": PolicySpec("one host, no network", steps="alone"),
}
# The policy that carries out each mode a job can name.
MODE_POLICIES: Final = {
    "async": "mlfabric",
    "sync": "allreduce",
    "backup": "backup",
    "ssp": "ssp",
    "local": "local",
}
ALIASES: Final = {"fcfs-sharded": "uniform-shards"}
DEFAULT_POLICIES: Final = (
    "fcfs-1",
    "ring",
    "uniform-shards",
    "allreduce",
    "backup",
    "mlfabric",
    "mlfabric-alongside",
    "mlfabric-overlap",
)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One job under one policy."""

    policy: str
    job: str
    workers: int
    seed: int
    simulated_s: float
    committed: int
    updates_per_s: float
    steps_per_s: float  # messages or sums applied
    delay_mean: float
    delay_std: float
    delay_p99: float
    delay_max: int
    dropped: int  # before any byte was sent
    dropped_late: int  # on the way
    lost: int  # with a host that died
    within_per_s: float  # committed no older than the delay bound, whether the policy keeps one or not
    bound: int | None
    bounded: bool  # does the policy keep the bound?
    local_steps: int  # of a worker that one update sums up; 1: an update is one gradient
    summed: int  # committed as part of a sum
    server_busy: float  # mean share of the servers' link rates in use, sampled
    moved_bytes: float  # of the model, to place shards anew
    slowest_share: float  # committed updates of the least served worker over the mean
    bytes_by_link: dict[str, float]  # by class of link; of all jobs together
    time_to_target_s: float | None = None
    accuracy: tuple[tuple[float, float], ...] = ()


def find_policy(name: str) -> tuple[str, PolicySpec]:
    name = ALIASES.get(name, name)
    if name not in POLICIES:
        raise FabricError(f"unknown policy {name!r}; known are {', '.join(POLICIES)}")
    return name, POLICIES[name]


def simulate(
    scenario: Scenario,
    policy: str,
    progress: Callable[[float], None] | None = None,
    make_learner: Callable[[], Learner] | None = None,
) -> list[Result]:
    """All jobs of the scenario under the policy; `progress` hears the virtual time."""
    name, _ = find_policy(policy)
    return [_result(run, name) for run in simulate_jobs(scenario, policy, progress, make_learner)]


def simulate_jobs(
    scenario: Scenario,
    policy: str,
    progress: Callable[[float], None] | None = None,
    make_learner: Callable[[], Learner] | None = None,
) -> list[JobRun]:
    """The same, with the books of each job."""
    _, spec = find_policy(policy)
    scenario = with_a_job(scenario)
    if spec.own_server:
        scenario = with_own_server(scenario)
    world, trouble = build_world(scenario)
    estimator = Estimator(world, spec.oracle)
    runs = []
    for job in scenario.jobs:
        learner = make_learner() if make_learner else None
        runs.append(JobRun(world, trouble, scenario, job, estimator, learner))
    if spec.learns:
        world.spawn(estimator.watch())
    world.run(0.0)
    for run in runs:
        if spec.asynchronous is not None:
            AsyncRun(run, spec.asynchronous).begin()
        elif spec.steps == "backup":
            BackupRun(run).begin()
        elif spec.steps == "rolling":
            RollingRun(run).begin()
        else:
            StepRun(run, spec.steps).begin()
    duration = float(scenario.duration)
    slices = 200
    for part in range(1, slices + 1):
        world.run(duration * part / slices)
        if progress is not None:
            progress(world.now)
    return runs


def _result(run: JobRun, policy: str) -> Result:
    tally, now = run.tally, run.world.now
    delays = np.array(tally.delays) if len(tally.delays) else np.zeros(1, dtype=np.int64)
    counts = np.array([tally.by_worker.get(worker, 0) for worker in range(len(run))])
    if policy == "alone":
        counts = counts[:1]
    by_link = {"host up": 0.0, "host down": 0.0, "rack up": 0.0, "rack down": 0.0}
    racks = {rack.name for rack in run.scenario.rack_links()}
    for link, carried in zip(run.world.links, run.world.carried, strict=True):
        if link.direction not in ("up", "down"):
            continue
        by_link[f"{'rack' if link.owner in racks else 'host'} {link.direction}"] += float(carried)
    if not racks:
        del by_link["rack up"], by_link["rack down"]
    return Result(
        policy=policy,
        job=run.spec.name,
        workers=len(run),
        seed=run.scenario.seed,
        simulated_s=now,
        committed=tally.committed,
        updates_per_s=tally.committed / now,
        steps_per_s=tally.steps / now,
        delay_mean=float(delays.mean()),
        delay_std=float(delays.std()),
        delay_p99=float(np.percentile(delays, 99)),
        delay_max=int(delays.max()),
        dropped=tally.dropped,
        dropped_late=tally.dropped_late,
        lost=tally.lost,
        within_per_s=tally.within / now,
        bound=run.counted_bound,
        bounded=POLICIES[policy].bounded,
        local_steps=LOCAL_STEPS if policy == "local" else 1,
        summed=tally.summed,
        server_busy=math.fsum(tally.busy) / len(tally.busy) if tally.busy else 0.0,
        moved_bytes=tally.moved_bytes,
        slowest_share=float(counts.min() / counts.mean()) if tally.committed else 0.0,
        bytes_by_link=by_link,
    )
