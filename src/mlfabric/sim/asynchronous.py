"""Asynchronous policies at flow level: every worker pushes its update and pulls the model in its own time.

The servers hold shares of the model. First-come policies send at once, share links as TCP does and know no
bound; the planned ones place shards by believed bandwidth (`sim.placing`), order what waits under the delay
bound and let it go by room (`sim.release`), keep the order of application (`sim.order`), and pace.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from mlfabric.plan.planner import weigh
from mlfabric.scenario import FaultEvent
from mlfabric.sim.estimate import OBSERVE_S, PACE, PROBE_FACTOR
from mlfabric.sim.fluid import Process
from mlfabric.sim.order import ApplicationOrder, Numbered, Settled
from mlfabric.sim.placing import WORTH_PLACING, Placement, best_shares, budget
from mlfabric.sim.release import Release, Update
from mlfabric.sim.streams import Signal, Stream
from mlfabric.sim.workload import JobRun

# A server's own transfers get at least this part of its link.
OWN_LEAST: Final = 0.25
# The fastest may be ahead of the slowest by so many steps in stale synchronous parallel runs.
SSP_SLACK: Final = 3
# Shards that change hands go before updates, or the move would outlast what it is for.
MOVE_PRIORITY: Final = 1e6
# A host that is silent for so long is taken for dead: its leads move, nobody waits for its updates.
SILENT_S: Final = 1.0


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
        self._placement = Placement(job, {job.first_server: 1.0})
        self._placing = False
        self._wanted = 0.0  # bytes per second of updates that all workers together would send
        self._revision = -1  # of the beliefs that shards were last considered with
        self._messages: dict[_Message, None] = {}  # under way, in the order of their start
        self._numbered: dict[int, _Message] = {}  # of them, those that are not settled
        self._held: list[tuple[int, Any]] = [(0, None)] * len(job)  # version and model each worker has
        self._life = [0] * len(job)  # a worker that dies and comes back lives once more
        self._down_since: dict[int, float] = {}
        self._clock = [0] * len(job)
        self._steps = [0] * len(job)
        self._ahead: deque[tuple[int, Signal]] = deque()

    def begin(self) -> None:
        job = self._job
        self._use(self._first_placement())
        job.trouble.listeners.append(self._hear)
        for worker in range(len(job)):
            job.world.spawn(self._work(worker, 0, float(job.spec.start)))
        job.world.spawn(self._watch())

    # --- where the shards are ---------------------------------------------------------------------------

    def _first_placement(self) -> Placement:
        job, kind = self._job, self._settings.servers
        if kind == "bandwidth":
            return Placement(job, best_shares(job, self._budget()))
        if kind == "uniform":
            return Placement(job, {worker: 1 / len(job) for worker in range(len(job))})
        return Placement(job, {job.first_server: 1.0})

    def _budget(self) -> Any:
        means = budget(self._job, 1 if self._settings.alongside else 2)
        self._wanted = means.wanted
        return means

    def _use(self, placement: Placement) -> None:
        """From now on shards are there; what is under way goes on to where they are."""
        old, self._placement = self._placement, placement
        self._release.placement = placement
        self._job.serving = placement.serving_links()
        gone = sum(max(share - placement.shares.get(host, 0.0), 0.0) for host, share in old.shares.items())
        for message in self._messages:
            for way, stream in message.streams.items():
                if len(message.members) == 1 and not stream.done.fired and not stream.path.empty:
                    worker = message.members[0].worker
                    # What a shard that moved already had of the update is sent once more.
                    again = gone * max(self._job.size_bytes - self._job.world.left_bytes(stream), 0.0)
                    self._job.world.reroute(stream, placement.path(worker, way), again)

    def _watch(self) -> Process:
        """Notice the silent, let waiting updates go, place shards anew where that pays."""
        job, settings = self._job, self._settings
        while True:
            yield OBSERVE_S
            job.sample_busy()
            if not settings.planned:
                continue
            self._notice_silence()
            if (
                settings.servers == "bandwidth"
                and job.estimator.revision != self._revision
                and not self._placing
            ):
                self._revision = job.estimator.revision
                self._consider_placing()
            self._pace_again()
            self._end_leases()
            self._release.run()

    def _consider_placing(self) -> None:
        means = self._budget()
        shares = best_shares(self._job, means)
        if means.room(shares) >= WORTH_PLACING * means.room(self._placement.shares):
            self._placing = True
            self._job.world.spawn(self._place(shares))

    def _place(self, shares: dict[int, float]) -> Process:
        """Move the parts of the model that change hands; until they are there nothing else changes."""
        job = self._job
        moved = {
            host: shares.get(host, 0.0) - self._placement.shares.get(host, 0.0)
            for host in {**shares, **self._placement.shares}
        }
        loads = {job.world.links[job.up[host]]: -change for host, change in moved.items() if change < 0}
        loads |= {job.world.links[job.down[host]]: change for host, change in moved.items() if change > 0}
        stream = job.send(job.path(loads), job.size_bytes, lambda _source, _target: False, MOVE_PRIORITY)
        job.tally.moved_bytes += job.size_bytes * sum(change for change in moved.values() if change > 0)
        yield stream.done
        self._placing = False
        if not job.gone & shares.keys():
            self._use(Placement(job, shares))

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
        if self._settings.slack is not None:
            yield self._keep_pace(worker)
        if self._life[worker] == life:
            done.fire()

    def _fetch(self, worker: int) -> Process:
        """The model, by itself."""
        base, model = self._job.version, self._job.learner.read()
        yield self._send_one(worker, "pull").done
        self._held[worker] = (base, model)

    def _send_one(self, worker: int, way: str) -> Stream:
        job, placement = self._job, self._placement
        priority = job.spec.weight if self._settings.planned else 1.0
        return job.send(
            placement.path(worker, way),
            job.size_bytes,
            lambda source, target: placement.crosses(worker, way, source, target),
            priority,
        )

    # --- a message --------------------------------------------------------------------------------------

    def _let_go(self, members: list[Update], entry: Numbered) -> None:
        message = self._start(members, entry)
        for member in members:
            member.go.fire(message)

    def _dropped(self, update: Update) -> None:
        self._job.tally.dropped += 1
        update.go.fire(None)

    def _start(self, members: list[Update], entry: Numbered | None = None) -> _Message:
        message = _Message(members, entry)
        self._messages[message] = None
        if entry is not None:
            self._numbered[entry.number] = message
        self._job.world.spawn(self._carry(message))
        return message

    def _carry(self, message: _Message) -> Process:
        """Push, application and pull of one message."""
        worker = message.members[0].worker
        pushed = self._stream(message, "push", worker)
        if self._settings.alongside:
            pulled = self._pull(message, worker)
        yield pushed.done
        if message.entry is None:
            self._commit(message)
        elif not message.settled.fired:  # not dropped on its way
            self._settle(self._order.arrive(message.entry))
        yield message.settled
        if not self._settings.alongside:
            pulled = self._pull(message, worker)
        yield pulled.done
        self._messages.pop(message, None)
        message.over.fire()

    def _pull(self, message: _Message, worker: int) -> Stream:
        message.base, message.model = self._job.version, self._job.learner.read()
        return self._stream(message, "pull", worker)

    def _stream(self, message: _Message, way: str, worker: int) -> Stream:
        stream = message.streams[way] = self._send_one(worker, way)
        if self._settings.planned and not stream.path.empty:
            self._job.world.set_pace(stream, self._pace(worker, way, None))
        return stream

    def _pace_again(self) -> None:
        """All that is under way follows what is believed now."""
        job, shares = self._job, self._placement.shares
        believed = job.estimator.believed * PACE
        ways = {"push": believed[job.up].tolist(), "pull": believed[job.down].tolist()}
        for message in self._messages:
            worker = message.members[0].worker
            for way, stream in message.streams.items():
                if stream.slot >= 0 and len(message.members) == 1:
                    pace = self._pace(worker, way, stream) if worker in shares else ways[way][worker]
                    job.world.set_pace(stream, max(pace, 1.0))

    def _pace(self, worker: int, way: str, stream: Stream | None) -> float:
        """A server's link serves first: its own transfers get what all others leave."""
        job = self._job
        link = job.up[worker] if way == "push" else job.down[worker]
        believed = float(job.estimator.believed[link])
        share = self._placement.shares.get(worker, 0.0)
        left = believed
        if share > 0:
            own = job.world.rate(stream) * (1 - share) if stream else 0.0
            serving = float(job.world.used[link]) - own
            reserve = min(share * self._wanted, max(serving, 0.1 * believed) * PROBE_FACTOR)
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
        for way, stream in message.streams.items():
            if way == "push":
                job.world.cancel(stream)
                stream.done.fire()
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
                job.tally.lost += 1
                self._release.finished(message.members, committed=False)
                if message.entry is not None:
                    del self._numbered[message.entry.number]
                    self._settle(self._order.drop(message.entry))

    def _notice_silence(self) -> None:
        job = self._job
        if not job.scenario.faults:
            return
        for host, name in enumerate(job.hosts):
            if job.trouble.up(name):
                self._down_since.pop(host, None)
                job.gone.discard(host)
                continue
            since = self._down_since.setdefault(host, job.world.now)
            if job.world.now - since >= SILENT_S and host not in job.gone:
                job.gone.add(host)
                if self._settings.servers == "bandwidth" and host in self._placement.shares:
                    job.world.spawn(self._fail_over(host))

    def _fail_over(self, lost: int) -> Process:
        """The lead of a silent host's shard moves to its replica; without one the shard is filled again from
        what a worker pulled last."""
        job = self._job
        shares = {host: share for host, share in self._placement.shares.items() if host not in job.gone}
        means = self._budget()
        heir = int(means.spare.argmax())
        share = 1.0 - sum(shares.values())
        if job.spec.replicas is None:
            alive = [host for host in range(len(job)) if host not in job.gone and host != heir]
            if alive:
                source = max(alive, key=lambda host: (means.spare[host], -host))
                links = {job.world.links[job.up[source]]: share, job.world.links[job.down[heir]]: share}
                job.tally.moved_bytes += job.size_bytes * share
                yield job.send(
                    job.path(links), job.size_bytes, lambda _source, _target: False, MOVE_PRIORITY
                ).done
        shares = {host: part for host, part in self._placement.shares.items() if host not in job.gone}
        shares[heir] = shares.get(heir, 0.0) + 1.0 - sum(shares.values())
        self._use(Placement(job, shares))
