"""The worker: holds updates, offers them, sends where it is told, keeps each until the server's word.

It sees sizes, norms and versions, never bytes. An update ends in exactly one outcome: committed or dropped;
a committed one may later be reported lost, when a fail-over went back to a replica that did not have it
(`roles.durability`). The first values of a model are sent by `roles.publication`, later ones come by
`roles.fetching`.
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
    TransferSent,
    UpdateSubmitted,
)
from mlfabric.messages import (
    DropUpdate,
    Grant,
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
    Action,
    CancelTransfer,
    FailJob,
    FreeBuffer,
    JobBecameReady,
    Note,
    RefuseTransfer,
    ResolveDurable,
    ResolvePublish,
    ResolveUpdate,
    Send,
    StartTransfer,
    WorkerSettings,
)
from mlfabric.roles.applied import AppliedSet
from mlfabric.roles.durability import Durability
from mlfabric.roles.fetching import Fetching
from mlfabric.roles.publication import Publication

# After a broken transfer the scheduler usually has a better plan within this time; else we offer again.
RETRY_S = 1.0


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
        self._publication = Publication(settings.node)
        self._fetching = Fetching(settings.scheduler, self._shards)
        self._durability = Durability(self._shards)
        self._updates: dict[str, _Update] = {}
        self._dropped_late: dict[str, None] = {}  # a shard may have applied its part all the same
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
                return self._fetching.accept(event, about)
            case TransferArriving():
                return [RefuseTransfer(event.transfer, "a worker takes no such transfer")]
            case TransferFinished(transfer=transfer):
                return self._model_arrived(transfer)
            case TransferSent(transfer=transfer):
                return self._fetching.passed_on(transfer)
            case TransferFailed(transfer=transfer):
                return self._transfer_failed(transfer, now)
            case DurabilityRequested(update=update):
                return self._want_durable(update)
            case PublishRequested():
                return [self._tell(self._publication.begin(event))]
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
                return self._durability.reached(update, shard)
            case PullFailed(pull=pull, reason=reason):
                return self._fetching.refused(pull, reason)
            case PublishFirst(shards=shards):
                return self._publication.send(shards)
            case PublishRefused(reason=reason):
                return [*self._publication.end(), ResolvePublish(reason)]
            case JobReady():
                return self._job_ready(message)
            case JobFailed(reason=reason):
                return [FailJob(reason)]
        return []

    def _tell(self, message: OfferUpdate | PublishWanted | JobKnown) -> Send:
        return Send(self._settings.scheduler, "scheduler", message)

    # --- the job ----------------------------------------------------------------------------------------

    def _job_ready(self, message: JobReady) -> list[Action]:
        # Everybody hears that the model is in place; whoever publishes another one is yet to be refused.
        publishing = self._publication.is_of(message.arrays, message.parts)
        self._job = message
        self._shards.clear()
        self._shards.update({shard.index: shard for shard in message.shards})
        self._codec = message.settings.codec if message.settings.codec != "float32" else ""
        self._every = message.settings.wait_for
        if not self._bases:
            self._bases = tuple(Version(0, message.version) for _ in message.shards)
        ready = JobBecameReady(message.arrays, message.shards, message.settings, message.rule)
        if not publishing:
            return [ready]
        return [*self._publication.end(), ready, ResolvePublish()]

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
        floors = [split_update_id(open_)[1] for open_ in (*self._updates, *self._durability.updates())]
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
            return [Note("partly-applied", reason, (ack.update,), loud=True, shards=(ack.shard,))]
        if held is None or ack.version.epoch < self._shards[ack.shard].epoch:
            return []  # already settled, or the word of a leader that has been replaced
        held.acks[ack.shard] = ack
        if ack.durable is not None:
            self._durability.advance(ack.shard, ack.durable)
        if len(held.acks) < len(self._shards):
            return []
        del self._updates[ack.update]
        self._counts["committed"] += 1
        self._durability.committed(ack.update, held.acks)
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
            parts = tuple(sorted(held.acks))
            named = ("shard " if len(parts) == 1 else "shards ") + ", ".join(map(str, parts))
            actions.append(
                Note(
                    "partly-applied", f"only {named} applied it: {reason}", (update,), loud=True, shards=parts
                )
            )
            reason = f"{reason}; {named} had applied it"
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
        if self._publication.failed(transfer, now):
            return []
        for held in self._updates.values():
            if held.transfers.pop(transfer, None) is not None:
                held.retry_at = now + RETRY_S
                return []
        return self._fetching.failed(transfer, now + RETRY_S)

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
            elif change.orderly:
                actions += self._stop_part(held, index, change.reason)
            else:
                actions += self._offer_again(update, change.reason)
        for update in self._durability.of_shard(index):
            if update in survived:
                actions += self._durability.reached(update, index)
            else:
                self._counts["lost"] += not self._durability.is_lost(update)
                actions += self._durability.lose(update, index)
        if change.orderly:
            return [*actions, *self._fetching.lead_moved(index)]
        return [*actions, *self._fetching.begin_again()]

    def _stop_part(self, held: _Update, shard: int, reason: str) -> list[Action]:
        """Its old leader takes nothing more; if this part was granted, it is granted anew."""
        stopped = [transfer for transfer, index in held.transfers.items() if index == shard]
        for transfer in stopped:
            del held.transfers[transfer]
        held.starts = [start for start in held.starts if start[2].shard != shard]
        return [CancelTransfer(transfer, reason) for transfer in stopped]

    def _scheduler_changed(self) -> list[Action]:
        """A new scheduler knows nothing: all that has no outcome is asked for again."""
        actions: list[Action] = []
        if self._job is not None:
            shards = tuple(shard for _, shard in sorted(self._shards.items()))
            actions.append(self._tell(JobKnown(msgspec.structs.replace(self._job, shards=shards))))
        publishing = self._publication.wanted()
        if publishing is not None:
            actions.append(self._tell(publishing))
        for update in list(self._updates):
            actions += self._offer_again(update, "the scheduler changed")
        return [*actions, *self._fetching.begin_again()]

    def _peer_lost(self, node: str, now: float) -> None:
        """Its word about our updates may be lost with the connection; usually the scheduler says more."""
        led = {index for index, shard in self._shards.items() if shard.leader == node}
        for held in self._updates.values():
            if led - held.acks.keys():
                held.retry_at = now + RETRY_S
        self._fetching.leader_silent(led, now + RETRY_S)

    # --- asked by the application -----------------------------------------------------------------------

    def _want_durable(self, update: str) -> list[Action]:
        if update in self._updates:
            return [
                ResolveDurable(update, f"update {update} is not committed yet; wait for its result first")
            ]
        return self._durability.want(update)

    def _want_pull(self, event: PullRequested) -> list[Action]:
        """For the next step, the model has to hold the step that our last update was for."""
        clock = -1 if event.aside else self._counts["committed"] + self._counts["dropped"]
        after = 0
        if self._every and clock > self._fetching.pulled_at:
            after = min(base.count for base in self._began(self._bases)) + self._every
        first = not (self._fetching.has_model or event.with_state or self._counts["offered"])
        return self._fetching.begin(PullWanted(event.pull, event.with_state, first, clock, after))

    def _began(self, bases: tuple[Version, ...]) -> tuple[Version, ...]:
        """Where one step takes several gradients, the versions at which it began: its weights are theirs."""
        if not self._every:
            return bases
        return tuple(Version(base.epoch, base.count - base.count % self._every) for base in bases)

    def _model_arrived(self, transfer: str) -> list[Action]:
        came = self._fetching.came(transfer)
        complete = self._fetching.arrived(transfer)
        if complete is None:
            return came
        self._bases = complete.versions
        return [*came, complete]

    # --- time -------------------------------------------------------------------------------------------

    def _on_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for update, held in list(self._updates.items()):
            due = [start for start in held.starts if start[0] <= now]
            held.starts = [start for start in held.starts if start[0] > now]
            actions += [self._start(update, held, weight, part) for _, weight, part in due]
            if held.retry_at is not None and now >= held.retry_at:
                actions += self._offer_again(update, "its transfer broke off")
        actions += self._publication.send_again(now)
        actions += self._fetching.retry(now)
        return actions

    def next_deadline(self) -> float | None:
        times = [start[0] for held in self._updates.values() for start in held.starts]
        times += [held.retry_at for held in self._updates.values() if held.retry_at is not None]
        times += [*self._fetching.deadlines(), *self._publication.deadlines()]
        return min(times, default=None)

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(**self._counts, open=len(self._updates))

    def validate(self) -> None:
        counts = self._counts
        assert counts["offered"] == counts["committed"] + counts["dropped"] + len(self._updates), (
            "an update has no outcome or two"
        )
        assert not set(self._updates) & set(self._durability.updates()), "an open update can't be committed"
