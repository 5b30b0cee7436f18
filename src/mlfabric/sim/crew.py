"""Workers that exchange sums among themselves and go on without those who die.

Who is there, an exchange among some of them, and the model for one that is new to it. When an exchange is due
and what goes into it is the policies' business (`sim.backup`, `sim.rolling`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

import numpy as np

from mlfabric.scenario import FaultEvent
from mlfabric.sim.fluid import Process
from mlfabric.sim.placing import Placement
from mlfabric.sim.stepwise import shares_path, watch_links
from mlfabric.sim.streams import Signal
from mlfabric.sim.workload import JobRun

# An exchange in which nothing moves for so long is given up, and tried again without whom it waited for.
SILENT_S: Final = 1.0


class Crew:
    """`compute` is what a worker does in one life, from so many seconds on; `lose` hears who died."""

    def __init__(
        self, job: JobRun, compute: Callable[[int, int, float], Process], lose: Callable[[int], None]
    ) -> None:
        self._job = job
        self._compute = compute
        self._lose = lose
        self.life = [0] * len(job)  # what was begun in an earlier life is nobody's
        self.away: set[int] = set()  # fetch the model, or are down
        self._exchanging: list[int] = []
        self._moved = Signal()  # the exchange under way is through, or given up

    def begin(self) -> None:
        job = self._job
        job.trouble.listeners.append(self._hear)
        job.serving = np.concatenate([job.up[: len(job)], job.down[: len(job)]])
        for worker in range(len(job)):
            job.world.spawn(self._compute(worker, 0, float(job.spec.start)))
        job.world.spawn(watch_links(job))

    def _hear(self, fault: FaultEvent) -> None:
        worker = self._job.number.get(fault.host or "", -1)
        if not 0 <= worker < len(self._job):
            return
        if fault.do in ("kill", "drain"):
            self.life[worker] += 1
            self.away.add(worker)
            self._lose(worker)
            if worker in self._exchanging:
                self._job.world.at(self._job.world.now + SILENT_S, self._moved.fire)
        elif fault.do == "restart":
            self.fetch(worker)

    def present(self) -> list[int]:
        """Who can take part in an exchange."""
        job = self._job
        return [w for w in range(len(job)) if w not in self.away and job.trouble.up(job.names[w])]

    def exchange(self, workers: list[int]) -> Generator[Signal, Any, bool]:
        """Until the sum is everywhere, or somebody died; whether it is."""
        job, among, moved = self._job, set(workers), Signal()
        self._exchanging, self._moved = workers, moved
        lives = [self.life[worker] for worker in workers]

        def end() -> None:
            # One that died took its sums with it, even if its links were back soon.
            if lives == [self.life[worker] for worker in workers]:
                moved.fire(True)

        stream = job.send(
            shares_path(job, workers),
            job.size_bytes,
            lambda source, target: {job.number.get(source), job.number.get(target)} <= among,
        )
        stream.done.then(end)
        yield moved
        self._exchanging = []
        job.world.cancel(stream)
        return bool(moved.value)

    def fetch(self, worker: int) -> None:
        """The model from those who have it; then compute again."""
        self.away.add(worker)
        self._job.world.spawn(self._fetching(worker, self.life[worker]))

    def _fetching(self, worker: int, life: int) -> Process:
        job = self._job
        others = [w for w in range(len(job)) if w != worker and job.trouble.up(job.names[w])]
        placement = Placement(job, {source: 1 / len(others) for source in others})
        yield job.send(
            placement.path(worker, "pull"),
            job.size_bytes,
            lambda source, target: placement.crosses(worker, "pull", source, target),
        ).done
        if self.life[worker] == life:
            self.away.discard(worker)
            job.world.spawn(self._compute(worker, life, 0.0))
