"""One link's residual rate over time, and the taking of rate from it.

A staircase is exact: its rates are whole multiples of 1/1024 byte per second, and sums and differences of
such numbers below 2^43 have no rounding in floats. It is canonical: neighbouring steps differ, so equal
ledgers have equal lists, and what is given back leaves no trace. The ledger (`reservation.py`) says which
links a transfer crosses and who holds what; here are only the lists and the loops that run thousands of times
per plan.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

from mlfabric.topology import Link

INF: Final = math.inf
# What rounding may leave over of a transfer; nothing waits for it.
NOTHING_BYTES: Final = 1e-6


def snap_rate(rate_bytes_per_s: float) -> float:
    """The largest multiple of 1/1024 not above the rate; 2^53 of them still add up exactly: 8.8 TB/s."""
    return rate_bytes_per_s if rate_bytes_per_s == INF else int(rate_bytes_per_s * 1024) / 1024


class Staircase:
    """One link's residual rate over time.

    Step i holds from `starts[i]` to `starts[i + 1]`; the last start is infinite. Neighbouring steps differ,
    so that a link filled by a thousand transfers is one step of zero, and equal ledgers have equal lists.
    """

    __slots__ = ("capacity", "direction", "owner", "residuals", "starts")

    def __init__(self, owner: str, direction: str, capacity_bytes_per_s: float, start_s: float) -> None:
        self.owner = owner
        self.direction = direction
        self.capacity = capacity = snap_rate(capacity_bytes_per_s)
        self.starts = [start_s, INF]
        self.residuals = [capacity, 0.0]

    @property
    def link(self) -> Link:
        return Link(self.owner, self.direction)

    def add(self, from_s: float, to_s: float, rate: float) -> None:
        """Give back (rate > 0) or take away (rate < 0) over a stretch of time."""
        starts, residuals = self.starts, self.residuals
        if to_s <= starts[0]:
            return
        first = bisect_right(starts, from_s) - 1
        if first < 0:
            first = 0
        elif to_s <= starts[first + 1]:
            cut(starts, residuals, first, from_s, to_s, residuals[first] + rate)
            return
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

    def least_after(self, now_s: float) -> float:
        """The smallest residual from now on."""
        return min(self.residuals[max(bisect_right(self.starts, now_s) - 1, 0) : -1])

    def forget_before(self, now_s: float) -> None:
        head = bisect_right(self.starts, now_s) - 1
        if head > 0:
            del self.starts[:head], self.residuals[:head]
            self.starts[0] = now_s
        elif head == 0:
            self.starts[0] = now_s


Path = tuple[Staircase, ...]
Piece = tuple[float, float, float]  # from, to, rate


def take_both(a: Staircase, b: Staircase, size_bytes: float, at_s: float, limit: float) -> list[Piece]:
    """Walk and take at once over two links, as most transfers do; empty if it never ends.

    The same as `walk` and `add`, with the steps of each link between start and finish rebuilt in one pass.
    """
    if limit <= 0:
        return []
    a_starts, a_residuals, b_starts, b_residuals = a.starts, a.residuals, b.starts, b.residuals
    i = bisect_right(a_starts, at_s) - 1
    j = bisect_right(b_starts, at_s) - 1
    a_left, a_end = a_residuals[i], a_starts[i + 1]
    b_left, b_end = b_residuals[j], b_starts[j + 1]
    while a_left <= 0 or b_left <= 0:  # to the first moment both have something left
        at_s = a_end if a_left <= 0 and (b_left > 0 or a_end > b_end) else b_end
        if at_s == INF:
            return []
        while a_end <= at_s:
            i += 1
            a_left, a_end = a_residuals[i], a_starts[i + 1]
        while b_end <= at_s:
            j += 1
            b_left, b_end = b_residuals[j], b_starts[j + 1]
    rate = a_left if a_left < b_left else b_left
    if rate > limit:
        rate = limit
    until = a_end if a_end < b_end else b_end
    done_s = at_s + size_bytes / rate
    if done_s <= until:  # one piece, as most are
        if done_s <= at_s:
            return []
        cut(a_starts, a_residuals, i, at_s, done_s, a_left - rate)
        cut(b_starts, b_residuals, j, at_s, done_s, b_left - rate)
        return [(at_s, done_s, rate)]
    left = size_bytes
    a_first, b_first = i, j
    a_new, a_rest = [at_s], [a_left - rate]
    b_new, b_rest = [at_s], [b_left - rate]
    pieces: list[Piece] = []
    begin_s, going = at_s, rate  # the piece under way
    while done_s > until:
        left -= rate * (until - at_s)
        at_s = until
        if left <= NOTHING_BYTES:
            done_s = at_s
            break
        if a_end <= at_s:
            i += 1
            a_left, a_end = a_residuals[i], a_starts[i + 1]
        if b_end <= at_s:
            j += 1
            b_left, b_end = b_residuals[j], b_starts[j + 1]
        rate = a_left if a_left < b_left else b_left
        if rate > limit:
            rate = limit
        until = a_end if a_end < b_end else b_end
        if rate > 0:
            done_s = at_s + left / rate
        elif until == INF:
            return []
        else:
            rate, done_s = 0.0, INF
        if rate != going:
            if going:
                pieces.append((begin_s, at_s, going))
            begin_s, going = at_s, rate
        rest = a_left - rate
        if a_rest[-1] != rest:
            a_new.append(at_s)
            a_rest.append(rest)
        rest = b_left - rate
        if b_rest[-1] != rest:
            b_new.append(at_s)
            b_rest.append(rest)
    if done_s > begin_s:
        pieces.append((begin_s, done_s, going))
    _rebuild(a_starts, a_residuals, a_first, i, a_new, a_rest, done_s)
    _rebuild(b_starts, b_residuals, b_first, j, b_new, b_rest, done_s)
    return pieces


def cut(
    starts: list[float], residuals: list[float], step: int, at_s: float, done_s: float, rest: float
) -> None:
    """Lower or raise a stretch that lies within one step."""
    goes_on = starts[step + 1] > done_s
    level_after = not goes_on and starts[step + 1] != INF and residuals[step + 1] == rest
    if starts[step] < at_s:
        if goes_on:
            starts[step + 1 : step + 1] = (at_s, done_s)
            residuals[step + 1 : step + 1] = (rest, residuals[step])
        elif level_after:
            starts[step + 1] = at_s
        else:
            starts.insert(step + 1, at_s)
            residuals.insert(step + 1, rest)
    elif step and residuals[step - 1] == rest:  # level with the step before, which grows
        if goes_on:
            starts[step] = done_s
        else:
            after = step + 2 if level_after else step + 1
            del starts[step:after], residuals[step:after]
    elif goes_on:
        starts.insert(step + 1, done_s)
        residuals.insert(step, rest)
    else:
        residuals[step] = rest
        if level_after:
            del starts[step + 1], residuals[step + 1]


def _rebuild(
    starts: list[float],
    residuals: list[float],
    first: int,
    last: int,
    new: list[float],
    rest: list[float],
    done_s: float,
) -> None:
    """Replace steps `first` to `last` by the part before, the new steps, and the part after `done_s`."""
    after = residuals[last]
    if starts[last + 1] > done_s:  # the last step goes on as it was
        if after != rest[-1]:
            new.append(done_s)
            rest.append(after)
    elif starts[last + 1] != INF and residuals[last + 1] == rest[-1]:
        last += 1  # the step after is level with the last new one
    if starts[first] < new[0]:  # the first step begins as it was
        if residuals[first] == rest[0]:
            new[0] = starts[first]
        else:
            first += 1
    elif first and residuals[first - 1] == rest[0]:
        first -= 1
        new[0] = starts[first]
    starts[first : last + 1] = new
    residuals[first : last + 1] = rest
