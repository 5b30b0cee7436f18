"""Finding where records start: each record states its length, so the starts form a chain.

Three forms with equal results. `walk_python` follows the chain one record at a time and is the oracle.
`walk_lockstep` cuts the buffer into lanes, guesses a start in each and advances all lanes together; it is
exact, not heuristic, because a lane counts only if the lane before it ends exactly on its start, and the
first start is known. Where a guess was wrong (a capture that carries a capture) the chain is followed one
by one until it meets a good lane. The compiled form is in `native`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic import native
from mlfabric.traffic.capture.frames import rows_at, view_at_every_byte

# Below this there is nothing to gain from lanes.
_LEAST_LOCKSTEP_BYTES: Final = 1 << 18
_RECORDS_PER_LANE: Final = 128
_LEAST_LANES: Final = 32
_CHAINED: Final = 3  # plausible records that must follow a guessed start

Plausible = Callable[[NDArray[np.int64]], NDArray[np.bool_]]


@dataclass(frozen=True)
class Chain:
    """How a format links records: the next one starts `base` + (number at `field`) bytes later."""

    order: str  # "<" or ">"
    field: int
    base: int
    least: int  # smallest number that can be right
    most: int  # largest one; beyond it the file is damaged
    multiple: int  # the number divides by this
    head_bytes: int  # what the reader wants of each record: at least the field

    def allows(self, number: int) -> bool:
        return self.least <= number <= self.most and number % self.multiple == 0


@dataclass(frozen=True)
class Walk:
    offsets: NDArray[np.int64]  # of whole records
    stop: int  # first byte not part of them
    broken: bool  # the record at `stop` can't be right (rather than merely incomplete)
    heads: NDArray[np.uint8] | None = None  # the records' first bytes, where the walk had to look at them

    def numbers(self, data: NDArray[np.uint8], chain: Chain) -> NDArray[np.unsignedinteger]:
        """The 32-bit numbers at the start of every record, one row each."""
        heads = rows_at(data, self.offsets, chain.head_bytes) if self.heads is None else self.heads
        return heads.view(chain.order + "u4")


def walk(data: NDArray[np.uint8], start: int, end: int, chain: Chain, plausible: Plausible) -> Walk:
    """The records between `start` (known to be one) and `end`, by the quickest form there is."""
    library = native.library()
    if library is not None:
        return Walk(*native.walk(library, data, start, end, chain))
    return walk_lockstep(data, start, end, chain, plausible)


def walk_python(
    data: NDArray[np.uint8], start: int, end: int, chain: Chain, most_records: int | None = None
) -> Walk:
    number_at = struct.Struct(chain.order + "I").unpack_from
    buffer = data.data
    header = max(chain.base, chain.field + 4)
    offsets: list[int] = []
    position = start
    while position + header <= end and (most_records is None or len(offsets) < most_records):
        number = number_at(buffer, position + chain.field)[0]
        if not chain.allows(number):
            return Walk(np.array(offsets, np.int64), position, True)
        following = position + chain.base + number
        if following > end:
            break
        offsets.append(position)
        position = following
    return Walk(np.array(offsets, np.int64), position, False)


def walk_lockstep(data: NDArray[np.uint8], start: int, end: int, chain: Chain, plausible: Plausible) -> Walk:
    if end - start < _LEAST_LOCKSTEP_BYTES:
        return walk_python(data, start, end, chain)
    sample = walk_python(data, start, end, chain, _RECORDS_PER_LANE)
    if sample.broken or len(sample.offsets) < _RECORDS_PER_LANE:
        return walk_python(data, start, end, chain)
    average = (sample.stop - start) / len(sample.offsets)
    longest = int(np.diff(sample.offsets, append=sample.stop).max())
    lane_bytes = int(average * _RECORDS_PER_LANE)
    if (end - start) // lane_bytes < _LEAST_LANES:
        return walk_python(data, start, end, chain)

    number_at = view_at_every_byte(data, chain.order + "u4")
    # The next start is at most one record away; a lane that finds none is walked as part of the one before.
    window = min(lane_bytes // 2, longest + 16)
    nominal = np.arange(start + lane_bytes, end - lane_bytes, lane_bytes, dtype=np.int64)
    guessed = _guess_starts(nominal, window, number_at, chain, plausible, end)
    starts = np.concatenate([np.array([start], np.int64), guessed])
    limits = np.append(starts[1:], end)
    offsets = _advance_all(starts, limits, number_at, chain)
    return _checked(data, offsets, starts, end, chain)


def _guess_starts(
    nominal: NDArray[np.int64],
    window: int,
    number_at: NDArray[np.unsignedinteger],
    chain: Chain,
    plausible: Plausible,
    end: int,
) -> NDArray[np.int64]:
    """In each lane the first byte from which a few chained records look right; lanes without one drop out."""
    positions = (nominal[:, None] + np.arange(window)).ravel()
    positions = positions[plausible(positions)]
    alive = np.ones(len(positions), bool)
    hop = positions.copy()
    for _ in range(_CHAINED):
        hop = np.where(alive, hop + chain.base + number_at[hop + chain.field].astype(np.int64), hop)
        alive &= hop < end - 64
        hop = np.where(alive, hop, nominal[0])
        alive &= plausible(hop)
    positions = positions[alive]
    lanes = np.searchsorted(nominal, positions, side="right")
    _, first = np.unique(lanes, return_index=True)
    return positions[first]


def _advance_all(
    starts: NDArray[np.int64],
    limits: NDArray[np.int64],
    number_at: NDArray[np.unsignedinteger],
    chain: Chain,
) -> NDArray[np.int64]:
    """Every lane's offsets up to its limit, in file order. Numbers are not judged here, only clamped."""
    rows: list[NDArray[np.int64]] = []
    number_at = number_at[chain.field :]
    cursor = starts
    while True:
        for _ in range(16):
            rows.append(cursor)
            step = number_at[cursor].astype(np.int64)
            if chain.base == 0:
                np.maximum(step, chain.least, out=step)
            else:
                step += chain.base
            step += cursor
            cursor = np.minimum(step, limits, out=step)
        if (cursor == limits).all():
            break
    table = np.stack(rows).T
    return table[table < limits[:, None]]


def _checked(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], starts: NDArray[np.int64], end: int, chain: Chain
) -> Walk:
    """Keeps what the chain really visits, following it one by one where the lanes disagree."""
    heads = rows_at(data, offsets, chain.head_bytes)
    numbers = heads.view(chain.order + "u4")[:, chain.field // 4].astype(np.int64)
    following = offsets + numbers
    following += chain.base
    wrong = numbers > chain.most
    if chain.least:
        wrong |= numbers < chain.least
    if chain.multiple > 1:
        wrong |= numbers % chain.multiple != 0
    wrong[:-1] |= following[:-1] != offsets[1:]
    wrong[-1] |= bool(following[-1] > end)
    wrong |= offsets + max(chain.base, chain.field + 4) > end
    breaks = np.flatnonzero(wrong)
    if not len(breaks):
        return Walk(offsets, int(following[-1]), False, heads)
    if breaks[0] == len(offsets) - 1 and chain.allows(int(numbers[-1])):
        # Only the last record goes on beyond the data at hand.
        return Walk(offsets[:-1], int(offsets[-1]), False, heads[:-1])
    kept, stop, broken = _followed(data, offsets, breaks, starts, end, chain)
    if stop is None:
        return Walk(np.concatenate(kept), int(following[-1]), False)
    return Walk(np.concatenate(kept), stop, broken)


def _followed(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    breaks: NDArray[np.intp],
    starts: NDArray[np.int64],
    end: int,
    chain: Chain,
) -> tuple[list[NDArray[np.int64]], int | None, bool]:
    """Runs of offsets on the chain; where it ended and whether it broke, None where the lanes' end stands."""
    lane_of = {int(position): index for index, position in enumerate(starts)}
    first_of_lane = np.searchsorted(offsets, starts)
    kept: list[NDArray[np.int64]] = []
    at = 0
    while True:
        nth = int(np.searchsorted(breaks, at))
        if nth == len(breaks):
            kept.append(offsets[at:])
            return kept, None, False
        broken_at = int(breaks[nth])
        kept.append(offsets[at:broken_at])
        position = int(offsets[broken_at])
        while True:
            one = walk_python(data, position, end, chain, 1)
            if not len(one.offsets):
                return kept, one.stop, one.broken
            kept.append(one.offsets)
            position = one.stop
            if position in lane_of:
                at = int(first_of_lane[lane_of[position]])
                break
