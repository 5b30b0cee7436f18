"""The places of a server's order that are neither applied nor given up, and who may go before whom."""

from __future__ import annotations

from dataclasses import dataclass

from mlfabric.messages import LeftOut, MemberUpdate, Sequence, SettleSlot, Slot, SlotLate, UpdateRefused
from mlfabric.roles.actions import Action, Send
from mlfabric.roles.parcels import Parcels
from mlfabric.roles.standing import Standing


@dataclass(slots=True)
class SlotPlace:
    """A slot of the order that is neither applied nor given up."""

    slot: Slot
    lease_until: float
    overdue: bool = False  # its lease has ended; that matters once it blocks others
    complained: bool = False
    frozen: bool = False  # a withdrawal is being decided


class Lineup:
    def __init__(self, standing: Standing, parcels: Parcels) -> None:
        self._standing = standing
        self._parcels = parcels
        self.places: dict[int, SlotPlace] = {}  # by number, ascending

    def add(self, message: Sequence, now: float) -> list[Action]:
        actions: list[Action] = []
        for slot in message.slots:
            if slot.group is None and slot.members[0].update in self._standing.applied:
                actions += self._parcels.acknowledge_again(slot.members[0])
                continue
            self._parcels.expect_again(slot)
            late = slot.number not in self.places and slot.number < max(self.places, default=slot.number)
            self.places[slot.number] = SlotPlace(slot, now + slot.lease_s)
            if late:
                self.places = dict(sorted(self.places.items()))
        return actions

    def mark_overdue(self, now: float) -> None:
        for place in self.places.values():
            place.overdue = place.overdue or now >= place.lease_until

    def deadlines(self) -> list[float]:
        return [place.lease_until for place in self.places.values() if not place.overdue]

    def freeze(self, number: int) -> tuple[bool, bool]:
        """A withdrawal is asked: (whether it could be given up, whether its bytes are all here)."""
        place = self.places.get(number)
        if place is None:
            return False, False
        parcel = self._parcels.of(place.slot)
        complete = parcel is not None and parcel.complete
        if not complete:
            place.frozen = True
        return not complete, complete

    def settle(self, message: SettleSlot) -> list[Action] | None:
        """The withdrawal is decided; None: there is no such place any more."""
        place = self.places.get(message.number)
        if place is None:
            return None
        place.frozen = False
        if not message.dropped:
            return []
        del self.places[message.number]
        if message.final:
            self._parcels.give_up(member.update for member in place.slot.members)
        if place.slot.group:
            self._parcels.give_up((place.slot.group,))
        return self._parcels.free_parcel(place.slot.group or place.slot.members[0].update)

    def may_overtake(self, waiting: list[SlotPlace], count: int) -> bool:
        """Whether all that wait would still be within their bound after `count` others went ahead."""
        if self._standing.max_delay is None:
            return True
        position = self._standing.version + count
        for place in waiting:
            for member in place.slot.members:
                if position - self._standing.base_count(member) > self._standing.max_delay:
                    return False
                position += 1
        return True

    def complain(self, waiting: list[SlotPlace], now: float) -> list[Action]:
        actions: list[Action] = []
        for place in waiting:
            if place.overdue and not place.complained:
                place.complained = True
                silent = now - place.lease_until + place.slot.lease_s
                actions.append(self._standing.tell(SlotLate(self._standing.shard, place.slot.number, silent)))
        return actions

    def refuse_old(
        self, place: SlotPlace, members: tuple[MemberUpdate, ...], too_old: list[str]
    ) -> list[Action]:
        key = place.slot.group or members[0].update
        reason = f"older than the bound of {self._standing.max_delay} when its turn came"
        rest = tuple(member.update for member in members if member.update not in too_old)
        actions: list[Action] = [
            Send(member.worker, "worker", UpdateRefused(member.update, self._standing.shard, reason))
            for member in members
            if member.update in too_old
        ]
        actions += [
            self._standing.tell(UpdateRefused(update, self._standing.shard, reason)) for update in too_old
        ]
        if rest:
            actions.append(
                self._standing.tell(LeftOut(place.slot.group or "", self._standing.shard, rest, reason))
            )
        return [*actions, *self._parcels.free_parcel(key)]

    def drop_applied_places(self) -> list[Action]:
        """An update that was granted again and came by its first way after all needs no second place."""
        actions: list[Action] = []
        for number, place in list(self.places.items()):
            if place.slot.group is None and place.slot.members[0].update in self._standing.applied:
                del self.places[number]
                actions += self._parcels.acknowledge_again(place.slot.members[0])
        return actions

    def drop_place_of(self, group: str) -> None:
        for number, place in list(self.places.items()):
            if place.slot.group == group:
                del self.places[number]
