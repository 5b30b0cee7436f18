"""The rhythm of a job's collective calls, and how slowly its bytes may leave without being late. Pure.

Training repeats itself: every iteration makes the same calls, of the same sizes, at about the same times
after its first one. Once two iterations are alike, the next one's calls are known beforehand. All results
of an iteration are needed soon after its last call (the optimizer waits for them), so its bytes have from
their own call until then. The slowest way to send them in time is the taut string below what has been
called: at each call the rate is the least, over all calls still to come, of what will have been called
before it and has not left, divided by the time until then. So the bytes of early calls fill the time until
later ones, and nothing goes faster than it must.

After the last call the bytes get the time they took at full speed, plus an allowance: a share of the
iteration. What pacing really costs is seen every time, as the wait from the last call to the end of all;
where that exceeds the allowance, the aim is set earlier, and later again as it fits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

# Waiting that pacing may add, as a share of an iteration.
ALLOWANCE = 0.02
# Calls of one iteration, at the most.
LONGEST = 256
# Times within an iteration that differ by more than this share of it are no rhythm.
ALIKE = 0.1
# Shorter iterations are left alone: clocks and processors are not that punctual.
SHORTEST_S = 0.02
# The aim, as a share of the time that is allowed: where it begins, and how it follows what was seen.
FIRST_AIM = 0.5
LEAST_AIM = 0.2
SOONER, LATER = 0.8, 1.05
# It moves later while less than this share of the allowance was used.
WELL_WITHIN = 0.7
# Bytes of early calls go so much faster than they would have to: ranks wait for each other now and then, and
# what is left when the last call comes has to be sent in haste.
AHEAD = 1.5
# New figures count so much in running means.
NEWS = 0.3
# An iteration that takes longer than this many usual ones was interrupted; it teaches nothing.
INTERRUPTED = 1.5
# Two of them within so many iterations: what was taken for the rhythm is only a part of it.
OFTEN = 8


@dataclass(slots=True)
class Call:
    at: float
    size_bytes: int
    ended_at: float | None = None


@dataclass(slots=True)
class Pattern:
    """One iteration: its calls by size and by time after the first, and how long it takes."""

    sizes: list[int]
    offsets: list[float]
    period_s: float
    full_speed_wait_s: float  # from the last call to the end of all, when nothing was paced

    @property
    def calls(self) -> int:
        return len(self.sizes)


class Cadence:
    """Told of every large call and its end, it says how fast bytes have to leave; None: unlimited."""

    def __init__(self, allowance: float = ALLOWANCE) -> None:
        self.allowance = allowance
        self.pattern: Pattern | None = None
        self.aim = FIRST_AIM
        self._recent: deque[Call] = deque(maxlen=2 * LONGEST + 1)
        self._current: list[Call] = []  # of this iteration
        self._sent_before = 0  # bytes that had left when this iteration began
        self._ratio: float | None = None  # bytes that leave for each byte of a call
        self._rate: float | None = None
        self._due = 0.0  # when all of this iteration should be there
        self._allowed_s = 1.0
        self._iterations = 0
        self._interrupted_at = -OFTEN
        self._least_calls = 1  # of an iteration: what is shorter was found to be no rhythm

    def posted(self, now: float, size_bytes: int, sent_bytes: int) -> Call:
        """A call begins. `sent_bytes` is what has left so far, ever."""
        call = Call(now, size_bytes)
        self._recent.append(call)
        if self.pattern is None:
            self._learn(sent_bytes)
        else:
            self._follow(call, sent_bytes)
        return call

    def ended(self, now: float, call: Call) -> None:
        call.ended_at = now

    def rate(self, now: float) -> float | None:
        """Bytes per second at which to go on from here."""
        if self._rate is None or now <= self._due:
            return self._rate
        # Late in spite of it: faster and faster, but no burst. The aim will be set earlier.
        return self._rate * 2 ** min((now - self._due) / self._allowed_s, 32.0)

    def allowed_wait_s(self, pattern: Pattern) -> float:
        """From the last call to the end of all."""
        return pattern.full_speed_wait_s + self.allowance * pattern.period_s

    def _decide(self, now: float, sent_bytes: int) -> None:
        """At each call: the rate until the next one."""
        pattern, ratio = self.pattern, self._ratio
        assert pattern is not None
        if ratio is None:
            self._rate = None
            return
        begun = len(self._current)
        owed = ratio * sum(call.size_bytes for call in self._current) - (sent_bytes - self._sent_before)
        mean = ratio * sum(pattern.sizes) / pattern.period_s
        self._allowed_s = self.allowed_wait_s(pattern) * self.aim
        last_call = now + pattern.offsets[-1] - pattern.offsets[begun - 1]
        self._due = last_call + self._allowed_s
        slowest: float | None = None
        for place in range(begun, pattern.calls):
            until = pattern.offsets[place] - pattern.offsets[begun - 1]
            if until > 0:
                slowest = _least(slowest, AHEAD * owed / until)
            owed += ratio * pattern.sizes[place]
        self._rate = max(_least(slowest, owed / (self._due - now)), mean)

    # --- learning ---------------------------------------------------------------------------------------

    def _learn(self, sent_bytes: int) -> None:
        """Look whether the last calls are two equal iterations and the first call of a third."""
        calls = list(self._recent)
        for count in range(self._least_calls, (len(calls) - 1) // 2 + 1):
            older, newer = calls[-2 * count - 1 : -count - 1], calls[-count - 1 : -1]
            following = calls[-1]
            if [c.size_bytes for c in older] != [c.size_bytes for c in newer]:
                continue
            if following.size_bytes != newer[0].size_bytes:
                continue
            gaps = [
                _gaps(older, newer[0].at),
                _gaps(newer, following.at),
            ]
            period = sum(gaps[1])
            if period < SHORTEST_S or max(abs(a - b) for a, b in zip(*gaps, strict=True)) > ALIKE * period:
                continue
            # The longest gap is the one in which nothing is called: there an iteration begins.
            longest = max(range(count), key=lambda place: (gaps[1][place], -place))
            if longest != count - 1:
                return  # not at a beginning; the next calls will be
            self._begin_pattern(newer, following, gaps[1], sent_bytes)
            return

    def _begin_pattern(self, calls: list[Call], following: Call, gaps: list[float], sent_bytes: int) -> None:
        wait = _wait_s(calls)
        if wait is None:
            return
        offsets = [call.at - calls[0].at for call in calls]
        self.pattern = Pattern([c.size_bytes for c in calls], offsets, sum(gaps), wait)
        self.aim = FIRST_AIM
        self._ratio = None  # learned in the iteration that begins now, still at full speed
        self._current = [following]
        self._sent_before = sent_bytes

    # --- following --------------------------------------------------------------------------------------

    def _follow(self, call: Call, sent_bytes: int) -> None:
        pattern = self.pattern
        assert pattern is not None
        place = len(self._current)
        if place == pattern.calls:
            if not self._iteration_over(call, sent_bytes):
                self._least_calls = pattern.calls + 1
                self._forget()
                return
            place = 0
            self._current = []
        if call.size_bytes != pattern.sizes[place]:
            self._least_calls = 1
            self._forget()
            return
        self._current.append(call)
        self._decide(call.at, sent_bytes)

    def _iteration_over(self, following: Call, sent_bytes: int) -> bool:
        """Learn from it; False: such iterations are not the rhythm."""
        pattern = self.pattern
        assert pattern is not None
        calls = self._current
        period = following.at - calls[0].at
        wait = _wait_s(calls)
        paced = self._ratio is not None
        total = sum(pattern.sizes)
        self._iterations += 1
        if period > INTERRUPTED * pattern.period_s:
            often = self._iterations - self._interrupted_at < OFTEN
            self._interrupted_at = self._iterations
            if often:
                return False
        elif wait is not None:
            seen = (sent_bytes - self._sent_before) / total
            self._ratio = seen if self._ratio is None else _mixed(self._ratio, seen)
            for place, call in enumerate(calls):
                pattern.offsets[place] = _mixed(pattern.offsets[place], call.at - calls[0].at)
            if paced:
                self._correct_aim(wait)
            else:
                pattern.full_speed_wait_s = min(pattern.full_speed_wait_s, wait)
            pattern.period_s = _mixed(pattern.period_s, period - max(wait - pattern.full_speed_wait_s, 0.0))
        self._sent_before = sent_bytes
        return True

    def _correct_aim(self, wait_s: float) -> None:
        pattern = self.pattern
        assert pattern is not None
        allowed = self.allowed_wait_s(pattern)
        if wait_s > allowed:
            self.aim = max(LEAST_AIM, self.aim * max(SOONER, allowed / wait_s * 0.95))
        elif wait_s < allowed - (1 - WELL_WITHIN) * self.allowance * pattern.period_s:
            self.aim = min(1.0, self.aim * LATER)

    def _forget(self) -> None:
        """This is another rhythm, or none: at full speed until it is known."""
        self.pattern = None
        self._ratio = None
        self._rate = None
        self._current = []


def _gaps(calls: list[Call], following: float) -> list[float]:
    times = [*(call.at for call in calls), following]
    return [later - earlier for earlier, later in pairwise(times)]


def _wait_s(calls: list[Call]) -> float | None:
    """From the last call to the end of all; None while some have not ended."""
    ends = [call.ended_at for call in calls]
    if any(end is None for end in ends):
        return None
    return max(end for end in ends if end is not None) - calls[-1].at


def _least(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def _mixed(old: float, new: float) -> float:
    return old + NEWS * (new - old)
