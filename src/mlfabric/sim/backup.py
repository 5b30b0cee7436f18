"""Exchanges among those that are ready and fast; the others keep their gradient for a later one.

Who takes part is the planner's `choose_participants`. A gradient that has become older than the delay bound
is dropped before it costs bandwidth, and its host fetches the model anew beside the exchanges of the others.
"""

from __future__ import annotations

from typing import Any, Final

from mlfabric.plan.allreduce import choose_participants
from mlfabric.sim.crew import Crew
from mlfabric.sim.fluid import Process
from mlfabric.sim.streams import Signal
from mlfabric.sim.workload import JobRun

# A step of a worker is taken for a straggling one this much later than its nominal time.
OVERDUE: Final = 1.2
# What is believed of a straggling step: so many more compute times.
STRAGGLES_FOR: Final = 2.0


class BackupRun:
    def __init__(self, job: JobRun) -> None:
        self._job = job
        self._crew = Crew(job, self._compute, self._lose)
        count = len(job)
        self._gradients: dict[int, Any] = {}  # ready, by worker
        self._began = [0.0] * count
        self._base = [0] * count
        self._step = [0] * count
        self._news = Signal()
        self._bound = job.bound()

    def begin(self) -> None:
        self._crew.begin()
        self._job.world.spawn(self._coordinate())

    def _lose(self, worker: int) -> None:
        self._job.tally.lost += self._gradients.pop(worker, None) is not None

    def _compute(self, worker: int, life: int, wait_s: float = 0.0) -> Process:
        job = self._job
        if job.spec.steps is not None and self._step[worker] >= job.spec.steps:
            self._crew.away.add(worker)
            return
        yield wait_s
        self._began[worker] = job.world.now
        self._base[worker] = job.version
        model = job.learner.read()
        yield from job.computing(worker, self._step[worker])
        if self._crew.life[worker] != life:
            return
        self._gradients[worker] = job.learner.compute(model)
        self._step[worker] += 1
        self._news.fire()

    def _expected(self, worker: int) -> float:
        """Seconds until its gradient is there, as far as anybody can tell."""
        if worker in self._gradients:
            return 0.0
        nominal = self._job.nominal_s
        left = self._began[worker] + OVERDUE * nominal - self._job.world.now
        return left if left > 0 else STRAGGLES_FOR * nominal

    def _coordinate(self) -> Process:
        job = self._job
        while True:
            self._drop_the_old()
            chosen, wait = self._choose()
            if not chosen:
                self._news = Signal()
                job.world.at(job.world.now + wait, self._news.fire)
                yield self._news
                continue
            if not (yield from self._crew.exchange(chosen)):
                continue
            members = [(w, self._base[w], self._gradients.pop(w), 1.0) for w in chosen]
            job.commit(members)
            for worker in chosen:
                job.world.spawn(self._compute(worker, self._crew.life[worker]))

    def _drop_the_old(self) -> None:
        job = self._job
        if self._bound is None:
            return
        for worker in sorted(self._gradients):
            if job.version - self._base[worker] > self._bound:
                del self._gradients[worker]
                job.tally.dropped += 1
                self._crew.fetch(worker)

    def _choose(self) -> tuple[list[int], float]:
        """Who exchanges now; nobody if waiting a little brings more, and for how long at most."""
        job = self._job
        patience = STRAGGLES_FOR * job.nominal_s
        able = self._crew.present()
        if not self._gradients or len(able) < 2:
            return [], patience
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
