"""The burstiness curve E(tau): most bytes in any window of length tau, windows sliding over arrivals.

Exact without looking at every window. The windows that start in a block of packets hold no more than the
bytes from the block's first packet to what the next block's first window reaches; blocks whose bound is
below the best window found so far are never opened. `envelope_by_bins` is the aligned form other tools
report, offered under its own name: it under-reads by up to two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic import native
from mlfabric.traffic.arrivals import Arrivals, Bytes, Positions, instant
from mlfabric.traffic.trace import Trace, pieces

_BLOCK: Final = 64
_SUBBLOCK: Final = 8
# Blocks opened at once: bounds the memory, and lets the best so far exclude later ones.
_OPENED: Final = 4096


@dataclass(frozen=True)
class Peak:
    """The fullest window of one length."""

    bytes: float  # a whole number for instant arrivals
    start_ns: float  # of the first such window, from the trace's first packet


@dataclass(frozen=True)
class _Family:
    """Candidate windows in order: where each starts, the bytes before it, the bytes up to its end."""

    count: int
    position: Callable[[NDArray[np.int64]], Positions]
    before: Callable[[NDArray[np.int64]], Bytes]
    reach: Callable[[Positions], Bytes]


def envelope(arrivals: Arrivals | Trace, tau_ns: int) -> Peak | None:
    """E(tau) and where the first fullest window lies; None where tau exceeds the span."""
    if isinstance(arrivals, Trace):
        arrivals = instant(arrivals)
    if not len(arrivals) or tau_ns > arrivals.end[-1] - arrivals.start[0]:
        return None
    library = native.library()
    if library is not None and arrivals.line_rate_bps is None:
        running = arrivals.running
        most, first = native.window_maximum(
            library, arrivals.start, running.columns(), running.largest, tau_ns
        )
        return Peak(most, int(arrivals.start[first]))
    forward = _Family(
        len(arrivals),
        arrivals.start.take,
        arrivals.running,
        lambda position: arrivals.passed(position + tau_ns),
    )
    best, index = _best(forward)
    peak = Peak(best, arrivals.start[index].item())
    if arrivals.line_rate_bps is None:
        return peak
    # A fluid window may be fullest where it ends with a frame instead of starting with one: the same search
    # on the trace read backwards.
    last, total = len(arrivals) - 1, arrivals.running.one(len(arrivals))
    backward = _Family(
        len(arrivals),
        lambda index: -arrivals.end.take(last - index),
        lambda index: total - arrivals.running(last - index + 1),
        lambda position: total - arrivals.passed(-(position + tau_ns)),
    )
    best, index = _best(backward)
    if best > peak.bytes:
        peak = Peak(best, arrivals.end[last - index].item() - tau_ns)
    return peak


def _best(family: _Family) -> tuple[Any, int]:
    first = np.arange(0, family.count, _BLOCK)
    reach, before = family.reach(family.position(first)), family.before(first)
    held = reach - before
    # All windows of a block start before the next block does, so none reaches further than that one's.
    farthest = np.append(reach[1:], family.before(np.array([family.count])))
    bound = farthest - before
    best, index = held.max(), int(first[held.argmax()])
    # The most promising blocks first: what they hold excludes most others.
    promising = np.argsort(bound)[-_SUBBLOCK:]
    best, index = _open(family, first[promising], farthest[promising], best, index)
    rest = np.flatnonzero(bound >= best)
    for start in range(0, len(rest), _OPENED):
        chosen = rest[start : start + _OPENED]
        chosen = chosen[bound[chosen] >= best]
        best, index = _open(family, first[chosen], farthest[chosen], best, index)
    return best.item(), index


def _open(
    family: _Family, first: NDArray[np.int64], farthest: Bytes, best: Any, index: int
) -> tuple[Any, int]:
    """The best window of these blocks or the one known, whichever holds more (the earlier one of equals)."""
    for step, length in ((_SUBBLOCK, _BLOCK), (1, _SUBBLOCK)):
        if not len(first):
            break
        inner = (first[:, None] + np.arange(0, length, step)).ravel()
        ends = np.repeat(farthest, length // step)
        inside = inner < family.count
        inner, ends = inner[inside], ends[inside]
        reach, before = family.reach(family.position(inner)), family.before(inner)
        held = reach - before
        top = held.max()
        where = int(inner[held == top].min())
        if top > best or (top == best and where < index):
            best, index = top, where
        following = np.append(reach[1:], 0)
        # The next candidate belongs to another block where the numbering jumps.
        follows = np.append(np.diff(inner) == step, False)
        farthest = np.where(follows, np.minimum(following, ends), ends)
        open_ = farthest - before >= best
        first, farthest = inner[open_], farthest[open_]
    return best, index


def envelope_by_bins(trace: Trace, tau_ns: int) -> int | None:
    """Most bytes in any of the aligned bins [k tau, (k+1) tau) counted from the first packet."""
    return envelopes_by_bins(trace, [tau_ns])[0]


def envelopes_by_bins(trace: Trace, taus_ns: Sequence[int]) -> list[int | None]:
    """The same for several lengths: bins of one that divides another are added up, not counted again."""
    fitting = sorted({tau_ns for tau_ns in taus_ns if len(trace) and tau_ns <= trace.span_ns})
    library = native.library()
    most: dict[int, int] = {}
    while fitting:
        family = [tau_ns for tau_ns in fitting if tau_ns % fitting[0] == 0]
        if library is not None and trace.size.dtype == np.uint32:
            columns = np.ascontiguousarray(trace.time_ns), np.ascontiguousarray(trace.size)
            found = native.binned_maxima(library, *columns, family)
        else:
            found = _binned_maxima(trace, family)
        most.update(zip(family, found, strict=True))
        fitting = [tau_ns for tau_ns in fitting if tau_ns not in most]
    return [most.get(tau_ns) for tau_ns in taus_ns]


def _binned_maxima(trace: Trace, taus_ns: Sequence[int]) -> list[int]:
    """A piece of the trace at a time; the last bin of each length goes on in the next piece."""
    origin = int(trace.time_ns[0])
    most = [0] * len(taus_ns)
    last = [(-1, 0)] * len(taus_ns)  # number and bytes of the bin that is still open
    for times, sizes in zip(pieces(trace.time_ns), pieces(trace.size), strict=True):
        filled = {taus_ns[0]: _filled_bins((times - origin) // taus_ns[0], sizes)}
        for place, tau_ns in enumerate(taus_ns):
            finer = max(known for known in filled if tau_ns % known == 0)
            numbers, sums = filled[finer]
            if tau_ns != finer:
                numbers, sums = filled[tau_ns] = _filled_bins(numbers // (tau_ns // finer), sums)
            number, held = last[place]
            begun = int(sums[0]) + (held if number == numbers[0] else 0)
            most[place] = max(most[place], held, begun, int(sums[1:].max(initial=0)))
            last[place] = int(numbers[-1]), int(sums[-1]) if len(sums) > 1 else begun
    return most


def _filled_bins(
    numbers: NDArray[np.int64], sizes: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Neighbours of one bin added up: the bins that hold something, and what they hold."""
    begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    return numbers[begins], np.add.reduceat(sizes, begins, dtype=np.int64)


def byte_series(trace: Trace, bin_ns: int, origin_ns: int | None = None) -> NDArray[np.int64]:
    """Bytes in each aligned bin, from the first packet (or `origin_ns`) to the last."""
    if not len(trace):
        return np.zeros(0, np.int64)
    origin = int(trace.time_ns[0]) if origin_ns is None else origin_ns
    count = int((trace.time_ns[-1] - origin) // bin_ns) + 1
    if count < len(trace) // 16:
        edges = np.searchsorted(trace.time_ns, origin + np.arange(count + 1) * bin_ns)
        return np.diff(trace.running(edges))
    series = np.zeros(count, np.int64)
    for times, sizes in zip(pieces(trace.time_ns), pieces(trace.size), strict=True):
        bins = (times - origin) // bin_ns
        low = int(bins[0])
        sums = np.bincount(bins - low, weights=sizes)
        series[low : low + len(sums)] += sums.astype(np.int64)
    return series
