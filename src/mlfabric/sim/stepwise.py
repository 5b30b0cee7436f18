"""Policies that go step by step at flow level: an exchange among many, then everybody computes again.

`ring` and `allreduce` wait for all; `backup` plans each exchange among those that bring the most updates per
second and lets the others keep their gradient for a later one, within the delay bound; `local` exchanges
models only every few steps; `alone` is one host without a network.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mlfabric.plan.allreduce import choose_participants, link_loads, plan_all_reduce
from mlfabric.sim.estimate import OBSERVE_S
from mlfabric.sim.fluid import Floats, Ints, Process, Signal
from mlfabric.sim.workload import JobRun
from mlfabric.topology import Link

# Steps that `local` makes between two averages.
LOCAL_STEPS: Final = 8
# A step of a worker is taken for a straggling one this much later than its nominal time.
OVERDUE: Final = 1.2
# What is believed of a straggling step: so many more compute times.
STRAGGLES_FOR: Final = 2.0


class StepRun:
    """All workers of a job under one step-by-step policy."""

    def __init__(self, job: JobRun, kind: str) -> None:
        self._job = job
        self._kind = kind
        self._step = [0] * len(job)

    def begin(self) -> None:
        job = self._job
        job.serving = np.concatenate([job.up[: len(job)], job.down[: len(job)]])
        if self._kind == "alone":
            job.serving = np.zeros(0, dtype=np.intp)
            job.world.spawn(self._alone())
        elif self._kind == "backup":
            BackupRun(job).begin()
        else:
            job.world.spawn(self._together())
        job.world.spawn(self._watch())

    def _watch(self) -> Process:
        while True:
            yield OBSERVE_S
            self._job.sample_busy()
            if self._kind != "ring":
                self._job.estimator.observe()

    def _alone(self) -> Process:
        job = self._job
        yield float(job.spec.start)
        step = 0
        while job.spec.steps is None or step < job.spec.steps:
            job.learner.read(0)
            yield job.compute_s(0, step)
            step += 1
            job.learner.compute(0)
            job.commit([0], [job.version])

    def _together(self) -> Process:
        """Everybody computes, everybody exchanges."""
        job = self._job
        everybody = list(range(len(job)))
        rounds = LOCAL_STEPS if self._kind == "local" else 1
        yield float(job.spec.start)
        while job.spec.steps is None or self._step[0] < job.spec.steps:
            slowest = 0.0
            for worker in everybody:
                job.learner.read(worker)
                slowest = max(
                    slowest, sum(job.compute_s(worker, self._step[worker] + r) for r in range(rounds))
                )
                self._step[worker] += rounds
                job.learner.compute(worker)
            yield slowest
            links, weights = ring_path(job) if self._kind == "ring" else shares_path(job, everybody)
            yield job.world.send(links, weights, job.size_bytes).done
            for _ in range(rounds):
                job.commit(everybody, [job.version] * len(everybody))


class BackupRun:
    """Exchanges among those that are ready and fast; the others keep their gradient for a later one.

    A gradient that has become older than the delay bound is dropped before it costs bandwidth, and its host
    fetches the model anew beside the exchanges of the others.
    """

    def __init__(self, job: JobRun) -> None:
        self._job = job
        count = len(job)
        self._ready = [False] * count
        self._began = [0.0] * count
        self._base = [0] * count
        self._step = [0] * count
        self._fetching = [False] * count
        self._news = Signal()
        bound = job.spec.max_delay
        self._bound = 1 << 60 if bound == "none" else 2 * count if bound == "auto" else bound

    def begin(self) -> None:
        for worker in range(len(self._job)):
            self._job.world.spawn(self._compute(worker))
        self._job.world.spawn(self._coordinate())

    def _compute(self, worker: int) -> Process:
        job = self._job
        if self._step[worker] == 0:
            yield float(job.spec.start)
        self._began[worker] = job.world.now
        self._base[worker] = job.version
        job.learner.read(worker)
        yield job.compute_s(worker, self._step[worker])
        job.learner.compute(worker)
        self._step[worker] += 1
        self._ready[worker] = True
        self._news.fire()

    def _expected(self, worker: int) -> float:
        """Seconds until its gradient is there, as far as anybody can tell."""
        if self._ready[worker]:
            return 0.0
        nominal = self._job.nominal_s
        left = self._began[worker] + OVERDUE * nominal - self._job.world.now
        return left if left > 0 and not self._fetching[worker] else STRAGGLES_FOR * nominal

    def _coordinate(self) -> Process:
        job = self._job
        while True:
            chosen, wait = self._choose() if any(self._ready) else ([], STRAGGLES_FOR * job.nominal_s)
            if not chosen:
                self._news = Signal()
                job.world.at(job.world.now + wait, self._news.fire)
                yield self._news
                continue
            links, weights = shares_path(job, chosen)
            yield job.world.send(links, weights, job.size_bytes).done
            job.commit(chosen, [self._base[w] for w in chosen])
            for worker in chosen:
                self._ready[worker] = False
                job.world.spawn(self._compute(worker))
            for worker in range(len(job)):
                if self._ready[worker] and job.version - self._base[worker] > self._bound:
                    self._ready[worker], self._fetching[worker] = False, True
                    job.tally.dropped += 1
                    job.world.spawn(self._fetch(worker, chosen))

    def _fetch(self, worker: int, sources: list[int]) -> Process:
        """The model from those who have it; then compute again."""
        job = self._job
        links, weights = job.spread(worker, {source: 1 / len(sources) for source in sources}, "pull")
        yield job.world.send(links, weights, job.size_bytes).done
        self._fetching[worker] = False
        job.world.spawn(self._compute(worker))

    def _choose(self) -> tuple[list[int], float]:
        """Who exchanges now; nobody if waiting a little brings more, and for how long at most."""
        job = self._job
        able = [w for w in range(len(job)) if not self._fetching[w]]
        expected = {job.names[w]: self._expected(w) for w in able}
        plan = choose_participants(
            job.believed_network(),
            list(expected),
            job.size_bytes,
            expected,
            compute_s=job.nominal_s,
            least=2,
        )
        waits = max(expected[name] for name in plan.participants)
        if waits > 0:
            return [], max(waits, 1e-3 * job.nominal_s)
        return [job.number[name] for name in plan.participants], 0.0


def ring_path(job: JobRun) -> tuple[Ints, Floats]:
    """A ring by rank: every host passes 2(N-1)/N of the update on, and all go at the slowest link's pace."""
    count = len(job)
    each = 2 * (count - 1) / count
    loads: dict[Link, float] = {}
    network = job.believed_network()
    for worker in range(count):
        path = network.path(job.names[worker], job.names[(worker + 1) % count])
        for link in path:
            loads[link] = loads.get(link, 0.0) + each
    return job.loads(loads)


def shares_path(job: JobRun, workers: list[int]) -> tuple[Ints, Floats]:
    """An all-reduce with the shares planned on the believed rates."""
    network = job.believed_network(workers)
    names = [job.names[worker] for worker in workers]
    plan = plan_all_reduce(network, names, job.size_bytes)
    return job.loads(link_loads(network, plan.form, plan.shares))
