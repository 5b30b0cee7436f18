"""The server: leads a shard, applies updates in the order it is given, exactly once each.

It is the last judge of both bounds: no update older than the delay bound is applied, and no step becomes
visible that would take the model further from its replica than the divergence bound allows. Bytes that come
are taken in by `roles.parcels`, the order is kept in `roles.lineup`; how far the replica may fall behind, and
what is in flight to it, is `roles.replication`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mlfabric.events import (
    DeadlinePassed,
    Event,
    LeaseRenewed,
    MessageReceived,
    PeerLost,
    SchedulerChanged,
    StepMeasured,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    TransferSent,
)
from mlfabric.messages import (
    Aggregate,
    ControlMessage,
    DurableWanted,
    InitialPart,
    JudgeUpdate,
    LeadYielded,
    MemberUpdate,
    NotApplied,
    ReplicaAssigned,
    ReplicaHas,
    Replicate,
    Sequence,
    ServePull,
    SettleSlot,
    ShardReady,
    SlotWithdrawn,
    WithdrawSlot,
    YieldLead,
)
from mlfabric.roles.actions import (
    Action,
    CommitStep,
    CreateShard,
    DumpShard,
    FillShard,
    FreeBuffer,
    MeasureStep,
    Note,
    Send,
    ServerSettings,
)
from mlfabric.roles.applied import AppliedSet
from mlfabric.roles.lineup import Lineup, SlotPlace
from mlfabric.roles.parcels import Parcel, Parcels
from mlfabric.roles.release import MAX_RATE
from mlfabric.roles.serving import Serving
from mlfabric.roles.standing import Standing


@dataclass(slots=True)
class _Staged:
    """The step that is computed and not yet visible."""

    number: int
    members: tuple[MemberUpdate, ...]
    parcel: Parcel
    divergence: float = 0.0
    withheld_since: float | None = None


class ServerStatistics(msgspec.Struct, frozen=True):
    version: int
    epoch: int
    applied: int
    messages: int
    aggregated: int
    overtaken: int
    withheld: int
    waiting: int
    divergence: float
    largest_delay: int
    followed: bool  # by a replica that could take over


class Server:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._standing = Standing(settings)
        self._shard = self._standing.shard
        self._epoch = self._standing.epoch
        self._link = self._standing.link
        self._parcels = Parcels(self._standing)
        self._lineup = Lineup(self._standing, self._parcels)
        self._serving = Serving(self._shard, self._epoch)
        self._staged: _Staged | None = None
        self._counts = {"applied": 0, "messages": 0, "aggregated": 0, "overtaken": 0, "withheld": 0}
        self._largest_delay = 0
        self._within_bound = True
        self._lease_until: float | None = None  # none: it has never been limited
        self._yielding = False  # the lead moves to the replica once that holds everything
        self._fenced = False  # a step waits because nobody says that we still lead

    def begin(self) -> list[Action]:
        if self._settings.promoted:
            return [DumpShard(self._shard, "promoted")]
        return [CreateShard(self._settings.shard, self._settings.rule, self._settings.dtype)]

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case MessageReceived(sender=sender, message=DurableWanted(update=update)):
                return self._want_durable(update, sender, now)
            case MessageReceived(sender=sender, message=ReplicaHas() as held):
                return self._replica_has(sender, held, now)
            case MessageReceived(message=message):
                return self._on_message(message, now)
            case TransferArriving(about=Aggregate() as about) if self._parcels.is_known(about):
                self._lineup.drop_place_of(about.group)
                return self._parcels.arrive(event)
            case TransferArriving():
                return self._parcels.arrive(event)
            case TransferFinished(transfer=transfer):
                return self._arrived(transfer, now)
            case TransferSent(transfer=transfer):
                return self._sent(transfer)
            case TransferFailed(transfer=transfer, reason=reason):
                return self._failed(transfer, reason, now)
            case StepMeasured():
                return self._measured(event, now)
            case LeaseRenewed(until_s=until):
                return self._lease_renewed(until, now)
            case SchedulerChanged(term=term):
                return self._scheduler_changed(term)
            case PeerLost(node=node) if self._link.waits_for(node):
                return self._link.broke(now)
            case DeadlinePassed():
                self._lineup.mark_overdue(now)
                return [*self._retry_replication(now), *self._advance(now)]
        return []

    def _on_message(self, message: object, now: float) -> list[Action]:
        match message:
            case Sequence():
                return self._sequenced(message, now)
            case WithdrawSlot(number=number):
                return self._withdraw(number)
            case SettleSlot():
                return self._settle(message, now)
            case JudgeUpdate(member=member):
                if member.update in self._standing.applied:
                    return self._parcels.acknowledge_again(member)
                return [self._tell(NotApplied(self._shard, member.update))]
            case ServePull():
                self._serving.wanted.append(message)
                return self._serve_pulls()
            case Replicate(rate_bytes_per_s=rate, reason=reason):
                return self._replicate(reason, now, rate=rate)
            case ReplicaAssigned():
                self._yielding = False
                return [*self._replica_assigned(message, now), *self._advance(now)]
            case YieldLead(replica=replica):
                self._yielding = True
                stranger = replica is not None and replica != self._link.node
                assigned = self._link.assigned(replica, "", orderly=True) if stranger else []
                # The link is for what has to move; the model comes from who leads next.
                stopped = self._serving.stop(f"the lead of shard {self._shard} moves")
                return [*stopped, *assigned, *self._yield_lead(now)]
        return []

    def _tell(self, message: ControlMessage) -> Send:
        return self._standing.tell(message)

    def _arrived(self, transfer: str, now: float) -> list[Action]:
        initial = self._parcels.initial_arrived(transfer)
        if initial is not None:
            return self._fill(initial, now)
        complete, actions = self._parcels.arrived(transfer)
        return self._advance(now) if complete else actions

    def _fill(self, about: InitialPart, now: float) -> list[Action]:
        self._standing.filled = True
        self._standing.version = about.version
        buffer = f"initial/{self._shard}"
        filled: list[Action] = [
            FillShard(self._shard, buffer, about.with_state, about.version),
            FreeBuffer(buffer),
        ]
        ready = ShardReady(self._shard, self._epoch, replica_filled=False)
        return [*filled, self._tell(ready), *self._replicate("the replica is empty", now)]

    def _failed(self, transfer: str, reason: str, now: float) -> list[Action]:
        if self._serving.is_transfer(transfer):
            return self._sent(transfer, failed=True)
        if self._link.is_transfer(transfer):
            return self._link.broke(now)
        return self._parcels.failed(transfer)

    def _sequenced(self, message: Sequence, now: float) -> list[Action]:
        if message.epoch != self._epoch:
            return []
        self._standing.max_delay = message.max_delay
        if self._staged is not None:  # who is in this step has no need of a place any more
            slots = tuple(slot for slot in message.slots if slot.number != self._staged.number)
            message = msgspec.structs.replace(message, slots=slots)
        return [*self._lineup.add(message, now), *self._advance(now)]

    def _advance(self, now: float) -> list[Action]:
        """Stage the next step whose turn it is; complain about who is late where that blocks others."""
        if self._staged is not None or not self._standing.filled or self._yielding:
            return []
        waiting: list[SlotPlace] = []
        limit = self._serving.last_number_allowed()
        for number, place in self._lineup.places.items():
            if limit is not None and number > limit:
                break
            parcel = self._parcels.of(place.slot)
            if parcel is None or not parcel.complete or place.frozen:
                waiting.append(place)
                continue
            members = parcel.members or place.slot.members
            if place.slot.group is not None and any(m.update in self._standing.applied for m in members):
                del self._lineup.places[number]
                return [*self._parcels.refuse_known(place.slot.group, members), *self._advance(now)]
            if not self._lineup.may_overtake(waiting, len(members)):
                return self._lineup.complain(waiting, now)
            return self._stage(number, place, members, parcel, waiting, now)
        return []

    def _stage(
        self,
        number: int,
        place: SlotPlace,
        members: tuple[MemberUpdate, ...],
        parcel: Parcel,
        waiting: list[SlotPlace],
        now: float,
    ) -> list[Action]:
        del self._lineup.places[number]
        too_old = self._standing.too_old(members)
        if too_old:
            return [*self._lineup.refuse_old(place, members, too_old), *self._advance(now)]
        self._counts["overtaken"] += len(waiting)
        self._staged = _Staged(number, members, parcel)
        actions: list[Action] = []
        if waiting:
            names = ", ".join(m.update for w in waiting for m in w.slot.members)
            note = Note("overtook", f"{names} still in transit, within their bound", _names(members))
            actions.append(note)
        step = MeasureStep(self._shard, parcel.buffer, parcel.weight, len(members), parcel.settings)
        return [*actions, step]

    def _measured(self, event: StepMeasured, now: float) -> list[Action]:
        staged = self._staged
        if staged is None:
            return []
        staged.divergence = event.divergence
        if self._link.allows(event.divergence):
            return self._commit(now)
        if staged.withheld_since is None:
            staged.withheld_since = now
            self._counts["withheld"] += 1
        reason = f"divergence would be {event.divergence:.4g}, bound {self._settings.settings.divergence:.4g}"
        note = Note("withheld", reason, _names(staged.members), value=event.divergence)
        if self._link.is_level(self._standing.version):
            # The replica holds all there is, and this one step alone exceeds the bound: it goes there first.
            return [note, *self._replicate(reason, now, ahead=True)]
        return [note, *self._replicate(reason, now)]

    def _commit(self, now: float) -> list[Action]:
        if self._lease_until is not None and now >= self._lease_until:
            return self._hold_back(now)
        staged, self._staged = self._staged, None
        assert staged is not None
        self._standing.divergence = staged.divergence
        self._counts["messages"] += 1
        self._counts["applied"] += len(staged.members)
        if len(staged.members) > 1:
            self._counts["aggregated"] += len(staged.members)
        actions: list[Action] = [CommitStep(self._shard)]
        acks: list[Action] = []
        for member in staged.members:
            delay = self._standing.version - self._standing.base_count(member)
            self._largest_delay = max(self._largest_delay, delay)
            self._within_bound &= self._standing.max_delay is None or delay <= self._standing.max_delay
            self._standing.version += 1
            self._standing.applied.add(member.update, member.floor)
            acks.append(self._standing.acknowledgement(member, delay))
        actions += self._parcels.free_applied(staged.members[0].update, staged.parcel)
        actions += [*acks, self._tell(self._standing.report(_names(staged.members)))]
        actions += [*self._lineup.drop_applied_places(), *self._serve_pulls()]
        return [*actions, *(self._yield_lead(now) if self._yielding else self._advance(now))]

    def _hold_back(self, now: float) -> list[Action]:
        """Somebody else may lead this shard by now: nothing is acknowledged until we hear that none does."""
        if self._fenced:
            return []
        self._fenced = True
        assert self._staged is not None
        assert self._lease_until is not None
        silent = now - self._lease_until
        reason = f"no word from a scheduler, the lease ended {silent:.1f} s ago"
        return [Note("fenced", reason, _names(self._staged.members), loud=True)]

    def _lease_renewed(self, until: float, now: float) -> list[Action]:
        self._lease_until = until
        if not self._fenced or now >= until:
            return []
        self._fenced = False
        if self._staged is None:
            return []
        return [MeasureStep(self._shard, "", self._staged.parcel.weight, len(self._staged.members))]

    def _scheduler_changed(self, term: int) -> list[Action]:
        """What the last scheduler granted is forgotten, but for the step that is staged; workers offer the
        rest again. So every update has one way to the model, and the new scheduler knows which."""
        self._standing.term = term
        self._yielding = False
        staged = self._staged.parcel if self._staged is not None else None
        actions = self._parcels.free_all_but(staged)
        self._lineup.places.clear()
        self._serving.wanted.clear()
        if not self._standing.filled:
            return actions
        return [*actions, self._tell(self._standing.shard_report())]

    def end(self) -> list[Action]:
        return [*self._parcels.end(), *self._serving.end(), *self._link.end()]

    def _withdraw(self, number: int) -> list[Action]:
        gone, complete = self._lineup.freeze(number)
        waiting = complete or (self._staged is not None and self._staged.number == number)
        return [self._tell(SlotWithdrawn(self._shard, self._epoch, number, gone, waiting))]

    def _settle(self, message: SettleSlot, now: float) -> list[Action]:
        actions = self._lineup.settle(message)
        if actions is None:
            return []
        return [*actions, *self._serve_pulls(), *self._advance(now)]

    def _serve_pulls(self) -> list[Action]:
        applying = self._staged is not None
        return self._serving.serve(self._standing.version, applying, self._lineup.places)

    def _sent(self, transfer: str, failed: bool = False) -> list[Action]:
        served = self._serving.sent(transfer, failed)
        return [] if served is None else [self._tell(served), *self._serving.free_unused()]

    def _replicate(
        self, reason: str, now: float, rate: float | None = None, ahead: bool = False, whole: bool = False
    ) -> list[Action]:
        if not self._standing.filled:
            return []
        applied = self._standing.applied
        version = self._standing.version
        if ahead:
            assert self._staged is not None
            applied = AppliedSet(self._standing.applied.frozen())
            for member in self._staged.members:
                applied.add(member.update, member.floor)
            version += len(self._staged.members)
        return self._link.send(version, applied.frozen(), reason, rate, ahead, whole)

    def _retry_replication(self, now: float) -> list[Action]:
        if not self._link.retry_due(now):
            return []
        ahead = self._staged is not None and self._link.is_level(self._standing.version)
        return self._replicate("the last attempt broke off", now, ahead=ahead)

    def _replica_has(self, sender: str, message: ReplicaHas, now: float) -> list[Action]:
        if message.epoch != self._epoch:
            return []
        first = not self._link.filled
        actions, ahead = self._link.acknowledged(sender, message)
        if first and self._link.filled:
            actions.append(self._tell(ShardReady(self._shard, self._epoch, replica_filled=True)))
        if self._yielding and self._staged is None:
            return [*actions, *self._yield_lead(now)]
        if ahead:
            staged = self._staged
            assert staged is not None
            staged.divergence = 0.0
            return actions + self._commit(now)
        if self._staged is not None and self._staged.withheld_since is not None:
            parcel = self._staged.parcel
            actions.append(MeasureStep(self._shard, "", parcel.weight, len(self._staged.members)))
        elif self._link.has_waiters() and not self._link.is_level(self._standing.version):
            actions += self._replicate("a worker waits for durability", now)
        return actions

    def _replica_assigned(self, message: ReplicaAssigned, now: float) -> list[Action]:
        actions = self._link.assigned(message.replica, message.reason, message.orderly)
        if message.replica is not None:
            return actions + self._replicate("the replica is empty", now)
        if self._staged is not None and self._staged.withheld_since is not None:
            actions += self._commit(now)
        return actions

    def _want_durable(self, update: str, worker: str, now: float) -> list[Action]:
        answer = self._link.wait_for(update, worker, self._standing.version)
        if answer:
            return answer
        return self._replicate("a worker waits for durability", now)

    def _yield_lead(self, now: float) -> list[Action]:
        """Nothing is applied meanwhile but the step that is staged, so level means level for good."""
        if self._staged is not None:
            return []
        if self._link.has_everything(self._standing.version):
            return [self._tell(LeadYielded(self._shard, self._epoch, self._standing.version))]
        return self._replicate("the lead moves to the replica", now, rate=MAX_RATE, whole=True)

    def next_deadline(self) -> float | None:
        times = self._lineup.deadlines()
        retry = self._link.retry_at
        if retry is not None:
            times.append(retry)
        return min(times, default=None)

    def statistics(self) -> ServerStatistics:
        return ServerStatistics(
            version=self._standing.version,
            epoch=self._epoch,
            **self._counts,
            waiting=len(self._lineup.places),
            divergence=self._standing.divergence,
            largest_delay=self._largest_delay,
            followed=self._link.filled,
        )

    def validate(self) -> None:
        numbers = list(self._lineup.places)
        assert numbers == sorted(numbers), "places are kept in the order of their numbers"
        assert self._within_bound, "an applied update was too old"
        self._serving.validate()
        self._link.validate()


def _names(members: tuple[MemberUpdate, ...]) -> tuple[str, ...]:
    return tuple(member.update for member in members)
