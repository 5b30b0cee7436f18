"""Workers that never wait: they compute gradient after gradient while all-reduces follow each other.

A round is an all-reduce among all who are there. It takes from each whatever is ready when it begins, and is
one step of the common model when it ends. A worker computes from the newest model it has when a step of its
own begins, moved on to where the model is expected to be when that gradient is applied.

Nothing is dropped for its age, so there is no delay bound. As under the other policies delays are booked in
updates; how far ahead workers compute is counted in rounds.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from mlfabric.sim.crew import Crew
from mlfabric.sim.fluid import Process
from mlfabric.sim.streams import Signal
from mlfabric.sim.workload import JobRun

# A worker expects its next gradient to be as late as so many of its last ones were on average.
REMEMBERED: Final = 8


class Ready(NamedTuple):
    """A gradient, and what it was computed from: the version in updates and in rounds."""

    worker: int
    base: int
    base_rounds: int
    gradient: Any


class RollingRun:
    def __init__(self, job: JobRun) -> None:
        self._job = job
        self._crew = Crew(job, self._compute, self._lose)
        self._step = [0] * len(job)
        self._pending: list[Ready] = []  # for the next round, in the order they were computed
        self._taken: list[Ready] = []  # in the round under way
        self._late_rounds: list[deque[int]] = [deque(maxlen=REMEMBERED) for _ in range(len(job))]
        self._news = Signal()

    def begin(self) -> None:
        self._crew.begin()
        self._job.world.spawn(self._coordinate())

    def _lose(self, worker: int) -> None:
        kept = [each for each in self._pending if each.worker != worker]
        taken = [each for each in self._taken if each.worker != worker]
        self._job.tally.lost += len(self._pending) + len(self._taken) - len(kept) - len(taken)
        self._pending, self._taken = kept, taken
        self._late_rounds[worker].clear()
        self._news.fire()  # half of those who are left are fewer

    def _compute(self, worker: int, life: int, wait_s: float) -> Process:
        job = self._job
        yield wait_s
        while not self._finished(worker):
            base, rounds = job.version, job.tally.steps
            model = job.learner.read(self._ahead(worker))
            yield from job.computing(worker, self._step[worker])
            if self._crew.life[worker] != life:
                return
            self._step[worker] += 1
            self._pending.append(Ready(worker, base, rounds, job.learner.compute(model)))
            self._news.fire()

    def _finished(self, worker: int) -> bool:
        steps = self._job.spec.steps
        return steps is not None and self._step[worker] >= steps

    def _ahead(self, worker: int) -> float:
        """Steps from the model a worker has to the one its next gradient will make."""
        late = self._late_rounds[worker]
        return 1 + sum(late) / len(late) if any(late) else 0.0

    def _coordinate(self) -> Process:
        while True:
            workers = self._crew.present()
            if not self._due(workers):
                self._news = Signal()
                yield self._news
                continue
            there = set(workers)
            self._taken = [each for each in self._pending if each.worker in there]
            self._pending = [each for each in self._pending if each.worker not in there]
            if (yield from self._crew.exchange(workers)):
                self._apply(self._taken)
            else:
                self._pending = self._taken + self._pending
            self._taken = []

    def _due(self, workers: list[int]) -> bool:
        """Has half of those who compute something to give?"""
        ready = {each.worker for each in self._pending}.intersection(workers)
        computing = sum(not self._finished(worker) for worker in workers)
        return len(ready) >= max(1, -(-computing // 2))

    def _apply(self, taken: list[Ready]) -> None:
        for each in taken:
            self._late_rounds[each.worker].append(self._job.tally.steps - each.base_rounds)
        self._job.commit([(each.worker, each.base, each.gradient, 1.0) for each in taken])
