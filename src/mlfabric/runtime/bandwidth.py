"""A host's own link rates, learned from what its collective links carry. Pure: the mesh feeds it.

A rate says something about a link only while the link is what holds the bytes back. A sender that has bytes
waiting for several peers, and whose packets to all of them wait about as long on their way, is held back by
its own uplink: they wait in one queue. One that has bytes waiting for one peer only, or gets them through to
some much sooner than to others, is held back by the others.
It tells those with every frame (`pressed`), so a receiver that most peers are pressed by knows that its own
downlink is the limit. What a peer's single flow would tell about a third host is not used: it comes late and
reads low. Nor do flows into other racks say anything of a host: their racks' uplinks hold them back.

Links to all peers stay open, and operations may be among a few of them: "most" is of the peers of those that
are under way. Between two hosts nobody knows whose link is the limit, and nothing is learned but that what a
link carries it can carry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

Flow = TypeVar("Flow", bound=Hashable)

# How often the flows are looked at while something is under way.
TICK_S = 0.025
# Bytes waiting to be sent that count as held back: more than the kernel holds for want of a moment's time.
BACKLOG_BYTES = 32 * 1024
# Bytes that have left since the last look and are more than control messages.
SENT_BYTES = 8 * 1024
# Packets that take so much longer than they could wait in a queue.
QUEUED_US = 1500
# It is the same queue for all flows if the packets of none wait for less than this part of what is usual.
SAME_QUEUE = 0.45
# A look that comes later than this tells of a busy processor, not of the network.
LATE_S = 0.06
# An uplink that had nothing to send for more than this share of the time was not the limit.
LEAST_BUSY = 0.85
# So many of the flows must have had something to send all along: one alone may wait at its receiver.
ENOUGH_FLOWS = 1 / 3
# A rate is taken over at least this long, without the beginning, in which TCP finds its window.
SAMPLE_S = 0.04
BEGINNING_S = 0.02
# The highest of the last few samples tells of a changed link soon: a link can't carry more than it can carry,
# but a moment's hiccup is no slow link. What differs by less than a jump is noise, and smoothed over more.
# A fall to less than half takes one sample less to believe: the sooner, the less goes the wrong way.
SOON_SAMPLES = 3
FALL_SAMPLES = 2
RAISE_SAMPLES = 2
STEADY_SAMPLES = 20
# Older ones may be of another rate.
SAMPLES_S = 1.5
JUMP = 0.25
FALL = 0.5
# A sender whose uplink carries less than this share of what it can is not held back by its uplink.
UPLINK_FREE = 0.75
# An uplink that carries so much of what is believed of it for so long, while hardly ever anything waits here
# (at so many of the looks at most), can carry more: so many times as much is believed of it then.
USED_UP = 0.5
TRY_S = 0.25
HINDERED = 0.3
TRY = 1.25
# What a peer said of us holds this long, as long as more of the same bytes come; a slow link brings its next
# word late.
PRESSED_S = 0.3
# What was seen longer ago is not told with what is seen now: the link may have changed.
FRESH_S = 0.25
# A host's downlink is to blame only if so many of its peers say so: plans are made for the slowest.
NEARLY_ALL = 0.7
# Probes of peers that are busy read low, never high: the best of so many counts, unless they are from before
# a pause. A rise is believed at once. Differences below this are noise.
PROBE_SAMPLES = 3
PROBE_PAUSE_S = 2.5
PROBE_NOISE = 0.15
# Differences below this are not worth telling.
WORTH_TELLING = 0.07


@dataclass(slots=True)
class FlowState:
    """One link as the kernel sees it now."""

    acked_bytes: int
    received_bytes: int
    waiting_bytes: int  # to be sent
    busy_us: int  # so long has it had bytes to send, all its life
    pressed_by_peer: bool = False  # the peer says that we hold its bytes back, and more of them are coming
    far: bool = False  # it leads into another rack
    used: bool = True  # by an operation under way
    queued_us: int | None = None  # so much longer than ever its packets are on their way; None: not known


class RateMeter:
    """The rate of one direction of a host's link."""

    def __init__(self) -> None:
        self.rate: float | None = None  # bytes per second, once seen
        self.seen_at = float("-inf")
        self._since: float | None = None  # the link has been the limit from here on
        self._sample: tuple[float, int] | None = None
        self._samples: deque[tuple[float, float]] = deque(maxlen=STEADY_SAMPLES)  # when, how fast
        self._carried = 0  # at the last look
        self._passed: tuple[float, int] | None = None
        self._passing: deque[float] = deque(maxlen=RAISE_SAMPLES)
        self._probes: deque[tuple[float, float]] = deque(maxlen=PROBE_SAMPLES)

    def probed(self, now: float, rate: float) -> None:
        """A probe came through at this rate, while nothing else was under way here."""
        if self._probes and now - self._probes[-1][0] > PROBE_PAUSE_S:
            self._probes.clear()
        self._probes.append((now, rate))
        self.seen_at = now
        best = max(each for _, each in self._probes)
        enough = len(self._probes) == PROBE_SAMPLES
        if self.rate is None:
            self.rate = best if enough else None
        elif best > (1 + PROBE_NOISE) * self.rate or (enough and best < (1 - PROBE_NOISE) * self.rate):
            self._jump(now, best)

    def look(self, now: float, carried_bytes: int, limiting: bool) -> None:
        """`limiting`: the link has held bytes back since the last look. Of what has just begun to be sent
        nothing is acknowledged yet, which is no slow link."""
        self._probes.clear()
        self._raise(now, carried_bytes)
        moved, self._carried = carried_bytes > self._carried, carried_bytes
        if not limiting or not moved:
            self._since = self._sample = None
            return
        if self._since is None:
            self._since = now
        if self._sample is None:
            if now - self._since >= BEGINNING_S:
                self._sample = (now, carried_bytes)
            return
        began, before = self._sample
        if now - began < SAMPLE_S:
            return
        self._sample = (now, carried_bytes)
        while self._samples and now - self._samples[0][0] > SAMPLES_S:
            self._samples.popleft()
        self._samples.append((now, (carried_bytes - before) / (now - began)))
        self.seen_at = now
        self._weigh(now)

    def _raise(self, now: float, carried_bytes: int) -> None:
        """What a link carries it can carry, whatever holds the bytes back."""
        if self._passed is None:
            self._passed = (now, carried_bytes)
        began, before = self._passed
        if now - began < SAMPLE_S:
            return
        self._passed = (now, carried_bytes)
        self._passing.append((carried_bytes - before) / (now - began))
        carried = min(self._passing)
        enough = len(self._passing) == RAISE_SAMPLES
        if enough and self.rate is not None and carried > (1 + JUMP) * self.rate:
            self.seen_at = now
            self._jump(now, carried)

    def _weigh(self, now: float) -> None:
        samples = [rate for _, rate in self._samples]
        soon = max(samples[-SOON_SAMPLES:])
        enough = len(samples) >= SOON_SAMPLES
        if self.rate is None:
            self.rate = soon if enough and soon > 0 else None
        elif len(samples) > 1 and (risen := min(samples[-2:])) > (1 + JUMP) * self.rate:
            self._jump(now, risen)  # one sample may be of what a queue let through after a pause
        elif enough and 0 < soon < (1 - JUMP) * self.rate:
            self._jump(now, soon)
        elif len(samples) >= FALL_SAMPLES and 0 < (fallen := max(samples[-FALL_SAMPLES:])) < FALL * self.rate:
            self._jump(now, fallen)
        elif enough:
            upper = sorted(samples)[len(samples) // 2 :]  # being interrupted makes samples low, never high
            self.rate = sum(upper) / len(upper)

    def believe(self, now: float, rate: float) -> None:
        """Have this rate until something else is seen."""
        self.rate, self.seen_at = rate, now
        self._samples.clear()

    def _jump(self, now: float, rate: float) -> None:
        self.rate = rate
        self._samples = deque([(now, rate)], maxlen=STEADY_SAMPLES)


@dataclass(slots=True)
class _Trial:
    """What an uplink carries for a while, and at how many looks something held its bytes back here."""

    began: float
    acked_bytes: int
    looks: int = 0
    hindered: int = 0


class HostRates(Generic[Flow]):
    """Both directions, and what the scheduler was told last."""

    def __init__(self) -> None:
        self.up = RateMeter()
        self.down = RateMeter()
        self.noticed: list[float] = []  # when rates changed by enough to be told, lately
        self._told: tuple[float | None, float | None] = (None, None)
        self._last: tuple[float, int] | None = None
        self._seen: dict[Flow, FlowState] = {}
        self._used: set[Flow] = set()
        self._backlog: set[Flow] = set()
        self._acked = self._received = 0  # by all flows that ever were
        self._trial: _Trial | None = None

    def look(self, now: float, flows: Mapping[Flow, FlowState], held_back: bool = False) -> set[Flow]:
        """Take a look at all flows; which of them are pressed by their receiver rather than by our uplink.

        While we hold our bytes back ourselves (`held_back`) they say nothing about any link.
        """
        used = {key for key, flow in flows.items() if flow.used}
        near = {key for key in used if not flows[key].far}
        if len(near) < 2:
            near = used
        backlog = {key for key, flow in flows.items() if flow.waiting_bytes >= BACKLOG_BYTES}
        up_limits = not held_back and self._queues_here(near, backlog, flows)
        pressing = sum(flows[key].pressed_by_peer for key in near)
        down_limits = pressing >= max(2, NEARLY_ALL * len(near))
        self._count(flows)
        # What went over other links since the last look says nothing of how full these were.
        same = used == self._used and flows.keys() == self._seen.keys()
        past = now - self._last[0] if self._last is not None else float("inf")
        comparable = same and past <= LATE_S
        full = up_limits and comparable and self._kept_busy(past, flows, used)
        self.up.look(now, self._acked, full)
        self.down.look(now, self._received, down_limits and comparable)
        waits = full or (comparable and self._seems_to_wait(past, flows, near))
        self._try(now, waits or down_limits or held_back)
        free = not up_limits and self._uplink_is_free(now, self._acked)
        waited = self._backlog if free and not held_back else set()
        self._seen, self._used, self._backlog = dict(flows), used or self._used, backlog
        self._last = (now, self._acked)
        return waited & backlog

    def _try(self, now: float, hindered: bool) -> None:
        """Believe more of an uplink that is used as much as is believed of it and not full.

        Hosts of which the same is believed get the same to carry. So the slowest of them holds the others up,
        and what those carry never shows that they could carry more.
        """
        if self._trial is None or now - self._trial.began > 2 * TRY_S:
            self._trial = _Trial(now, self._acked)
        trial = self._trial
        trial.looks += 1
        trial.hindered += hindered
        past = now - trial.began
        if past < TRY_S:
            return
        self._trial = None
        believed, carried = self.up.rate, (self._acked - trial.acked_bytes) / past
        if believed is None or trial.hindered > HINDERED * trial.looks or carried < USED_UP * believed:
            return
        self.up.believe(now, TRY * believed)

    def _queues_here(self, near: set[Flow], backlog: set[Flow], flows: Mapping[Flow, FlowState]) -> bool:
        """Whether packets wait at our own uplink: then those of all flows do, about as long. If those of one
        get through sooner, it is receivers that hold the others back, however many they are.

        Whether bytes wait to be sent, too, says little: of small operations the kernel has sent all, and what
        waits is in the queue already. Where nothing is known of packets, it has to do.
        """
        queued = _queued(flows[key] for key in near if self._sends(key, flows[key]))
        if queued and not _in_one_queue(queued):
            return False
        half = max(2, (len(near) + 1) // 2)
        return len(queued) >= half or len(near & backlog) >= half

    def _sends(self, key: Flow, flow: FlowState) -> bool:
        """Whether more than a few words went out by it since the last look: what is known of it is fresh."""
        before = self._seen.get(key)
        return before is not None and flow.acked_bytes - before.acked_bytes >= SENT_BYTES

    def _count(self, flows: Mapping[Flow, FlowState]) -> None:
        """Add what was carried since the last look; a flow that is new has carried nothing yet."""
        for key, flow in flows.items():
            before = self._seen.get(key, flow)
            self._acked += flow.acked_bytes - before.acked_bytes
            self._received += flow.received_bytes - before.received_bytes

    def _kept_busy(self, past: float, flows: Mapping[Flow, FlowState], used: set[Flow]) -> bool:
        """Whether the kernel had bytes to send all the time since the last look, for enough of those flows
        whose packets wait nowhere but here: one to a slow receiver has bytes on their way all along."""
        queued = _queued(flows[key] for key in used)
        most = median(queued) / SAME_QUEUE if queued else 0
        ours = [key for key in used if (flows[key].queued_us or 0) <= most]
        busy = sum(self._was_busy(key, flows[key], past) for key in ours)
        return busy > int(ENOUGH_FLOWS * len(ours))

    def _seems_to_wait(self, past: float, flows: Mapping[Flow, FlowState], near: set[Flow]) -> bool:
        """Whether the packets of all that had bytes on their way all the time wait, several of them: perhaps
        at our own uplink, though they are too few to tell."""
        queued = _queued(flows[key] for key in near if self._was_busy(key, flows[key], past))
        return len(queued) > 1 and _in_one_queue(queued)

    def _was_busy(self, key: Flow, flow: FlowState, past: float) -> bool:
        """Whether it had bytes to send, or on their way, all the time since the last look."""
        return flow.busy_us - self._seen[key].busy_us >= LEAST_BUSY * 1e6 * past

    def _uplink_is_free(self, now: float, acked: int) -> bool:
        if self._last is None or self.up.rate is None or now <= self._last[0]:
            return False
        return (acked - self._last[1]) / (now - self._last[0]) < UPLINK_FREE * self.up.rate

    @property
    def slower(self) -> float | None:
        """The rate of the slower direction, of those that are known."""
        return min((meter.rate for meter in (self.up, self.down) if meter.rate is not None), default=None)

    def probed(self, now: float, up: float | None, down: float | None) -> None:
        """What a probe showed, in either direction."""
        for meter, rate in ((self.up, up), (self.down, down)):
            if rate is not None:
                meter.probed(now, rate)

    def news(self, now: float) -> tuple[float | None, float | None] | None:
        """The rates, if they differ from what was told last; None stands for one not seen of late."""
        meters = (self.up, self.down)
        current = tuple(meter.rate if now - meter.seen_at <= FRESH_S else None for meter in meters)
        if not any(_differs(new, old) for new, old in zip(current, self._told, strict=True)):
            return None
        up, down = (new or old for new, old in zip(current, self._told, strict=True))
        self._told = (up, down)
        self.noticed = [*self.noticed[-99:], now]
        return current[0], current[1]


def _queued(flows: Iterable[FlowState]) -> list[int]:
    """How long packets wait, where that is known."""
    return [flow.queued_us for flow in flows if flow.queued_us is not None]


def _in_one_queue(queued_us: Sequence[int]) -> bool:
    """Whether packets that wait so long may wait in one queue: all wait, about as long or longer."""
    return min(queued_us) >= max(QUEUED_US, SAME_QUEUE * median(queued_us))


def _differs(new: float | None, old: float | None) -> bool:
    if new is None:
        return False
    return old is None or abs(new - old) > WORTH_TELLING * old
