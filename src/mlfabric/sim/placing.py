"""Where a job's shards are: shares of the model by host, and what a push to them or a pull from them crosses.

`best_shares` places by believed bandwidth as the fabric's own scheduler does (`plan.serving`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlfabric.plan.serving import SERVES_FROM, SPARE_LEAST, serving_shares
from mlfabric.sim.streams import Bundle, Floats, Ints, Path
from mlfabric.sim.workload import JobRun
from mlfabric.topology import Link


class Placement:
    """Shares of the model by host number."""

    def __init__(self, job: JobRun, shares: Mapping[int, float]) -> None:
        self.shares = {host: share for host, share in shares.items() if share > 0}
        self._job = job
        self._in_rack: dict[str, float] = {}
        for host, share in self.shares.items():
            rack = job.racks[host]
            if rack is not None:
                self._in_rack[rack] = self._in_rack.get(rack, 0.0) + share
        self._bundles = {"push": self._bundle("down"), "pull": self._bundle("up")}
        self._farthest_s = max((job.delay_s[job.hosts[host]] for host in self.shares), default=0.0)
        self._paths: dict[tuple[int, str], Path] = {}

    @property
    def in_racks(self) -> bool:
        return bool(self._in_rack)

    def through_racks(self) -> float:
        """Updates' bytes per second that the racks' own links let through, in both directions at once.

        All workers count alike: a rack takes in what the others push to its servers and what its workers pull
        from elsewhere.
        """
        job = self._job
        least = math.inf
        for rack, count in job.workers_in_rack.items():
            inside, part = self._in_rack.get(rack, 0.0), count / len(job)
            load = inside * (1 - part) + part * (1 - inside)
            if load > 0:
                rate = min(job.world.capacity[job.world.index[Link(rack, way)]] for way in ("up", "down"))
                least = min(least, float(rate) / load)
        return least

    def _bundle(self, way: str) -> Bundle:
        """The servers' own links, and those of their racks."""
        job, index = self._job, self._job.world.index
        ends = job.up if way == "up" else job.down
        weights = {int(ends[host]): share for host, share in self.shares.items()}
        weights |= {index[Link(rack, way)]: share for rack, share in self._in_rack.items()}
        weights |= {job.limits[link]: share for link, share in weights.items() if link in job.limits}
        return Bundle(np.array(list(weights), dtype=np.intp), np.array(list(weights.values())))

    def path(self, worker: int, way: str) -> Path:
        """What a worker's push ("push") or pull ("pull") crosses; its own share stays inside its host."""
        key = (worker, way)
        if key not in self._paths:
            self._paths[key] = self._make_path(worker, way)
        return self._paths[key]

    def _make_path(self, worker: int, way: str) -> Path:
        job, index = self._job, self._job.world.index
        own = self.shares.get(worker, 0.0)
        if own >= 1.0:
            return Path(np.zeros(0, dtype=np.intp), np.zeros(0))
        out, back = ("up", "down") if way == "push" else ("down", "up")
        mine, theirs = (job.up, job.down) if way == "push" else (job.down, job.up)
        weights = {int(mine[worker]): 1.0 - own}
        if own > 0:
            weights[int(theirs[worker])] = -own
        rack = job.racks[worker]
        if rack is not None:
            inside = self._in_rack.get(rack, 0.0)
            if inside < 1.0:
                weights[index[Link(rack, out)]] = 1.0 - inside
            if inside > 0:
                weights[index[Link(rack, back)]] = -inside
        weights |= {job.limits[link]: weight for link, weight in weights.items() if link in job.limits}
        return Path(
            np.array(list(weights), dtype=np.intp),
            np.array(list(weights.values())),
            self._bundles[way],
            job.delay_s[job.hosts[worker]] + self._farthest_s,
        )

    def crosses(self, worker: int, way: str, source: str, target: str) -> bool:
        """Does that push or pull need the way from the one host to the other?"""
        job = self._job
        here, there = (source, target) if way == "push" else (target, source)
        return here == job.hosts[worker] and there != here and job.number.get(there, -1) in self.shares

    def serving_links(self) -> Ints:
        hosts = list(self.shares)
        return np.concatenate([self._job.up[hosts], self._job.down[hosts]])


@dataclass(frozen=True, slots=True)
class Budget:
    """What hosts have to spare for serving, and what all workers together would send, in bytes per second."""

    spare: Floats
    wanted: float

    def room(self, shares: Mapping[int, float]) -> float:
        """Updates' bytes per second that servers with these shares can take and give."""
        return min((float(self.spare[host]) / share for host, share in shares.items()), default=0.0)


def budget(job: JobRun, transfers: int) -> Budget:
    """By belief; each round of a worker makes so many transfers one after the other."""
    up, down = job.rates()
    rates = np.minimum(up, down)[: len(job)]
    with np.errstate(divide="ignore"):
        own = job.size_bytes / (job.mean_compute_s + transfers * job.size_bytes / rates)
    return Budget(np.maximum(rates - own, SPARE_LEAST * rates), float(own.sum()))


def best_shares(job: JobRun, means: Budget) -> dict[int, float]:
    """Shards by what hosts have to spare, on the fewest fast hosts that carry what is wanted."""
    able = [int(w) for w in np.flatnonzero(means.spare >= SERVES_FROM * means.spare.max())]
    spare = {str(w): float(means.spare[w]) for w in able}
    rack_of = {str(w): job.racks[w] for w in able}
    shares = serving_shares(spare, means.wanted, rack_of, job.believed_network([]).racks.values())
    return {int(host): share for host, share in shares.items()}
