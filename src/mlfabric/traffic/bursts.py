"""Bursts: a partition of the trace wherever it pauses for longer than theta.

Theta is given, or lies in the middle (on a log scale) of the widest plateau of the burst count against log
theta: the widest empty stretch between two gaps of the trace. Every packet is in exactly one burst, so
bytes add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic import native
from mlfabric.traffic.trace import PIECE, Trace

# Gaps are binned by octave and 64th of one: the top bits of their float form.
_SHIFT: Final = 23 - 6


@dataclass(frozen=True)
class Bursts:
    """One row per burst, in order. Times count from the trace's first packet."""

    theta_ns: float
    theta_given: bool
    first: NDArray[np.int64]  # index of each burst's first packet
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    bytes: NDArray[np.int64]
    packets: NDArray[np.int64]
    gap_before_ns: NDArray[np.int64]  # -1 for the first

    def __len__(self) -> int:
        return len(self.first)

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
    for start in range(0, len(trace) - 1, PIECE):
        yield np.diff(trace.time_ns[start : start + PIECE + 1])


def widest_plateau(trace: Trace) -> tuple[int, int] | None:
    """The two neighbouring gaps, in sorted order, with the largest ratio; None where all gaps are equal."""
    occupied = np.zeros(1 << (32 - _SHIFT), bool)
    library = native.library()
    if library is not None:
        native.gap_classes(library, np.ascontiguousarray(trace.time_ns), _SHIFT, occupied)
    else:
        for gaps in gaps_in_pieces(trace):
            occupied[_bin(gaps)] = True
    occupied[_bin(np.zeros(1, np.int64))] = False  # ties are no gaps
    used = np.flatnonzero(occupied)
    if len(used) < 2:
        return _widest_by_sorting(trace)
    # An empty run of bins is as wide as its bins, less than one more at each end: look at all that may win.
    empty = np.diff(used)
    if empty.max() < 4:
        return _widest_by_sorting(trace)
    nominees = np.flatnonzero(empty >= empty.max() - 2)
    below = np.zeros(len(nominees), np.int64)
    above = np.full(len(nominees), np.iinfo(np.int64).max)
    for gaps in gaps_in_pieces(trace):
        bins = _bin(gaps)
        for row, nominee in enumerate(nominees):
            at_most, at_least = gaps[bins == used[nominee]], gaps[bins == used[nominee + 1]]
            below[row] = max(below[row], at_most.max(initial=0))
            above[row] = min(above[row], at_least.min(initial=np.iinfo(np.int64).max))
    best = int(np.argmax(above / below))
    return int(below[best]), int(above[best])


def _bin(gaps: NDArray[np.int64]) -> NDArray[np.int32]:
    return gaps.astype(np.float32).view(np.int32) >> _SHIFT


def _widest_by_sorting(trace: Trace) -> tuple[int, int] | None:
    """The plain form: for traces whose gaps are all alike, where bins are too coarse."""
    distinct: NDArray[np.int64] = np.zeros(0, np.int64)
    for gaps in gaps_in_pieces(trace):
        distinct = np.union1d(distinct, gaps[gaps > 0])
    if len(distinct) < 2:
        return None
    best = int(np.argmax(distinct[1:] / distinct[:-1]))
    return int(distinct[best]), int(distinct[best + 1])


def find_bursts(trace: Trace, theta_ns: float | None = None) -> Bursts:
    """The bursts of a trace, by a given pause or by the widest plateau."""
    given = theta_ns is not None
    if theta_ns is None:
        plateau = widest_plateau(trace)
        theta_ns = math.sqrt(plateau[0] * plateau[1]) if plateau else float(trace.span_ns)
    count = len(trace)
    starts = [np.zeros(min(count, 1), np.int64)]
    for number, gaps in enumerate(gaps_in_pieces(trace)):
        starts.append(np.flatnonzero(gaps > theta_ns) + number * PIECE + 1)
    first = np.concatenate(starts)
    if not count:
        none = np.zeros(0, np.int64)
        return Bursts(theta_ns, given, none, none, none, none, none, none)
    last = np.append(first[1:], count) - 1
    start, end = trace.time_ns[first], trace.time_ns[last]
    sizes = trace.running(last + 1) - trace.running(first)
    gap = np.concatenate([[-1], start[1:] - end[:-1]])
    return Bursts(theta_ns, given, first, start, end - start, sizes, last - first + 1, gap)
