"""A plan that stands while offers come, transfers end and rates change: only what is touched is planned anew.

A new offer joins a group whose sum it doesn't delay, or goes direct, whichever is there first; it is put into
the order by its predicted completion, as far as the deadlines of those behind it allow. A changed rate gives
back and books again the transfers over that host's links and the sums that wait for them, and numbers the
updates anew by what is predicted now. Everything else keeps its bookings. From time to time a whole plan
(`plan_updates`) is better by what local changes miss; the caller decides when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from mlfabric.plan.forest import last_position, rotation
from mlfabric.plan.numbering import Arrival, number_arrivals
from mlfabric.plan.ordering import position_deadline
from mlfabric.plan.planner import lay_plan, split_bytes
from mlfabric.plan.reservation import Booking, Ledger
from mlfabric.plan.staircase import INF
from mlfabric.plan.standing import (
    PlanChange,
    StandingGroup,
    StandingTransfer,
    StandingUpdate,
    change_by_drop,
    delivered_bytes,
    write_group,
    write_placed,
)
from mlfabric.plan.values import JobState, Offer, Plan, PlannedDrop
from mlfabric.topology import Link
from mlfabric.units import format_time

# Groups a new offer looks at; trying all gains little.
GROUPS_TRIED: Final = 8


class StandingPlan:
    """One job's plan on a ledger it may share with other jobs."""

    def __init__(self, ledger: Ledger, job: JobState, offers: Sequence[Offer], now_s: float) -> None:
        self.ledger = ledger if job.max_rate_bytes_per_s is None else ledger.limited(job.max_rate_bytes_per_s)
        self.job = job
        self._applied = 0  # updates applied since the plan began
        self._entries: dict[str, StandingUpdate] = {}
        self._order: list[StandingUpdate] = []
        self._groups: dict[str, StandingGroup] = {}
        self._joinable: dict[str | None, list[str]] = {}  # tags of groups by rack of their first host
        self._users: dict[str, dict[StandingTransfer, None]] = {}  # transfers by host at either end, in order
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
            move = StandingTransfer(
                found.tag,
                found.shard,
                found.aggregator,
                found.target,
                found.size_bytes,
                found.parent,
                found.booking,
            )
            names = [laid.kept[index].update for index in found.members]
            group = self._groups.setdefault(found.tag, StandingGroup(found.tag, found.parent, names, []))
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
                move = StandingTransfer(
                    offer.update, s, offer.host, target, cargo.parts[index][s], sent.tag, booking
                )
                moves.append(move)
                self._watch(move)
            entry = StandingUpdate(offer, cargo.deadlines[index], sent.tag, moves, placed.finish_s)
            self._entries[offer.update] = entry
            self._order.append(entry)
        return laid.plan

    def _watch(self, move: StandingTransfer) -> None:
        self._users.setdefault(move.source, {})[move] = None
        self._users.setdefault(move.target, {})[move] = None

    # -- a new offer

    def add_offer(self, offer: Offer, now_s: float) -> PlanChange:
        """Place one more update, or drop it with the reason."""
        self._advance(now_s)
        job, ledger = self.job, self.ledger
        deadline = position_deadline(offer, job)
        if offer.host not in ledger.network.hosts:
            return change_by_drop(offer, f"host {offer.host} is not in the network")
        sizes = split_bytes(offer.size_bytes, job.shards)
        # (finish, prefers a group, targets, tag)
        options: list[tuple[float, int, Sequence[str], str | None]] = []
        for near in self._near_groups(offer.host):
            moves = self._groups[near].moves
            finish_s = max([move.booking.finish_s for move in moves])
            options.append((finish_s, 0, [move.source for move in moves], near))
        servers = [shard.server for shard in job.shards]
        direct_s = max(
            ledger.finish(ledger.path(offer.host, server), size, now_s)
            for server, size in zip(servers, sizes, strict=True)
        )
        if direct_s < INF:
            options.append((direct_s, 1, servers, None))
        reachable = False
        for finish_s, _, targets, tag in sorted(options, key=lambda option: option[:2]):
            if tag is not None and not self._in_time(offer.host, sizes, self._groups[tag], now_s):
                continue
            reachable = True
            position = self._find_position(deadline, finish_s, tag)
            if position is not None:
                return self._insert(offer, deadline, position, sizes, targets, tag, now_s)
        if not reachable:
            return change_by_drop(offer, f"no bandwidth from {offer.host} to its servers")
        delay = job.placed_version + self._first_free() - offer.base_version
        return change_by_drop(offer, f"delay would be {delay}, bound {job.max_delay}")

    def _near_groups(self, host: str) -> list[str]:
        """A few groups it might join: of its own rack, else the last ones made."""
        rack = self.ledger.network.hosts[host].rack
        return self._joinable.get(rack, [])[-GROUPS_TRIED:]

    def _in_time(self, host: str, sizes: Sequence[int], group: StandingGroup, now_s: float) -> bool:
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
        order = self._order
        if tag is not None:  # beside its group, whose members stand together
            behind = len(order)
            while self._top(order[behind - 1].tag) != tag:
                behind -= 1
            return behind if self._first_free() <= behind <= deadline else None
        position = len(order)
        while position > 0:
            first, movable = self._message_before(position)
            if not movable or (position <= deadline and order[first].finish_s <= finish_s):
                break
            position = first
        return position if position <= deadline else None

    def _message_before(self, position: int) -> tuple[int, bool]:
        """Where the message that ends before this position begins, and whether it can be one later."""
        order, applied = self._order, self._applied
        first = position - 1
        movable = order[first].deadline - applied > first
        top = self._top(order[first].tag)
        while top is not None and first > 0 and self._top(order[first - 1].tag) == top:
            first -= 1
            movable = movable and order[first].deadline - applied > first
        return first, movable

    def _first_free(self) -> int:
        """The first position from which on everybody can be one later."""
        for position in range(len(self._order) - 1, -1, -1):
            if self._order[position].deadline - self._applied <= position:
                return position + 1
        return 0

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
        now_s: float,
    ) -> PlanChange:
        ledger = self.ledger
        moves: list[StandingTransfer] = []
        for s in rotation(len(sizes), position):
            booking = ledger.reserve(ledger.path(offer.host, targets[s]), sizes[s], now_s)
            moves.append(StandingTransfer(offer.update, s, offer.host, targets[s], sizes[s], tag, booking))
            self._watch(moves[-1])
        moves.sort(key=lambda move: move.shard)
        ends_s = max(move.booking.finish_s for move in moves)
        entry = StandingUpdate(offer, deadline + self._applied, tag, moves, ends_s)
        self._entries[offer.update] = entry
        if tag is not None:
            return self._join(self._groups[tag], entry, position, now_s)
        # Its own parts may have got in each other's way; a later completion still finds a place in time.
        settled = self._find_position(deadline, ends_s, None)
        assert settled is not None
        self._order.insert(settled, entry)
        how = f"straight to the server; at the server in {format_time(ends_s - now_s)}"
        return PlanChange((write_placed(self.job, entry, settled, how),), (), (), settled + 1)

    def _join(self, group: StandingGroup, entry: StandingUpdate, position: int, now_s: float) -> PlanChange:
        """One more member for a group, which is sent later only if its parts got in each other's way."""
        group.members.append(entry.offer.update)
        self._order.insert(position, entry)
        starts = {move.shard: move.booking.start_s for move in group.moves}
        late = [move.shard for move in entry.moves if move.booking.finish_s > starts[move.shard]]
        self._book_again([group.moves[shard] for shard in late], now_s)
        finish_s = max(move.booking.finish_s for move in group.moves)
        shifted_from = position + 1
        for name in group.members:
            self._entries[name].finish_s = finish_s
        if late:
            first = self._renumber()
            shifted_from = shifted_from if first is None else min(first, shifted_from)
            position = self._order.index(entry)
        how = f"joins the sum at {entry.moves[0].target} before it leaves"
        groups = tuple(write_group(self.job, group, move, self._ready_s(move)) for move in group.moves)
        return PlanChange((write_placed(self.job, entry, position, how),), groups, (), shifted_from)

    def _advance(self, now_s: float) -> None:
        if now_s > self.ledger.now_s:
            self.ledger.advance(now_s)

    # -- time and rates

    def remove(self, update: str, now_s: float, applied: bool = False) -> None:
        """An update is gone, or applied: its own transfers give back what is left of them.

        One that was applied counts: those behind it stand one position earlier and are as old as before. One
        that is gone makes the others younger, so some may give way that could not before.
        """
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
        if applied:
            self._applied += 1
            self.job = replace(self.job, placed_version=self.job.placed_version + 1)
        self._renumber()

    def _dissolve(self, group: StandingGroup, now_s: float) -> None:
        """A group without members sends no sum."""
        for move in group.moves:
            self._forget(move, now_s)
        del self._groups[group.tag]
        for tags in self._joinable.values():
            if group.tag in tags:
                tags.remove(group.tag)

    def _forget(self, move: StandingTransfer, now_s: float) -> None:
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
        if not touched:
            return PlanChange()
        if up <= 0 or down <= 0:
            return self._lose(touched, host, now_s)
        later = self._sums_behind(touched)
        self._book_again([*touched, *later], now_s)
        owners = {move.owner for move in (*touched, *later)}
        tags = {tag for tag in owners if tag in self._groups}
        return self._settle(owners, tags, f"booked again as {host}'s rate changed", now_s)

    def _lose(self, touched: Iterable[StandingTransfer], host: str, now_s: float) -> PlanChange:
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

    def _sums_behind(self, moves: Iterable[StandingTransfer]) -> list[StandingTransfer]:
        """The sums that wait for these transfers, level by level, each once."""
        found: dict[StandingTransfer, None] = {}
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

    def _book_again(self, moves: Sequence[StandingTransfer], now_s: float) -> None:
        """Give back what these transfers hold from now on, then take it again: parts first, then sums."""
        if not moves:
            return
        ledger = self.ledger
        left = {}
        for move in moves:
            ledger.release(move.booking, now_s)
            left[move] = move.size - delivered_bytes(move.booking, now_s)
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

    def _ready_s(self, move: StandingTransfer) -> float:
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
        shifted_from = self._renumber()
        place = {entry.offer.update: position for position, entry in enumerate(self._order)}
        placed = tuple(
            write_placed(self.job, self._entries[name], place[name], why) for name in changed if name in place
        )
        groups = tuple(
            write_group(self.job, self._groups[tag], move, self._ready_s(move))
            for tag in sorted(tags)
            for move in self._groups[tag].moves
        )
        return PlanChange(placed, groups, (), shifted_from)

    def _renumber(self) -> int | None:
        """The order anew by predicted completion, as deadlines allow; the first position that changed."""
        order, applied = self._order, self._applied
        runs: list[list[int]] = []  # positions of one message each; members of a group stand together
        before_tag, before_top = None, None
        for index, entry in enumerate(order):
            tag = entry.tag
            top = before_top if tag == before_tag else self._top(tag)
            if top is not None and top == before_top:
                runs[-1].append(index)
            else:
                runs.append([index])
            before_tag, before_top = tag, top
        deadlines = [entry.deadline - applied for entry in order]
        arrivals = []
        for k, members in enumerate(runs):
            if len(members) > 1:
                members.sort(key=lambda i: (deadlines[i], i))
            finish_s = max([order[i].finish_s for i in members])
            arrivals.append(Arrival(members, finish_s, last_position(members, deadlines), k))
        anew = [index for message in number_arrivals(arrivals) for index in message.members]
        first = next((position for position, index in enumerate(anew) if position != index), None)
        if first is not None:
            self._order = [order[index] for index in anew]
        return first
