"""Runs a scenario under a policy at flow level and says what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from mlfabric.errors import FabricError, ScenarioError
from mlfabric.scenario import Scenario
from mlfabric.sim.asynchronous import SSP_SLACK, AsyncRun, AsyncSettings
from mlfabric.sim.estimate import Estimator
from mlfabric.sim.stepwise import StepRun
from mlfabric.sim.workload import JobRun, Learner, build_world


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A way to exchange updates, by name."""

    about: str
    asynchronous: AsyncSettings | None = None  # None: step by step
    steps: str = ""
    oracle: bool = False  # is told the links' rates of now; everybody else learns them


POLICIES: Final[dict[str, PolicySpec]] = {
    "mlfabric": PolicySpec(
        "shards by bandwidth, ordered, bounded, paced", AsyncSettings("bandwidth", planned=True)
    ),
    "mlfabric-alongside": PolicySpec(
        "the same with pulls beside pushes", AsyncSettings("bandwidth", planned=True, alongside=True)
    ),
    "oracle": PolicySpec(
        "mlfabric-alongside told the rates of now",
        AsyncSettings("bandwidth", planned=True, alongside=True),
        oracle=True,
    ),
    "backup": PolicySpec("planned all-reduce among the fastest", steps="backup"),
    "allreduce": PolicySpec("all-reduce with planned shares, all take part", steps="allreduce"),
    "ring": PolicySpec("ring all-reduce, all take part", steps="ring"),
    "fcfs-1": PolicySpec("first come, one server", AsyncSettings("first")),
    "uniform-shards": PolicySpec("first come, every host serves 1/N", AsyncSettings("uniform")),
    "ssp": PolicySpec("uniform shards, at most 3 steps ahead", AsyncSettings("uniform", slack=SSP_SLACK)),
    "local": PolicySpec("8 steps of each worker per planned all-reduce", steps="local"),
    "alone": PolicySpec("one host, no network", steps="alone"),
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
    dropped: int
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
    make_learner: Callable[[int], Learner] | None = None,
) -> list[Result]:
    """All jobs of the scenario under the policy; `progress` hears the virtual time."""
    name, spec = find_policy(policy)
    if not scenario.jobs:
        raise ScenarioError(f"scenario {scenario.name or 'without a name'} has no job to simulate")
    if scenario.faults:
        raise ScenarioError("runs at flow level know no faults yet; take 'faults' out of the scenario")
    world = build_world(scenario)
    estimator = Estimator(world, spec.oracle)
    runs = []
    for job in scenario.jobs:
        learner = make_learner(len(scenario.places(job).workers)) if make_learner else None
        run = JobRun(world, scenario, job, estimator, learner)
        runs.append(run)
        if spec.asynchronous is not None:
            AsyncRun(run, spec.asynchronous).begin()
        else:
            StepRun(run, spec.steps).begin()
    duration = float(scenario.duration)
    slices = 200
    for part in range(1, slices + 1):
        world.run(duration * part / slices)
        if progress is not None:
            progress(world.now)
    return [_result(run, name) for run in runs]


def _result(run: JobRun, policy: str) -> Result:
    tally, now = run.tally, run.world.now
    delays = np.array(tally.delays) if len(tally.delays) else np.zeros(1, dtype=np.int64)
    counts = np.array([tally.by_worker.get(worker, 0) for worker in range(len(run))])
    if policy == "alone":
        counts = counts[:1]
    by_link = {"host up": 0.0, "host down": 0.0, "rack up": 0.0, "rack down": 0.0}
    racks = {rack.name for rack in run.scenario.rack_links()}
    for link, carried in zip(run.world.links, run.world.carried, strict=True):
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
        server_busy=math.fsum(tally.busy) / len(tally.busy) if tally.busy else 0.0,
        moved_bytes=tally.moved_bytes,
        slowest_share=float(counts.min() / counts.mean()) if tally.committed else 0.0,
        bytes_by_link=by_link,
    )
