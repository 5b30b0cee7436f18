"""How a plan becomes grants to workers, orders to sum, and slots of the order at the servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlfabric.messages import GatherGroup, Grant, MemberInfo, MemberUpdate, PartRoute, Sequence, Slot
from mlfabric.plan.values import Group, Placed, Plan, Reserved
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.entries import Entries, GatheringGroup, GrantedPart, GrantedUpdate
from mlfabric.roles.release import MAX_RATE, node_on
from mlfabric.topology import Network

# How much longer than planned a group may gather and an update may stay away before it is given up.
PATIENCE = 2.0
PATIENCE_S = 1.0


@dataclass(slots=True)
class _Gathered:
    """A planned group while its members are released."""

    planned: Group
    book: GatheringGroup | None = None
    members: list[MemberUpdate] = field(default_factory=list)

    def slot(self, empty: Slot) -> Slot:
        assert self.book is not None
        return Slot(empty.number, tuple(self.members), self.book.group, empty.lease_s)


class Granting:
    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def release(
        self,
        plan: Plan,
        released: tuple[Placed, ...],
        members: Mapping[str, MemberInfo],
        bound: int | None,
        now: float,
    ) -> list[Action]:
        """Turn the part of a plan that starts now into grants, orders to sum, and slots of the order."""
        gathered = {group.group: _Gathered(group) for group in plan.groups}
        slots: dict[int, list[Slot]] = {index: [] for index in self._entries.shards}
        grants: list[Action] = []
        for placed in released:
            waiting = self._entries.waiting.pop(placed.update)
            number = self._entries.next_number
            self._entries.next_number += 1
            self._entries.counts["granted"] += 1
            lease = (placed.finish_s - now) * PATIENCE + PATIENCE_S
            weight = placed.weight if self._entries.settings.weigh else 1.0
            granted = GrantedUpdate(waiting.offer, waiting.worker, number, {}, weight)
            routes = []
            for part in placed.parts:
                if part.shard in self._entries.taking_over:
                    self._hold(granted, part.shard, part.rate_bytes_per_s, part.finish_s, members)
                    continue
                member = self._entries.member(waiting, part.shard)
                if part.group is None:
                    slots[part.shard].append(Slot(number, (member,), None, lease))
                    name, slot = None, number
                    node, role = self._entries.shards[part.shard].range.leader, f"server.{part.shard}"
                else:
                    gathering = self._gather(gathered[part.group], number, lease, members, member)
                    name, slot = gathering.group, gathering.slot
                    node, role = gathering.aggregator, "aggregator"
                    if slot == number:
                        slots[part.shard].append(Slot(number, (), part.group, lease))
                source, target = members[waiting.worker].host, members[node].host
                reserved = Reserved(source, target, float(part.size_bytes), part.rate_bytes_per_s)
                granted.parts[part.shard] = GrantedPart(part.shard, slot, name, reserved, part.finish_s)
                epoch = self._entries.shards[part.shard].range.epoch
                wait = max(part.start_s - now, 0.0)
                routes.append(
                    PartRoute(
                        shard=part.shard,
                        node=node,
                        role=role,
                        rate_bytes_per_s=min(part.rate_bytes_per_s, MAX_RATE),
                        start_in_s=wait,
                        epoch=epoch,
                        group=name,
                        term=self._entries.term,
                    )
                )
            self._entries.granted[placed.update] = granted
            grants.append(Note("placed", f"number {number}: {placed.reason}", (placed.update,)))
            if routes:
                grant = Grant(placed.update, number, weight, tuple(routes), placed.reason)
                grants.append(Send(waiting.worker, "worker", grant))
        return [*self._sequences(slots, gathered, bound), *self._gather_orders(gathered, now), *grants]

    def _gather(
        self,
        gathered: _Gathered,
        number: int,
        lease: float,
        members: Mapping[str, MemberInfo],
        member: MemberUpdate,
    ) -> GatheringGroup:
        """The book's entry for a planned group, made when its first member is released."""
        group = gathered.planned
        if gathered.book is None:
            self._entries.next_group += 1
            node = node_on(group.aggregator, members, member.worker)
            server = members[self._entries.shards[group.shard].range.leader].host
            gathered.book = GatheringGroup(
                group=self._group_name(),
                aggregator=node,
                shard=group.shard,
                slot=number,
                members=set(),
                reserved=Reserved(group.aggregator, server, float(group.size_bytes), group.rate_bytes_per_s),
                finish_s=group.finish_s,
            )
            self._entries.groups[gathered.book.group] = gathered.book
        self._entries.counts["grouped"] += 1
        gathered.members.append(member)
        gathered.book.members.add(member.update)
        return gathered.book

    def _group_name(self) -> str:
        term = f".t{self._entries.term}" if self._entries.term else ""
        return f"{self._entries.job}{term}.g{self._entries.next_group}"

    def _gather_orders(self, gathered: Mapping[str, _Gathered], now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in gathered.values():
            if entry.book is None:
                continue
            group, range_ = entry.planned, self._entries.shards[entry.planned.shard].range
            order = GatherGroup(
                group=entry.book.group,
                shard=group.shard,
                epoch=range_.epoch,
                members=tuple(entry.members),
                server=range_.leader,
                rate_bytes_per_s=min(group.rate_bytes_per_s, MAX_RATE),
                forward_in_s=(group.ready_s - now) * 1.5 + PATIENCE_S / 2,
                reason=group.reason,
                term=self._entries.term,
            )
            updates = tuple(member.update for member in entry.members)
            actions += [
                Note("grouped", f"{entry.book.group} at {entry.book.aggregator}: {group.reason}", updates),
                Send(entry.book.aggregator, "aggregator", order),
            ]
        return actions

    def _sequences(
        self, slots: Mapping[int, list[Slot]], gathered: Mapping[str, _Gathered], bound: int | None
    ) -> list[Action]:
        actions: list[Action] = []
        for index, ordered in slots.items():
            if not ordered:
                continue
            complete = tuple(
                slot if slot.group is None else gathered[slot.group].slot(slot) for slot in ordered
            )
            range_ = self._entries.shards[index].range
            message = Sequence(index, range_.epoch, complete, bound)
            actions.append(Send(range_.leader, f"server.{index}", message))
        return actions

    def grant_broken(
        self, network: Network, members: Mapping[str, MemberInfo], bound: int | None, now: float
    ) -> list[Action]:
        """The parts of these updates did not arrive: they are sent again, in the place they have."""
        broken, self._entries.broken = self._entries.broken, set()
        actions: list[Action] = []
        for update in sorted(broken & self._entries.granted.keys()):
            granted = self._entries.granted[update]
            granted.again = True
            routes = []
            for index in sorted(granted.parts):
                if index in self._entries.taking_over:
                    self._hold(granted, index, MAX_RATE, now, members)
                    continue
                routes.append(self._route_directly(granted, index, network, members, now))
                member = self._entries.member(granted, index)
                lease = (granted.parts[index].finish_s - now) * PATIENCE + PATIENCE_S
                actions += self._sequences({index: [Slot(granted.number, (member,), None, lease)]}, {}, bound)
            reason = "it did not arrive, and other shards have applied it: in the place it has"
            if routes:
                grant = Grant(update, granted.number, granted.weight, tuple(routes), reason)
                actions.append(Send(granted.worker, "worker", grant))
        return actions

    def grant_remainders(
        self, network: Network, members: Mapping[str, MemberInfo], bound: int | None, now: float
    ) -> list[Action]:
        """An update that some shards have applied can't be dropped any more: its other parts go at once, the
        oldest first, so that none becomes too old by waiting for another."""
        shards = len(self._entries.shards)
        rests = [each for each in self._entries.decidable() if len(each.offer.shards) < shards]
        actions: list[Action] = []
        for waiting in sorted(rests, key=lambda each: (-self._entries.age(each), each.arrival)):
            update = waiting.offer.update
            del self._entries.waiting[update]
            number = self._entries.next_number
            self._entries.next_number += 1
            granted = GrantedUpdate(waiting.offer, waiting.worker, number, {})
            routes = []
            for index in waiting.offer.shards:
                if index in self._entries.taking_over:
                    self._hold(granted, index, MAX_RATE, now, members)
                    continue
                routes.append(self._route_directly(granted, index, network, members, now))
                slot = Slot(number, (self._entries.member(waiting, index),), None, PATIENCE_S)
                actions += self._sequences({index: [slot]}, {}, bound)
            self._entries.granted[update] = granted
            reason = "the rest of an update that other shards have applied"
            if routes:
                grant = Grant(update, number, 1.0, tuple(routes), reason)
                actions.append(Send(waiting.worker, "worker", grant))
        return actions

    def _hold(
        self,
        granted: GrantedUpdate,
        index: int,
        rate: float,
        finish_s: float,
        members: Mapping[str, MemberInfo],
    ) -> None:
        """Book a part whose shard is changing hands; it is sent once that is done."""
        source = members[granted.worker].host
        target = members[self._entries.taking_over[index]].host
        size = granted.offer.size_bytes * self._entries.shards[index].range.count / self._entries.elements
        reserved = Reserved(source, target, size, rate)
        granted.parts[index] = GrantedPart(index, granted.number, None, reserved, finish_s, held=True)

    def grant_anew(
        self,
        index: int,
        network: Network,
        members: Mapping[str, MemberInfo],
        bound: int | None,
        now: float,
        only_held: bool = False,
    ) -> list[Action]:
        """Another node leads this shard now: what was on its way there goes to it, in the same order. Or it
        did not come to that (`only_held`): what was held back goes to who leads it still."""
        for name in [name for name, group in self._entries.groups.items() if group.shard == index]:
            if not only_held:
                del self._entries.groups[name]
        slots: list[Slot] = []
        grants: list[Action] = []
        for granted in sorted(self._entries.granted.values(), key=lambda each: each.number):
            if index not in granted.parts or (only_held and not granted.parts[index].held):
                continue
            route = self._route_directly(granted, index, network, members, now)
            lease = (granted.parts[index].finish_s - now) * PATIENCE + PATIENCE_S
            slots.append(Slot(granted.number, (self._entries.member(granted, index),), None, lease))
            update, reason = granted.offer.update, f"shard {index} is led by {route.node} now"
            grant = Grant(update, granted.number, granted.weight, (route,), reason)
            grants.append(Send(granted.worker, "worker", grant))
        return [*self._sequences({index: slots}, {}, bound), *grants]

    def _route_directly(
        self,
        granted: GrantedUpdate,
        index: int,
        network: Network,
        members: Mapping[str, MemberInfo],
        now: float,
    ) -> PartRoute:
        """Book a part at its path's whole rate, straight to who leads the shard."""
        book = self._entries.shards[index].range
        source, target = members[granted.worker].host, members[book.leader].host
        rate = min(network.rate(source, target), MAX_RATE)
        size = granted.offer.size_bytes * book.count / self._entries.elements
        reserved = Reserved(source, target, size, rate)
        granted.parts[index] = GrantedPart(index, granted.number, None, reserved, now + size / rate)
        role = f"server.{index}"
        return PartRoute(index, book.leader, role, rate, 0.0, book.epoch, None, self._entries.term)
