"""Two numbers about the gaps between packets: how uneven they are, and whether like follows like.

Burstiness is Goh and Barabasi's (s - m)/(s + m) in the form Kim and Jo gave it for finite sequences: -1 for a
regular beat, 0 for random arrivals, 1 for the most uneven sequence of this length. Memory is the
correlation of each gap with the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mlfabric.traffic.bursts import gaps_in_pieces
from mlfabric.traffic.trace import Trace


@dataclass(frozen=True)
class GapStatistics:
    count: int
    mean_ns: float
    burstiness: float | None
    memory: float | None


def gap_statistics(trace: Trace) -> GapStatistics:
    count = max(0, len(trace) - 1)
    if count < 2 or not trace.span_ns:
        return GapStatistics(count, trace.span_ns / max(count, 1), None, None)
    mean = trace.span_ns / count
    squares = products = 0.0
    before: float | None = None
    for gaps in gaps_in_pieces(trace):
        centred = gaps - mean
        squares += float(centred @ centred)
        products += float(centred[1:] @ centred[:-1])
        if before is not None:
            products += before * float(centred[0])
        before = float(centred[-1])
        last = before
    deviation = math.sqrt(squares / count)
    first = float(trace.time_ns[1] - trace.time_ns[0]) - mean
    return GapStatistics(
        count, mean, _burstiness(deviation / mean, count), _memory(squares, products, first, last, count)
    )


def _burstiness(ratio: float, count: int) -> float:
    high, low = math.sqrt(count + 1), math.sqrt(count - 1)
    return (high * ratio - low) / ((high - 2) * ratio + low)


def _memory(squares: float, products: float, first: float, last: float, count: int) -> float | None:
    """Pearson's correlation of (gap i, gap i + 1) from sums of gaps centred on the overall mean."""
    pairs = count - 1
    mean_early, mean_late = -last / pairs, -first / pairs  # all but one sum to minus the one left out
    spread_early = (squares - last * last) / pairs - mean_early**2
    spread_late = (squares - first * first) / pairs - mean_late**2
    if spread_early <= 0 or spread_late <= 0:
        return None
    return float(
        np.clip((products / pairs - mean_early * mean_late) / math.sqrt(spread_early * spread_late), -1, 1)
    )
