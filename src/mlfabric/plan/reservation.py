"""What every link still has to give, and when: the ledger that planning reads and writes.

A link is a staircase of residual rate over time (`staircase.py`). A transfer takes, from its start on, all
that the narrowest link of its path has left (no sharing: that is what makes shortest-first work), up to an
optional limit, until its bytes are through. Rates are exact, so no drift can ever lift a link above its
capacity, and what is released leaves the ledger as it was before, bit for bit.

A scratch plan is an undo log: `mark()`, try, `undo(mark)`. The ledger plans nothing and knows no offers.
The readable form that this one is tested against is `tests/plan/plain_ledger.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Final, NamedTuple

import msgspec

from mlfabric.plan.staircase import INF, NOTHING_BYTES, Path, Piece, Staircase, cut, snap_rate, take_both
from mlfabric.plan.values import Reserved
from mlfabric.topology import Host, Link, Network, Rack

# A staircase drops its past when it is walked and has more past steps than this.
LONG_PAST_STEPS: Final = 64


class Booking(msgspec.Struct, frozen=True, gc=False):
    """What one transfer holds: the same pieces on every link of its path."""

    path: Path
    pieces: list[Piece]
    start_s: float
    finish_s: float


class Hold(NamedTuple):
    """What several transfers hold together, by link: each a constant rate over one stretch of time."""

    rates: Mapping[Staircase, float]
    from_s: float
    to_s: float


class Doors:
    """The links at which a host meets the network, or a rack the core; made when they are first used."""

    __slots__ = ("_down", "_owner", "_start_s", "_up", "rack", "rack_down", "rack_up")

    def __init__(self, owner: Host | Rack, start_s: float, rack: str | None, core: Doors | None) -> None:
        self._owner = owner
        self._start_s = start_s
        self._up: Staircase | None = None
        self._down: Staircase | None = None
        self.rack = rack
        self.rack_up = None if core is None else core.up
        self.rack_down = None if core is None else core.down

    @property
    def up(self) -> Staircase:
        found = self._up
        if found is None:
            owner = self._owner
            found = self._up = Staircase(owner.name, "up", owner.up_bytes_per_s, self._start_s)
        return found

    @property
    def down(self) -> Staircase:
        found = self._down
        if found is None:
            owner = self._owner
            found = self._down = Staircase(owner.name, "down", owner.down_bytes_per_s, self._start_s)
        return found

    def made(self) -> Iterator[Staircase]:
        """Those that were used."""
        if self._up is not None:
            yield self._up
        if self._down is not None:
            yield self._down


class Ledger:
    """Residual rates of all links of a network from `now` on."""

    def __init__(self, network: Network, now_s: float = 0.0) -> None:
        self.network = network
        self.now_s = now_s
        self._doors: dict[str, Doors] = {}
        self._racks: dict[str, Doors] = {}
        self._log: list[Booking | Hold] = []  # releases with their rates negated
        self.host_limit = INF
        self._caps: dict[str, Staircase] = {}

    # -- where a transfer goes

    def path(self, source: str, target: str) -> Path:
        """The links a transfer crosses; empty inside one host."""
        if source == target:
            return ()
        doors = self._doors
        here = doors.get(source) or self._open(source)
        there = doors.get(target) or self._open(target)
        way: Path
        if here.rack == there.rack:
            way = (here.up, there.down)
        elif here.rack_up is None:
            way = (here.up, there.down) if there.rack_down is None else (here.up, there.rack_down, there.down)
        elif there.rack_down is None:
            way = (here.up, here.rack_up, there.down)
        else:
            way = (here.up, here.rack_up, there.rack_down, there.down)
        return way if self.host_limit == INF else (self._cap(source), *way)

    def limited(self, rate_bytes_per_s: float) -> Ledger:
        """The same ledger for a job that may send no more than this from any host, all transfers together."""
        view = copy(self)
        view.host_limit = rate_bytes_per_s
        view._caps = {}
        return view

    def _cap(self, host: str) -> Staircase:
        """A link that only this job sees: what it may still send from the host."""
        found = self._caps.get(host)
        if found is None:
            found = self._caps[host] = Staircase(host, "limit", self.host_limit, self.now_s)
        return found

    def doors(self, host: str) -> Doors:
        """The links at which a host meets the network."""
        return self._doors.get(host) or self._open(host)

    def stairs(self, link: Link) -> Staircase:
        """The staircase of a link; made when its owner is first asked for."""
        doors = self._doors.get(link.owner) or self._racks.get(link.owner)
        if doors is None:
            doors = (
                self._open(link.owner) if link.owner in self.network.hosts else self._open_rack(link.owner)
            )
        return doors.up if link.direction == "up" else doors.down

    def _open(self, name: str) -> Doors:
        host = self.network.hosts[name]
        core = None
        if host.rack is not None and host.rack in self.network.racks:
            core = self._racks.get(host.rack) or self._open_rack(host.rack)
        self._doors[name] = doors = Doors(host, self.now_s, host.rack, core)
        return doors

    def _open_rack(self, name: str) -> Doors:
        self._racks[name] = doors = Doors(self.network.racks[name], self.now_s, None, None)
        return doors

    # -- transfers

    def finish(self, path: Path, size_bytes: float, start_s: float, limit: float = INF) -> float:
        """When a transfer started no earlier than `start_s` would be through; infinite over a dead link."""
        return self.walk(path, size_bytes, start_s, limit)[1]

    def reserve(self, path: Path, size_bytes: float, start_s: float, limit: float = INF) -> Booking:
        """Take what `finish` promises. A transfer that can never end is refused."""
        if len(path) == 2 and size_bytes > 0:
            at_s = start_s if start_s > self.now_s else self.now_s
            pieces = take_both(
                path[0], path[1], size_bytes, at_s, limit if limit == INF else snap_rate(limit)
            )
            if pieces:
                booking = Booking(path, pieces, pieces[0][0], pieces[-1][1])
                self._log.append(booking)
                return booking
        pieces, finish_s = self.walk(path, size_bytes, start_s, limit)
        if finish_s == INF:
            raise ValueError(f"no transfer ends over {' '.join(str(stairs.link) for stairs in path)}")
        booking = Booking(path, pieces, pieces[0][0] if pieces else start_s, finish_s)
        for from_s, to_s, rate in pieces:
            for stairs in path:
                stairs.add(from_s, to_s, -rate)
        self._log.append(booking)
        return booking

    def reserve_parts(
        self,
        source: str,
        targets: Sequence[str],
        sizes: Sequence[int],
        order: Iterable[int],
        start_s: float,
    ) -> list[Booking]:
        """`reserve` for the parts of one update, in the given order; bookings in the order of the targets."""
        doors, log = self._doors, self._log
        here = doors.get(source) or self._open(source)
        at_s = start_s if start_s > self.now_s else self.now_s
        bookings: list[Booking] = [None] * len(sizes)  # type: ignore[list-item]
        for k in order:
            target = targets[k]
            there = doors.get(target) or self._open(target)
            if here.rack == there.rack and here is not there and sizes[k] > 0 and self.host_limit == INF:
                pieces = take_both(here.up, there.down, sizes[k], at_s, INF)
                if pieces:
                    booking = Booking((here.up, there.down), pieces, pieces[0][0], pieces[-1][1])
                    log.append(booking)
                    bookings[k] = booking
                    continue
            bookings[k] = self.reserve(self.path(source, target), sizes[k], start_s)
        return bookings

    def walk(self, path: Path, size_bytes: float, start_s: float, limit: float) -> tuple[list[Piece], float]:
        """The pieces a transfer would take and when it ends."""
        pieces: list[Piece] = []
        if not path or size_bytes <= 0:
            return pieces, start_s
        at_s = start_s if start_s > self.now_s else self.now_s
        left = size_bytes
        if limit != INF:
            limit = snap_rate(limit)
            if limit <= 0:
                return pieces, INF
        indices, ends, rates = [], [], []
        for stairs in path:
            index = bisect_right(stairs.starts, at_s) - 1
            if index > LONG_PAST_STEPS:
                stairs.forget_before(self.now_s)
                index = bisect_right(stairs.starts, at_s) - 1
            indices.append(index)
            ends.append(stairs.starts[index + 1])
            rates.append(stairs.residuals[index])
        while True:
            rate = min(rates)
            if rate > limit:
                rate = limit
            if rate > 0:
                until = min(ends)
                done_s = at_s + left / rate
                end_s = until if done_s > until else done_s
                if end_s > at_s:
                    if pieces and pieces[-1][2] == rate and pieces[-1][1] == at_s:
                        pieces[-1] = (pieces[-1][0], end_s, rate)
                    else:
                        pieces.append((at_s, end_s, rate))
                if done_s <= until:
                    return pieces, done_s
                left -= rate * (until - at_s)
                if left <= NOTHING_BYTES:
                    return pieces, until
                at_s = until
                for k, end in enumerate(ends):
                    if end <= at_s:
                        index = indices[k] = indices[k] + 1
                        rates[k], ends[k] = path[k].residuals[index], path[k].starts[index + 1]
            else:  # over the stretch in which a link has nothing left, at once
                for k, rest in enumerate(rates):
                    if rest <= 0 and ends[k] > at_s:
                        at_s = ends[k]
                if at_s == INF:
                    return pieces, INF
                for k, end in enumerate(ends):
                    if end <= at_s:
                        stairs = path[k]
                        index = indices[k] = bisect_right(stairs.starts, at_s, indices[k]) - 1
                        rates[k], ends[k] = stairs.residuals[index], stairs.starts[index + 1]

    def fit(self, path: Path, rates: Sequence[float], duration_s: float, start_s: float) -> float:
        """The earliest time from which each link of the path has its rate left for `duration_s` on end."""
        at_s = max(start_s, self.now_s)
        moved = True
        while moved:
            moved = False
            for stairs, rate in zip(path, rates, strict=True):
                if stairs.capacity < rate:
                    return INF
                starts, residuals = stairs.starts, stairs.residuals
                index = bisect_right(starts, at_s) - 1
                until = at_s + duration_s
                while starts[index] < until:
                    if residuals[index] < rate:
                        at_s = starts[index + 1]
                        if at_s == INF:
                            return INF
                        until = at_s + duration_s
                        moved = True
                    index += 1
        return at_s

    def hold(self, path: Path, rate: float, start_s: float, finish_s: float) -> Booking:
        """Take a constant rate over a stretch that `fit` found free."""
        booking = Booking(path, [(start_s, finish_s, rate)] if path else [], start_s, finish_s)
        for stairs in path:
            stairs.add(start_s, finish_s, -rate)
        self._log.append(booking)
        return booking

    def hold_totals(self, totals: Mapping[Staircase, float], from_s: float, to_s: float) -> bool:
        """Take from each link what several transfers hold together, if all links have it."""
        if from_s < self.now_s:
            return False
        steps = []  # in which the stretch begins
        for stairs, rate in totals.items():
            starts, residuals = stairs.starts, stairs.residuals
            index = bisect_right(starts, from_s) - 1
            steps.append(index)
            while starts[index] < to_s:
                if residuals[index] < rate:
                    return False
                index += 1
        for (stairs, rate), index in zip(totals.items(), steps, strict=True):
            if to_s <= stairs.starts[index + 1]:
                rest = stairs.residuals[index] - rate
                cut(stairs.starts, stairs.residuals, index, from_s, to_s, rest)
            else:
                stairs.add(from_s, to_s, -rate)
        self._log.append(Hold(totals, from_s, to_s))
        return True

    def release(self, booking: Booking, from_s: float = -INF) -> None:
        """Give back what a booking holds from `from_s` on: all of it, or the remainder of a transfer."""
        kept = [(max(begin, from_s), end, rate) for begin, end, rate in booking.pieces if end > from_s]
        for begin, end, rate in kept:
            for stairs in booking.path:
                stairs.add(begin, end, rate)
        undone = [(begin, end, -rate) for begin, end, rate in kept]
        self._log.append(Booking(booking.path, undone, booking.start_s, booking.finish_s))

    # -- scratch plans

    def mark(self) -> int:
        """A point to come back to by `undo`."""
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Take back every booking and release since the mark."""
        log = self._log
        while len(log) > mark:
            last = log.pop()
            if isinstance(last, Hold):
                for stairs, rate in last.rates.items():
                    stairs.add(last.from_s, last.to_s, rate)
                continue
            for from_s, to_s, rate in last.pieces:
                for stairs in last.path:
                    stairs.add(from_s, to_s, rate)

    # -- time and change

    def advance(self, now_s: float) -> None:
        """The past no longer matters; marks from before can't be undone any more."""
        self.now_s = now_s
        self._log.clear()

    def change_network(self, network: Network) -> None:
        """From now on new links follow this network; links in use change by `set_capacity`."""
        self.network = network

    def set_capacity(self, link: Link, bytes_per_s: float) -> None:
        """A link became faster or slower. A residual below zero says that bookings must be moved off it."""
        stairs = self.stairs(link)
        change = snap_rate(bytes_per_s) - stairs.capacity
        stairs.capacity += change
        for index in range(len(stairs.residuals) - 1):
            stairs.residuals[index] += change

    def links(self) -> Iterator[Staircase]:
        """Every link touched so far."""
        for doors in (*self._doors.values(), *self._racks.values()):
            yield from doors.made()

    def overbooked(self) -> list[Link]:
        """Links with a residual below zero from now on, by name. Empty unless a capacity was lowered."""
        now_s = self.now_s
        return sorted(stairs.link for stairs in self.links() if stairs.least_after(now_s) < 0)


def open_ledger(network: Network, reserved: Iterable[Reserved], now_s: float) -> Ledger:
    """A ledger in which the transfers under way hold what they need to end.

    They are taken in the order of their fields, so equal sets give equal ledgers; where they claim more than
    a link has (its rate has just fallen) the later ones get what is left and end later.
    """
    ledger = Ledger(network, now_s)
    for moving in sorted(reserved, key=lambda r: (r.source, r.target, r.remaining_bytes, r.rate_bytes_per_s)):
        if moving.source in network.hosts and moving.target in network.hosts:
            path = ledger.path(moving.source, moving.target)
            if ledger.finish(path, moving.remaining_bytes, now_s, moving.rate_bytes_per_s) < INF:
                ledger.reserve(path, moving.remaining_bytes, now_s, moving.rate_bytes_per_s)
    return ledger
