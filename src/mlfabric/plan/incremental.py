"""A plan that stands while offers come, transfers end and rates change: only what is touched is planned anew.

A new offer joins a group whose sum it doesn't delay, or goes direct, whichever is there first; it is put into
the order by its predicted completion, as far as the deadlines of those behind it allow. A changed rate gives
back and books again the transfers over that host's links and the sums that wait for them. Everything else
keeps its bookings. From time to time a whole plan (`plan_updates`) is better by what local changes miss; the
caller decides when.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from mlfabric.plan.forest import rotation
from mlfabric.plan.ordering import position_deadline
from mlfabric.plan.planner import lay_plan, split_bytes
from mlfabric.plan.reservation import Booking, Ledger
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import Group, JobState, Offer, Part, Placed, Plan, PlannedDrop
from mlfabric.plan.writing import weigh
from mlfabric.topology import Link
from mlfabric.units import format_time

# Groups a new offer looks at; trying all gains little.
GROUPS_TRIED: Final = 8


@dataclass(frozen=True, slots=True)
class PlanChange:
    """What an event did to a standing plan: entries made or changed; the rest stands."""

    placed: tuple[Placed, ...] = ()
    groups: tuple[Group, ...] = ()
    drops: tuple[PlannedDrop, ...] = ()
    shifted_from: int | None = None  # updates from this position on are one later than before


class _Move:
    """One transfer of the standing plan: a part of an update, or a group's sum of one shard."""

    __slots__ = ("booking", "group", "owner", "shard", "size", "source", "target")

    def __init__(
        self, owner: str, shard: int, source: str, target: str, size: int, group: str | None, booking: Booking
    ) -> None:
        self.owner = owner  # update, or tag of the group
        self.shard = shard  # its place in the job's shards
        self.source = source
        self.target = target
        self.size = size
        self.group = group  # tag of the group it goes into
        self.booking = booking


class _Entry:
    """An update in the standing order."""

    __slots__ = ("deadline", "finish_s", "moves", "offer", "tag")

    def __init__(
        self, offer: Offer, deadline: int, tag: str | None, moves: list[_Move], finish_s: float
    ) -> None:
        self.offer = offer
        self.deadline = deadline
        self.tag = tag
        self.moves = moves
        self.finish_s = finish_s


class _Sums:
    """A group: its members, and its sums by shard."""

    __slots__ = ("members", "moves", "parent", "tag")

    def __init__(self, tag: str, parent: str | None, members: list[str], moves: list[_Move]) -> None:
        self.tag = tag
        self.parent = parent
        self.members = members
        self.moves = moves


class StandingPlan:
    """One job's plan on a ledger it may share with other jobs."""

    def __init__(self, ledger: Ledger, job: JobState, offers: Sequence[Offer], now_s: float) -> None:
        self.ledger = ledger if job.max_rate_bytes_per_s is None else ledger.limited(job.max_rate_bytes_per_s)
        self.job = job
        self._entries: dict[str, _Entry] = {}
        self._order: list[_Entry] = []
        self._groups: dict[str, _Sums] = {}
        self._joinable: dict[str | None, list[str]] = {}  # tags of groups by rack of their first host
        self._users: dict[str, dict[_Move, None]] = {}  # transfers by host at either end, in order
        self.plan = self._adopt(offers, now_s)

    def order(self) -> list[str]:
        """Updates by position."""
        return [entry.offer.update for entry in self._order]

    def finish_s(self, update: str) -> float:
        return self._entries[update].finish_s

    # -- the first plan

    def _adopt(self, offers: Sequence[Offer], now_s: float) -> Plan:
        laid = lay_plan(self.ledger, self.job, offers, now_s)
        layout, cargo = laid.layout, laid.cargo
        for found in layout.sums:
            if found.chain:
                continue  # a chain's hops are its members' own parts
            move = _Move(
                found.tag,
                found.shard,
                found.aggregator,
                found.target,
                found.size_bytes,
                found.parent,
                found.booking,
            )
            names = [laid.kept[index].update for index in found.members]
            group = self._groups.setdefault(found.tag, _Sums(found.tag, found.parent, names, []))
            group.moves.append(move)
            self._watch(move)
        for group in self._groups.values():
            group.moves.sort(key=lambda move: move.shard)
            if group.parent is None:
                rack = self.ledger.network.hosts[group.moves[0].source].rack
                self._joinable.setdefault(rack, []).append(group.tag)
        index_of = {offer.update: index for index, offer in enumerate(laid.kept)}
        for placed in laid.plan.placed:
            index = index_of[placed.update]
            sent, offer = layout.sent[index], laid.kept[index]
            moves = []
            for s, (target, booking) in enumerate(zip(sent.targets, sent.bookings, strict=True)):
                if booking.pieces and not booking.path:  # its stream of a paced gather
                    path = self.ledger.path(offer.host, target)
                    booking = Booking(path, booking.pieces, booking.start_s, booking.finish_s)
                move = _Move(offer.update, s, offer.host, target, cargo.parts[index][s], sent.tag, booking)
                moves.append(move)
                self._watch(move)
            entry = _Entry(offer, cargo.deadlines[index], sent.tag, moves, placed.finish_s)
            self._entries[offer.update] = entry
            self._order.append(entry)
        return laid.plan

    def _watch(self, move: _Move) -> None:
        self._users.setdefault(move.source, {})[move] = None
        self._users.setdefault(move.target, {})[move] = None

    # -- a new offer

    def add_offer(self, offer: Offer, now_s: float) -> PlanChange:
        """Place one more update, or drop it with the reason."""
        self._advance(now_s)
        job, ledger = self.job, self.ledger
        deadline = position_deadline(offer, job)
        if offer.host not in ledger.network.hosts:
            return _dropped(offer, f"host {offer.host} is not in the network")
        sizes = split_bytes(offer.size_bytes, job.shards)
        # (finish, prefers a group, targets, tag)
        options: list[tuple[float, int, Sequence[str], str | None]] = []
        for near in self._near_groups(offer.host):
            group = self._groups[near]
            if self._in_time(offer.host, sizes, group, now_s):
                finish_s = max(move.booking.finish_s for move in group.moves)
                options.append((finish_s, 0, [move.source for move in group.moves], near))
        servers = [shard.server for shard in job.shards]
        direct_s = max(
            ledger.finish(ledger.path(offer.host, server), size, now_s)
            for server, size in zip(servers, sizes, strict=True)
        )
        if direct_s < INF:
            options.append((direct_s, 1, servers, None))
        for finish_s, _, targets, tag in sorted(options, key=lambda option: option[:2]):
            position = self._find_position(deadline, finish_s, tag)
            if position is not None:
                return self._insert(offer, deadline, position, sizes, targets, tag, finish_s, now_s)
        if not options:
            return _dropped(offer, f"no bandwidth from {offer.host} to its servers")
        delay = job.placed_version + self._first_free() - offer.base_version
        return _dropped(offer, f"delay would be {delay}, bound {job.max_delay}")

    def _near_groups(self, host: str) -> list[str]:
        """A few groups it might join: of its own rack, else the last ones made."""
        rack = self.ledger.network.hosts[host].rack
        return self._joinable.get(rack, [])[-GROUPS_TRIED:]

    def _in_time(self, host: str, sizes: Sequence[int], group: _Sums, now_s: float) -> bool:
        """Would its parts be at the group's hosts before the sums leave?"""
        ledger = self.ledger
        for move, size in zip(group.moves, sizes, strict=True):
            start_s = move.booking.start_s
            if start_s <= now_s or size > move.size:
                return False
            if ledger.finish(ledger.path(host, move.source), size, now_s) > start_s:
                return False
        return True

    def _find_position(self, deadline: int, finish_s: float, tag: str | None) -> int | None:
        """By predicted completion, but behind everybody who can't be one later; None if that is too late."""
        first = self._first_free()
        if tag is not None:  # beside its group, whose members stand together
            behind = len(self._order)
            while self._top(self._order[behind - 1].tag) != tag:
                behind -= 1
            return behind if first <= behind <= deadline else None
        latest = min(deadline, len(self._order))
        wanted: int = bisect_right(self._order, finish_s, key=lambda entry: entry.finish_s)
        wanted = min(max(wanted, first), latest)
        for position in chain(range(wanted, latest + 1), range(wanted - 1, first - 1, -1)):
            if position >= first and not self._inside_group(position):
                return position
        return None

    def _first_free(self) -> int:
        """The first position from which on everybody can be one later."""
        for position in range(len(self._order) - 1, -1, -1):
            if self._order[position].deadline <= position:
                return position + 1
        return 0

    def _inside_group(self, position: int) -> bool:
        """Would an update put here part two members of one group?"""
        if not 0 < position < len(self._order):
            return False
        tag = self._top(self._order[position].tag)
        return tag is not None and tag == self._top(self._order[position - 1].tag)

    def _top(self, tag: str | None) -> str | None:
        """The outermost group a tag belongs to; a chain has no group here but keeps together too."""
        while tag is not None and tag in self._groups and self._groups[tag].parent is not None:
            tag = self._groups[tag].parent
        return tag

    def _insert(
        self,
        offer: Offer,
        deadline: int,
        position: int,
        sizes: Sequence[int],
        targets: Sequence[str],
        tag: str | None,
        finish_s: float,
        now_s: float,
    ) -> PlanChange:
        ledger = self.ledger
        moves: list[_Move] = []
        for s in rotation(len(sizes), position):
            booking = ledger.reserve(ledger.path(offer.host, targets[s]), sizes[s], now_s)
            moves.append(_Move(offer.update, s, offer.host, targets[s], sizes[s], tag, booking))
            self._watch(moves[-1])
        moves.sort(key=lambda move: move.shard)
        ends_s = max(move.booking.finish_s for move in moves)
        entry = _Entry(offer, deadline, tag, moves, max(finish_s, ends_s))
        groups: tuple[Group, ...] = ()
        if tag is not None:
            group = self._groups[tag]
            group.members.append(offer.update)
            late = [move for move in group.moves if moves[move.shard].booking.finish_s > move.booking.start_s]
            self._book_again(late, now_s)  # its own parts got in each other's way
            entry.finish_s = max(move.booking.finish_s for move in group.moves)
            groups = tuple(self._write_group(group, move) for move in group.moves)
        self._entries[offer.update] = entry
        self._order.insert(position, entry)
        if tag is None:
            how = f"direct, there in {format_time(entry.finish_s - now_s)}"
        else:
            how = f"joins the sum at {targets[0]} that leaves after it is there"
        return PlanChange((self._write_placed(position, how),), groups, (), position + 1)

    def _advance(self, now_s: float) -> None:
        if now_s > self.ledger.now_s:
            self.ledger.advance(now_s)

    # -- time and rates

    def remove(self, update: str, now_s: float) -> None:
        """An update is through or gone: its own transfers give back what is left of them."""
        entry = self._entries.pop(update)
        self._order.remove(entry)
        for move in entry.moves:
            self._forget(move, now_s)
        tag = entry.tag
        while tag is not None and tag in self._groups:
            group = self._groups[tag]
            group.members.remove(update)
            if not group.members:
                self._dissolve(group, now_s)
            tag = group.parent

    def _dissolve(self, group: _Sums, now_s: float) -> None:
        """A group without members sends no sum."""
        for move in group.moves:
            self._forget(move, now_s)
        del self._groups[group.tag]
        for tags in self._joinable.values():
            if group.tag in tags:
                tags.remove(group.tag)

    def _forget(self, move: _Move, now_s: float) -> None:
        self.ledger.release(move.booking, now_s)
        for host in (move.source, move.target):
            self._users[host].pop(move, None)

    def change_rate(self, host: str, up: float, down: float, now_s: float) -> PlanChange:
        """A host's links became faster or slower: book its transfers and the sums behind them again."""
        self._advance(now_s)
        ledger = self.ledger
        before = ledger.network.hosts[host]
        changed = replace(before, up_bytes_per_s=up, down_bytes_per_s=down)
        ledger.change_network(ledger.network.with_host(changed))
        ledger.set_capacity(Link(host, "up"), up)
        ledger.set_capacity(Link(host, "down"), down)
        touched = [move for move in self._users.get(host, {}) if move.booking.finish_s > now_s]
        if up <= 0 or down <= 0:
            return self._lose(touched, host, now_s)
        later = self._sums_behind(touched)
        self._book_again([*touched, *later], now_s)
        owners = {move.owner for move in (*touched, *later)}
        tags = {tag for tag in owners if tag in self._groups}
        return self._settle(owners, tags, f"booked again as {host}'s rate changed", now_s)

    def _lose(self, touched: Iterable[_Move], host: str, now_s: float) -> PlanChange:
        """A link is gone: what has to cross it is dropped, with the members of its groups."""
        names: set[str] = set()
        for move in touched:
            if move.owner in self._groups:
                names.update(self._groups[move.owner].members)
            else:
                names.add(move.owner)
        drops = []
        for name in sorted(names & self._entries.keys()):
            self.remove(name, now_s)
            drops.append(PlannedDrop(name, f"the link of host {host} is gone while it had to cross it"))
        return PlanChange(drops=tuple(drops))

    def _sums_behind(self, moves: Iterable[_Move]) -> list[_Move]:
        """The sums that wait for these transfers, level by level, each once."""
        found: dict[_Move, None] = {}
        level = list(moves)
        already = set(level)
        while level:
            above = []
            for move in level:
                group = self._groups.get(move.group) if move.group is not None else None
                if group is not None:
                    above.append(group.moves[move.shard])
            level = [move for move in above if move not in already and move not in found]
            found.update(dict.fromkeys(level))
        return list(found)

    def _book_again(self, moves: Sequence[_Move], now_s: float) -> None:
        """Give back what these transfers hold from now on, then take it again: parts first, then sums."""
        if not moves:
            return
        ledger = self.ledger
        left = {}
        for move in moves:
            ledger.release(move.booking, now_s)
            left[move] = move.size - _delivered(move.booking, now_s)
        place = {entry.offer.update: position for position, entry in enumerate(self._order)}
        parts = [move for move in moves if move.owner not in self._groups]
        sums = [move for move in moves if move.owner in self._groups]
        parts.sort(key=lambda move: (place.get(move.owner, 0), move.shard))
        sums.sort(key=lambda move: (move.owner.count("-") * -1, move.booking.start_s, move.owner, move.shard))
        for move in (*parts, *sums):
            ready_s = now_s
            if move.owner in self._groups:
                ready_s = max(now_s, self._ready_s(move))
            path = ledger.path(move.source, move.target)
            again = ledger.reserve(path, left[move], ready_s)
            past = [(a, min(b, now_s), rate) for a, b, rate in move.booking.pieces if a < now_s]
            start_s = past[0][0] if past else again.start_s
            move.booking = Booking(path, [*past, *again.pieces], start_s, again.finish_s)

    def _ready_s(self, move: _Move) -> float:
        """When the last child of a group is at its host."""
        arrivals = [
            child.booking.finish_s
            for child in self._users.get(move.source, {})
            if child.group == move.owner and child.shard == move.shard and child.target == move.source
        ]
        return max(arrivals, default=0.0)

    def _settle(self, owners: set[str], tags: set[str], why: str, now_s: float) -> PlanChange:
        """Predicted completions after transfers moved; order by them where deadlines allow."""
        changed: dict[str, None] = dict.fromkeys(sorted(owners & self._entries.keys()))
        for tag in sorted(tags):
            changed.update(dict.fromkeys(self._groups[tag].members))
        for name in changed:
            entry = self._entries.get(name)
            if entry is not None:
                top = self._top(entry.tag)
                moves = self._groups[top].moves if top is not None and top in self._groups else entry.moves
                entry.finish_s = max(move.booking.finish_s for move in moves)
        place = {entry.offer.update: position for position, entry in enumerate(self._order)}
        placed = tuple(self._write_placed(place[name], why) for name in changed if name in place)
        groups = tuple(
            self._write_group(self._groups[tag], move)
            for tag in sorted(tags)
            for move in self._groups[tag].moves
        )
        return PlanChange(placed, groups)

    # -- records

    def _write_placed(self, position: int, why: str) -> Placed:
        job, entry = self.job, self._order[position]
        delay = job.placed_version + position - entry.offer.base_version
        bound = "no bound" if job.max_delay is None else f"bound {job.max_delay}"
        parts = tuple(
            Part(
                job.shards[move.shard].index,
                move.target,
                move.size,
                move.booking.start_s,
                move.booking.finish_s,
                _mean_rate(move),
                None if move.group is None else f"{move.group}.{job.shards[move.shard].index}",
            )
            for move in entry.moves
        )
        weight = weigh(delay, job.concurrency)
        reason = f"{why}; delay {delay}, {bound}"
        return Placed(entry.offer.update, position, delay, weight, parts, entry.finish_s, reason)

    def _write_group(self, group: _Sums, move: _Move) -> Group:
        shard = self.job.shards[move.shard].index
        return Group(
            group=f"{group.tag}.{shard}",
            shard=shard,
            aggregator=move.source,
            members=tuple(group.members),
            size_bytes=move.size,
            ready_s=self._ready_s(move),
            start_s=move.booking.start_s,
            finish_s=move.booking.finish_s,
            rate_bytes_per_s=_mean_rate(move),
            reason=f"{len(group.members)} updates reach {move.target} as one sum",
            target=move.target,
            parent=None if group.parent is None else f"{group.parent}.{shard}",
        )


def _mean_rate(move: _Move) -> float:
    lasts = move.booking.finish_s - move.booking.start_s
    return move.size / lasts if lasts > 0 else INF


def _delivered(booking: Booking, now_s: float) -> float:
    return sum((min(end, now_s) - begin) * rate for begin, end, rate in booking.pieces if begin < now_s)


def _dropped(offer: Offer, reason: str) -> PlanChange:
    return PlanChange(drops=(PlannedDrop(offer.update, reason),))
