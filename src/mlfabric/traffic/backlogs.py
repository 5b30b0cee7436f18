"""B_max(r): the largest queue a work-conserving link of rate r would build up, also its smallest token
bucket.

B_max(r) is the maximum over s <= t of A(t) - A(s-) - r (t - s). Exact per rate: blocks of packets give
bounds for where the busiest stretch can begin and end, and only those blocks are opened. As a function of r
it is convex and piecewise linear; `backlog_curve` finds all of its corners by intersecting the lines of
known points, two evaluations per corner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic import native
from mlfabric.traffic.arrivals import Arrivals, instant
from mlfabric.traffic.trace import Trace

_BLOCK: Final = 64
_SUBBLOCK: Final = 8
_TOGETHER: Final = 16  # blocks that are first looked at as one
_FEW: Final = 256  # blocks that are opened without a second look
_PIECE: Final = 1 << 15  # packets whose columns stay in the processor's cache
_BITS_PER_BYTE_NS: Final = 8e9  # bit/s in one byte per nanosecond

_Part = slice | NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """The busiest stretch at some rate: what arrived, in how long, and the queue that leaves."""

    rate_bps: float
    bytes: float  # the backlog
    arrived_bytes: float
    duration_ns: float
    start_ns: float

    @property
    def delay_s(self) -> float:
        """How long the last byte of that queue waits."""
        return self.bytes * 8 / self.rate_bps if self.rate_bps else math.inf

    def at(self, rate_bps: float) -> float:
        """This stretch's backlog at another rate."""
        return self.arrived_bytes - rate_bps / _BITS_PER_BYTE_NS * self.duration_ns


@dataclass(frozen=True)
class _Blocks:
    """Runs of packets [first, last] with what bounds a busy stretch that begins or ends in one."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    first_start: NDArray[Any]
    last_start: NDArray[Any]
    first_end: NDArray[Any]
    last_end: NDArray[Any]
    before: NDArray[Any]
    after: NDArray[Any]

    @classmethod
    def of(cls, arrivals: Arrivals, first: NDArray[np.int64], last: NDArray[np.int64]) -> _Blocks:
        start, end, running = arrivals.start, arrivals.end, arrivals.running
        first_start, last_start = start.take(first), start.take(last)
        instantaneous = start is end
        return cls(
            first,
            last,
            first_start,
            last_start,
            first_start if instantaneous else end.take(first),
            last_start if instantaneous else end.take(last),
            running(first),
            running(last + 1),
        )

    def worth_opening(self, rate: float, known: float) -> tuple[NDArray[np.intp], float]:
        """Blocks that may hold the beginning or the end of the busiest stretch, never leaving one out, and
        the best stretch between block ends."""
        known_low = np.minimum.accumulate(self.before - rate * self.first_start)
        best = max(known, float((self.after - rate * self.last_end - known_low).max()))
        highest = self.after - rate * self.first_end
        lowest = self.before - rate * self.last_start
        # Rounding of the bounds themselves must not exclude the optimum.
        enough = best - 1e-9 * max(abs(best), 1.0) - 1e-12 * float(np.abs(lowest).max())
        # Within one block no stretch exceeds the block's bytes; otherwise it begins in an earlier one.
        alone = self.after - self.before >= enough
        may_end = highest[1:] - np.minimum.accumulate(lowest)[:-1] >= enough
        may_begin = np.maximum.accumulate(highest[::-1])[-2::-1] - lowest[:-1] >= enough
        alone[1:] |= may_end
        alone[:-1] |= may_begin
        return np.flatnonzero(alone), best

    def mark(self, depth: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]) -> None:
        """Notes the blocks from each `begin` to each `end`: the running sum of `depth` is above zero
        there."""
        # Ranges with one beginning nest: the longest stands for all of them.
        last = np.append(begin[1:] != begin[:-1], True)
        np.add.at(depth, np.searchsorted(self.first, begin[last], side="right") - 1, 1)
        np.add.at(depth, np.searchsorted(self.first, end[last], side="right"), -1)

    def bounds(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """When the first and the last packet of each came, and the bytes before and after it."""
        return self.first_start, self.last_start, self.before, self.after

    def only(self, chosen: NDArray[np.integer[Any]]) -> _Blocks:
        return _Blocks(*(getattr(self, each.name)[chosen] for each in fields(self)))


class Backlog:
    """Evaluates B_max of one trace at any rate."""

    def __init__(self, arrivals: Arrivals | Trace) -> None:
        self._arrivals = instant(arrivals) if isinstance(arrivals, Trace) else arrivals
        first = _block_starts(self._arrivals.start)
        self._blocks = _Blocks.of(self._arrivals, first, np.append(first[1:], len(self._arrivals)) - 1)
        self._coarse_first = np.arange(0, len(first), _TOGETHER)
        coarse = first[self._coarse_first]
        self._coarse = _Blocks.of(self._arrivals, coarse, np.append(coarse[1:], len(self._arrivals)) - 1)

    def at(self, rate_bps: float) -> Stretch:
        """B_max at one rate, with the stretch that makes it."""
        library = self._library()
        if library is None:
            return self._within(self._blocks, rate_bps, None)[0]
        return self._compiled(library, [rate_bps])[0]

    def _library(self) -> Any:
        """The compiled form; it takes whole nanoseconds, which fluid arrivals do not have."""
        return native.library() if self._arrivals.line_rate_bps is None else None

    def _compiled(self, library: Any, rates_bps: Sequence[float]) -> list[Stretch]:
        found = native.busiest_stretches(
            library,
            self._arrivals.start,
            self._arrivals.running.columns(),
            np.array(rates_bps, np.float64) / _BITS_PER_BYTE_NS,
            self._blocks.first,
            self._blocks.bounds(),
            _TOGETHER,
            self._coarse.bounds(),
        )
        rows = zip(rates_bps, found.tolist(), strict=True)
        return [self._stretch(rate, opening, closing) for rate, (opening, closing) in rows]

    def at_many(self, rates_bps: Sequence[float]) -> list[Stretch]:
        """B_max at several rates. What is busy at one rate bounds what can matter at all higher ones: a
        stretch that counts there lies in a busy period here whose queue is at least that of the highest
        rate."""
        if not rates_bps:
            return []
        library = self._library()
        if library is not None:
            return self._compiled(library, rates_bps)
        found: dict[float, Stretch] = {max(rates_bps): self.at(max(rates_bps))}
        floor = found[max(rates_bps)].bytes
        blocks = self._blocks
        for rate in sorted(set(rates_bps) - set(found)):
            found[rate], narrower = self._within(blocks, rate, floor * (1 - 1e-9) - 1e-6)
            blocks = blocks if narrower is None else narrower
        return [found[rate] for rate in rates_bps]

    def _within(
        self, blocks: _Blocks, rate_bps: float, floor: float | None
    ) -> tuple[Stretch, _Blocks | None]:
        """The busiest stretch in these blocks; and, where most had to be opened, those that still matter."""
        rate = rate_bps / _BITS_PER_BYTE_NS
        best, opening, closing, lowest, lowest_at = -math.inf, 0, 0, math.inf, 0
        looked_at, chosen, known = self._look(blocks, rate)
        # What stays for higher rates is chosen from all that is left, not from what matters at this one.
        narrowing = floor is not None and looked_at is blocks and len(chosen) > len(blocks.first) // 4
        busy = np.zeros(len(blocks.first) + 1, np.int64)
        parts = self._all_of(blocks) if narrowing else self._parts(looked_at, chosen, rate, known)
        for part in parts:
            before, after, start, end = self._columns(part)
            low = before - rate * start
            after = after - (rate * end)
            low = np.minimum.accumulate(low)
            np.minimum(low, lowest, out=low)
            after -= low
            top = int(after.argmax())
            if after[top] > best:
                best, closing = float(after[top]), _index(part, top)
                reached = int(np.searchsorted(-low, -low[top]))
                opening = lowest_at if lowest <= low[top] else _index(part, reached)
            if narrowing and after[top] >= floor:
                ends = np.flatnonzero(after >= floor)
                began = np.searchsorted(-low, -low[ends])
                since = np.where(low[ends] >= lowest, lowest_at, _indices(part, began))
                blocks.mark(busy, since, _indices(part, ends))
            if low[-1] < lowest:
                lowest, lowest_at = float(low[-1]), _index(part, int(np.searchsorted(-low, -low[-1])))
        stretch = self._stretch(rate_bps, opening, closing)
        return stretch, blocks.only(np.flatnonzero(np.cumsum(busy[:-1]) > 0)) if narrowing else None

    def _stretch(self, rate_bps: float, opening: int, closing: int) -> Stretch:
        """What the packets from one to another leave queued."""
        arrived = self._arrivals.running.one(closing + 1) - self._arrivals.running.one(opening)
        started = self._arrivals.start[opening].item()
        duration = self._arrivals.end[closing].item() - started
        queued = arrived - rate_bps / _BITS_PER_BYTE_NS * duration
        return Stretch(rate_bps, queued, arrived, duration, started)

    def _columns(self, part: _Part) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Bytes before and after each packet of a part, and where it starts and ends."""
        arrivals = self._arrivals
        if isinstance(part, slice):
            sums = arrivals.running.between(part.start, part.stop)
            return sums[:-1], sums[1:], arrivals.start[part], arrivals.end[part]
        start = arrivals.start.take(part)
        end = start if arrivals.end is arrivals.start else arrivals.end.take(part)
        return *arrivals.running.around(part), start, end

    def _look(self, blocks: _Blocks, rate: float) -> tuple[_Blocks, NDArray[np.intp], float]:
        """Blocks, those of them worth opening, and the best stretch known: first by many blocks at once."""
        known = -math.inf
        if blocks is self._blocks:
            outer, known = self._coarse.worth_opening(rate, known)
            if len(outer) <= len(self._coarse.first) // 4:
                begin = self._coarse_first[outer]
                count = np.minimum(begin + _TOGETHER, len(blocks.first)) - begin
                blocks = blocks.only(_spread_out(begin, count, 1))
        chosen, known = blocks.worth_opening(rate, known)
        return blocks, chosen, known

    def _all_of(self, blocks: _Blocks) -> Iterator[_Part]:
        """Every packet of these blocks, in order."""
        if blocks is self._blocks:
            for start in range(0, len(self._arrivals), _PIECE):
                yield slice(start, min(start + _PIECE, len(self._arrivals)))
            return
        yield from _in_runs(blocks.first, blocks.last)

    def _parts(self, blocks: _Blocks, chosen: NDArray[np.intp], rate: float, known: float) -> Iterator[_Part]:
        """Packets of the chosen blocks in order: everything where that is most of what there is."""
        if blocks is self._blocks and len(chosen) > len(blocks.first) // 4:
            yield from self._all_of(blocks)
            return
        first, last = blocks.first[chosen], blocks.last[chosen]
        if len(chosen) > _FEW:
            count = (last - first) // _SUBBLOCK + 1
            inner = _spread_out(first, count, _SUBBLOCK)
            ends = np.minimum(inner + _SUBBLOCK - 1, np.repeat(last, count))
            kept, _ = _Blocks.of(self._arrivals, inner, ends).worth_opening(rate, known)
            first, last = inner[kept], ends[kept]
        yield from _in_runs(first, last)


def _in_runs(first: NDArray[np.int64], last: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    together = _PIECE // _SUBBLOCK
    for start in range(0, len(first), together):
        few = slice(start, start + together)
        yield _spread_out(first[few], last[few] - first[few] + 1, 1)


def _index(part: _Part, position: int) -> int:
    return part.start + position if isinstance(part, slice) else int(part[position])


def _indices(part: _Part, positions: NDArray[np.intp]) -> NDArray[np.int64]:
    return part.start + positions if isinstance(part, slice) else part[positions]


def _spread_out(first: NDArray[np.int64], count: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """first[k], first[k] + step, ... count[k] of them, for every k in turn."""
    shift = np.repeat(first - step * (np.cumsum(count) - count), count)
    result: NDArray[np.int64] = np.arange(len(shift)) * step + shift
    return result


def _block_starts(position: NDArray[Any]) -> NDArray[np.int64]:
    """Blocks of at most 64 packets, none of which spans a long pause: its bounds would be useless."""
    count = len(position)
    pause = (position[-1] - position[0]) * (_BLOCK / count)
    regular = np.arange(0, count, _BLOCK)
    after_pause = [
        np.flatnonzero(np.diff(position[start : start + _PIECE + 1]) > pause) + start + 1
        for start in range(0, count - 1, _PIECE)
    ]
    return np.unique(np.concatenate([regular, *after_pause]))


def backlog(arrivals: Arrivals | Trace, rate_bps: float) -> Stretch:
    return Backlog(arrivals).at(rate_bps)


def backlog_curve(
    arrivals: Arrivals | Trace, low_bps: float, high_bps: float, most_corners: int = 2000
) -> list[Stretch]:
    """Every corner of B_max between two rates, both ends included: straight between neighbours.

    With more corners than asked for, the result is still exact at each point and an upper bound between them.
    """
    exact = Backlog(arrivals)
    left, right = exact.at(low_bps), exact.at(high_bps)
    points = {left.rate_bps: left, right.rate_bps: right}
    waiting = [(left, right)]
    while waiting and len(points) < most_corners:
        low, high = waiting.pop()
        slope = low.duration_ns - high.duration_ns
        if slope <= 0:
            continue
        rate = (low.arrived_bytes - high.arrived_bytes) / slope * _BITS_PER_BYTE_NS
        if not low.rate_bps < rate < high.rate_bps:
            continue
        middle = exact.at(rate)
        points[rate] = middle
        if middle.bytes > low.at(rate) + 1e-6 + 1e-12 * abs(middle.arrived_bytes):
            waiting += [(low, middle), (middle, high)]
    return [points[rate] for rate in sorted(points)]


def least_rate(arrivals: Arrivals | Trace, buffer_bytes: float) -> float | None:
    """The smallest link rate (bit/s) whose queue never exceeds the buffer; None where no rate is enough,
    because one instant brings more than the buffer holds."""
    exact = Backlog(arrivals)
    rate = 0.0
    while True:
        stretch = exact.at(rate)
        if stretch.bytes <= buffer_bytes * (1 + 1e-12) + 1e-6:
            return rate
        if stretch.duration_ns <= 0:
            return None
        # Newton's step on a convex curve from the left never overshoots and ends at a corner's line.
        following = (stretch.arrived_bytes - buffer_bytes) / stretch.duration_ns * _BITS_PER_BYTE_NS
        if following <= rate:
            return rate
        rate = following
