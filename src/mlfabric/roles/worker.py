"""The worker: holds updates, offers them, sends where it is told, keeps each until the server's word.

It sees sizes, norms and versions, never bytes. An update ends in exactly one outcome: committed or dropped;
a committed one may later be reported lost, when a fail-over went back to a replica that did not have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mlfabric.events import (
    DeadlinePassed,
    DurabilityRequested,
    Event,
    MessageReceived,
    PeerLost,
    PublishRequested,
    PullRequested,
    SchedulerChanged,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    UpdateSubmitted,
)
from mlfabric.messages import (
    DropUpdate,
    DurableWanted,
    Grant,
    InitialPart,
    JobFailed,
    JobKnown,
    JobReady,
    LeaderChanged,
    ModelPart,
    OfferAgain,
    OfferUpdate,
    PartRoute,
    PublishFirst,
    PublishRefused,
    PublishWanted,
    PullFailed,
    PullWanted,
    ShardRange,
    StepSettings,
    UpdateApplied,
    UpdateDurable,
    UpdatePart,
    UpdateRefused,
    Version,
    split_update_id,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    CancelTransfer,
    FailJob,
    FreeBuffer,
    JobBecameReady,
    Note,
    RefuseTransfer,
    ResolveDurable,
    ResolvePublish,
    ResolvePull,
    ResolveUpdate,
    Send,
    StartTransfer,
    WorkerSettings,
)
from mlfabric.roles.applied import AppliedSet

# After a broken transfer the scheduler usually has a better plan within this time; else we offer again.
RETRY_S = 1.0
# A part of the first model that came too early is tried again after this time.
AGAIN_S = 0.05


@dataclass(slots=True)
class _Update:
    """An update without an outcome."""

    buffer: str
    size_bytes: int
    bases: tuple[Version, ...]
    norm: float
    settings: StepSettings | None
    acks: dict[int, UpdateApplied] = field(default_factory=dict)
    transfers: dict[str, int] = field(default_factory=dict)  # under way: transfer -> shard
    starts: list[tuple[float, float, PartRoute]] = field(default_factory=list)  # (when, weight, part)
    attempt: int = 0
    retry_at: float | None = None


@dataclass(slots=True)
class _Pull:
    wanted: PullWanted
    versions: dict[int, Version] = field(default_factory=dict)
    transfers: dict[str, tuple[int, Version]] = field(default_factory=dict)
    retry_at: float | None = None


class WorkerStatistics(msgspec.Struct, frozen=True):
    offered: int
    committed: int
    dropped: int
    lost: int
    open: int


class Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._job: JobReady | None = None
        self._shards: dict[int, ShardRange] = {}
        self._bases: tuple[Version, ...] = ()
        self._codec = ""
        self._every = 0  # gradients that make one step; 0: each update is one
        self._pulled_at = 0  # updates that had an outcome when the last model came
        self._publish: PublishRequested | None = None
        self._initial: dict[str, StartTransfer] = {}  # the first values on their way, by transfer
        self._initial_again: dict[str, float] = {}  # those that broke off, and when to try again
        self._updates: dict[str, _Update] = {}
        self._undurable: dict[str, dict[int, Version]] = {}  # committed, not known to be at the replica
        self._durable_waits: dict[str, set[int]] = {}
        self._dropped_late: dict[str, None] = {}  # a shard may have applied its part all the same
        self._pulls: dict[str, _Pull] = {}
        self._next_number = 0
        self._counts = {"offered": 0, "committed": 0, "dropped": 0, "lost": 0}

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case MessageReceived(message=message):
                return self._on_message(message, now)
            case UpdateSubmitted():
                return self._submit(event)
            case PullRequested():
                return self._want_pull(event)
            case TransferArriving(about=ModelPart() as about):
                return self._accept_model(event, about)
            case TransferArriving():
                return [RefuseTransfer(event.transfer, "a worker takes no such transfer")]
            case TransferFinished(transfer=transfer):
                return self._model_arrived(transfer)
            case TransferFailed(transfer=transfer):
                return self._transfer_failed(transfer, now)
            case DurabilityRequested(update=update):
                return self._want_durable(update)
            case PublishRequested():
                self._publish = event
                return [self._want_publish(event)]
            case SchedulerChanged():
                return self._scheduler_changed()
            case PeerLost(node=node):
                self._peer_lost(node, now)
            case DeadlinePassed():
                return self._on_deadline(now)
        return []

    def _on_message(self, message: object, now: float) -> list[Action]:
        match message:
            case Grant():
                return self._granted(message, now)
            case UpdateApplied():
                return self._acknowledged(message)
            case DropUpdate(update=update, reason=reason, late=late):
                return self._dropped(update, reason, late)
            case UpdateRefused(update=update, reason=reason):
                return self._dropped(update, reason, True)
            case OfferAgain(update=update, reason=reason):
                return self._offer_again(update, reason)
            case LeaderChanged():
                return self._leader_changed(message, now)
            case UpdateDurable(update=update, shard=shard):
                return self._now_durable(update, shard)
            case PullFailed(pull=pull, reason=reason) if pull in self._pulls:
                del self._pulls[pull]
                return [ResolvePull(pull, error=reason)]
            case PublishFirst(shards=shards):
                return self._send_initial(shards)
            case PublishRefused(reason=reason):
                return [*self._forget_publish(), ResolvePublish(reason)]
            case JobReady():
                return self._job_ready(message)
            case JobFailed(reason=reason):
                return [FailJob(reason)]
        return []

    def _tell(self, message: OfferUpdate | PullWanted | PublishWanted | JobKnown) -> Send:
        return Send(self._settings.scheduler, "scheduler", message)

    # --- publishing -------------------------------------------------------------------------------------

    def _want_publish(self, event: PublishRequested) -> Send:
        return self._tell(
            PublishWanted(
                event.arrays,
                event.rule,
                event.settings,
                event.elements,
                event.dtype,
                event.state_vectors,
                event.version,
            )
        )

    def _send_initial(self, shards: tuple[ShardRange, ...]) -> list[Action]:
        event = self._publish
        if event is None:
            return []
        starts = [
            StartTransfer(
                transfer=f"{self._settings.node}/initial/{shard.index}",
                node=shard.leader,
                role=f"server.{shard.index}",
                buffer=event.buffer,
                about=InitialPart(shard.index, event.version, event.state_vectors > 0),
                ranges=tuple(
                    (vector * event.elements + shard.start, shard.count)
                    for vector in range(1 + event.state_vectors)
                ),
            )
            for shard in shards
        ]
        self._initial = {start.transfer: start for start in starts}
        return list(starts)

    def _forget_publish(self) -> list[Action]:
        event, self._publish = self._publish, None
        self._initial.clear()
        self._initial_again.clear()
        return [FreeBuffer(event.buffer)] if event else []

    def _job_ready(self, message: JobReady) -> list[Action]:
        # Everybody hears that the model is in place; whoever publishes another one is yet to be refused.
        publishing = self._publish is not None and self._publish.arrays == message.arrays
        self._job = message
        self._shards = {shard.index: shard for shard in message.shards}
        self._codec = message.settings.codec if message.settings.codec != "float32" else ""
        self._every = message.settings.wait_for
        if not self._bases:
            self._bases = tuple(Version(0, message.version) for _ in message.shards)
        ready = JobBecameReady(message.arrays, message.shards, message.settings, message.rule)
        if not publishing:
            return [ready]
        return [*self._forget_publish(), ready, ResolvePublish()]

    # --- updates ----------------------------------------------------------------------------------------

    def _submit(self, event: UpdateSubmitted) -> list[Action]:
        if not self._shards:
            return [
                FreeBuffer(event.buffer),
                ResolveUpdate(event.update, False, reason="nothing is published in this job yet"),
            ]
        self._updates[event.update] = _Update(
            event.buffer,
            event.size_bytes,
            self._began(event.bases or self._bases),
            event.norm,
            event.settings,
        )
        self._next_number = split_update_id(event.update)[1] + 1
        self._counts["offered"] += 1
        return [self._offer(event.update)]

    def _offer(self, update: str, again: str = "") -> Send:
        held = self._updates[update]
        floors = [split_update_id(open_)[1] for open_ in (*self._updates, *self._undurable)]
        return self._tell(
            OfferUpdate(
                update=update,
                size_bytes=held.size_bytes,
                bases=held.bases,
                norm=held.norm,
                floor=min(floors, default=self._next_number),
                shards=tuple(index for index in self._shards if index not in held.acks),
                again=again,
            )
        )

    def _granted(self, grant: Grant, now: float) -> list[Action]:
        held = self._updates.get(grant.update)
        if held is None:
            return []
        held.attempt += 1
        held.retry_at = None
        actions: list[Action] = []
        for part in grant.parts:
            if part.epoch < self._shards[part.shard].epoch:
                continue  # granted before a fail-over we already know of; the update is offered again
            if part.start_in_s <= 0:
                actions.append(self._start(grant.update, held, grant.weight, part))
            else:
                held.starts.append((now + part.start_in_s, grant.weight, part))
        return actions

    def _start(self, update: str, held: _Update, weight: float, part: PartRoute) -> StartTransfer:
        shard = self._shards[part.shard]
        transfer = f"{update}/{part.shard}/{held.attempt}"
        held.transfers[transfer] = part.shard
        return StartTransfer(
            transfer=transfer,
            node=part.node,
            role=part.role,
            buffer=held.buffer,
            about=UpdatePart(update, part.shard, part.epoch, weight, part.group, part.term, held.settings),
            rate_bytes_per_s=part.rate_bytes_per_s,
            ranges=((shard.start, shard.count),),
            scale=weight,
            codec=self._codec,
        )

    def _acknowledged(self, ack: UpdateApplied) -> list[Action]:
        held = self._updates.get(ack.update)
        if ack.update in self._dropped_late:
            reason = f"shard {ack.shard} had applied it when it was dropped"
            return [Note("partly-applied", reason, (ack.update,), loud=True)]
        if held is None or ack.version.epoch < self._shards[ack.shard].epoch:
            return []  # already settled, or the word of a leader that has been replaced
        held.acks[ack.shard] = ack
        if ack.durable is not None:
            self._advance_durable(ack.shard, ack.durable)
        if len(held.acks) < len(self._shards):
            return []
        del self._updates[ack.update]
        self._counts["committed"] += 1
        pending = {
            index: got.version
            for index, got in held.acks.items()
            if got.durable is not None and got.version > got.durable
        }
        if pending:
            self._undurable[ack.update] = pending
        last = max(held.acks.values(), key=lambda got: (got.version.count, got.shard))
        return [
            FreeBuffer(held.buffer),
            ResolveUpdate(
                ack.update,
                True,
                version=last.version,
                delay_updates=max(got.delay_updates for got in held.acks.values()),
            ),
        ]

    def _dropped(self, update: str, reason: str, late: bool) -> list[Action]:
        held = self._updates.pop(update, None)
        if held is None:
            return []
        self._counts["dropped"] += 1
        if late and len(self._shards) > 1:
            self._dropped_late[update] = None
            while len(self._dropped_late) > 1000:
                del self._dropped_late[next(iter(self._dropped_late))]
        actions: list[Action] = [CancelTransfer(transfer, reason) for transfer in held.transfers]
        if held.acks:
            parts = ", ".join(str(index) for index in sorted(held.acks))
            actions.append(
                Note("partly-applied", f"only shards {parts} applied it: {reason}", (update,), loud=True)
            )
        return [*actions, FreeBuffer(held.buffer), ResolveUpdate(update, False, reason=reason, late=late)]

    def _offer_again(self, update: str, reason: str) -> list[Action]:
        held = self._updates.get(update)
        if held is None:
            return []
        actions: list[Action] = [CancelTransfer(transfer, reason) for transfer in held.transfers]
        held.transfers.clear()
        held.starts.clear()
        held.retry_at = None
        return [*actions, self._offer(update, reason)]

    def _transfer_failed(self, transfer: str, now: float) -> list[Action]:
        if transfer in self._initial:
            # Its server has not heard yet that it is one: word and bytes take different ways.
            self._initial_again[transfer] = now + AGAIN_S
            return []
        for held in self._updates.values():
            if held.transfers.pop(transfer, None) is not None:
                held.retry_at = now + RETRY_S
                return []
        for pull in self._pulls.values():
            if pull.transfers.pop(transfer, None) is not None:
                pull.retry_at = now + RETRY_S
        return []

    # --- fail-over --------------------------------------------------------------------------------------

    def _leader_changed(self, change: LeaderChanged, now: float) -> list[Action]:
        index = change.shard.index
        self._shards[index] = change.shard
        survived = AppliedSet(change.applied)
        version = Version(change.shard.epoch, change.version)
        actions: list[Action] = []
        for update, held in list(self._updates.items()):
            held.acks.pop(index, None)
            if update in survived:
                actions += self._acknowledged(UpdateApplied(update, index, version, 0, version))
            else:
                actions += self._offer_again(update, change.reason)
        for update in [u for u, shards in self._undurable.items() if index in shards]:
            if update in survived:
                actions += self._now_durable(update, index)
            else:
                actions += self._lose(update, change)
        return [*actions, *self._pull_again()]

    def _pull_again(self) -> list[Action]:
        actions: list[Action] = []
        for pull, wanted in self._pulls.items():
            actions += [FreeBuffer(_pull_buffer(pull, shard)) for shard in wanted.versions]
            wanted.versions.clear()
            wanted.transfers.clear()
            wanted.retry_at = None
            actions.append(self._tell(wanted.wanted))
        return actions

    def _scheduler_changed(self) -> list[Action]:
        """A new scheduler knows nothing: all that has no outcome is asked for again."""
        actions: list[Action] = []
        if self._job is not None:
            shards = tuple(shard for _, shard in sorted(self._shards.items()))
            actions.append(self._tell(JobKnown(msgspec.structs.replace(self._job, shards=shards))))
        if self._publish is not None:
            actions.append(self._want_publish(self._publish))
        for update in list(self._updates):
            actions += self._offer_again(update, "the scheduler changed")
        return [*actions, *self._pull_again()]

    def _peer_lost(self, node: str, now: float) -> None:
        """Its word about our updates may be lost with the connection; usually the scheduler says more."""
        led = {index for index, shard in self._shards.items() if shard.leader == node}
        for held in self._updates.values():
            if led - held.acks.keys():
                held.retry_at = now + RETRY_S
        for pull in self._pulls.values():
            if led - pull.versions.keys():
                pull.retry_at = now + RETRY_S

    def _lose(self, update: str, change: LeaderChanged) -> list[Action]:
        del self._undurable[update]
        self._counts["lost"] += 1
        reason = f"committed, but not in the replica that took over shard {change.shard.index}"
        actions: list[Action] = [
            Note("lost", reason, (update,), loud=True),
            ResolveUpdate(update, True, reason=reason, lost=True),
        ]
        if self._durable_waits.pop(update, None) is not None:
            actions.append(ResolveDurable(update, f"update {update} was lost: {reason}"))
        return actions

    # --- durability -------------------------------------------------------------------------------------

    def _advance_durable(self, shard: int, durable: Version) -> None:
        for update in [u for u, shards in self._undurable.items() if shard in shards]:
            if self._undurable[update][shard] <= durable and update not in self._durable_waits:
                del self._undurable[update][shard]
                if not self._undurable[update]:
                    del self._undurable[update]

    def _want_durable(self, update: str) -> list[Action]:
        if update in self._updates:
            return [
                ResolveDurable(update, f"update {update} is not committed yet; wait for its result first")
            ]
        shards = self._undurable.get(update)
        if not shards:
            if all(shard.replica is None for shard in self._shards.values()):
                return [
                    ResolveDurable(update, "this job has no replica; publish with divergence= to get one")
                ]
            return [ResolveDurable(update)]
        self._durable_waits[update] = set(shards)
        return [
            Send(self._shards[index].leader, f"server.{index}", DurableWanted(update, index))
            for index in shards
        ]

    def _now_durable(self, update: str, shard: int) -> list[Action]:
        held = self._undurable.get(update)
        if held is not None:
            held.pop(shard, None)
            if not held:
                del self._undurable[update]
        waiting = self._durable_waits.get(update)
        if waiting is None:
            return []
        waiting.discard(shard)
        if waiting:
            return []
        del self._durable_waits[update]
        return [ResolveDurable(update)]

    # --- pulls ------------------------------------------------------------------------------------------

    def _want_pull(self, event: PullRequested) -> list[Action]:
        """For the next step, the model has to hold the step that our last update was for."""
        clock = -1 if event.aside else self._counts["committed"] + self._counts["dropped"]
        after = 0
        if self._every and clock > self._pulled_at:
            after = min(base.count for base in self._began(self._bases)) + self._every
        wanted = PullWanted(event.pull, event.with_state, clock, after)
        self._pulls[event.pull] = _Pull(wanted)
        return [self._tell(wanted)]

    def _began(self, bases: tuple[Version, ...]) -> tuple[Version, ...]:
        """Where one step takes several gradients, the versions at which it began: its weights are theirs."""
        if not self._every:
            return bases
        return tuple(Version(base.epoch, base.count - base.count % self._every) for base in bases)

    def _accept_model(self, event: TransferArriving, about: ModelPart) -> list[Action]:
        pull = self._pulls.get(about.pull)
        if pull is None or about.version.epoch < self._shards[about.shard].epoch:
            return [RefuseTransfer(event.transfer, f"pull {about.pull} is not waited for")]
        if about.shard in pull.versions:
            return [RefuseTransfer(event.transfer, f"shard {about.shard} of {about.pull} is here already")]
        # Asked for twice, after a fault: the second copy takes the first one's place.
        pull.transfers = {t: of for t, of in pull.transfers.items() if of[0] != about.shard}
        pull.transfers[event.transfer] = (about.shard, about.version)
        return [AcceptTransfer(event.transfer, _pull_buffer(about.pull, about.shard))]

    def _model_arrived(self, transfer: str) -> list[Action]:
        for name, pull in self._pulls.items():
            if transfer not in pull.transfers:
                continue
            shard, version = pull.transfers.pop(transfer)
            pull.versions[shard] = version
            if len(pull.versions) < len(self._shards):
                return []
            versions = tuple(pull.versions[index] for index in sorted(pull.versions))
            self._bases = versions
            self._pulled_at = max(self._pulled_at, pull.wanted.clock)
            del self._pulls[name]
            return [ResolvePull(name, versions)]
        return []

    # --- time -------------------------------------------------------------------------------------------

    def _on_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for update, held in list(self._updates.items()):
            due = [start for start in held.starts if start[0] <= now]
            held.starts = [start for start in held.starts if start[0] > now]
            actions += [self._start(update, held, weight, part) for _, weight, part in due]
            if held.retry_at is not None and now >= held.retry_at:
                actions += self._offer_again(update, "its transfer broke off")
        for transfer in [name for name, at in self._initial_again.items() if now >= at]:
            del self._initial_again[transfer]
            actions.append(self._initial[transfer])
        for wanted in self._pulls.values():
            if wanted.retry_at is not None and now >= wanted.retry_at:
                wanted.retry_at = None
                actions.append(self._tell(wanted.wanted))
        return actions

    def next_deadline(self) -> float | None:
        times = [start[0] for held in self._updates.values() for start in held.starts]
        times += [held.retry_at for held in self._updates.values() if held.retry_at is not None]
        times += [pull.retry_at for pull in self._pulls.values() if pull.retry_at is not None]
        times += self._initial_again.values()
        return min(times, default=None)

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(**self._counts, open=len(self._updates))

    def validate(self) -> None:
        counts = self._counts
        assert counts["offered"] == counts["committed"] + counts["dropped"] + len(self._updates), (
            "an update has no outcome or two"
        )
        assert not set(self._updates) & set(self._undurable), "an open update can't be committed"


def _pull_buffer(pull: str, shard: int) -> str:
    """The driver hands these to the application when the pull is resolved."""
    return f"pull/{pull}/{shard}"
