"""Asynchronous policies at flow level: every worker pushes its update and pulls the model in its own time.

The servers hold shares of the model. First-come policies send at once and share links as TCP does; the
planned ones place shards by believed bandwidth, order what waits under the delay bound, and pace.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mlfabric.plan.ordering import order_updates
from mlfabric.plan.placement import place_shards
from mlfabric.plan.values import JobState, Offer
from mlfabric.plan.writing import weigh
from mlfabric.sim.estimate import OBSERVE_S, PACE, PROBE_FACTOR
from mlfabric.sim.fluid import Floats, Ints, Process, Signal, Stream
from mlfabric.sim.workload import JobRun
from mlfabric.topology import Host, Network

# Shards are placed anew if that raises what the servers can take by this factor.
WORTH_PLACING: Final = 1.1
# A host serves if it has at least this share of what the best one has to spare; no more than so many do.
SERVES_FROM: Final = 0.25
MOST_SERVERS: Final = 256
# A server's own transfers get at least this part of its link.
OWN_LEAST: Final = 0.25
# The fastest may be ahead of the slowest by so many steps in stale synchronous parallel runs.
SSP_SLACK: Final = 3


@dataclass(frozen=True, slots=True)
class AsyncSettings:
    """How an asynchronous policy behaves."""

    servers: str = "first"  # "first": one host, "uniform": all hosts alike, "bandwidth": planned
    planned: bool = False  # ordered, bounded and paced
    alongside: bool = False  # the pull runs beside the push
    slack: int | None = None  # of stale synchronous parallel


@dataclass(slots=True)
class _Waiting:
    offer: Offer
    go: Signal = field(default_factory=Signal)


class AsyncRun:
    """All workers of a job under one asynchronous policy."""

    def __init__(self, job: JobRun, settings: AsyncSettings) -> None:
        self._job = job
        self._settings = settings
        self._shares: dict[int, float] = {}
        self._paths: dict[tuple[int, str], tuple[Ints, Floats]] = {}
        self._placing = False
        self._own: dict[tuple[int, str], Stream] = {}
        self._wanted = 0.0  # bytes per second of updates that all workers together would send
        self._waiting: dict[str, _Waiting] = {}
        self._granted: dict[int, float] = {}  # worker -> believed rate of its push
        self._drops_in_row: dict[int, int] = {}
        self._offers = 0
        self._clock = [0] * len(job)
        self._behind: deque[tuple[int, Signal]] = deque()
        bound = job.spec.max_delay
        if bound == "auto":
            # With the pull beside the push a model is read before its reader's last update is in it.
            bound = (3 if settings.alongside else 2) * len(job) * job.spec.in_flight
        self._bound = bound if isinstance(bound, int) else None

    def begin(self) -> None:
        self._set_shares(self._first_shares())
        for worker in range(len(self._job)):
            self._job.world.spawn(self._work(worker))
        self._job.world.spawn(self._watch())

    # --- where the shards are ---------------------------------------------------------------------------

    def _first_shares(self) -> dict[int, float]:
        job, kind = self._job, self._settings.servers
        if kind == "bandwidth":
            return self._best_shares()
        if kind == "uniform":
            return {worker: 1 / len(job) for worker in range(len(job))}
        return {job.number[job.scenario.places(job.spec).servers[0]]: 1.0}

    def _spare(self) -> Floats:
        """Bytes per second each host has for serving beside its own transfers, as believed."""
        job, believed = self._job, self._job.estimator.believed
        rates = np.minimum(believed[job.up], believed[job.down])[: len(job)]
        own = job.size_bytes / (job.mean_compute_s + job.size_bytes / rates)
        self._wanted = float(own.sum())
        spare: Floats = rates - own
        return spare

    def _best_shares(self) -> dict[int, float]:
        """Shards by what hosts have to spare, on those where it is worth it."""
        spare = self._spare()
        able = np.flatnonzero(spare >= SERVES_FROM * spare.max())
        network = Network.of(Host(str(w), float(spare[w]), float(spare[w])) for w in able)
        shards = place_shards(network, list(network.hosts), min(len(able), MOST_SERVERS))
        return {int(shard.server): shard.share for shard in shards}

    def _set_shares(self, shares: dict[int, float]) -> None:
        job = self._job
        self._shares = shares
        self._paths.clear()
        hosts = list(shares)
        job.serving = np.concatenate([job.up[hosts], job.down[hosts]])

    def _room(self, shares: dict[int, float]) -> float:
        """Bytes per second of updates that servers with these shares can take and give, as believed."""
        job, believed = self._job, self._job.estimator.believed
        return min(
            float(min(believed[job.up[server]], believed[job.down[server]])) / share
            for server, share in shares.items()
        )

    def _watch(self) -> Process:
        """Learn rates; let waiting updates go; place shards anew where that pays."""
        job = self._job
        planned = self._settings.planned
        while True:
            yield OBSERVE_S
            job.sample_busy()
            if not planned:
                continue
            job.estimator.observe()
            if job.estimator.changed and self._settings.servers == "bandwidth" and not self._placing:
                self._consider_placing()
            self._pace_again()
            self._release()

    def _consider_placing(self) -> None:
        shares = self._best_shares()
        spare = self._spare()
        before = min(float(spare[server]) / share for server, share in self._shares.items())
        after = min(float(spare[server]) / share for server, share in shares.items())
        if after < WORTH_PLACING * before:
            return
        self._placing = True
        self._job.world.spawn(self._place(shares))

    def _place(self, shares: dict[int, float]) -> Process:
        """Move the parts of the model that change hands; until they are there nothing else changes."""
        job, size = self._job, self._job.size_bytes
        moved = {s: shares.get(s, 0.0) - self._shares.get(s, 0.0) for s in {*shares, *self._shares}}
        weights = {int(job.up[s]): -change for s, change in moved.items() if change < 0}
        weights |= {int(job.down[s]): change for s, change in moved.items() if change > 0}
        links = np.array(list(weights), dtype=np.intp)
        # In large clusters a move gets several streams' part of a link, or it would outlast what it is for.
        ahead = max(1.0, len(job) / 128)
        stream = job.world.send(links, np.array(list(weights.values())) / ahead, size * ahead)
        job.tally.moved_bytes += size * sum(change for change in moved.values() if change > 0)
        yield stream.done
        self._set_shares(shares)
        self._placing = False

    # --- a worker ---------------------------------------------------------------------------------------

    def _send(self, worker: int, way: str) -> Signal:
        job = self._job
        key = (worker, way)
        if key not in self._paths:
            self._paths[key] = job.spread(worker, self._shares, way)
        links, weights = self._paths[key]
        stream = job.world.send(links, weights, job.size_bytes)
        if self._settings.planned and len(links):
            self._own[key] = stream
            stream.pace = self._pace(worker, way)
        return stream.done

    def _pace(self, worker: int, way: str) -> float:
        """A server's link serves first: its own transfers get what all others leave."""
        job = self._job
        link = job.up[worker] if way == "push" else job.down[worker]
        believed = float(job.estimator.believed[link])
        share = self._shares.get(worker, 0.0)
        left = believed
        if share > 0:
            own = self._own.get((worker, way))
            serving = float(job.world.used[link]) - (own.rate * (1 - share) if own else 0.0)
            reserve = min(share * self._wanted, max(serving, 0.1 * believed) * PROBE_FACTOR)
            left = max(believed - reserve, OWN_LEAST * believed)
        return PACE * left / max(1 - share, 1e-9)

    def _pace_again(self) -> None:
        for key, stream in list(self._own.items()):
            if stream.done.fired:
                del self._own[key]
            else:
                self._job.world.set_pace(stream, self._pace(*key))

    def _work(self, worker: int) -> Process:
        job = self._job
        base = 0
        step = 0
        job.learner.read(worker)
        yield float(job.spec.start)
        while job.spec.steps is None or step < job.spec.steps:
            yield job.compute_s(worker, step)
            job.learner.compute(worker)
            step += 1
            next_base = base
            pulled: Signal | None = None
            if self._settings.planned:
                waiting = self._offer(worker, base, step)
                yield waiting.go
            kept = not self._settings.planned or waiting.go.value is not None
            if kept:
                pushed = self._send(worker, "push")
                if self._settings.alongside:
                    next_base = job.version
                    job.learner.read(worker)
                    pulled = self._send(worker, "pull")
                yield pushed
                self._commit(worker, base)
                if pulled is not None:
                    yield pulled
            if pulled is None:
                next_base = job.version
                job.learner.read(worker)
                yield self._send(worker, "pull")
            base = next_base
            if self._settings.slack is not None:
                yield self._keep_pace(worker)

    def _commit(self, worker: int, base: int) -> None:
        job = self._job
        self._granted.pop(worker, None)
        weight = weigh(job.version - base, len(job)) if self._settings.planned else 1.0
        job.commit([worker], [base], [weight])
        self._release()

    def _keep_pace(self, worker: int) -> Signal:
        """Stale synchronous parallel: wait while too far ahead of the slowest."""
        go = Signal()
        self._clock[worker] += 1
        slowest = min(self._clock)
        self._behind.append((worker, go))
        assert self._settings.slack is not None
        free = [w for w in self._behind if self._clock[w[0]] <= slowest + self._settings.slack]
        self._behind = deque(w for w in self._behind if w not in free)
        for _, signal in free:
            signal.fire()
        return go

    # --- order ------------------------------------------------------------------------------------------

    def _offer(self, worker: int, base: int, step: int) -> _Waiting:
        job = self._job
        self._offers += 1
        name = job.names[worker]
        offer = Offer(
            update=f"{name}/{step}",
            worker=name,
            host=str(worker),
            size_bytes=job.size_bytes,
            base_version=base,
            arrival=self._offers,
            drops_in_row=self._drops_in_row.get(worker, 0),
        )
        waiting = self._waiting[offer.update] = _Waiting(offer)
        self._release()
        return waiting

    def _release(self) -> None:
        """Let the first of the order go while the servers have room for more, and drop the hopeless."""
        if not self._waiting:
            return
        job, believed = self._job, self._job.estimator.believed
        room = self._room(self._shares) - sum(self._granted.values())
        tight = self._bound is not None and any(
            job.version + len(self._granted) - w.offer.base_version > self._bound - len(self._waiting)
            for w in self._waiting.values()
        )
        if room <= 0 and self._granted and not tight:
            return
        rates = {u: float(believed[job.up[int(w.offer.host)]]) for u, w in self._waiting.items()}
        state = JobState(
            name=job.spec.name,
            placed_version=job.version + len(self._granted),
            max_delay=self._bound,
            concurrency=len(job),
        )
        durations = {update: job.size_bytes / rate for update, rate in rates.items()}
        ordered = order_updates([w.offer for w in self._waiting.values()], state, durations)
        for drop in ordered.drops:
            waiting = self._waiting.pop(drop.update)
            worker = int(waiting.offer.host)
            self._drops_in_row[worker] = self._drops_in_row.get(worker, 0) + 1
            job.tally.dropped += 1
            waiting.go.fire(None)
        for offer in ordered.kept:
            if room <= 0 and self._granted:
                break
            worker = int(offer.host)
            self._drops_in_row.pop(worker, None)
            self._granted[worker] = rates[offer.update]
            room -= rates[offer.update]
            self._waiting.pop(offer.update).go.fire(offer.update)
