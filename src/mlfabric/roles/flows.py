"""How fast bulk transfers to each peer go, and whether the network held them back. Pure: drivers feed it.

A flow says something of the network only while it had bytes to send all the time, was not paced by us, was
not waiting for the receiver's process, and no longer grows. Who was to blame is for the scheduler to say,
which hears of all flows (`roles.blame`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

# How often flows are looked at while something is under way.
TICK_S = 0.025
# A look that comes later than this tells of a busy processor, not of the network.
LATE_S = 0.08
# A rate is taken over at least this long and so many bytes, or over the longest time.
SAMPLE_S = 0.05
SAMPLE_BYTES = 128 * 1024
LONGEST_S = 0.2
# TCP finds its window in the beginning.
BEGINNING_S = 0.02
# A flow had bytes to send all the time, and the receiver took them.
LEAST_BUSY = 0.85
MOST_WINDOW = 0.15
# Transfers may go so much faster than planned. One that goes at this share of its pace is held back by it and
# may go faster still: that is how a link that got faster is noticed.
HEADROOM = 1.25
PACED = 0.92
RAISE = 2.0
# One sample above the last by so much: it grows still.
GROWS = 1.15
# A node's total is the second highest of so many samples.
TOTAL_SAMPLES = 3
# What differs by less, or was said less long ago, is not said again.
WORTH_TELLING = 0.07
REPEAT_S = 0.25


@dataclass(frozen=True, slots=True)
class BulkState:
    """A bulk connection as the kernel sees it now."""

    acked_bytes: int
    busy_us: int  # so long has it had bytes to send, all its life
    window_us: int  # of that, so long did the receiver's window hold it back
    pace_bytes_per_s: float  # the most we let it send; infinite where we do not
    waiting: bool  # there are more bytes for it than the kernel takes


@dataclass(frozen=True, slots=True)
class FlowSample:
    """What was sent to a peer: payload bytes per second, and whether the network held that back."""

    peer: str
    bytes_per_s: float | None  # None: it has just begun; zero: it has ended
    limited: bool


@dataclass(slots=True)
class _Sample:
    began: float
    first: BulkState


class _Flow:
    def __init__(self) -> None:
        self._since: float | None = None  # it has had bytes to send from here on
        self._sample: _Sample | None = None
        self._last_rate: float | None = None
        self.rate = 0.0
        self.limited = False
        self.paced = False
        self.told: tuple[float, float, bool] | None = None  # (when, rate, limited)

    def look(self, now: float, state: BulkState, late: bool) -> bool:
        """Whether there is a new sample."""
        if not state.waiting or late:
            self._since = self._sample = None
            return False
        if self._since is None:
            self._since = now
        if self._sample is None:
            if now - self._since >= BEGINNING_S:
                self._sample = _Sample(now, state)
            return False
        began, first = self._sample.began, self._sample.first
        lasted, count = now - began, state.acked_bytes - first.acked_bytes
        if lasted < SAMPLE_S or (count < SAMPLE_BYTES and lasted < LONGEST_S):
            return False
        self._sample = _Sample(now, state)
        measured = count / lasted
        busy = (state.busy_us - first.busy_us) / 1e6 >= LEAST_BUSY * lasted
        window = (state.window_us - first.window_us) / 1e6 > MOST_WINDOW * lasted
        last, self._last_rate = self._last_rate, measured
        steady = last is not None and measured <= GROWS * last
        # One sample alone may hold what had been queued before: what grows is told a sample later.
        self.rate = measured if steady or last is None else last
        self.paced = self.rate >= PACED * first.pace_bytes_per_s
        self.limited = busy and not window and steady and not self.paced
        return True


class _Total:
    """All that goes out of a node in bulk, or comes in."""

    def __init__(self) -> None:
        self._sample: tuple[float, int] | None = None
        self._samples: deque[float] = deque([0.0] * TOTAL_SAMPLES, maxlen=TOTAL_SAMPLES)
        self._told: tuple[float, float] = (float("-inf"), 0.0)

    def look(self, now: float, count: int, late: bool) -> None:
        """`count`: bytes, ever."""
        if self._sample is None or late:
            self._sample = (now, count)
            return
        began, before = self._sample
        if now - began >= SAMPLE_S:
            self._sample = (now, count)
            self._samples.append((count - before) / (now - began))

    def news(self, now: float) -> float | None:
        """The rate, if it is worth telling. One sample alone may hold what had been queued before, or an
        interruption: two of the last few have to be as high."""
        rate = sorted(self._samples)[-2]
        at, told = self._told
        if abs(rate - told) <= WORTH_TELLING * told and (rate == 0 or now - at < REPEAT_S):
            return None
        self._told = (now, rate)
        return rate


class FlowWatch:
    """All bulk flows of a node."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._totals = (_Total(), _Total())  # out, in
        self._looked_at = float("-inf")
        self._ended: list[str] = []

    def look(
        self,
        now: float,
        states: Iterable[tuple[str, BulkState]],
        shared: bool,
        counts: tuple[int, int] = (0, 0),
    ) -> list[str]:
        """Look at every flow that has bytes to send; `shared`: others of ours use the links, so nothing can
        be said of limits. `counts`: bytes that ever went to other hosts, and came from them. The peers whose
        pace held them back: it may be raised."""
        late = now - self._looked_at > LATE_S
        self._looked_at = now
        for total, count in zip(self._totals, counts, strict=True):
            total.look(now, count, late)
        raised, current = [], dict(states)
        for peer in [peer for peer in self._flows if peer not in current]:
            if self._flows.pop(peer).told is not None:
                self._ended.append(peer)
        for peer, state in current.items():
            flow = self._flows.setdefault(peer, _Flow())
            if flow.look(now, state, late):
                flow.limited = flow.limited and not shared
                if flow.paced:
                    raised.append(peer)
        return raised

    def totals(self, now: float) -> tuple[float | None, float | None]:
        """What the scheduler should hear of all that goes out and comes in: one flow may be short and its
        part of a link unknown, but what the link carries is known exactly."""
        out, into = (total.news(now) for total in self._totals)
        return out, into

    def news(self, now: float) -> tuple[FlowSample, ...]:
        """What the scheduler should hear of single flows."""
        told = [FlowSample(peer, 0.0, False) for peer in self._ended]
        self._ended.clear()
        for peer, flow in self._flows.items():
            if flow.told is None:
                flow.told = (float("-inf"), 0.0, False)
                told.append(FlowSample(peer, flow.rate or None, flow.limited))
                continue
            at, rate, limited = flow.told
            changed = abs(flow.rate - rate) > WORTH_TELLING * rate or flow.limited != limited
            if flow.rate > 0 and (changed or now - at >= REPEAT_S):
                flow.told = (now, flow.rate, flow.limited)
                told.append(FlowSample(peer, flow.rate, flow.limited))
        return tuple(told)
