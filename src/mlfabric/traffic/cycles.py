"""Traces made cyclic: whole iterations that can be shifted around the circle and laid over each other.

To keep many draws affordable packets are first gathered into grains; a result is then off by at most one
grain, which every output states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.rhythm import find_rhythm
from mlfabric.traffic.trace import NS_PER_S, Trace

MOST_GRAINS: Final = 50_000


@dataclass(frozen=True)
class Cycle:
    """Arrivals on a circle of `length_ns`; `period_ns` is one iteration, the circle a whole number of
    them."""

    time_ns: NDArray[np.int64]  # within [0, length_ns), sorted
    size: NDArray[np.int64]
    length_ns: int
    period_ns: int
    grain_bytes: int  # the largest grain
    from_rhythm: bool

    @property
    def total_bytes(self) -> int:
        return int(self.size.sum())

    @property
    def mean_rate_bps(self) -> float:
        return self.total_bytes * 8e9 / self.length_ns

    @property
    def rounds(self) -> int:
        return max(1, round(self.length_ns / self.period_ns))

    def shifted(self, shift_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Times and sizes after turning the circle by `shift_ns`, sorted again."""
        shift = int(shift_ns) % self.length_ns
        split = int(np.searchsorted(self.time_ns, self.length_ns - shift))
        times = np.concatenate(
            [self.time_ns[split:] - (self.length_ns - shift), self.time_ns[:split] + shift]
        )
        return times, np.concatenate([self.size[split:], self.size[:split]])

    def unrolled(self, turns: int = 2) -> Trace:
        """The circle walked several times, as a plain trace: what wraps around is seen from the second
        turn on."""
        times = (np.arange(turns)[:, None] * self.length_ns + self.time_ns).ravel()
        return Trace.from_arrays(times, np.tile(self.size, turns))


def make_cycle(trace: Trace, most_grains: int = MOST_GRAINS) -> Cycle:
    """The whole iterations of a trace as a circle; its whole span where no rhythm was found."""
    trace.needs_packets("extrapolate from")
    rhythm = find_rhythm(trace)
    if rhythm is not None:
        begin, end = int(rhythm.begins_ns[0]), int(rhythm.begins_ns[-1])
        period = round(rhythm.period_s * NS_PER_S)
        low, high = np.searchsorted(trace.time_ns, [begin, end])
    else:
        if trace.span_ns <= 0:
            raise FabricError("a single instant can't be extrapolated")
        begin, end = 0, trace.span_ns + max(1, trace.span_ns // max(len(trace) - 1, 1))
        period, low, high = end, 0, len(trace)
    times = trace.time_ns[low:high] - begin
    sizes = trace.size[low:high].astype(np.int64)
    times, sizes = grained(times, sizes, most_grains)
    return Cycle(times, sizes, end - begin, min(period, end - begin), int(sizes.max()), rhythm is not None)


def grained(
    times: NDArray[np.int64], sizes: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Neighbours gathered by equal shares of the bytes, so that no grain is much larger than the mean one.

    A grain never reaches across a pause longer than its share of the time, and stands at its first packet:
    backlogs come out no smaller than they are.
    """
    if len(times) <= most:
        return times, sizes
    passed = np.cumsum(sizes)
    share = passed[-1] / (most / 2)
    pause = (times[-1] - times[0]) / (most / 2)
    label = ((passed - 1) / share).astype(np.int64)
    begins = np.concatenate([[True], (np.diff(label) > 0) | (np.diff(times) > pause)])
    first = np.flatnonzero(begins)
    return times[first], np.add.reduceat(sizes, first)


def overlaid(
    cycles: Sequence[Cycle], shifts_ns: Sequence[int], turns: int = 2
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """All cycles turned by their shifts on one circle, walked `turns` times; and where the last turn begins.

    Circles of different length run side by side for as long as the longest needs.
    """
    length = max(cycle.length_ns for cycle in cycles)
    if all(cycle.length_ns == length for cycle in cycles):
        # One turn is sorted, and the others are it again.
        turned = [cycle.shifted(shift) for cycle, shift in zip(cycles, shifts_ns, strict=True)]
        once, sizes_once = _merged([each[0] for each in turned], [each[1] for each in turned])
        walked = (np.arange(turns)[:, None] * length + once).ravel()
        return walked, np.tile(sizes_once, turns), (turns - 1) * length
    times, sizes = [], []
    for cycle, shift in zip(cycles, shifts_ns, strict=True):
        time_ns, size = cycle.shifted(shift)
        count = -(-turns * length // cycle.length_ns)
        walked = (np.arange(count)[:, None] * cycle.length_ns + time_ns).ravel()
        inside = walked < turns * length
        times.append(walked[inside])
        sizes.append(np.tile(size, count)[inside])
    return *_merged(times, sizes), (turns - 1) * length


def _merged(
    times: Sequence[NDArray[np.int64]], sizes: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if len(times) == 1:
        return times[0], sizes[0]
    together = np.concatenate(times)
    order = np.argsort(together, kind="stable")  # sorted runs: a merge
    return together[order], np.concatenate(sizes)[order]
