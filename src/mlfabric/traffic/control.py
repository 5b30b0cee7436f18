"""The small closed loop: the same burst schedules, with senders that react to the queue.

Each job sends its bursts one after the other; the pause after a burst is kept, so a burst that takes longer
moves everything behind it, as in synchronous training. Time advances in steps of one round trip. The models
are the published control laws in their simplest form; they show how far bursts stretch, not what one
product does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.bursts import find_bursts
from mlfabric.traffic.cycles import Cycle
from mlfabric.traffic.extrapolation import Link
from mlfabric.traffic.trace import NS_PER_S

Control = Literal["none", "dctcp", "dcqcn", "pfc"]
CONTROLS: Final[tuple[Control, ...]] = ("none", "dctcp", "dcqcn", "pfc")
_GAIN_DCTCP: Final = 1 / 16  # g of RFC 8257
_GAIN_DCQCN: Final = 1 / 256  # g of Zhu et al., SIGCOMM 2015
_FAST_RECOVERY: Final = 5  # steps before the target rate itself is raised, same source
_SEGMENT_BYTES: Final = 1448
_XON: Final = 0.5  # share of the mark at which paused senders resume
_MOST_STEPS: Final = 2_000_000
_MOST_BURSTS: Final = 400
# Where a trickle fills the pauses, bursts are told by load: bins of an iteration, and of the fullest bin the
# share above which a bin is part of a burst; fewer empty bins than these do not end one.
_BINS: Final = 1000
_MOST_BINS: Final = 200_000
_LOADED: Final = 0.3
_BRIDGED: Final = 3


@dataclass(frozen=True)
class Schedule:
    """One job's bursts: bytes and own rate of each, and the pause that follows it."""

    bytes: NDArray[np.float64]
    rate_bps: NDArray[np.float64]
    pause_s: NDArray[np.float64]
    start_s: float


@dataclass(frozen=True)
class ControlResult:
    control: Control
    stretch_mean: float  # burst duration relative to alone on the link
    stretch_p95: float
    stretch_max: float
    round_stretch: float  # time of a whole cycle relative to alone
    marked_share: float  # of bytes
    pause_s: float  # per job, PFC
    lost_bytes: float
    most_queue_bytes: float
    bursts: int
    finished: bool


def schedules(cycles: Sequence[Cycle], shifts_ns: Sequence[int]) -> list[Schedule]:
    """The bursts of each job's cycle, starting after its shift."""
    return [_schedule(cycle, shift) for cycle, shift in zip(cycles, shifts_ns, strict=True)]


def _schedule(cycle: Cycle, shift_ns: int) -> Schedule:
    trace = cycle.unrolled(1)
    bins = min(_BINS * cycle.rounds, _MOST_BINS)
    load, _ = np.histogram(trace.time_ns, bins, (0, cycle.length_ns), weights=trace.size.astype(np.float64))
    fullest_bps = load.max() * 8e9 * bins / cycle.length_ns
    found = find_bursts(trace)
    if len(found) > _MOST_BURSTS:
        # Bursts inside bursts: take iterations apart only at pauses that matter on their scale.
        found = find_bursts(trace, cycle.period_ns / 100)
    on_ns = max(int(found.duration_ns.sum()), 1)
    if len(found) > _MOST_BURSTS or found.bytes.sum() * 8e9 < _LOADED * fullest_bps * on_ns:
        return _schedule_by_load(load, cycle, shift_ns)
    duration = np.maximum(found.duration_ns, 1000)
    ends = found.start_ns + found.duration_ns
    following = np.append(found.start_ns[1:], cycle.length_ns + found.start_ns[0])
    return Schedule(
        found.bytes.astype(np.float64),
        found.bytes * 8e9 / duration,
        np.maximum(following - ends, 0) / NS_PER_S,
        shift_ns % cycle.length_ns / NS_PER_S,
    )


def _schedule_by_load(load: NDArray[np.float64], cycle: Cycle, shift_ns: int) -> Schedule:
    """Bursts as runs of loaded bins; what trickles between them is sent with the one before."""
    width_s = cycle.length_ns / len(load) / NS_PER_S
    busy = np.flatnonzero(load > _LOADED * load.max())
    breaks = np.flatnonzero(np.diff(busy) > _BRIDGED)
    first, last = busy[np.append(0, breaks + 1)], busy[np.append(breaks, len(busy) - 1)]
    turned = np.roll(load, -first[0])  # what comes before the first burst belongs to the last
    sizes = np.add.reduceat(turned, first - first[0])
    own = np.array([load[a : b + 1].sum() for a, b in zip(first, last, strict=True)])
    lasting_s = (last - first + 1) * width_s
    following = np.append(first[1:], first[0] + len(load))
    start_s = (first[0] * width_s + shift_ns / NS_PER_S) % (cycle.length_ns / NS_PER_S)
    return Schedule(sizes, own * 8 / lasting_s, (following - last - 1) * width_s, start_s)


class _Senders:
    """All jobs at once: what each still has to send, how fast it goes, what its law remembers."""

    def __init__(self, plans: Sequence[Schedule], rtt_s: float) -> None:
        count = len(plans)
        self.plans, self.rtt_s = plans, rtt_s
        self.at = np.zeros(count, np.int64)  # current burst
        self.left = np.array([plan.bytes[0] for plan in plans])
        self.wakes_s = np.array([plan.start_s for plan in plans])
        self.began_s = self.wakes_s.copy()
        self.line = np.array([plan.rate_bps[0] for plan in plans])
        self.rate = self.line.copy()
        self.target = self.line.copy()
        self.alpha = np.zeros(count)
        self.quiet = np.zeros(count, np.int64)
        self.done_s = np.full(count, np.nan)
        self.stretches: list[float] = []

    def active(self, now_s: float) -> NDArray[np.bool_]:
        awake: NDArray[np.bool_] = np.isnan(self.done_s) & (self.wakes_s <= now_s + 1e-12)
        return awake

    def next_burst(self, job: int, now_s: float, alone_bps: float) -> None:
        plan = self.plans[job]
        burst = int(self.at[job])
        alone = plan.bytes[burst] * 8 / min(plan.rate_bps[burst], alone_bps)
        self.stretches.append((now_s - self.began_s[job]) / max(alone, self.rtt_s))
        if burst + 1 == len(plan.bytes):
            self.done_s[job] = now_s + plan.pause_s[burst]
            return
        self.at[job] = burst + 1
        self.left[job] = plan.bytes[burst + 1]
        self.wakes_s[job] = self.began_s[job] = now_s + plan.pause_s[burst]
        self.line[job] = self.rate[job] = self.target[job] = plan.rate_bps[burst + 1]
        self.quiet[job] = 0

    def react(self, control: Control, active: NDArray[np.bool_], marked: float) -> None:
        """One round trip's worth of the law, for every active sender."""
        if control == "dctcp":
            self.alpha[active] += _GAIN_DCTCP * (marked - self.alpha[active])
            grown = self.rate + _SEGMENT_BYTES * 8 / self.rtt_s
            cut = self.rate * (1 - self.alpha / 2)
            self.rate = np.where(
                active, np.clip(cut if marked > 0 else grown, self.line / 1000, self.line), self.rate
            )
        elif control == "dcqcn":
            self.alpha[active] += _GAIN_DCQCN * ((1.0 if marked > 0 else 0.0) - self.alpha[active])
            if marked > 0:
                self.target = np.where(active, self.rate, self.target)
                # The first notification of a burst counts in full: alpha starts at one.
                strength = np.where(self.quiet == 0, np.maximum(self.alpha, 0.5), self.alpha)
                self.rate = np.where(active, self.rate * (1 - strength / 2), self.rate)
                self.quiet = np.where(active, 1, self.quiet)
            else:
                self.quiet = np.where(active, self.quiet + 1, self.quiet)
                raised = np.where(self.quiet > _FAST_RECOVERY, self.target + self.line / 100, self.target)
                self.target = np.where(active, np.minimum(raised, self.line), self.target)
                self.rate = np.where(active, (self.rate + self.target) / 2, self.rate)
            self.rate = np.clip(self.rate, self.line / 1000, self.line)


def simulate(plans: Sequence[Schedule], link: Link, control: Control, rtt_s: float = 50e-6) -> ControlResult:
    """Every job's cycle once, through one queue, under one law."""
    if control not in CONTROLS:
        raise FabricError(f"--control {control!r} is not one of {', '.join(CONTROLS)}")
    senders = _Senders(plans, rtt_s)
    queue = lost = most = marked_bytes = sent_bytes = paused_s = 0.0
    paused = False
    now_s, steps = 0.0, 0
    drain = link.rate_bps / 8 * rtt_s
    while np.isnan(senders.done_s).any() and steps < _MOST_STEPS:
        steps += 1
        active = senders.active(now_s)
        if not active.any() and queue <= 0:
            now_s = float(senders.wakes_s[np.isnan(senders.done_s)].min())
            continue
        wanted = np.where(active, np.minimum(senders.rate / 8 * rtt_s, senders.left), 0.0)
        if control == "pfc" and paused:
            wanted[:] = 0
            paused_s += rtt_s * float(active.mean())
        offered = float(wanted.sum())
        # With drops the lost bytes stay with their senders, who must send them again.
        room = np.inf if control == "pfc" else max(0.0, link.buffer_bytes - queue + drain)
        passed = min(1.0, room / offered) if offered > 0 else 1.0
        lost += offered * (1 - passed)
        senders.left -= wanted * passed
        before = queue
        queue = max(0.0, queue + offered * passed - drain)
        most = max(most, queue)
        share = _marked_share(control, before, queue, link)
        marked_bytes += share * offered
        sent_bytes += offered
        paused = queue > link.mark_bytes * (_XON if paused else 1.0)
        now_s += rtt_s
        for job in np.flatnonzero(active & (senders.left <= 1e-6)):
            senders.next_burst(int(job), now_s + queue * 8 / link.rate_bps, link.rate_bps)
        senders.react(control, active, share)
    return _result(control, senders, link, lost, most, marked_bytes / max(sent_bytes, 1), paused_s)


def _marked_share(control: Control, before: float, after: float, link: Link) -> float:
    """Share of this step's bytes that met a queue above the mark."""
    if control in ("none", "pfc"):
        return 0.0
    low, high = min(before, after), max(before, after)
    if low > link.mark_bytes:
        return 1.0
    return (high - link.mark_bytes) / (high - low) if high > link.mark_bytes else 0.0


def _result(
    control: Control, senders: _Senders, link: Link, lost: float, most: float, marked: float, paused_s: float
) -> ControlResult:
    stretch = np.array(senders.stretches or [1.0])
    alone = []
    for plan in senders.plans:
        busy = (plan.bytes * 8 / np.minimum(plan.rate_bps, link.rate_bps)).sum()
        alone.append(float(busy + plan.pause_s.sum()))
    taken = senders.done_s - np.array([plan.start_s for plan in senders.plans])
    finished = not np.isnan(taken).any()
    return ControlResult(
        control,
        float(stretch.mean()),
        float(np.quantile(stretch, 0.95)),
        float(stretch.max()),
        float(np.mean(taken / np.array(alone))) if finished else float("inf"),
        marked,
        paused_s,
        lost,
        most,
        len(senders.stretches),
        finished,
    )
