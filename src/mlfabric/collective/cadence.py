"""The rhythm of a job's collective calls, and how slowly its bytes may leave without being late. Pure.

Training repeats itself: every iteration makes the same calls, of the same sizes, at about the same times.
Once two iterations are alike, the next one's calls are known beforehand. What can't be known is which
results the job waits for. DDP waits for all of them after the last call of a backward pass, and for none
before; a plain loop waits for each. So it is found out. A call is drawn out a little, and the gap to the
next call tells: where it grows by as much as the call took longer, the job waits there; where it stays as
it was, it does not. After the first questions all of that happens within the allowance, a share of the
iteration.

Calls up to one that is waited for, that one included, belong together: their bytes have until the last
one's time at full speed and its part of the allowance are over. The slowest way to send them in time is the
taut string below what has been called: at each call the rate is the least, over all calls to come, of what
will have been called before it and has not left, divided by the time until then. What pacing costs is seen
every time, as the time that the last call took; where it exceeds the allowance the aim is set earlier, and
later again as it fits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

# Waiting that pacing may add to an iteration, as a share of it.
ALLOWANCE = 0.025
# Calls of one iteration, at the most.
LONGEST = 128
# Gaps that differ by more than this share of an iteration are no rhythm.
ALIKE = 0.1
# Shorter iterations are left alone: clocks and processors are not that punctual.
SHORTEST_S = 0.02
# The aim, as a share of the time that is allowed: where it begins, and how it follows what was seen.
FIRST_AIM = 0.7
LEAST_AIM = 0.2
SOONER, LATER = 0.8, 1.05
# It moves later while less than this share of the allowance was used.
WELL_WITHIN = 0.8
# Bytes of calls that nobody waits for go so much faster than they would have to: ranks wait for each other
# now and then, and what is left when the last call comes has to be sent in haste.
AHEAD = 1.5
# A gap that grew by less than this share of what its call took longer was not waited in; by more than that,
# it was. Between the two what was believed stays.
FREE_BELOW, WAITED_ABOVE = 0.35, 0.65
# The first drawing out has to tell through the noise: each call may take the whole allowance for itself, as
# long as all of them together take no more than this share of the iteration.
QUESTION = 0.16
# So many iterations speak before a call is taken for one that nobody waits for.
WITNESSES = 2
# An iteration this much longer than usual, right after a call was taken for such a one, says that it was
# not.
REGRET = 1.1
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
class Beat:
    """One call of an iteration, as it usually is."""

    size_bytes: int
    gap_s: float  # until the next call, were nothing drawn out
    full_speed_s: float  # from the call to its end, were nothing drawn out
    waited_for: bool = True
    aim: float = FIRST_AIM
    witnesses: int = 0
    freed_at: int = 0  # iteration
    drawn_out_s: float = 0.0  # running means: how much longer it took, and how much the gap grew
    grown_s: float = 0.0


class Cadence:
    """Told of every large call and its end, it says how fast bytes have to leave; None: unlimited."""

    def __init__(self, allowance: float = ALLOWANCE) -> None:
        self.allowance = allowance
        self.beats: list[Beat] = []  # of one iteration; empty: no rhythm is known
        self._recent: deque[Call] = deque(maxlen=2 * LONGEST + 1)
        self._place = 0  # of the next call
        self._ratio: float | None = None  # bytes that leave for each byte of a call
        self._sent_at_start = 0
        self._called_bytes = 0  # since nothing was under way, and what had left then
        self._sent_at_rest = 0
        self._rate: float | None = None
        self._due = 0.0  # when what is under way should be there
        self._allowed_s = 1.0
        self._iterations = 0
        self._interrupted_at = -OFTEN
        self._least_calls = 1  # of an iteration: what is shorter was found to be no rhythm

    @property
    def period_s(self) -> float:
        return sum(beat.gap_s for beat in self.beats)

    def posted(self, now: float, size_bytes: int, sent_bytes: int) -> Call:
        """A call begins. `sent_bytes` is what has left so far, ever."""
        call = Call(now, size_bytes)
        if all(each.ended_at is not None for each in self._open()):
            self._called_bytes, self._sent_at_rest = 0, sent_bytes
        self._called_bytes += size_bytes
        self._recent.append(call)
        if not self.beats:
            self._learn(sent_bytes)
        else:
            self._follow(call, sent_bytes)
        self._decide(now, sent_bytes)
        return call

    def ended(self, now: float, call: Call) -> None:
        call.ended_at = now

    def rate(self, now: float) -> float | None:
        """Bytes per second at which to go on from here."""
        if self._rate is None or now <= self._due:
            return self._rate
        # Late in spite of it: faster and faster, but no burst. The aim will be set earlier.
        return self._rate * 2 ** min((now - self._due) / self._allowed_s, 32.0)

    def _open(self) -> list[Call]:
        """The latest calls, of which some may be under way."""
        return list(self._recent)[-max(len(self.beats), 1) :]

    # --- deciding ---------------------------------------------------------------------------------------

    def allowed_s(self, beat: Beat) -> float:
        """How long a call that is waited for may take."""
        if beat.witnesses < WITNESSES:
            share = min(self.allowance, QUESTION / len(self.beats))
        else:
            share = self.allowance / max(sum(each.waited_for for each in self.beats), 1)
        return beat.full_speed_s + share * self.period_s

    def _decide(self, now: float, sent_bytes: int) -> None:
        """At each call: the rate until the next one."""
        if self._ratio is None:
            self._rate = None
            return
        count = len(self.beats)
        owed = self._ratio * self._called_bytes - (sent_bytes - self._sent_at_rest)
        mean = self._ratio * sum(beat.size_bytes for beat in self.beats) / self.period_s
        slowest: float | None = None
        until = 0.0
        for step in range(count):
            beat = self.beats[(self._place - 1 + step) % count]
            if beat.waited_for or step == count - 1:
                break
            until += beat.gap_s
            slowest = _least(slowest, AHEAD * owed / until)
            owed += self._ratio * self.beats[(self._place + step) % count].size_bytes
        self._allowed_s = self.allowed_s(beat) * beat.aim if beat.waited_for else beat.gap_s
        self._due = now + until + self._allowed_s
        self._rate = max(_least(slowest, owed / (until + self._allowed_s)), mean)

    # --- learning ---------------------------------------------------------------------------------------

    def _learn(self, sent_bytes: int) -> None:
        """Look whether the last calls are two equal iterations and the first call of a third."""
        calls = list(self._recent)
        for count in range(self._least_calls, (len(calls) - 1) // 2 + 1):
            older, newer, following = calls[-2 * count - 1 : -count - 1], calls[-count - 1 : -1], calls[-1]
            if following.size_bytes != newer[0].size_bytes or following.size_bytes != older[0].size_bytes:
                continue
            sizes = [call.size_bytes for call in newer]
            if [call.size_bytes for call in older] != sizes:
                continue
            before, now = _gaps(older, newer[0]), _gaps(newer, following)
            most = max(abs(a - b) for a, b in zip(before, now, strict=True))
            if sum(now) < SHORTEST_S or most > ALIKE * sum(now):
                continue
            durations = [[_duration(call) for call in calls] for calls in (older, newer)]
            self.beats = [
                Beat(size, (gap + other) / 2, min(first, second, gap))
                for size, gap, other, first, second in zip(sizes, before, now, *durations, strict=True)
            ]
            self._place = 1
            self._sent_at_start = sent_bytes
            self._ratio = None  # learned in the iteration that begins now, still at full speed
            return

    # --- following --------------------------------------------------------------------------------------

    def _follow(self, call: Call, sent_bytes: int) -> None:
        if self._place == len(self.beats):
            if not self._iteration_over(call, sent_bytes):
                self._forget(len(self.beats) + 1)
                return
            self._place = 0
        if call.size_bytes != self.beats[self._place].size_bytes:
            self._forget(1)
            return
        self._place += 1

    def _iteration_over(self, following: Call, sent_bytes: int) -> bool:
        """Learn from it; False: such iterations are not the rhythm."""
        calls = list(self._recent)[-len(self.beats) - 1 : -1]
        self._iterations += 1
        seen = (sent_bytes - self._sent_at_start) / sum(beat.size_bytes for beat in self.beats)
        self._sent_at_start = sent_bytes
        if following.at - calls[0].at > INTERRUPTED * self.period_s:
            often = self._iterations - self._interrupted_at < OFTEN
            self._interrupted_at = self._iterations
            return not often
        gaps = _gaps(calls, following)
        paced = self._ratio is not None
        self._ratio = seen if self._ratio is None else _mixed(self._ratio, seen)
        if paced:
            self._judge(calls, gaps, sum(gaps) > REGRET * self.period_s)
            return True
        for beat, call, gap in zip(self.beats, calls, gaps, strict=True):
            beat.full_speed_s = min(beat.full_speed_s, _duration(call))
            beat.gap_s = _mixed(beat.gap_s, gap)
        return True

    def _judge(self, calls: list[Call], gaps: list[float], regret: bool) -> None:
        """Where does the job wait? Then follow its pace, by the gaps in which nobody does."""
        for beat, call, gap in zip(self.beats, calls, gaps, strict=True):
            taken = min(_duration(call), gap)
            was_free = not beat.waited_for
            _witness(beat, taken - beat.full_speed_s, gap - beat.gap_s, overtaken=_duration(call) > gap)
            if regret and was_free and self._iterations - beat.freed_at <= WITNESSES:
                beat.waited_for, beat.witnesses = True, -OFTEN
            elif was_free is beat.waited_for:
                beat.freed_at = self._iterations
            if beat.waited_for:
                self._correct_aim(beat, taken)
        if not any(beat.waited_for for beat in self.beats):
            max(self.beats, key=lambda beat: beat.grown_s / max(beat.drawn_out_s, 1e-9)).waited_for = True
        free = [(beat, gap) for beat, gap in zip(self.beats, gaps, strict=True) if not beat.waited_for]
        usual = sum(beat.gap_s for beat, _ in free)
        if usual > 0:
            change = 1 + NEWS * (sum(gap for _, gap in free) / usual - 1)
            for beat in self.beats:
                if beat.waited_for:
                    beat.gap_s *= change
        for beat, gap in free:
            beat.gap_s = _mixed(beat.gap_s, gap)

    def _correct_aim(self, beat: Beat, taken_s: float) -> None:
        allowed = self.allowed_s(beat)
        used = taken_s - beat.full_speed_s
        if taken_s > allowed:
            beat.aim = max(LEAST_AIM, beat.aim * max(SOONER, 0.95 * allowed / taken_s))
        elif used < WELL_WITHIN * (allowed - beat.full_speed_s):
            beat.aim = min(1.0, beat.aim * LATER)

    def _forget(self, least_calls: int) -> None:
        """This is another rhythm, or none: at full speed until it is known."""
        self._least_calls = least_calls
        self.beats = []
        self._ratio = self._rate = None


def _witness(beat: Beat, drawn_out_s: float, grown_s: float, overtaken: bool) -> None:
    """Take note of how a call was drawn out and what became of the gap behind it."""
    beat.witnesses += 1
    if overtaken:  # the next call came before this one's end: nobody waited
        beat.waited_for, beat.witnesses = False, max(beat.witnesses, WITNESSES)
        beat.drawn_out_s, beat.grown_s = max(drawn_out_s, beat.drawn_out_s), 0.0
        return
    news = NEWS if beat.witnesses > WITNESSES else 0.5
    if drawn_out_s > 2 * beat.drawn_out_s > 0:
        news = 1.0  # far more than before: this one tells more
    beat.drawn_out_s += news * (drawn_out_s - beat.drawn_out_s)
    beat.grown_s += news * (grown_s - beat.grown_s)
    if beat.drawn_out_s > 0:
        share = beat.grown_s / beat.drawn_out_s
        if share > WAITED_ABOVE:
            beat.waited_for = True
        elif share < FREE_BELOW and beat.witnesses >= WITNESSES:
            beat.waited_for = False


def _gaps(calls: list[Call], following: Call) -> list[float]:
    return [later.at - earlier.at for earlier, later in pairwise([*calls, following])]


def _duration(call: Call) -> float:
    return float("inf") if call.ended_at is None else call.ended_at - call.at


def _least(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def _mixed(old: float, new: float) -> float:
    return old + NEWS * (new - old)
