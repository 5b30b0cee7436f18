"""The server: leads a shard, applies updates in the order it is given, exactly once each.

It is the last judge of both bounds: no update older than the delay bound is applied, and no step becomes
visible that would take the model further from its replica than the divergence bound allows. How far the
replica may fall behind, and what is in flight to it, is `roles.replication`'s business.
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
    AppliedReport,
    ControlMessage,
    DurableWanted,
    InitialPart,
    JudgeUpdate,
    LeadYielded,
    LeftOut,
    MemberUpdate,
    NotApplied,
    PullServed,
    ReplicaAssigned,
    ReplicaHas,
    Replicate,
    Sequence,
    ServePull,
    SettleSlot,
    ShardReady,
    ShardReport,
    Slot,
    SlotLate,
    SlotWithdrawn,
    StepSettings,
    UpdateApplied,
    UpdatePart,
    UpdateRefused,
    Version,
    WithdrawSlot,
    YieldLead,
    count_at,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    CommitStep,
    CreateShard,
    DumpShard,
    FillShard,
    FreeBuffer,
    MeasureStep,
    Note,
    RefuseTransfer,
    Send,
    ServerSettings,
)
from mlfabric.roles.applied import AppliedSet
from mlfabric.roles.release import MAX_RATE
from mlfabric.roles.replication import ReplicaLink
from mlfabric.roles.serving import Serving


@dataclass(slots=True)
class _Parcel:
    """Bytes for this shard: one update, or a sum of several."""

    buffer: str
    weight: float
    members: tuple[MemberUpdate, ...] | None  # of an aggregate; a single update's are in its slot
    settings: StepSettings | None
    complete: bool = False


@dataclass(slots=True)
class _Place:
    """A slot of the order that is neither applied nor given up."""

    slot: Slot
    lease_until: float
    overdue: bool = False  # its lease has ended; that matters once it blocks others
    complained: bool = False
    frozen: bool = False  # a withdrawal is being decided


@dataclass(slots=True)
class _Staged:
    """The step that is computed and not yet visible."""

    number: int
    members: tuple[MemberUpdate, ...]
    parcel: _Parcel
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


class Server:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._shard = settings.shard.index
        self._epoch = settings.shard.epoch
        self._version = settings.version
        self._applied = AppliedSet(settings.applied)
        self._filled = settings.promoted
        self._max_delay: int | None = settings.settings.max_delay
        self._places: dict[int, _Place] = {}  # by number, ascending
        self._parcels: dict[str, _Parcel] = {}  # by update or group
        self._arriving: dict[str, str] = {}  # transfer -> key of its parcel
        self._initial: dict[str, InitialPart] = {}
        self._withdrawn: set[str] = set()  # updates given up; late bytes of theirs are refused
        self._staged: _Staged | None = None
        self._serving = Serving(self._shard, self._epoch)
        self._link = ReplicaLink(self._shard, self._epoch, settings.settings.divergence, settings.fail_overs)
        self._counts = {"applied": 0, "messages": 0, "aggregated": 0, "overtaken": 0, "withheld": 0}
        self._divergence = 0.0
        self._largest_delay = 0
        self._within_bound = True
        self._term = 0
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
            case TransferArriving():
                return self._arrive(event)
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
                for place in self._places.values():
                    place.overdue = place.overdue or now >= place.lease_until
                return [*self._retry_replication(now), *self._advance(now)]
        return []

    def _on_message(self, message: object, now: float) -> list[Action]:
        match message:
            case Sequence():
                return self._sequenced(message, now)
            case WithdrawSlot(number=number, reason=reason):
                return self._withdraw(number, reason)
            case SettleSlot():
                return self._settle(message, now)
            case JudgeUpdate(member=member):
                if member.update in self._applied:
                    return self._acknowledge_again(member)
                return [self._tell(NotApplied(self._shard, member.update))]
            case ServePull():
                self._serving.wanted.append(message)
                return self._serve_pulls()
            case Replicate(rate_bytes_per_s=rate, reason=reason):
                return self._replicate(reason, now, rate=rate)
            case ReplicaAssigned():
                self._yielding = False
                return self._replica_assigned(message, now)
            case YieldLead():
                self._yielding = True
                return self._yield_lead(now)
        return []

    def _tell(self, message: ControlMessage) -> Send:
        return Send(self._settings.scheduler, "scheduler", message)

    # --- bytes come in ----------------------------------------------------------------------------------

    def _arrive(self, event: TransferArriving) -> list[Action]:
        match event.about:
            case InitialPart() as about:
                self._initial[event.transfer] = about
                return [AcceptTransfer(event.transfer, f"initial/{self._shard}")]
            case UpdatePart() as about:
                refusal = self._refusal(about.epoch, about.term, about.update)
                if about.update in self._applied:
                    refusal = f"{about.update} is already applied"
                if refusal:
                    return [RefuseTransfer(event.transfer, refusal)]
                return self._accept(event, about.update, _Parcel("", about.weight, None, about.settings))
            case Aggregate() as about:
                return self._arrive_aggregate(event, about)
        return [RefuseTransfer(event.transfer, "a server takes updates and sums of them only")]

    def _arrive_aggregate(self, event: TransferArriving, about: Aggregate) -> list[Action]:
        refusal = self._refusal(about.epoch, about.term, about.group)
        if refusal:
            return [RefuseTransfer(event.transfer, refusal)]
        if any(member.update in self._applied for member in about.members):
            self._drop_place_of(about.group)
            refused = RefuseTransfer(event.transfer, f"a member of {about.group} is already applied")
            return [refused, *self._refuse_known(about.group, about.members)]
        return self._accept(event, about.group, _Parcel("", about.weight, about.members, about.settings))

    def _refuse_known(self, group: str, members: tuple[MemberUpdate, ...]) -> list[Action]:
        """A sum with a member that is already in can't be taken apart: the others are offered again."""
        known = [member for member in members if member.update in self._applied]
        rest = tuple(member.update for member in members if member.update not in self._applied)
        reason = f"{', '.join(member.update for member in known)} in group {group} already applied"
        actions: list[Action] = [Note("refused", reason, rest)]
        for member in known:
            actions += self._acknowledge_again(member)
        if rest:
            actions.append(self._tell(LeftOut(group, self._shard, rest, reason)))
        return [*actions, *self._free_parcel(group)]

    def _refusal(self, epoch: int, term: int, key: str) -> str | None:
        if epoch != self._epoch:
            return f"meant for epoch {epoch}, this is {self._epoch}"
        if term < self._term:
            return f"granted in term {term}, this is {self._term}"
        if key in self._withdrawn:
            return f"{key} was given up"
        held = self._parcels.get(key)
        return f"{key} is already here" if held is not None and held.complete else None

    def _accept(self, event: TransferArriving, key: str, parcel: _Parcel) -> list[Action]:
        parcel.buffer = f"parcel/{event.transfer}"
        self._parcels[key] = parcel
        self._arriving[event.transfer] = key
        return [AcceptTransfer(event.transfer, parcel.buffer)]

    def _arrived(self, transfer: str, now: float) -> list[Action]:
        if transfer in self._initial:
            return self._fill(self._initial.pop(transfer), now)
        key = self._arriving.pop(transfer, None)
        if key is None:
            return []
        parcel = self._parcels.get(key)
        if parcel is None or parcel.buffer != f"parcel/{transfer}":
            return [FreeBuffer(f"parcel/{transfer}")]
        parcel.complete = True
        return self._advance(now)

    def _fill(self, about: InitialPart, now: float) -> list[Action]:
        self._filled = True
        self._version = about.version
        buffer = f"initial/{self._shard}"
        filled: list[Action] = [
            FillShard(self._shard, buffer, about.with_state, about.version),
            FreeBuffer(buffer),
        ]
        ready = ShardReady(self._shard, self._epoch, replica_filled=False)
        return [*filled, self._tell(ready), *self._replicate("the replica is empty", now)]

    def _failed(self, transfer: str, reason: str, now: float) -> list[Action]:
        if self._serving.is_transfer(transfer):
            return self._sent(transfer)
        if self._link.is_transfer(transfer):
            return self._link.broke(now)
        key = self._arriving.pop(transfer, None)
        if key is None:
            return []
        parcel = self._parcels.get(key)
        if parcel is not None and parcel.buffer == f"parcel/{transfer}":
            del self._parcels[key]
        return [FreeBuffer(f"parcel/{transfer}")]

    # --- the order --------------------------------------------------------------------------------------

    def _sequenced(self, message: Sequence, now: float) -> list[Action]:
        if message.epoch != self._epoch:
            return []
        self._max_delay = message.max_delay
        actions: list[Action] = []
        for slot in message.slots:
            if slot.group is None and slot.members[0].update in self._applied:
                actions += self._acknowledge_again(slot.members[0])
                continue
            for member in slot.members:
                self._withdrawn.discard(member.update)
            self._places[slot.number] = _Place(slot, now + slot.lease_s)
        return actions + self._advance(now)

    def _acknowledge_again(self, member: MemberUpdate) -> list[Action]:
        """It came a second time, after a fault: the worker hears that it is in, the scheduler too."""
        version = Version(self._epoch, self._version)
        ack = UpdateApplied(member.update, self._shard, version, 0, self._link.durable_version())
        return [
            Send(member.worker, "worker", ack),
            self._tell(self._report((member.update,))),
            *self._free_parcel(member.update),
        ]

    def _report(self, updates: tuple[str, ...]) -> AppliedReport:
        return AppliedReport(
            self._shard,
            self._epoch,
            self._version,
            updates,
            self._divergence,
            self._link.acknowledged_version(),
        )

    def _advance(self, now: float) -> list[Action]:
        """Stage the next step whose turn it is; complain about who is late where that blocks others."""
        if self._staged is not None or not self._filled:
            return []
        waiting: list[_Place] = []
        limit = self._serving.last_number_allowed()
        for number, place in self._places.items():
            if limit is not None and number > limit:
                break
            parcel = self._parcel_of(place)
            if parcel is None or not parcel.complete or place.frozen:
                waiting.append(place)
                continue
            members = parcel.members or place.slot.members
            if place.slot.group is not None and any(m.update in self._applied for m in members):
                del self._places[number]
                return [*self._refuse_known(place.slot.group, members), *self._advance(now)]
            if not self._may_overtake(waiting, len(members)):
                return self._complain(waiting, now)
            return self._stage(number, place, members, parcel, waiting, now)
        return []

    def _parcel_of(self, place: _Place) -> _Parcel | None:
        key = place.slot.group or place.slot.members[0].update
        return self._parcels.get(key)

    def _may_overtake(self, waiting: list[_Place], count: int) -> bool:
        """Whether all that wait would still be within their bound after `count` others went ahead."""
        if self._max_delay is None:
            return True
        position = self._version + count
        for place in waiting:
            for member in place.slot.members:
                if position - self._base_count(member) > self._max_delay:
                    return False
                position += 1
        return True

    def _base_count(self, member: MemberUpdate) -> int:
        return count_at(member.base, self._settings.fail_overs)

    def _complain(self, waiting: list[_Place], now: float) -> list[Action]:
        actions: list[Action] = []
        for place in waiting:
            if place.overdue and not place.complained:
                place.complained = True
                silent = now - place.lease_until + place.slot.lease_s
                actions.append(self._tell(SlotLate(self._shard, place.slot.number, silent)))
        return actions

    def _stage(
        self,
        number: int,
        place: _Place,
        members: tuple[MemberUpdate, ...],
        parcel: _Parcel,
        waiting: list[_Place],
        now: float,
    ) -> list[Action]:
        del self._places[number]
        too_old = [
            member.update
            for offset, member in enumerate(members)
            if self._max_delay is not None
            and self._version + offset - self._base_count(member) > self._max_delay
        ]
        if too_old:
            return [*self._refuse_old(place, members, too_old), *self._advance(now)]
        self._counts["overtaken"] += len(waiting)
        self._staged = _Staged(number, members, parcel)
        actions: list[Action] = []
        if waiting:
            names = ", ".join(m.update for w in waiting for m in w.slot.members)
            note = Note("overtook", f"{names} still in transit, within their bound", _names(members))
            actions.append(note)
        step = MeasureStep(self._shard, parcel.buffer, parcel.weight, len(members), parcel.settings)
        return [*actions, step]

    def _refuse_old(
        self, place: _Place, members: tuple[MemberUpdate, ...], too_old: list[str]
    ) -> list[Action]:
        key = place.slot.group or members[0].update
        reason = f"older than the bound of {self._max_delay} when its turn came"
        rest = tuple(member.update for member in members if member.update not in too_old)
        actions: list[Action] = [
            Send(member.worker, "worker", UpdateRefused(member.update, self._shard, reason))
            for member in members
            if member.update in too_old
        ]
        actions += [self._tell(UpdateRefused(update, self._shard, reason)) for update in too_old]
        if rest:
            actions.append(self._tell(LeftOut(place.slot.group or "", self._shard, rest, reason)))
        return [*actions, *self._free_parcel(key)]

    def _free_parcel(self, key: str) -> list[Action]:
        parcel = self._parcels.get(key)
        if parcel is None or not parcel.complete:
            return []
        del self._parcels[key]
        return [FreeBuffer(parcel.buffer)]

    # --- a step becomes visible -------------------------------------------------------------------------

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
        if self._link.is_level(self._version):
            # The replica holds all there is, and this one step alone exceeds the bound: it goes there first.
            return [note, *self._replicate(reason, now, ahead=True)]
        return [note, *self._replicate(reason, now)]

    def _commit(self, now: float) -> list[Action]:
        if self._lease_until is not None and now >= self._lease_until:
            return self._hold_back(now)
        staged, self._staged = self._staged, None
        assert staged is not None
        self._divergence = staged.divergence
        self._counts["messages"] += 1
        self._counts["applied"] += len(staged.members)
        if len(staged.members) > 1:
            self._counts["aggregated"] += len(staged.members)
        actions: list[Action] = [CommitStep(self._shard)]
        acks: list[Action] = []
        for member in staged.members:
            delay = self._version - self._base_count(member)
            self._largest_delay = max(self._largest_delay, delay)
            self._within_bound &= self._max_delay is None or delay <= self._max_delay
            self._version += 1
            self._applied.add(member.update, member.floor)
            version = Version(self._epoch, self._version)
            ack = UpdateApplied(member.update, self._shard, version, delay, self._link.durable_version())
            acks.append(Send(member.worker, "worker", ack))
        keys = {staged.members[0].update} | {k for k, p in self._parcels.items() if p is staged.parcel}
        for key in keys:
            actions += self._free_parcel(key)
        actions += [*acks, self._tell(self._report(_names(staged.members)))]
        return [*actions, *self._drop_applied_places(), *self._serve_pulls(), *self._advance(now)]

    def _drop_applied_places(self) -> list[Action]:
        """An update that was granted again and came by its first way after all needs no second place."""
        actions: list[Action] = []
        for number, place in list(self._places.items()):
            if place.slot.group is None and place.slot.members[0].update in self._applied:
                del self._places[number]
                actions += self._acknowledge_again(place.slot.members[0])
        return actions

    # --- the scheduler ----------------------------------------------------------------------------------

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
        self._term = term
        staged = self._staged.parcel if self._staged is not None else None
        actions: list[Action] = []
        for key, parcel in list(self._parcels.items()):
            if parcel is not staged:
                actions += self._free_parcel(key)
                self._parcels.pop(key, None)
        self._places.clear()
        self._serving.wanted.clear()
        if not self._filled:
            return actions
        report = ShardReport(
            shard=self._settings.shard,
            version=self._version,
            applied=self._applied.frozen(),
            fail_overs=self._settings.fail_overs,
            replica=self._link.node,
            replica_version=self._link.acknowledged_version(),
        )
        return [*actions, self._tell(report)]

    def end(self) -> list[Action]:
        return [FreeBuffer(parcel.buffer) for parcel in self._parcels.values()]

    # --- giving up on late ones -------------------------------------------------------------------------

    def _withdraw(self, number: int, reason: str) -> list[Action]:
        place = self._places.get(number)
        parcel = self._parcel_of(place) if place is not None else None
        complete = parcel is not None and parcel.complete
        waiting = complete or (self._staged is not None and self._staged.number == number)
        gone = place is not None and not complete
        if place is not None and gone:
            place.frozen = True
        return [self._tell(SlotWithdrawn(self._shard, self._epoch, number, gone, waiting))]

    def _settle(self, message: SettleSlot, now: float) -> list[Action]:
        place = self._places.get(message.number)
        if place is None:
            return []
        place.frozen = False
        actions: list[Action] = []
        if message.dropped:
            del self._places[message.number]
            if message.final:
                self._withdrawn.update(_names(place.slot.members))
            if place.slot.group:
                self._withdrawn.add(place.slot.group)
            key = place.slot.group or place.slot.members[0].update
            actions = self._free_parcel(key)
        return [*actions, *self._serve_pulls(), *self._advance(now)]

    def _drop_place_of(self, group: str) -> None:
        for number, place in list(self._places.items()):
            if place.slot.group == group:
                del self._places[number]

    # --- pulls ------------------------------------------------------------------------------------------

    def _serve_pulls(self) -> list[Action]:
        applying = self._staged is not None
        return self._serving.serve(self._version, applying, self._places)

    def _sent(self, transfer: str) -> list[Action]:
        pull = self._serving.sent(transfer)
        if pull is None:
            return []
        return [self._tell(PullServed(pull, self._shard)), *self._serving.free_unused()]

    # --- replication ------------------------------------------------------------------------------------

    def _replicate(
        self, reason: str, now: float, rate: float | None = None, ahead: bool = False
    ) -> list[Action]:
        if not self._filled:
            return []
        applied = self._applied
        version = self._version
        if ahead:
            assert self._staged is not None
            applied = AppliedSet(self._applied.frozen())
            for member in self._staged.members:
                applied.add(member.update, member.floor)
            version += len(self._staged.members)
        return self._link.send(version, applied.frozen(), reason, rate, ahead)

    def _retry_replication(self, now: float) -> list[Action]:
        if not self._link.retry_due(now):
            return []
        ahead = self._staged is not None and self._link.is_level(self._version)
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
        elif self._link.has_waiters() and not self._link.is_level(self._version):
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
        answer = self._link.wait_for(update, worker, self._version)
        if answer:
            return answer
        return self._replicate("a worker waits for durability", now)

    def _yield_lead(self, now: float) -> list[Action]:
        """The scheduler lets nothing come in meanwhile, so level means level for good."""
        if self._staged is None and self._link.has_everything(self._version):
            return [self._tell(LeadYielded(self._shard, self._epoch, self._version))]
        return self._replicate("the lead moves to the replica", now, rate=MAX_RATE)

    # --- time and state ---------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        times = [place.lease_until for place in self._places.values() if not place.overdue]
        retry = self._link.retry_at
        if retry is not None:
            times.append(retry)
        return min(times, default=None)

    def statistics(self) -> ServerStatistics:
        return ServerStatistics(
            version=self._version,
            epoch=self._epoch,
            **self._counts,
            waiting=len(self._places),
            divergence=self._divergence,
            largest_delay=self._largest_delay,
        )

    def validate(self) -> None:
        numbers = list(self._places)
        assert numbers == sorted(numbers), "places are kept in the order of their numbers"
        assert self._within_bound, "an applied update was too old"
        self._serving.validate()
        self._link.validate()


def _names(members: tuple[MemberUpdate, ...]) -> tuple[str, ...]:
    return tuple(member.update for member in members)
