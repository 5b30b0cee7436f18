"""One job's order: offers that wait, updates that were granted, groups that gather; who is told what.

The planner decides order and routes; this book carries its decisions out and keeps them true while members
come late, refuse, or die. It belongs to the scheduler and sees no bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from mlfabric.messages import (
    AppliedReport,
    DropUpdate,
    GatherGroup,
    Grant,
    JobSettings,
    JudgeUpdate,
    LeaveOut,
    LeftOut,
    MemberInfo,
    MemberUpdate,
    OfferAgain,
    OfferUpdate,
    PartRoute,
    Sequence,
    SettleSlot,
    ShardRange,
    Slot,
    SlotLate,
    SlotWithdrawn,
    Version,
    WithdrawSlot,
    count_at,
)
from mlfabric.plan.planner import plan_updates
from mlfabric.plan.values import Group, JobState, Offer, Placed, Plan, Reserved, Shard
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.release import (
    MAX_RATE,
    at_full_rate,
    due_prefix,
    host_of,
    lookahead,
    node_on,
    remainder,
)
from mlfabric.topology import Network

# Offers that come within this time are planned together.
BATCH_S = 0.002
# So are changes of rates.
RATES_S = 0.05
# How much longer than planned a group may gather and an update may stay away before it is given up.
PATIENCE = 2.0
PATIENCE_S = 1.0
# A new scheduler does not know how far the last one numbered: each term has numbers of its own.
NUMBERS_PER_TERM = 2**40


@dataclass(slots=True)
class ShardBook:
    """What the scheduler knows of a shard."""

    range: ShardRange
    version: int = 0
    ready: bool = False
    replica_filled: bool = False
    fail_overs: list[Version] = field(default_factory=list)
    undurable: dict[str, int] = field(default_factory=dict)  # update -> version, not at the replica yet


@dataclass(slots=True)
class _Waiting:
    offer: OfferUpdate
    worker: str  # node
    arrival: int
    since: float
    judging: set[int] | None = None  # shards that have yet to say that they lack it; None: not asked


@dataclass(slots=True)
class _GrantedPart:
    shard: int
    slot: int  # number of the slot it belongs to at this shard
    group: str | None
    reserved: Reserved
    finish_s: float


@dataclass(slots=True)
class _Granted:
    offer: OfferUpdate
    worker: str
    number: int
    parts: dict[int, _GrantedPart]


@dataclass(slots=True)
class _Gathering:
    group: str
    aggregator: str  # node
    shard: int
    slot: int
    members: set[str]
    reserved: Reserved
    finish_s: float


@dataclass(slots=True)
class _Gathered:
    """A planned group while its members are released."""

    planned: Group
    book: _Gathering | None = None
    members: list[MemberUpdate] = field(default_factory=list)

    def slot(self, empty: Slot) -> Slot:
        assert self.book is not None
        return Slot(empty.number, tuple(self.members), self.book.group, empty.lease_s)


@dataclass(slots=True)
class _Withdrawal:
    """A number that is being given up, and what follows once all shards have answered."""

    update: str | None  # of a single update; a group's members are offered again by themselves
    why: str
    asked: set[int]
    ask: set[int]  # have not answered yet
    drop: bool  # tell the worker that it is dropped
    refused: set[int] = field(default_factory=set)


class OrderBook:
    def __init__(
        self, job: str, settings: JobSettings, elements: int, term: int = 0, first_number: int = 0
    ) -> None:
        self.job = job
        self._term = term
        self.settings = settings
        self.shards: dict[int, ShardBook] = {}
        self._elements = elements
        self._waiting: dict[str, _Waiting] = {}
        self._granted: dict[str, _Granted] = {}
        self._groups: dict[str, _Gathering] = {}
        self._withdrawals: dict[tuple[int, int], _Withdrawal] = {}  # by number and shard
        self._leaving: dict[tuple[int, str], int] = {}  # (shard, update) -> slot; may still be applied
        self._drops_in_row: dict[str, int] = {}
        self._next_number = max(term * NUMBERS_PER_TERM, first_number)
        self._next_group = first_number  # no fewer than there were groups; their names are not used twice
        self._arrivals = 0
        self.plan_at: float | None = None
        self.recent: deque[tuple[float, int]] = deque(maxlen=1000)  # (when, updates applied), of any shard
        self.counts = {"offers": 0, "granted": 0, "dropped": 0, "dropped_late": 0, "grouped": 0, "again": 0}

    # --- offers and outcomes ----------------------------------------------------------------------------

    def offered(self, offer: OfferUpdate, worker: str, now: float) -> list[Action]:
        actions: list[Action] = []
        self.counts["offers"] += 1
        if offer.again:
            self.counts["again"] += 1
        if offer.update in self._granted:
            actions = self._void(offer.update, offer.again or "it was offered again")
        self._arrivals += 1
        self._waiting[offer.update] = _Waiting(offer, worker, self._arrivals, now)
        self._plan_soon(now + BATCH_S)
        return actions

    def _plan_soon(self, at: float) -> None:
        self.plan_at = at if self.plan_at is None else min(self.plan_at, at)

    def rates_changed(self, now: float) -> None:
        """What waits is planned anew, soon: news of rates come in flocks."""
        if self._waiting:
            self._plan_soon(now + RATES_S)

    def applied(self, report: AppliedReport, now: float) -> list[Action]:
        book = self.shards[report.shard]
        if report.epoch != book.range.epoch:
            return []
        book.version = max(book.version, report.version)
        self.recent.append((now, len(report.updates)))
        held = report.replica_version if report.replica_version is not None else report.version
        book.undurable.update(dict.fromkeys(report.updates, report.version))
        book.undurable = {update: at for update, at in book.undurable.items() if at > held}
        for update in report.updates:
            self._leaving.pop((report.shard, update), None)
            granted = self._granted.get(update)
            if granted is not None:
                self._finish_part(granted, report.shard)
                self._drops_in_row.pop(granted.worker, None)
            waiting = self._waiting.get(update)
            if waiting is not None:  # offered again, and came by its first way after all
                rest = tuple(index for index in waiting.offer.shards if index != report.shard)
                waiting.offer = msgspec.structs.replace(waiting.offer, shards=rest)
                if waiting.judging is not None:
                    waiting.judging.discard(report.shard)
                if not rest:
                    del self._waiting[update]
        self._plan_soon(now)
        return []

    def refused(self, update: str) -> None:
        """A server found it too old when its turn came; its worker knows."""
        granted = self._granted.get(update)
        self._waiting.pop(update, None)
        for shard in self.shards:
            self._leaving.pop((shard, update), None)
        if granted is not None:
            self.counts["dropped_late"] += 1
            for shard in list(granted.parts):
                self._finish_part(granted, shard)

    def _finish_part(self, granted: _Granted, shard: int) -> None:
        part = granted.parts.pop(shard, None)
        if part is not None and part.group in self._groups:
            gathering = self._groups[part.group]
            gathering.members.discard(granted.offer.update)
            if not gathering.members:
                del self._groups[part.group]
        if not granted.parts:
            self._granted.pop(granted.offer.update, None)

    # --- planning ---------------------------------------------------------------------------------------

    def max_delay(self, workers: int) -> int | None:
        """The bound in force; "auto" is twice the updates that can be in flight."""
        if self.settings.unbounded:
            return None
        if self.settings.max_delay is not None:
            return self.settings.max_delay
        return 2 * max(workers, 1) * self.settings.in_flight

    def placed_count(self, shard: int) -> int:
        under_way = sum(1 for granted in self._granted.values() if shard in granted.parts)
        leaving = sum(1 for index, _ in self._leaving if index == shard)
        return self.shards[shard].version + under_way + leaving

    def reserved(self, now: float) -> list[Reserved]:
        """What is under way for this job, as far as it should still be."""
        held: list[_GrantedPart | _Gathering] = list(self._groups.values())
        held += [part for granted in self._granted.values() for part in granted.parts.values()]
        return [remainder(each.reserved, each.finish_s, now) for each in held]

    def plan(
        self, network: Network, others: list[Reserved], members: Mapping[str, MemberInfo], now: float
    ) -> list[Action]:
        """Plan what waits, tell everybody concerned what starts now, leave the rest for later."""
        self.plan_at = None
        workers = sum(1 for member in members.values() if "worker" in member.roles)
        bound = self.max_delay(workers)
        actions = self._grant_remainders(network, members, bound, now)
        if not self._decidable():
            return actions
        state, offers = self._situation(network, members, workers, bound)
        plan = at_full_rate(
            plan_updates(network, [*others, *self.reserved(now)], state, offers, 0.0),
            now,
            network,
            {offer.update: offer.host for offer in offers},
            {shard.index: shard.server for shard in state.shards},
        )
        for drop in plan.drops:
            actions += self._drop(drop.update, drop.reason)
        released = due_prefix(plan, now)
        if released:
            actions += self._release(plan, released, members, bound, now)
        rest = plan.placed[len(released) :]
        if rest:
            starts = [
                part.start_s - lookahead(part.finish_s - part.start_s) for p in rest for part in p.parts
            ]
            self._plan_soon(max(min(starts), now + BATCH_S))
        return actions

    def _decidable(self) -> list[_Waiting]:
        """What waits, but for updates whose first way may still lead to the model: nobody decides twice."""
        undecided = {update for _, update in self._leaving}
        return [
            waiting
            for update, waiting in self._waiting.items()
            if update not in undecided and not waiting.judging
        ]

    def _situation(
        self, network: Network, members: Mapping[str, MemberInfo], workers: int, bound: int | None
    ) -> tuple[JobState, list[Offer]]:
        placed = {index: self.placed_count(index) for index in self.shards}
        top = max(placed.values())
        offers = []
        for waiting in self._decidable():
            offer = waiting.offer
            behind = max(
                placed[index] - count_at(offer.bases[index], self.shards[index].fail_overs)
                for index in self.shards
            )
            offers.append(
                Offer(
                    update=offer.update,
                    worker=waiting.worker,
                    host=members[waiting.worker].host,
                    size_bytes=offer.size_bytes,
                    base_version=top - behind,
                    norm=offer.norm,
                    arrival=waiting.arrival,
                    drops_in_row=self._drops_in_row.get(waiting.worker, 0),
                    job=self.job,
                )
            )
        aggregators: tuple[str, ...] = ()
        if self.settings.aggregate:
            aggregators = tuple(sorted({m.host for m in members.values() if "aggregator" in m.roles}))
        shards = tuple(
            Shard(
                index=index,
                server=members[book.range.leader].host,
                replica=host_of(book.range.replica, members),
                share=book.range.count / self._elements,
            )
            for index, book in sorted(self.shards.items())
        )
        state = JobState(
            name=self.job,
            placed_version=top,
            max_delay=bound,
            concurrency=max(workers * self.settings.in_flight, 1),
            shards=shards,
            aggregators=aggregators,
            policy=self.settings.policy,
        )
        return state, offers

    def _drop(self, update: str, reason: str) -> list[Action]:
        waiting = self._waiting[update]
        if waiting.offer.again and waiting.judging is None:
            return self._judge(waiting)
        del self._waiting[update]
        self.counts["dropped"] += 1
        self._drops_in_row[waiting.worker] = self._drops_in_row.get(waiting.worker, 0) + 1
        return [
            Note("dropped", reason, (update,)),
            Send(waiting.worker, "worker", DropUpdate(update, reason)),
        ]

    def _judge(self, waiting: _Waiting) -> list[Action]:
        """An update offered again after a fault may be in the model, its acknowledgement lost: ask first."""
        waiting.judging = set(waiting.offer.shards)
        return [
            Send(
                self.shards[index].range.leader,
                f"server.{index}",
                JudgeUpdate(index, self._member(waiting, index)),
            )
            for index in waiting.offer.shards
        ]

    def not_applied(self, shard: int, update: str, now: float) -> None:
        waiting = self._waiting.get(update)
        if waiting is not None and waiting.judging is not None:
            waiting.judging.discard(shard)
            self._plan_soon(now)

    def _release(
        self,
        plan: Plan,
        released: tuple[Placed, ...],
        members: Mapping[str, MemberInfo],
        bound: int | None,
        now: float,
    ) -> list[Action]:
        """Turn the part of a plan that starts now into grants, orders to sum, and slots of the order."""
        gathered = {group.group: _Gathered(group) for group in plan.groups}
        slots: dict[int, list[Slot]] = {index: [] for index in self.shards}
        grants: list[Action] = []
        for placed in released:
            waiting = self._waiting.pop(placed.update)
            number = self._next_number
            self._next_number += 1
            self.counts["granted"] += 1
            lease = (placed.finish_s - now) * PATIENCE + PATIENCE_S
            weight = placed.weight if self.settings.weigh else 1.0
            granted = _Granted(waiting.offer, waiting.worker, number, {})
            routes = []
            for part in placed.parts:
                member = self._member(waiting, part.shard)
                if part.group is None:
                    slots[part.shard].append(Slot(number, (member,), None, lease))
                    name, slot = None, number
                    node, role = self.shards[part.shard].range.leader, f"server.{part.shard}"
                else:
                    gathering = self._gather(gathered[part.group], number, lease, members, member)
                    name, slot = gathering.group, gathering.slot
                    node, role = gathering.aggregator, "aggregator"
                    if slot == number:
                        slots[part.shard].append(Slot(number, (), part.group, lease))
                source, target = members[waiting.worker].host, members[node].host
                reserved = Reserved(source, target, float(part.size_bytes), part.rate_bytes_per_s)
                granted.parts[part.shard] = _GrantedPart(part.shard, slot, name, reserved, part.finish_s)
                epoch = self.shards[part.shard].range.epoch
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
                        term=self._term,
                    )
                )
            self._granted[placed.update] = granted
            grants += [
                Note("placed", f"number {number}: {placed.reason}", (placed.update,)),
                Send(
                    waiting.worker,
                    "worker",
                    Grant(placed.update, number, weight, tuple(routes), placed.reason),
                ),
            ]
        return [*self._sequences(slots, gathered, bound), *self._gather_orders(gathered, now), *grants]

    def _member(self, waiting: _Waiting, shard: int) -> MemberUpdate:
        offer = waiting.offer
        return MemberUpdate(offer.update, waiting.worker, offer.bases[shard], offer.floor)

    def _gather(
        self,
        gathered: _Gathered,
        number: int,
        lease: float,
        members: Mapping[str, MemberInfo],
        member: MemberUpdate,
    ) -> _Gathering:
        """The book's entry for a planned group, made when its first member is released."""
        group = gathered.planned
        if gathered.book is None:
            self._next_group += 1
            node = node_on(group.aggregator, members, member.worker)
            server = members[self.shards[group.shard].range.leader].host
            gathered.book = _Gathering(
                group=self._group_name(),
                aggregator=node,
                shard=group.shard,
                slot=number,
                members=set(),
                reserved=Reserved(group.aggregator, server, float(group.size_bytes), group.rate_bytes_per_s),
                finish_s=group.finish_s,
            )
            self._groups[gathered.book.group] = gathered.book
        self.counts["grouped"] += 1
        gathered.members.append(member)
        gathered.book.members.add(member.update)
        return gathered.book

    def _group_name(self) -> str:
        term = f".t{self._term}" if self._term else ""
        return f"{self.job}{term}.g{self._next_group}"

    def _gather_orders(self, gathered: Mapping[str, _Gathered], now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in gathered.values():
            if entry.book is None:
                continue
            group, range_ = entry.planned, self.shards[entry.planned.shard].range
            order = GatherGroup(
                group=entry.book.group,
                shard=group.shard,
                epoch=range_.epoch,
                members=tuple(entry.members),
                server=range_.leader,
                rate_bytes_per_s=min(group.rate_bytes_per_s, MAX_RATE),
                forward_in_s=(group.ready_s - now) * 1.5 + PATIENCE_S / 2,
                reason=group.reason,
                term=self._term,
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
            range_ = self.shards[index].range
            message = Sequence(index, range_.epoch, complete, bound)
            actions.append(Send(range_.leader, f"server.{index}", message))
        return actions

    def _grant_remainders(
        self, network: Network, members: Mapping[str, MemberInfo], bound: int | None, now: float
    ) -> list[Action]:
        """An update that some shards have applied can't be dropped any more: its other parts go at once."""
        actions: list[Action] = []
        for waiting in self._decidable():
            update = waiting.offer.update
            if len(waiting.offer.shards) == len(self.shards):
                continue
            del self._waiting[update]
            number = self._next_number
            self._next_number += 1
            granted = _Granted(waiting.offer, waiting.worker, number, {})
            routes = []
            for index in waiting.offer.shards:
                book = self.shards[index].range
                source, target = members[waiting.worker].host, members[book.leader].host
                rate = min(network.rate(source, target), MAX_RATE)
                size = waiting.offer.size_bytes * book.count / self._elements
                finish = now + size / rate
                reserved = Reserved(source, target, size, rate)
                granted.parts[index] = _GrantedPart(index, number, None, reserved, finish)
                role = f"server.{index}"
                routes.append(PartRoute(index, book.leader, role, rate, 0.0, book.epoch, None, self._term))
                slot = Slot(number, (self._member(waiting, index),), None, PATIENCE_S)
                message = Sequence(index, book.epoch, (slot,), bound)
                actions.append(Send(book.leader, f"server.{index}", message))
            self._granted[update] = granted
            reason = "the rest of an update that other shards have applied"
            actions.append(Send(waiting.worker, "worker", Grant(update, number, 1.0, tuple(routes), reason)))
        return actions

    # --- what goes wrong --------------------------------------------------------------------------------

    def _void(self, update: str, why: str) -> list[Action]:
        """Take back a grant: give up its direct slots, leave it out of groups."""
        granted = self._granted.pop(update)
        actions: list[Action] = []
        direct = {part.shard for part in granted.parts.values() if part.group is None}
        self._leaving.update({(shard, update): granted.number for shard in direct})
        if direct:
            actions += self._ask_withdrawal(granted.number, None, why, direct, drop=False)
        for part in granted.parts.values():
            gathering = self._groups.get(part.group or "")
            if gathering is not None:
                gathering.members.discard(update)
                self._leaving[part.shard, update] = gathering.slot
                actions.append(
                    Send(gathering.aggregator, "aggregator", LeaveOut(gathering.group, update, why))
                )
        return actions

    def _ask_withdrawal(
        self, number: int, update: str | None, why: str, shards: set[int], drop: bool
    ) -> list[Action]:
        withdrawal = _Withdrawal(update, why, set(shards), set(shards), drop)
        for index in shards:
            earlier = self._withdrawals.get((number, index))
            if earlier is not None:  # what it still waits for is settled with this one
                withdrawal.asked |= earlier.asked
                withdrawal.ask |= earlier.ask
                withdrawal.refused |= earlier.refused - shards
        for index in withdrawal.ask:
            self._withdrawals[number, index] = withdrawal
        return [
            Send(self.shards[index].range.leader, f"server.{index}", WithdrawSlot(number, why))
            for index in sorted(shards)
        ]

    def withdrawn(self, answer: SlotWithdrawn, now: float) -> list[Action]:
        withdrawal = self._withdrawals.pop((answer.number, answer.shard), None)
        if withdrawal is None:
            return []
        withdrawal.ask.discard(answer.shard)
        if not answer.withdrawn:
            withdrawal.refused.add(answer.shard)
        if not answer.waiting:
            gone = [k for k, slot in self._leaving.items() if k[0] == answer.shard and slot == answer.number]
            for key in gone:
                del self._leaving[key]
            self._plan_soon(now)
        if withdrawal.ask:
            return []
        update = withdrawal.update
        dropped = not withdrawal.refused
        final = withdrawal.drop and dropped
        # An update is dropped everywhere or nowhere; one that was offered again leaves where it can.
        actions: list[Action] = [
            Send(
                book.range.leader,
                f"server.{index}",
                SettleSlot(
                    answer.number,
                    dropped=dropped if withdrawal.drop else index not in withdrawal.refused,
                    final=final,
                ),
            )
            for index, book in sorted(self.shards.items())
            if index in withdrawal.asked
        ]
        if not withdrawal.drop or update is None:
            return actions
        if not dropped:
            parts = ", ".join(str(index) for index in sorted(withdrawal.refused))
            return [*actions, Note("kept", f"late, but shards {parts} have it already", (update,))]
        granted = self._granted.pop(update, None)
        if granted is not None:
            self.counts["dropped_late"] += 1
            actions += [
                Note("dropped", withdrawal.why, (update,)),
                Send(granted.worker, "worker", DropUpdate(update, withdrawal.why, late=True)),
            ]
        return actions

    def slot_late(self, message: SlotLate) -> list[Action]:
        asked = [w for (number, _), w in self._withdrawals.items() if number == message.number]
        if any(message.shard in withdrawal.asked for withdrawal in asked):
            return []
        under_way = next((withdrawal for withdrawal in asked if withdrawal.drop), None)
        if under_way is not None:  # an update is dropped everywhere or nowhere
            under_way.asked.add(message.shard)
            under_way.ask.add(message.shard)
            self._withdrawals[message.number, message.shard] = under_way
            range_ = self.shards[message.shard].range
            return [
                Send(range_.leader, f"server.{message.shard}", WithdrawSlot(message.number, under_way.why))
            ]
        for granted in self._granted.values():
            part = granted.parts.get(message.shard)
            if part is None or part.slot != message.number:
                continue
            if part.group is not None:
                return self._fail_group(part.group, f"group {part.group} silent {message.silent_s:.1f} s")
            why = f"overtaken, host {granted.worker} silent {message.silent_s:.1f} s"
            shards = set(granted.parts)
            return self._ask_withdrawal(message.number, granted.offer.update, why, shards, drop=True)
        # Nobody is behind it any more: clear the way.
        return self._ask_withdrawal(message.number, None, "nothing will come", {message.shard}, drop=False)

    def _fail_group(self, name: str, why: str) -> list[Action]:
        gathering = self._groups.pop(name, None)
        if gathering is None:
            return []
        self._leaving.update({(gathering.shard, update): gathering.slot for update in gathering.members})
        actions = self._ask_withdrawal(gathering.slot, None, why, {gathering.shard}, drop=False)
        for update in sorted(gathering.members):
            actions += self._send_again(update, gathering.shard, why)
        return actions

    def _send_again(self, update: str, shard: int, why: str) -> list[Action]:
        granted = self._granted.get(update)
        if granted is None or shard not in granted.parts:
            return []
        self._finish_part(granted, shard)
        return [Send(granted.worker, "worker", OfferAgain(update, (shard,), why))]

    def left_out(self, message: LeftOut, now: float) -> list[Action]:
        for update in message.updates:
            if self._leaving.pop((message.shard, update), None) is not None:
                self._plan_soon(now)
        gathering = self._groups.get(message.group)
        if gathering is not None and gathering.members <= set(message.updates):
            return self._fail_group(message.group, message.reason)
        return [
            action
            for update in message.updates
            for action in self._send_again(update, message.shard, message.reason)
        ]

    def node_lost(self, node: str, reason: str) -> list[Action]:
        """A worker's offers go with it; what it was gathering for others is offered again by them."""
        actions: list[Action] = []
        for update, waiting in list(self._waiting.items()):
            if waiting.worker == node:
                del self._waiting[update]
                actions.append(Note("abandoned", f"host {node} lost: {reason}", (update,)))
        for name, gathering in list(self._groups.items()):
            if gathering.aggregator == node:
                actions += self._fail_group(name, f"aggregator {node} lost: {reason}")
        for update, granted in list(self._granted.items()):
            if granted.worker == node:
                actions += self._void(update, f"host {node} lost: {reason}")
        return actions

    def leader_lost(self, shard: int) -> None:
        """Nothing granted reaches the old leader; workers offer again once they know the new one."""
        for name, gathering in list(self._groups.items()):
            if gathering.shard == shard:
                del self._groups[name]
        for granted in list(self._granted.values()):
            if shard in granted.parts:
                self._finish_part(granted, shard)
        self._withdrawals = {key: w for key, w in self._withdrawals.items() if shard not in w.ask}
        self._leaving = {key: slot for key, slot in self._leaving.items() if key[0] != shard}

    def is_idle(self, shard: int) -> bool:
        """Whether nothing is on its way to this shard."""
        return not (
            any(shard in granted.parts for granted in self._granted.values())
            or any(gathering.shard == shard for gathering in self._groups.values())
            or any(index == shard for index, _ in self._leaving)
        )

    def has_open(self, worker: str) -> bool:
        """Whether updates of this node, or sums it makes, are without an outcome."""
        return (
            any(waiting.worker == worker for waiting in self._waiting.values())
            or any(granted.worker == worker for granted in self._granted.values())
            or any(gathering.aggregator == worker for gathering in self._groups.values())
        )

    def open_counts(self) -> tuple[int, int]:
        """(updates that wait, updates on their way)."""
        return len(self._waiting), len(self._granted)

    def next_number(self) -> int:
        return self._next_number

    def last_number(self) -> int:
        return self._next_number - 1

    def validate(self) -> None:
        assert not self._waiting.keys() & self._granted.keys(), "an update both waits and is granted"
        for name, gathering in self._groups.items():
            for update in gathering.members:
                granted = self._granted.get(update)
                assert granted is not None, f"{update} in group {name} is not granted"
                assert any(part.group == name for part in granted.parts.values()), (
                    f"{update} is not in {name}"
                )
