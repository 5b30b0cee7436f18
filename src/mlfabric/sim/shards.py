"""Who leads a job's shards while it runs: placed anew where that pays, moved away from silent hosts.

Moving costs its bytes and goes before updates. A shard whose host is silent goes to its replica, where the
state is; a job without replicas has it filled again from what a worker pulled last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mlfabric.plan.serving import WORTH_PLACING
from mlfabric.sim.fluid import Process
from mlfabric.sim.placing import Budget, Placement, best_shares, budget
from mlfabric.sim.streams import Stream
from mlfabric.sim.workload import JobRun
from mlfabric.topology import Link

# Shards that change hands go before updates, or the move would outlast what it is for.
MOVE_PRIORITY: Final = 1e6
# A host that is silent for so long is taken for dead: its leads move, nobody waits for its updates.
SILENT_S: Final = 1.0


class Shards:
    """The placement in force. `changed` hears of a new one with the share of the model that changed hands."""

    def __init__(
        self, job: JobRun, servers: str, alongside: bool, changed: Callable[[Placement, float], None]
    ) -> None:
        self._job = job
        self._planned = servers == "bandwidth"
        self._transfers = 1 if alongside else 2  # of a worker's round, one after the other
        self._changed = changed
        self.wanted = 0.0  # bytes per second of updates that all workers together would send
        self._revision = -1  # of the beliefs that shards were last considered with
        self._move: Stream | None = None
        self._down_since: dict[int, float] = {}
        shares = {job.first_server: 1.0}
        if self._planned:
            shares = best_shares(job, self._budget())
        elif servers == "uniform":
            shares = {worker: 1 / len(job) for worker in range(len(job))}
        self.placement = Placement(job, shares)
        job.serving = self.placement.serving_links()

    def look(self) -> None:
        """Notice the silent, and consider whether other hosts should serve."""
        job = self._job
        self._notice_silence()
        if not self._planned or self._move is not None or job.estimator.revision == self._revision:
            return
        self._revision = job.estimator.revision
        means = self._budget()
        shares = best_shares(job, means)
        if means.room(shares) >= WORTH_PLACING * means.room(self.placement.shares):
            job.world.spawn(self._place(shares))

    def _budget(self) -> Budget:
        means = budget(self._job, self._transfers)
        self.wanted = means.wanted
        return means

    def _use(self, shares: Mapping[int, float]) -> None:
        old, self.placement = self.placement, Placement(self._job, shares)
        self._job.serving = self.placement.serving_links()
        moved = sum(max(share - shares.get(host, 0.0), 0.0) for host, share in old.shares.items())
        self._changed(self.placement, moved)

    def _place(self, shares: dict[int, float]) -> Process:
        """Move the parts of the model that change hands; until they are there nothing else changes."""
        links, job = self._job.world.links, self._job
        loads: dict[Link, float] = {}
        for host in {**shares, **self.placement.shares}:
            change = shares.get(host, 0.0) - self.placement.shares.get(host, 0.0)
            loads[links[job.down[host] if change > 0 else job.up[host]]] = abs(change)
        yield self._start_move(loads, sum(loads.values()) / 2).done
        self._move = None
        self._use(shares)

    def _start_move(self, loads: Mapping[Link, float], share: float) -> Stream:
        job = self._job
        self._move = job.send(job.path(loads), job.size_bytes, lambda _source, _target: False, MOVE_PRIORITY)
        job.tally.moved_bytes += job.size_bytes * share
        return self._move

    # --- silence ----------------------------------------------------------------------------------------

    def _notice_silence(self) -> None:
        job = self._job
        if not job.scenario.faults:
            return
        fresh = False
        for host, name in enumerate(job.hosts):
            if job.trouble.up(name):
                self._down_since.pop(host, None)
                job.gone.discard(host)
            elif job.world.now - self._down_since.setdefault(host, job.world.now) >= SILENT_S:
                fresh |= host not in job.gone
                job.gone.add(host)
        if fresh and self._planned and job.gone & self.placement.shares.keys():
            if self._move is not None:  # it may wait for the silent one
                job.world.cancel(self._move)
                self._move = None
            if len(job.gone) < len(job):
                job.world.spawn(self._fail_over())

    def _fail_over(self) -> Process:
        job, links = self._job, self._job.world.links
        kept = {host: share for host, share in self.placement.shares.items() if host not in job.gone}
        lost = 1.0 - sum(kept.values())
        ranked = [int(host) for host in (-self._budget().spare).argsort(kind="stable")]
        heir, *others = [host for host in ranked if host not in job.gone]
        if job.spec.replicas is None and others:
            loads = {links[job.up[others[0]]]: lost, links[job.down[heir]]: lost}
            yield self._start_move(loads, lost).done
            self._move = None
        kept[heir] = kept.get(heir, 0.0) + lost
        self._use(kept)
