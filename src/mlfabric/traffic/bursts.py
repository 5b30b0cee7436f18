"""Bursts: a partition of the trace wherever it pauses for longer than theta.

Theta is given, or lies in the middle (on a log scale) of the widest plateau of the burst count against log
theta: the widest empty stretch between two gaps of the trace. Only plateaus count that tell bursts from
pauses: an octave wide at least, and with two packets to a burst on average (the smallest gaps of any traffic
lie far apart on a log scale, and a theta between those would take every packet for a burst). Where there is
none the trace does not pause: it is one burst, and says so. Every packet is in exactly one burst, so bytes
add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic import native
from mlfabric.traffic.trace import Trace

# Gaps are classed by octave and 64th of one: the top bits of their float form.
_SHIFT: Final = 23 - 6
_CLASSES: Final = 1 << (32 - _SHIFT)
_PIECE: Final = 1 << 16  # packets whose gaps stay in the processor's cache
_LEAST_RATIO: Final = 2.0
_LEAST_PACKETS: Final = 2  # of the average burst
ThetaFrom = Literal["given", "widest plateau", "no plateau"]


@dataclass(frozen=True)
class Bursts:
    """One row per burst, in order. Times count from the trace's first packet."""

    theta_ns: float
    theta_from: ThetaFrom
    first: NDArray[np.int64]  # index of each burst's first packet
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    bytes: NDArray[np.int64]
    packets: NDArray[np.int64]
    gap_before_ns: NDArray[np.int64]  # -1 for the first

    def __len__(self) -> int:
        return len(self.first)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about theta."""
        if self.theta_from != "no plateau":
            return ()
        return (
            "no pause stands out from the other gaps, so all packets count as one burst; "
            "pass --theta to part them",
        )

    @property
    def rate_bps(self) -> NDArray[np.float64]:
        """Mean rate of each; a burst of one instant has none (nan)."""
        duration = np.where(self.duration_ns > 0, self.duration_ns, 1)
        return np.where(self.duration_ns > 0, self.bytes * 8e9 / duration, np.nan)

    @property
    def on_share(self) -> float:
        """Share of the time from the first burst's start to the last one's end that lies inside bursts."""
        if not len(self):
            return 0.0
        span = int(self.start_ns[-1] + self.duration_ns[-1] - self.start_ns[0])
        return float(self.duration_ns.sum()) / span if span else 1.0


def gaps_in_pieces(trace: Trace) -> Iterator[NDArray[np.int64]]:
    """Times between consecutive packets, a piece at a time."""
    for start in range(0, len(trace) - 1, _PIECE):
        yield np.diff(trace.time_ns[start : start + _PIECE + 1])


def widest_plateau(trace: Trace) -> tuple[int, int] | None:
    """The two neighbouring gaps, in sorted order, with the largest ratio; None where no plateau counts."""
    counts = _class_counts(trace)
    used = np.flatnonzero(counts)
    if len(used) < 2:
        return None
    low, high = _class_edges(used), _class_edges(used + 1)
    # Two gaps in neighbouring classes are as far apart as these edges allow: look at all that may win.
    at_most, at_least = high[1:] / low[:-1], low[1:] / high[:-1]
    bursts = 1 + np.cumsum(counts[used][::-1])[::-1][1:]
    counting = (bursts * _LEAST_PACKETS <= len(trace)) & (at_most >= _LEAST_RATIO)
    if not counting.any():
        return None
    nominees = np.flatnonzero(counting & (at_most >= at_least[counting].max()))
    below, above = _edges_of(trace, used, nominees)
    best = int(np.argmax(above / below))
    plateau = int(below[best]), int(above[best])
    return plateau if plateau[1] >= _LEAST_RATIO * plateau[0] else None


def _class_counts(trace: Trace) -> NDArray[np.int64]:
    """How many gaps fall into each class; ties are no gaps."""
    counts = np.zeros(_CLASSES, np.int64)
    library = native.library()
    if library is not None:
        native.gap_classes(library, np.ascontiguousarray(trace.time_ns), _SHIFT, counts)
    else:
        for gaps in gaps_in_pieces(trace):
            found = np.bincount(_class(gaps))
            counts[: len(found)] += found
    counts[_class(np.zeros(1, np.int64))] = 0
    return counts


def _edges_of(
    trace: Trace, used: NDArray[np.intp], nominees: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The largest gap below each plateau and the smallest above it."""
    below = np.zeros(len(nominees), np.int64)
    above = np.full(len(nominees), np.iinfo(np.int64).max)
    for gaps in gaps_in_pieces(trace):
        # Few gaps are near a plateau: the rest need not be classed again.
        near = gaps[gaps >= int(_class_edges(used[nominees].min()))]
        classes = _class(near)
        for row, nominee in enumerate(nominees):
            at_most, at_least = near[classes == used[nominee]], near[classes == used[nominee + 1]]
            below[row] = max(below[row], at_most.max(initial=0))
            above[row] = min(above[row], at_least.min(initial=np.iinfo(np.int64).max))
    return below, above


def _class(gaps: NDArray[np.int64]) -> NDArray[np.int32]:
    return gaps.astype(np.float32).view(np.int32) >> _SHIFT


def _class_edges(classes: Any) -> NDArray[np.float64]:
    """The smallest float of each class."""
    return (np.asarray(classes, np.int32) << _SHIFT).view(np.float32).astype(np.float64)


def find_bursts(trace: Trace, theta_ns: float | None = None) -> Bursts:
    """The bursts of a trace, by a given pause or by the widest plateau."""
    theta_from: ThetaFrom = "given"
    if theta_ns is None:
        plateau = widest_plateau(trace)
        theta_from = "widest plateau" if plateau else "no plateau"
        theta_ns = math.sqrt(plateau[0] * plateau[1]) if plateau else _longest_gap(trace)
    count = len(trace)
    starts = [np.zeros(min(count, 1), np.int64)]
    for number, gaps in enumerate(gaps_in_pieces(trace)):
        starts.append(np.flatnonzero(gaps > theta_ns) + number * _PIECE + 1)
    first = np.concatenate(starts)
    if not count:
        none = np.zeros(0, np.int64)
        return Bursts(theta_ns, theta_from, none, none, none, none, none, none)
    last = np.append(first[1:], count) - 1
    start, end = trace.time_ns[first], trace.time_ns[last]
    sizes = trace.running(last + 1) - trace.running(first)
    gap = np.concatenate([[-1], start[1:] - end[:-1]])
    return Bursts(theta_ns, theta_from, first, start, end - start, sizes, last - first + 1, gap)


def _longest_gap(trace: Trace) -> float:
    return float(max((int(gaps.max()) for gaps in gaps_in_pieces(trace)), default=0))
