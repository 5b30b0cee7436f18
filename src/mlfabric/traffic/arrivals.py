"""How a trace's bytes arrive: a whole frame at its stamp, or spread over its time on the wire.

`instant` puts each frame at its stamp. `fluid` sends frames through a FIFO of rate C: frame i ends at
e_i = max(t_i, e_{i-1} + w_i/C) and occupies the w_i/C before it, w_i its wire bytes. Both are given as
starts, ends and running bytes, which is all that envelope and backlog need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.trace import RunningBytes, Trace

Positions = NDArray[Any]  # int64 ns for instant arrivals, float64 ns for fluid ones
Counts = NDArray[np.integer[Any]]
Bytes = NDArray[Any]

_WIRE_LEAST: Final = 60
_WIRE_EXTRA: Final = 24


@dataclass(frozen=True)
class Arrivals:
    """Frames in order: when each starts and ends, and the bytes of the first k."""

    start: Positions
    end: Positions
    running: RunningBytes
    line_rate_bps: float | None = None  # None: instant

    def __len__(self) -> int:
        return len(self.start)

    @property
    def model(self) -> str:
        return "instant" if self.line_rate_bps is None else "fluid"

    @cached_property
    def _knots(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Positions and bytes between which a fluid trace is linear."""
        count = len(self)
        position, passed = np.empty(2 * count), np.empty(2 * count)
        position[0::2], position[1::2] = self.start, self.end
        sums = self.running(np.arange(count + 1)).astype(np.float64)
        passed[0::2], passed[1::2] = sums[:-1], sums[1:]
        return position, passed

    def passed(self, position: Positions) -> Bytes:
        """Bytes that arrived up to and including each position."""
        if self.line_rate_bps is None:
            return self.running(np.searchsorted(self.end, position, side="right"))
        knots, passed = self._knots
        return np.interp(position, knots, passed)


def instant(trace: Trace) -> Arrivals:
    times = np.ascontiguousarray(trace.time_ns)
    return Arrivals(times, times, trace.running)


def fluid(trace: Trace, line_rate_bps: float) -> Arrivals:
    """The trace through a FIFO of the line's rate; positions become fractions of nanoseconds."""
    if line_rate_bps <= 0:
        raise FabricError("the fluid model needs a line rate above zero")
    spent = wire_bytes(trace) * (8e9 / line_rate_bps)
    passed = np.cumsum(spent)
    end = np.maximum.accumulate(trace.time_ns - passed) + passed
    return Arrivals(end - spent, end, trace.running, line_rate_bps)


def wire_bytes(trace: Trace) -> NDArray[np.int64]:
    """What each frame takes on the wire; for layers above l2 the headers below are not known and not
    added."""
    size = trace.size.astype(np.int64)
    if trace.origin.layer == "wire":
        return size
    return np.maximum(size, _WIRE_LEAST) + _WIRE_EXTRA
