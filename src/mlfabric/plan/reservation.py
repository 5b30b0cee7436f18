"""What every link still has to give, and when: the ledger that planning reads and writes.

A link is a staircase of residual rate over time. A transfer takes, from its start on, all that the narrowest
link of its path has left (no sharing: that is what makes shortest-first work), up to an optional limit, until
its bytes are through. The ledger is exact: rates are whole multiples of 1/1024 byte per second, and sums and
differences of such numbers below 2^43 have no rounding in floats, so no drift can ever lift a link above its
capacity, and what is released leaves the ledger as it was before, bit for bit.

A scratch plan is an undo log: `mark()`, try, `undo(mark)`. The ledger plans nothing and knows no offers.
The readable form that this one is tested against is `tests/plan/plain_ledger.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from mlfabric.plan.values import Reserved
from mlfabric.topology import Link, Network

INF: Final = math.inf
# Rates are multiples of this. 2^53 of them still have exact sums: 8.8 TB/s.
RATE_GRAIN_BYTES_PER_S: Final = 1 / 1024

# A staircase drops its past when it is walked and has more past steps than this.
LONG_PAST_STEPS: Final = 64


def snap_rate(rate_bytes_per_s: float) -> float:
    """The largest exactly representable rate that is not above the given one."""
    if rate_bytes_per_s == INF:
        return INF
    return math.floor(rate_bytes_per_s / RATE_GRAIN_BYTES_PER_S) * RATE_GRAIN_BYTES_PER_S


class Staircase:
    """One link's residual rate over time.

    Step i holds from `starts[i]` to `starts[i + 1]`; the last start is infinite. Neighbouring steps differ,
    so that a link filled by a thousand transfers is one step of zero, and equal ledgers have equal lists.
    """

    __slots__ = ("capacity", "link", "residuals", "starts")

    def __init__(self, link: Link, capacity_bytes_per_s: float, start_s: float) -> None:
        self.link = link
        self.capacity = snap_rate(capacity_bytes_per_s)
        self.starts = [start_s, INF]
        self.residuals = [self.capacity, 0.0]

    def add(self, from_s: float, to_s: float, rate: float) -> None:
        """Give back (rate > 0) or take away (rate < 0) over a stretch of time."""
        starts, residuals = self.starts, self.residuals
        if to_s <= starts[0]:
            return
        first = bisect_right(starts, from_s) - 1
        if first < 0:
            first = 0
        elif starts[first] != from_s:
            first += 1
            starts.insert(first, from_s)
            residuals.insert(first, residuals[first - 1])
        after = first + 1
        residuals[first] += rate
        while starts[after] < to_s:
            residuals[after] += rate
            after += 1
        if starts[after] != to_s:
            starts.insert(after, to_s)
            residuals.insert(after, residuals[after - 1] - rate)
        elif to_s != INF and residuals[after] == residuals[after - 1]:
            del starts[after], residuals[after]
        if first and residuals[first] == residuals[first - 1]:
            del starts[first], residuals[first]

    def residual(self, at_s: float) -> float:
        return self.residuals[max(bisect_right(self.starts, at_s) - 1, 0)]

    def forget_before(self, now_s: float) -> None:
        head = bisect_right(self.starts, now_s) - 1
        if head > 0:
            del self.starts[:head], self.residuals[:head]
            self.starts[0] = now_s
        elif head == 0:
            self.starts[0] = now_s


Path = tuple[Staircase, ...]
Piece = tuple[float, float, float]  # from, to, rate


class Booking(NamedTuple):
    """What one transfer holds: the same pieces on every link of its path."""

    path: Path
    pieces: list[Piece]
    start_s: float
    finish_s: float


class _Doors(NamedTuple):
    """The links at which a host meets the network."""

    up: Staircase
    down: Staircase
    rack: str | None
    rack_up: Staircase | None
    rack_down: Staircase | None


class Ledger:
    """Residual rates of all links of a network from `now` on."""

    def __init__(self, network: Network, now_s: float = 0.0) -> None:
        self.network = network
        self.now_s = now_s
        self._stairs: dict[Link, Staircase] = {}
        self._doors: dict[str, _Doors] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._log: list[tuple[Booking, int]] = []

    # -- where a transfer goes

    def path(self, source: str, target: str) -> Path:
        """The links a transfer crosses; empty inside one host."""
        if source == target:
            return ()
        doors = self._doors
        here = doors.get(source) or self._open(source)
        there = doors.get(target) or self._open(target)
        if here.rack == there.rack:
            return (here.up, there.down)
        if here.rack_up is None:
            return (
                (here.up, there.down) if there.rack_down is None else (here.up, there.rack_down, there.down)
            )
        if there.rack_down is None:
            return (here.up, here.rack_up, there.down)
        return (here.up, here.rack_up, there.rack_down, there.down)

    def stairs(self, link: Link) -> Staircase:
        """The staircase of a link; made when first asked for."""
        found = self._stairs.get(link)
        if found is None:
            found = Staircase(link, self.network.capacity(link), self.now_s)
            self._stairs[link] = found
        return found

    def _open(self, host: str) -> _Doors:
        rack = self.network.hosts[host].rack
        self._doors[host] = doors = _Doors(
            self.stairs(Link(host, "up")),
            self.stairs(Link(host, "down")),
            rack,
            None if rack is None else self.stairs(Link(rack, "up")),
            None if rack is None else self.stairs(Link(rack, "down")),
        )
        return doors

    # -- transfers

    def finish(self, path: Path, size_bytes: float, start_s: float, limit: float = INF) -> float:
        """When a transfer started no earlier than `start_s` would be through; infinite over a dead link."""
        return self._walk(path, size_bytes, start_s, limit)[1]

    def reserve(self, path: Path, size_bytes: float, start_s: float, limit: float = INF) -> Booking:
        """Take what `finish` promises. A transfer that can never end is refused."""
        pieces, finish_s = self._walk(path, size_bytes, start_s, limit)
        if finish_s == INF:
            raise ValueError(f"no transfer ends over {' '.join(str(stairs.link) for stairs in path)}")
        booking = Booking(path, pieces, pieces[0][0] if pieces else start_s, finish_s)
        for from_s, to_s, rate in pieces:
            for stairs in path:
                stairs.add(from_s, to_s, -rate)
        self._log.append((booking, -1))
        return booking

    def _walk(self, path: Path, size_bytes: float, start_s: float, limit: float) -> tuple[list[Piece], float]:
        """The pieces a transfer would take and when it ends."""
        pieces: list[Piece] = []
        if not path or size_bytes <= 0:
            return pieces, start_s
        at_s = start_s if start_s > self.now_s else self.now_s
        left = size_bytes
        limit = snap_rate(limit)
        indices = [bisect_right(stairs.starts, at_s) - 1 for stairs in path]
        if max(indices) > LONG_PAST_STEPS:
            for stairs in path:
                stairs.forget_before(self.now_s)
            indices = [bisect_right(stairs.starts, at_s) - 1 for stairs in path]
        while True:
            rate, until = limit, INF
            for stairs, index in zip(path, indices, strict=True):
                residual = stairs.residuals[index]
                if residual < rate:
                    rate = residual
                end = stairs.starts[index + 1]
                if end < until:
                    until = end
            if rate > 0:
                done_s = at_s + left / rate
                if done_s <= until:
                    if done_s > at_s:
                        _extend(pieces, at_s, done_s, rate)
                    return pieces, done_s
                left -= rate * (until - at_s)
                _extend(pieces, at_s, until, rate)
                if left <= 0:
                    return pieces, until
            elif until == INF:
                return pieces, INF
            at_s = until
            for k, stairs in enumerate(path):
                if stairs.starts[indices[k] + 1] <= at_s:
                    indices[k] += 1

    def fit(self, path: Path, rate: float, duration_s: float, start_s: float) -> float:
        """The earliest time from which every link of the path has `rate` left for `duration_s` on end."""
        at_s = max(start_s, self.now_s)
        moved = True
        while moved:
            moved = False
            for stairs in path:
                if stairs.capacity < rate:
                    return INF
                index = bisect_right(stairs.starts, at_s) - 1
                until = at_s + duration_s
                while stairs.starts[index] < until:
                    if stairs.residuals[index] < rate and stairs.starts[index] != INF:
                        at_s = stairs.starts[index + 1]
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
        self._log.append((booking, -1))
        return booking

    def release(self, booking: Booking, from_s: float = -INF) -> None:
        """Give back what a booking holds from `from_s` on: all of it, or the remainder of a transfer."""
        kept = [(max(begin, from_s), end, rate) for begin, end, rate in booking.pieces if end > from_s]
        for begin, end, rate in kept:
            for stairs in booking.path:
                stairs.add(begin, end, rate)
        self._log.append((Booking(booking.path, kept, booking.start_s, booking.finish_s), 1))

    # -- scratch plans

    def mark(self) -> int:
        """A point to come back to by `undo`."""
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Take back every booking and release since the mark."""
        log = self._log
        while len(log) > mark:
            booking, sign = log.pop()
            for from_s, to_s, rate in reversed(booking.pieces):
                for stairs in booking.path:
                    stairs.add(from_s, to_s, rate if sign < 0 else -rate)

    # -- time and change

    def advance(self, now_s: float) -> None:
        """The past no longer matters; marks from before can't be undone any more."""
        self.now_s = now_s
        self._log.clear()

    def set_capacity(self, link: Link, bytes_per_s: float) -> None:
        """A link became faster or slower. A residual below zero says that bookings must be moved off it."""
        stairs = self.stairs(link)
        change = snap_rate(bytes_per_s) - stairs.capacity
        stairs.capacity += change
        for index in range(len(stairs.residuals) - 1):
            stairs.residuals[index] += change

    def links(self) -> Iterable[Staircase]:
        """Every link touched so far."""
        return self._stairs.values()

    def overbooked(self) -> list[Link]:
        """Links with a residual below zero, by name. Empty unless a capacity was lowered."""
        return sorted(stairs.link for stairs in self._stairs.values() if min(stairs.residuals) < 0)


def _extend(pieces: list[Piece], from_s: float, to_s: float, rate: float) -> None:
    """Append a piece, or lengthen the last one where nothing changes."""
    if pieces and pieces[-1][1] == from_s and pieces[-1][2] == rate:
        pieces[-1] = (pieces[-1][0], to_s, rate)
    else:
        pieces.append((from_s, to_s, rate))


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
