"""Asynchronous policies at flow level: every worker pushes its update and pulls the model in its own time.

The servers hold shares of the model. First-come policies send at once, share links as TCP does and know no
bound; the planned ones place shards by believed bandwidth (`sim.shards`), order what waits under the delay
bound and let it go by room (`sim.release`), keep the order of application (`sim.order`), and pace.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from mlfabric.plan.writing import weigh
from mlfabric.scenario import FaultEvent
from mlfabric.sim.estimate import OBSERVE_S, PACE, PROBE_FACTOR
from mlfabric.sim.fluid import Process
from mlfabric.sim.gathering import Gathered
from mlfabric.sim.order import ApplicationOrder, Numbered, Settled
from mlfabric.sim.placing import Placement
from mlfabric.sim.release import Release, Update
from mlfabric.sim.shards import Shards
from mlfabric.sim.streams import Signal, Stream
from mlfabric.sim.workload import JobRun

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
    in_flight: int | None = None  # rounds of a worker at once; None: as the job says


@dataclass(slots=True, eq=False)
class _Message:
    """An update, or a sum of several, between its start and the moment its members have a newer model."""

    members: list[Update]
    entry: Numbered | None = None
    group: Gathered | None = None  # the ways of a sum; None: straight to and from the servers
    settled: Signal = field(default_factory=Signal)  # applied (True) or dropped
    over: Signal = field(default_factory=Signal)
    base: int = 0  # version of the model its members get
    model: Any = None
    streams: dict[str, Stream] = field(default_factory=dict)


class AsyncRun:
    """All workers of a job under one asynchronous policy."""

    def __init__(self, job: JobRun, settings: AsyncSettings) -> None:
        self._job = job
        self._settings = settings
        self._in_flight = settings.in_flight or job.spec.in_flight
        job.counted_bound = job.bound(self._in_flight)
        self._order = ApplicationOrder(job.counted_bound if settings.planned else None)
        self._release = Release(job, self._order, self._in_flight, self._let_go, self._dropped)
        self._shards = Shards(job, settings.servers, settings.alongside, self._moved)
        self._release.placement = self._shards.placement
        self._messages: dict[_Message, None] = {}  # under way, in the order of their start
        self._numbered: dict[int, _Message] = {}  # of them, those that are not settled
        self._held: list[tuple[int, Any]] = [(0, None)] * len(job)  # version and model each worker has
        self._life = [0] * len(job)  # a worker that dies and comes back lives once more
        self._clock = [0] * len(job)
        self._steps = [0] * len(job)
        self._ahead: deque[tuple[int, Signal]] = deque()

    def begin(self) -> None:
        job = self._job
        job.trouble.listeners.append(self._hear)
        for worker in range(len(job)):
            job.world.spawn(self._work(worker, 0, float(job.spec.start)))
        job.world.spawn(self._watch())

    def _moved(self, placement: Placement, share: float) -> None:
        """Shards are elsewhere: what is under way goes on to where they are now."""
        job = self._job
        self._release.placement = placement
        for message in self._messages:
            for way, stream in message.streams.items():
                if message.group is None and stream.slot >= 0:
                    # What a shard that moved already had of the update is sent once more.
                    again = share * max(job.size_bytes - job.world.left_bytes(stream), 0.0)
                    job.world.reroute(stream, placement.path(message.members[0].worker, way), again)

    def _watch(self) -> Process:
        """Look at the shards, follow beliefs, end leases, and let waiting updates go."""
        while True:
            yield OBSERVE_S
            self._job.sample_busy()
            if self._settings.planned:
                self._shards.look()
                self._pace_again()
                self._end_leases()
                self._release.run()

    # --- a worker ---------------------------------------------------------------------------------------

    def _work(self, worker: int, life: int, start_s: float) -> Process:
        job = self._job
        yield start_s
        if life == 0:
            self._held[worker] = (job.version, job.learner.read())
        else:
            yield from self._fetch(worker)
        rounds: deque[Signal] = deque()
        while job.spec.steps is None or self._steps[worker] < job.spec.steps:
            yield from job.computing(worker, self._steps[worker])
            if self._life[worker] != life:
                return
            base, model = self._held[worker]
            self._steps[worker] += 1
            update = Update(worker, base, job.learner.compute(model), self._steps[worker])
            rounds.append(Signal())
            job.world.spawn(self._exchange(update, life, rounds[-1]))
            if len(rounds) >= self._in_flight:
                yield rounds.popleft()
            if self._life[worker] != life:
                return

    def _exchange(self, update: Update, life: int, done: Signal) -> Process:
        """The update out, a newer model in."""
        worker = update.worker
        if self._settings.planned:
            self._release.offer(update)
            yield update.go
            message = update.go.value
        else:
            message = self._start([update])
        if message is None:
            yield from self._fetch(worker)
        else:
            yield message.over
            if message.base >= self._held[worker][0]:
                self._held[worker] = (message.base, message.model)
        if self._settings.slack is not None and self._life[worker] == life:
            yield self._keep_pace(worker)
        if self._life[worker] == life:
            done.fire()

    def _fetch(self, worker: int) -> Process:
        """The model, by itself."""
        message = _Message([Update(worker, 0, None, 0)])
        self._messages[message] = None
        message.settled.fire(False)
        yield self._pull(message).done
        self._messages.pop(message, None)
        self._held[worker] = (message.base, message.model)

    def _send_one(self, worker: int, way: str) -> Stream:
        job, placement = self._job, self._shards.placement
        priority = job.spec.weight if self._settings.planned else 1.0
        return job.send(
            placement.path(worker, way),
            job.size_bytes,
            lambda source, target: placement.crosses(worker, way, source, target),
            priority,
        )

    # --- a message --------------------------------------------------------------------------------------

    def _let_go(self, members: list[Update], entry: Numbered, group: Gathered | None) -> None:
        message = self._start(members, entry, group)
        for member in members:
            member.go.fire(message)

    def _dropped(self, update: Update) -> None:
        self._job.tally.dropped += 1
        update.go.fire(None)

    def _start(
        self, members: list[Update], entry: Numbered | None = None, group: Gathered | None = None
    ) -> _Message:
        message = _Message(members, entry, group)
        self._messages[message] = None
        if entry is not None:
            self._numbered[entry.number] = message
        self._job.world.spawn(self._carry(message))
        return message

    def _carry(self, message: _Message) -> Process:
        """Push, application and pull of one message."""
        if self._settings.alongside:
            pulled = self._pull(message)
        for stage in range(len(message.group.push) if message.group else 1):
            yield self._stream(message, "push", stage).done
            if message.settled.fired:  # dropped on its way
                break
        if message.entry is None:
            self._commit(message)
        elif not message.settled.fired:
            self._settle(self._order.arrive(message.entry))
        yield message.settled
        if not self._settings.alongside:
            pulled = self._pull(message)
        yield pulled.done
        self._messages.pop(message, None)
        message.over.fire()

    def _pull(self, message: _Message) -> Stream:
        message.base, message.model = self._job.version, self._job.learner.read()
        return self._stream(message, "pull")

    def _stream(self, message: _Message, way: str, stage: int = 0) -> Stream:
        job, worker = self._job, message.members[0].worker
        if message.group is not None:
            path = message.group.push[stage] if way == "push" else message.group.pull
            stream = job.send(path, job.size_bytes, lambda _source, _target: False, job.spec.weight)
        else:
            stream = self._send_one(worker, way)
            if self._settings.planned and not stream.path.empty:
                job.world.set_pace(stream, self._pace(worker, way, None))
        message.streams[way] = stream
        return stream

    def _pace_again(self) -> None:
        """All that is under way follows what is believed now."""
        job, shares = self._job, self._shards.placement.shares
        believed = job.estimator.believed * PACE
        ways = {"push": believed[job.up].tolist(), "pull": believed[job.down].tolist()}
        for message in self._messages:
            worker = message.members[0].worker
            for way, stream in message.streams.items():
                if stream.slot >= 0 and message.group is None:
                    pace = self._pace(worker, way, stream) if worker in shares else ways[way][worker]
                    job.world.set_pace(stream, max(pace, 1.0))

    def _pace(self, worker: int, way: str, stream: Stream | None) -> float:
        """A server's link serves first: its own transfers get what all others leave."""
        job = self._job
        link = job.up[worker] if way == "push" else job.down[worker]
        believed = float(job.estimator.believed[link])
        share = self._shards.placement.shares.get(worker, 0.0)
        left = believed
        if share > 0:
            own = job.world.rate(stream) * (1 - share) if stream else 0.0
            serving = float(job.world.used[link]) - own
            reserve = min(share * self._shards.wanted, max(serving, 0.1 * believed) * PROBE_FACTOR)
            left = max(believed - reserve, OWN_LEAST * believed)
        return max(PACE * left / max(1 - share, 1e-9), 1.0)

    def _settle(self, settled: Settled) -> None:
        """Carry out what the order of application decided."""
        for entry in settled.applied:
            self._commit(self._numbered.pop(entry.number))

    def _end_leases(self) -> None:
        """Drop those that hold others up, once their lease is over or waiting costs more than they are worth.

        An update is worth the round in which its worker makes another; waiting costs all that wait.
        """
        job, order = self._job, self._order
        round_s = self._release.round_s()
        while order.waiting:
            late = []
            for entry in order.blockers():
                stream = self._numbered[entry.number].streams.get("push")
                left_s = math.inf if stream is None else self._left_s(entry, stream)
                if entry.lease_until <= job.world.now or left_s * order.waiting > round_s:
                    late.append(entry)
            for entry in late:
                self._drop_late(self._numbered.pop(entry.number))
            if not late:
                return

    def _left_s(self, entry: Numbered, stream: Stream) -> float:
        """How long the rest of a push takes, as far as anybody can tell."""
        job = self._job
        worker = self._numbered[entry.number].members[0].worker
        believed = float(job.estimator.believed[job.up[worker]])
        return job.world.left_bytes(stream) / max(min(job.world.rate(stream), believed), 1.0)

    def _drop_late(self, message: _Message) -> None:
        job = self._job
        job.tally.dropped_late += len(message.members)
        message.settled.fire(False)
        if "push" in message.streams:
            job.world.cancel(message.streams["push"])
            message.streams["push"].done.fire()
        assert message.entry is not None
        self._settle(self._order.drop(message.entry))
        self._release.finished(message.members, committed=False)

    def _commit(self, message: _Message) -> None:
        job = self._job
        in_order = message.entry is not None
        members = [
            (
                member.worker,
                member.base,
                member.gradient,
                weigh(job.version + k - member.base, len(job)) if in_order else 1.0,
            )
            for k, member in enumerate(message.members)
        ]
        job.commit(members, in_order)
        self._release.finished(message.members)
        message.settled.fire(True)

    def _keep_pace(self, worker: int) -> Signal:
        """Stale synchronous parallel: wait while too far ahead of the slowest."""
        go = Signal()
        self._clock[worker] += 1
        slowest = min(self._clock)
        self._ahead.append((worker, go))
        assert self._settings.slack is not None
        free = [w for w in self._ahead if self._clock[w[0]] <= slowest + self._settings.slack]
        self._ahead = deque(w for w in self._ahead if w not in free)
        for _, signal in free:
            signal.fire()
        return go

    # --- faults -----------------------------------------------------------------------------------------

    def _hear(self, fault: FaultEvent) -> None:
        """A host's worker ends with it, and begins anew when it is back."""
        job = self._job
        worker = job.number.get(fault.host or "", -1)
        if not 0 <= worker < len(job):
            return
        if fault.do in ("kill", "drain"):
            self._life[worker] += 1
            self._end(worker)
        elif fault.do == "restart":
            job.world.spawn(self._work(worker, self._life[worker], 0.0))

    def _end(self, worker: int) -> None:
        job = self._job
        job.tally.lost += self._release.forget(worker)
        for message in [m for m in self._messages if any(x.worker == worker for x in m.members)]:
            del self._messages[message]
            for stream in message.streams.values():
                job.world.cancel(stream)
            if not message.settled.fired:
                job.tally.lost += len(message.members)
                self._release.finished(message.members, committed=False)
                if message.entry is not None:
                    del self._numbered[message.entry.number]
                    self._settle(self._order.drop(message.entry))
            message.base = -1  # nobody gets a model by it; those it was shared with go on with what they have
            message.over.fire()
