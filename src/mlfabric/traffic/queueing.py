"""One queue: a link of rate C with a buffer Q that drops from the tail, and a mark K that ECN would use.

Drops are byte-granular: of a packet that does not fit the part that fits is kept. The compiled form does
the same arithmetic in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic import native


@dataclass(frozen=True)
class QueueResult:
    """What one queue saw from `from_ns` on."""

    arrived_bytes: int
    lost_bytes: float
    most_bytes: float  # largest queue
    above_mark_ns: float  # time the queue was longer than the mark
    duration_ns: int

    @property
    def loss_ratio(self) -> float:
        return self.lost_bytes / self.arrived_bytes if self.arrived_bytes else 0.0

    @property
    def above_mark_share(self) -> float:
        return self.above_mark_ns / self.duration_ns if self.duration_ns else 0.0


def drop_tail(
    time_ns: NDArray[np.int64],
    size: NDArray[np.int64],
    rate_bps: float,
    buffer_bytes: float,
    mark_bytes: float,
    from_ns: int,
    until_ns: int,
) -> QueueResult:
    """Sends arrivals through the queue; counts from `from_ns`, so that what came before fills it first."""
    rate = rate_bps / 8e9
    library = native.library()
    if library is not None:
        arrived, lost, most, above = native.drop_tail(
            library, time_ns, size, rate, buffer_bytes, mark_bytes, from_ns, until_ns
        )
    else:
        arrived, lost, most, above = _drop_tail(
            time_ns.tolist(), size.tolist(), rate, buffer_bytes, mark_bytes, from_ns, until_ns
        )
    return QueueResult(int(arrived), lost, most, above, until_ns - from_ns)


def _drop_tail(
    times: list[int], sizes: list[int], rate: float, room: float, mark: float, from_ns: int, until_ns: int
) -> tuple[float, float, float, float]:
    queue = arrived = lost = most = above = 0.0
    before = times[0] if times else 0
    for at, size in zip(times, sizes, strict=True):
        counted = at >= from_ns
        gap = at - before
        if counted and queue > mark:
            above += min((queue - mark) / rate, float(gap))
        queue = max(queue - rate * gap, 0.0)
        queue += size
        over = queue - room
        if over > 0:
            queue = room
        if counted:
            arrived += size
            if over > 0:
                lost += over
            if queue > most:
                most = queue
        before = at
    if queue > mark:
        above += min((queue - mark) / rate, float(until_ns - before))
    return arrived, lost, most, above
