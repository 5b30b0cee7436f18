"""Several jobs on one link: what their superposition does to its queue, for every way their phases may fall.

Open loop: senders do not slow down, so loss and queues are overstated; `control` closes the loop. Worst cases
are exact for equal jobs (K times the backlog at C/K), a bracket for different ones; best cases are the best
found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.backlogs import Backlog, least_rate
from mlfabric.traffic.cycles import Cycle, make_cycle, overlaid
from mlfabric.traffic.envelopes import envelope
from mlfabric.traffic.queueing import QueueResult, drop_tail
from mlfabric.traffic.trace import Trace

Law = Literal["aligned", "random", "best", "drift"]
_PHASES: Final = 48  # positions tried per job when phases are searched
_BEAT_POINTS: Final = 64
_COARSE_GRAINS: Final = 1500
_MOST_JOBS: Final = 1024


@dataclass(frozen=True)
class Link:
    rate_bps: float
    buffer_bytes: float
    mark_bytes: float


@dataclass(frozen=True)
class Draw:
    """One way the phases fell, and what the queue did."""

    shifts_ns: tuple[int, ...]
    queue: QueueResult
    backlog_bytes: float  # what an unbounded buffer would have held


@dataclass(frozen=True)
class LawResult:
    """All draws of one law."""

    law: Law
    draws: tuple[Draw, ...]

    def values(self, what: str) -> NDArray[np.float64]:
        columns = {
            "backlog": [draw.backlog_bytes for draw in self.draws],
            "loss": [draw.queue.loss_ratio for draw in self.draws],
            "marked": [draw.queue.above_mark_share for draw in self.draws],
        }
        return np.array(columns[what], np.float64)

    def band(self, what: str) -> tuple[float, float, float]:
        """Mean with the 95 % band of that mean."""
        values = self.values(what)
        mean = float(values.mean())
        if len(values) < 2:
            return mean, mean, mean
        half = 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))
        return mean, max(0.0, mean - half), mean + half

    @property
    def no_loss_share(self) -> float:
        return float(np.mean([draw.queue.lost_bytes <= 0 for draw in self.draws]))


@dataclass(frozen=True)
class Worst:
    """Bounds of the worst backlog over all phases; equal where the jobs are equal."""

    at_least_bytes: float
    at_most_bytes: float


@dataclass(frozen=True)
class Fit:
    """How many such jobs the link carries."""

    by_mean_rate: int
    worst_case: int
    random_95: int
    best_case: int


@dataclass(frozen=True)
class Extrapolation:
    cycles: tuple[Cycle, ...]
    link: Link
    laws: tuple[LawResult, ...]
    worst: Worst
    envelopes: tuple[tuple[int, float, float], ...]  # (tau, aligned, median of random draws)
    least_rate_bps: dict[str, float | None]  # smallest link rate without loss, by law
    fit: Fit | None
    warnings: tuple[str, ...] = field(default=())

    def law(self, name: Law) -> LawResult:
        return next(each for each in self.laws if each.law == name)


def extrapolate(
    traces: Sequence[Trace],
    jobs: int,
    link: Link,
    draws: int = 100,
    seed: int = 0,
    scales_ns: Sequence[int] = (1_000_000, 5_000_000, 20_000_000, 100_000_000),
    find_fit: bool = True,
) -> Extrapolation:
    """Lays `jobs` copies of the traces (dealt in turn) over each other on one link."""
    if not 1 <= jobs <= _MOST_JOBS:
        raise FabricError(f"the number of jobs must lie between 1 and {_MOST_JOBS}, not {jobs}")
    distinct = [make_cycle(trace) for trace in traces]
    cycles = tuple(distinct[number % len(distinct)] for number in range(jobs))
    generator = np.random.default_rng(seed)
    offered = sum(cycle.mean_rate_bps for cycle in cycles)
    warnings = _warnings(distinct, offered, link)
    laws = tuple(
        LawResult(
            law, tuple(_draw(cycles, shifts, link) for shifts in _shifts(law, cycles, link, draws, generator))
        )
        for law in ("aligned", "random", "best", "drift")
    )
    return Extrapolation(
        cycles,
        link,
        laws,
        worst_backlog(cycles, link.rate_bps),
        _envelopes(cycles, laws, scales_ns),
        {each.law: _least(cycles, each, link.buffer_bytes) for each in laws},
        _fit(distinct[0], link, generator) if find_fit and len(distinct) == 1 else None,
        tuple(warnings),
    )


def _warnings(cycles: Sequence[Cycle], offered_bps: float, link: Link) -> list[str]:
    found = []
    if any(not cycle.from_rhythm for cycle in cycles):
        found.append("no rhythm was found in some input: its whole span was taken as one iteration")
    if offered_bps > link.rate_bps:
        found.append(
            "together the jobs offer more than the link carries on average: queues grow without bound"
        )
    grain = max(cycle.grain_bytes for cycle in cycles)
    if grain > 65_536:
        found.append(
            f"packets were gathered into grains of up to {grain:,} bytes: queues are exact to that much"
        )
    found.append("open loop: real senders slow down, so loss and queues here are upper figures")
    return found


def _draw(cycles: Sequence[Cycle], shifts: Sequence[int], link: Link) -> Draw:
    times, sizes, measured = overlaid(cycles, shifts)
    until = 2 * measured
    queue = drop_tail(times, sizes, link.rate_bps, link.buffer_bytes, link.mark_bytes, measured, until)
    unbounded = drop_tail(times, sizes, link.rate_bps, math.inf, link.mark_bytes, measured, until)
    return Draw(tuple(int(shift) for shift in shifts), queue, unbounded.most_bytes)


def _shifts(
    law: str, cycles: Sequence[Cycle], link: Link, draws: int, generator: np.random.Generator
) -> list[list[int]]:
    if law == "aligned":
        return [[0] * len(cycles)]
    if law == "random":
        return [
            [int(generator.integers(0, cycle.length_ns)) for cycle in cycles] for _ in range(max(1, draws))
        ]
    if law == "best":
        return [interleaved(cycles, link.rate_bps)]
    # Slightly different periods: over one beat every job's phase passes slowly through all others'.
    return [
        [number * point * cycle.period_ns // _BEAT_POINTS for number, cycle in enumerate(cycles)]
        for point in range(_BEAT_POINTS if len(cycles) > 1 else 1)
    ]


def interleaved(cycles: Sequence[Cycle], rate_bps: float) -> list[int]:
    """Shifts that keep the jobs apart: even spacing, then each job in turn moved to its best phase."""
    coarse = [_coarsened(cycle) for cycle in cycles]
    count = len(cycles)
    shifts = [number * cycle.period_ns // count for number, cycle in enumerate(cycles)]

    def backlog_of(candidate: list[int]) -> float:
        times, sizes, measured = overlaid(coarse, candidate)
        return drop_tail(times, sizes, rate_bps, math.inf, math.inf, measured, 2 * measured).most_bytes

    best = backlog_of(shifts)
    for _ in range(2 if count > 1 else 0):
        before = best
        for number in range(1, min(count, 16)):
            for phase in range(_PHASES):
                trial = list(shifts)
                trial[number] = phase * cycles[number].period_ns // _PHASES
                value = backlog_of(trial)
                if value < best:
                    best, shifts = value, trial
        if best == before:
            break
    return shifts


def _coarsened(cycle: Cycle) -> Cycle:
    from mlfabric.traffic.cycles import grained

    # One iteration is enough to search phases with.
    inside = int(np.searchsorted(cycle.time_ns, cycle.period_ns))
    times, sizes = grained(cycle.time_ns[:inside], cycle.size[:inside], _COARSE_GRAINS)
    return Cycle(times, sizes, cycle.period_ns, cycle.period_ns, int(sizes.max()), cycle.from_rhythm)


def worst_backlog(cycles: Sequence[Cycle], rate_bps: float) -> Worst:
    """The largest backlog over all phases: exact for equal jobs, a bracket for different ones."""
    if sum(cycle.mean_rate_bps for cycle in cycles) > rate_bps:
        return Worst(math.inf, math.inf)
    kinds: list[Cycle] = []
    number: list[int] = []
    for cycle in cycles:
        known = next((index for index, each in enumerate(kinds) if each is cycle), None)
        if known is None:
            kinds.append(cycle)
            number.append(1)
        else:
            number[known] += 1
    exact = [Backlog(kind.unrolled()) for kind in kinds]
    if len(kinds) == 1:
        value = number[0] * exact[0].at(rate_bps / number[0]).bytes
        return Worst(value, value)
    return Worst(_from_below(kinds, number, rate_bps), _from_above(kinds, number, exact, rate_bps))


def _from_below(kinds: Sequence[Cycle], number: Sequence[int], rate_bps: float) -> float:
    traces = [kind.unrolled() for kind in kinds]
    longest = min(kind.length_ns for kind in kinds)
    best = 0.0
    for tau in np.unique(np.geomspace(1000, longest, 60).astype(np.int64)):
        peaks = [envelope(trace, int(tau)) for trace in traces]
        held = sum(count * (peak.bytes if peak else 0) for count, peak in zip(number, peaks, strict=True))
        best = max(best, held - rate_bps / 8e9 * int(tau))
    return best


def _from_above(
    kinds: Sequence[Cycle], number: Sequence[int], exact: Sequence[Backlog], rate_bps: float
) -> float:
    """Least sum of B_k(r_k) over r_k that sum to C. The sum is convex: give each slice of spare rate to
    whoever gains most from it."""
    rates = [kind.mean_rate_bps for kind in kinds]
    spare = rate_bps - sum(count * rate for count, rate in zip(number, rates, strict=True))
    slices = 200
    values = [each.at(rate).bytes for each, rate in zip(exact, rates, strict=True)]
    for _ in range(slices):
        step = [spare / slices / count for count in number]
        after = [each.at(rate + more).bytes for each, rate, more in zip(exact, rates, step, strict=True)]
        gains = [count * (a - b) for count, a, b in zip(number, values, after, strict=True)]
        chosen = int(np.argmax(gains))
        rates[chosen] += step[chosen]
        values[chosen] = after[chosen]
    return float(sum(count * value for count, value in zip(number, values, strict=True)))


def _envelopes(
    cycles: Sequence[Cycle], laws: Sequence[LawResult], scales_ns: Sequence[int]
) -> tuple[tuple[int, float, float], ...]:
    scales = [tau for tau in scales_ns if tau < cycles[0].length_ns]

    def envelopes_of(shifts: Sequence[int]) -> list[float]:
        times, sizes, _ = overlaid(cycles, shifts)
        trace = Trace.from_arrays(times, sizes)
        peaks = [envelope(trace, tau) for tau in scales]
        return [peak.bytes if peak else math.nan for peak in peaks]

    aligned = next(each for each in laws if each.law == "aligned").draws[0].shifts_ns
    random = [draw.shifts_ns for draw in next(each for each in laws if each.law == "random").draws[:9]]
    middle = np.median([envelopes_of(shifts) for shifts in random], axis=0)
    return tuple(zip(scales, envelopes_of(aligned), (float(each) for each in middle), strict=True))


def _least(cycles: Sequence[Cycle], result: LawResult, buffer_bytes: float) -> float | None:
    """Smallest rate without loss for the law's worst draw."""
    worst = max(result.draws, key=lambda draw: draw.backlog_bytes)
    times, sizes, _ = overlaid(cycles, worst.shifts_ns)
    return least_rate(Trace.from_arrays(times, sizes), buffer_bytes)


def _fit(cycle: Cycle, link: Link, generator: np.random.Generator) -> Fit:
    by_mean = int(link.rate_bps // cycle.mean_rate_bps) if cycle.mean_rate_bps else _MOST_JOBS
    by_mean = min(by_mean, _MOST_JOBS)
    exact = Backlog(cycle.unrolled())

    def worst_fits(jobs: int) -> bool:
        return jobs * exact.at(link.rate_bps / jobs).bytes <= link.buffer_bytes

    coarse = _coarsened(cycle)

    def random_fits(jobs: int) -> bool:
        lossless = 0
        for _ in range(20):
            shifts = [int(generator.integers(0, coarse.length_ns)) for _ in range(jobs)]
            times, sizes, measured = overlaid([coarse] * jobs, shifts)
            queue = drop_tail(
                times,
                sizes,
                link.rate_bps,
                link.buffer_bytes + coarse.grain_bytes,
                math.inf,
                measured,
                2 * measured,
            )
            lossless += queue.lost_bytes <= 0
        return lossless >= 19

    def best_fits(jobs: int) -> bool:
        shifts = [number * coarse.period_ns // jobs for number in range(jobs)]
        times, sizes, measured = overlaid([coarse] * jobs, shifts)
        room = link.buffer_bytes + coarse.grain_bytes
        return drop_tail(times, sizes, link.rate_bps, room, math.inf, measured, 2 * measured).lost_bytes <= 0

    return Fit(by_mean, _most(worst_fits, by_mean), _most(random_fits, by_mean), _most(best_fits, by_mean))


def _most(fits: object, limit: int) -> int:
    """The largest count that fits, by doubling and bisection; what fits more jobs is taken to fit fewer."""
    assert callable(fits)
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
