"""Policies that go step by step at flow level: an exchange among many, then everybody computes again.

`ring` and `allreduce` wait for all, `local` exchanges models only every few steps, `alone` is one host
without a network. Whoever is dead or silent is waited for: only `backup` (`sim.backup`), which leaves the
slow out, and `rolling` (`sim.rolling`), under which nobody waits to compute, go on without.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mlfabric.plan.allreduce import link_loads, plan_all_reduce
from mlfabric.scenario import FaultEvent
from mlfabric.sim.estimate import OBSERVE_S
from mlfabric.sim.fluid import Process
from mlfabric.sim.streams import Path, Signal
from mlfabric.sim.workload import JobRun
from mlfabric.topology import Link

# Steps that `local` makes between two averages.
LOCAL_STEPS: Final = 8


class StepRun:
    """All workers of a job under a policy that waits for all of them."""

    def __init__(self, job: JobRun, kind: str) -> None:
        self._job = job
        self._kind = kind
        self._back: dict[str, Signal] = {}  # hosts that are down -> when they are back

    def begin(self) -> None:
        job = self._job
        job.trouble.listeners.append(self._hear)
        job.serving = np.concatenate([job.up[: len(job)], job.down[: len(job)]])
        if self._kind == "alone":
            job.serving = np.zeros(0, dtype=np.intp)
            job.world.spawn(self._alone())
        else:
            job.world.spawn(self._together())
        job.world.spawn(watch_links(job))

    def _hear(self, fault: FaultEvent) -> None:
        if fault.host is None:
            return
        if fault.do in ("kill", "drain"):
            self._back.setdefault(fault.host, Signal())
        elif fault.do == "restart" and fault.host in self._back:
            self._back.pop(fault.host).fire()

    def _alone(self) -> Process:
        job = self._job
        yield float(job.spec.start)
        step = 0
        while job.spec.steps is None or step < job.spec.steps:
            model = job.learner.read()
            yield from job.computing(0, step)
            step += 1
            if job.names[0] in self._back:
                yield self._back[job.names[0]]
                continue
            job.commit([(0, job.version, job.learner.compute(model), 1.0)])

    def _together(self) -> Process:
        """Everybody computes, everybody exchanges; a host that is down holds all up until it is back."""
        job = self._job
        everybody = list(range(len(job)))
        rounds = LOCAL_STEPS if self._kind == "local" else 1
        step = 0
        yield float(job.spec.start)
        while job.spec.steps is None or step < job.spec.steps:
            model = job.learner.read()
            done = [Signal() for _ in everybody]
            for worker in everybody:
                job.world.spawn(self._compute(worker, step, rounds, done[worker]))
            yield tuple(done)
            gradients = [job.learner.compute(model, rounds) for _ in everybody]
            step += rounds
            path = ring_path(job) if self._kind == "ring" else shares_path(job, everybody)
            sent = job.send(path, job.size_bytes, self._crosses)
            yield sent.done
            yield tuple(self._back.values())
            # Averaged models: each worker moved by its own steps, and the average by the mean of those.
            weight = 1.0 / len(job) if self._kind == "local" else 1.0
            job.commit([(worker, job.version, gradients[worker], weight) for worker in everybody])

    def _compute(self, worker: int, step: int, rounds: int, done: Signal) -> Process:
        yield from self._job.computing(worker, step, rounds)
        if self._job.names[worker] in self._back:
            # What it had computed is lost; it computes again when it is back.
            yield self._back[self._job.names[worker]]
            yield from self._job.computing(worker, step, rounds)
        done.fire()

    def _crosses(self, source: str, target: str) -> bool:
        """Ring: neighbours by rank; else everybody sends to everybody."""
        number = self._job.number
        if source not in number or target not in number:
            return False
        return self._kind != "ring" or (number[target] - number[source]) % len(self._job) == 1


def watch_links(job: JobRun) -> Process:
    while True:
        yield OBSERVE_S
        job.sample_busy()


def ring_path(job: JobRun) -> Path:
    """A ring by rank: every host passes 2(N-1)/N of the update on, and all go at the slowest link's pace."""
    count = len(job)
    each = 2 * (count - 1) / count
    loads: dict[Link, float] = {}
    network = job.believed_network()
    for worker in range(count):
        path = network.path(job.names[worker], job.names[(worker + 1) % count])
        for link in path:
            loads[link] = loads.get(link, 0.0) + each
    return job.path(loads, _latency(job, list(range(count))))


def shares_path(job: JobRun, workers: list[int]) -> Path:
    """An all-reduce with the shares planned on the believed rates."""
    network = job.believed_network(workers)
    names = [job.names[worker] for worker in workers]
    plan = plan_all_reduce(network, names, job.size_bytes)
    return job.path(link_loads(network, plan.form, plan.shares), _latency(job, workers))


def _latency(job: JobRun, workers: list[int]) -> float:
    """Sums go there and back between the two that are farthest."""
    ways = sorted(job.delay_s[job.names[worker]] for worker in workers)
    return 2 * sum(ways[-2:])
