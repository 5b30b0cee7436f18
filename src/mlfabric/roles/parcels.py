"""Bytes that come to a server: which are taken, which are refused, and those that came a second time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlfabric.events import TransferArriving
from mlfabric.messages import (
    Aggregate,
    InitialPart,
    LeftOut,
    MemberUpdate,
    Slot,
    StepSettings,
    UpdatePart,
)
from mlfabric.roles.actions import AcceptTransfer, Action, FreeBuffer, Note, RefuseTransfer
from mlfabric.roles.standing import Standing


@dataclass(slots=True)
class Parcel:
    """Bytes for this shard: one update, or a sum of several."""

    buffer: str
    weight: float
    members: tuple[MemberUpdate, ...] | None  # of an aggregate; a single update's are in its slot
    settings: StepSettings | None  # what it is to be applied by; None: as published
    complete: bool = False


class Parcels:
    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._held: dict[str, Parcel] = {}  # by update or group
        self._arriving: dict[str, str] = {}  # transfer -> key of its parcel
        self._initial: dict[str, InitialPart] = {}
        self._withdrawn: set[str] = set()  # updates given up; late bytes of theirs are refused

    def arrive(self, event: TransferArriving) -> list[Action]:
        match event.about:
            case InitialPart() as about:
                self._initial[event.transfer] = about
                return [AcceptTransfer(event.transfer, f"initial/{self._standing.shard}")]
            case UpdatePart() as about:
                refusal = self._refusal(about.epoch, about.term, about.update)
                if about.update in self._standing.applied:
                    refusal = f"{about.update} is already applied"
                if refusal:
                    return [RefuseTransfer(event.transfer, refusal)]
                return self._accept(event, about.update, Parcel("", about.weight, None, about.settings))
            case Aggregate() as about:
                return self._arrive_aggregate(event, about)
        return [RefuseTransfer(event.transfer, "a server takes updates and sums of them only")]

    def _arrive_aggregate(self, event: TransferArriving, about: Aggregate) -> list[Action]:
        refusal = self._refusal(about.epoch, about.term, about.group)
        if refusal:
            return [RefuseTransfer(event.transfer, refusal)]
        if self._knows_one(about.members):
            refused = RefuseTransfer(event.transfer, f"a member of {about.group} is already applied")
            return [refused, *self.refuse_known(about.group, about.members)]
        return self._accept(event, about.group, Parcel("", about.weight, about.members, about.settings))

    def is_known(self, about: Aggregate) -> bool:
        """Whether a sum is refused because a member of it is in the model already."""
        refusal = self._refusal(about.epoch, about.term, about.group)
        return refusal is None and self._knows_one(about.members)

    def _knows_one(self, members: tuple[MemberUpdate, ...]) -> bool:
        return any(member.update in self._standing.applied for member in members)

    def refuse_known(self, group: str, members: tuple[MemberUpdate, ...]) -> list[Action]:
        """A sum with a member that is already in can't be taken apart: the others are offered again."""
        known = [member for member in members if member.update in self._standing.applied]
        rest = tuple(member.update for member in members if member.update not in self._standing.applied)
        reason = f"{', '.join(member.update for member in known)} in group {group} already applied"
        actions: list[Action] = [Note("refused", reason, rest)]
        for member in known:
            actions += self.acknowledge_again(member)
        if rest:
            actions.append(self._standing.tell(LeftOut(group, self._standing.shard, rest, reason)))
        return [*actions, *self.free_parcel(group)]

    def _refusal(self, epoch: int, term: int, key: str) -> str | None:
        if epoch != self._standing.epoch:
            return f"meant for epoch {epoch}, this is {self._standing.epoch}"
        if term < self._standing.term:
            return f"granted in term {term}, this is {self._standing.term}"
        if key in self._withdrawn:
            return f"{key} was given up"
        held = self._held.get(key)
        return f"{key} is already here" if held is not None and held.complete else None

    def _accept(self, event: TransferArriving, key: str, parcel: Parcel) -> list[Action]:
        parcel.buffer = f"parcel/{event.transfer}"
        self._held[key] = parcel
        self._arriving[event.transfer] = key
        return [AcceptTransfer(event.transfer, parcel.buffer)]

    def of(self, slot: Slot) -> Parcel | None:
        return self._held.get(slot.group or slot.members[0].update)

    def initial_arrived(self, transfer: str) -> InitialPart | None:
        return self._initial.pop(transfer, None)

    def arrived(self, transfer: str) -> tuple[bool, list[Action]]:
        """Whether a parcel is complete by it; bytes whose place another copy has taken are freed."""
        key = self._arriving.pop(transfer, None)
        if key is None:
            return False, []
        parcel = self._held.get(key)
        if parcel is None or parcel.buffer != f"parcel/{transfer}":
            return False, [FreeBuffer(f"parcel/{transfer}")]
        parcel.complete = True
        return True, []

    def failed(self, transfer: str) -> list[Action]:
        key = self._arriving.pop(transfer, None)
        if key is None:
            return []
        parcel = self._held.get(key)
        if parcel is not None and parcel.buffer == f"parcel/{transfer}":
            del self._held[key]
        return [FreeBuffer(f"parcel/{transfer}")]

    def give_up(self, keys: Iterable[str]) -> None:
        """Late bytes of these updates and groups are refused."""
        self._withdrawn.update(keys)

    def expect_again(self, slot: Slot) -> None:
        self._withdrawn.difference_update(member.update for member in slot.members)

    def free_applied(self, first: str, parcel: Parcel) -> list[Action]:
        keys = {first} | {key for key, held in self._held.items() if held is parcel}
        return [action for key in keys for action in self.free_parcel(key)]

    def free_all_but(self, kept: Parcel | None) -> list[Action]:
        actions: list[Action] = []
        for key, parcel in list(self._held.items()):
            if parcel is not kept:
                actions += self.free_parcel(key)
                self._held.pop(key, None)
        return actions

    def end(self) -> list[Action]:
        return [FreeBuffer(parcel.buffer) for parcel in self._held.values()]

    def free_parcel(self, key: str) -> list[Action]:
        parcel = self._held.get(key)
        if parcel is None or not parcel.complete:
            return []
        del self._held[key]
        return [FreeBuffer(parcel.buffer)]

    def acknowledge_again(self, member: MemberUpdate) -> list[Action]:
        """It came a second time, after a fault: the worker hears that it is in, the scheduler too."""
        return [
            self._standing.acknowledgement(member, 0),
            self._standing.tell(self._standing.report((member.update,))),
            *self.free_parcel(member.update),
        ]
