"""What runs show: when a target was reached, whether a run counts, what several seeds say. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from mlfabric.bench.train.settings import MOST_CPU, MOST_OVERRUN, REACHED_IN_A_ROW, RunSettings

Curve = Sequence[tuple[float, float]]  # seconds, accuracy


def lasting(curve: Curve) -> list[tuple[float, float]]:
    """What targets are held against: at each evaluation the least of it and the next ones that count."""
    starts = range(len(curve) - REACHED_IN_A_ROW + 1)
    return [(curve[i][0], min(found for _, found in curve[i : i + REACHED_IN_A_ROW])) for i in starts]


def reached(curve: Curve, target: float) -> float | None:
    """When the first of three evaluations in a row at or above the target was; None: never."""
    return next((at for at, accuracy in lasting(curve) if accuracy >= target), None)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as its folder's `result.json` has it."""

    settings: RunSettings
    seconds: float
    ended_early: bool  # the target had been seen often enough
    curve: list[tuple[float, float]]
    steps: int
    updates: int  # applied
    dropped: int
    delays: dict[int, int]  # how often each delay occurred
    overran_share: float
    gradient_s: float  # mean, really computing
    compute_s: float  # mean of a step's time by the scenario
    exchange_s: float  # mean from a gradient to the next step's beginning
    cpu_share: float  # of all processors, everything on the machine included
    diverged_s: float | None = None  # when its numbers were no numbers any more
    stolen_share: float = 0.0  # of that, given to other machines by a hypervisor
    link_bytes: dict[str, int]  # by link and direction
    steps_by_rank: list[int]
    versions: dict[str, str | int] = {}
    simulated: bool = False

    @property
    def samples_per_s(self) -> float:
        return self.updates * self.settings.batch / self.seconds if self.seconds else 0.0

    @property
    def waited_s(self) -> float:
        """How long was surely not enough: one that diverged would not have been there later either."""
        return self.seconds if self.diverged_s is None else self.settings.limit_s

    def reached(self, target: float) -> float | None:
        """When; None: never. One that diverged was never there, wherever it was before."""
        return reached(self.curve, target) if self.diverged_s is None else None

    def complaints(self) -> list[str]:
        """Why the run does not count; empty: it does."""
        found: list[str] = []
        if self.diverged_s is not None:
            return found  # by its arithmetic, however busy the machine was
        if self.overran_share > MOST_OVERRUN:
            found.append(f"{self.overran_share:.1%} of the steps overran their time")
        if self.cpu_share > MOST_CPU:
            found.append(f"the processors were {self.cpu_share:.0%} busy")
        if self.steps == 0:
            found.append("no step was made")
        if self.ended_early and self.reached(max(self.settings.targets)) is None:
            found.append("it was ended too early")
        return found


class Spread(msgspec.Struct, frozen=True):
    """Median and range over seeds; infinity stands for "not within the limit"."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A contender in a scenario: what its valid runs say together."""

    scenario: str
    contender: str
    seeds: list[int]  # of the runs that count
    refused: dict[int, list[str]]  # seeds whose runs do not, and why
    diverged: dict[int, float]  # seeds whose runs did, and after how many seconds
    to_target: dict[str, Spread]  # seconds, by target
    limit_s: float
    samples_per_s: Spread | None
    updates_per_s: Spread | None
    delay_mean: float
    delay_p99: int
    delay_max: int
    dropped_share: float
    bytes_per_update: float  # on the wire, out of all hosts
    busiest_link: str
    busiest_share: float  # of all bytes
    cpu_share: float
    overran_share: float
    exchange_s: float


def summarise(runs: Sequence[RunResult]) -> list[Row]:
    """One row per scenario and contender, in the order of first appearance."""
    by_key: dict[tuple[str, str], list[RunResult]] = {}
    for run in runs:
        by_key.setdefault((run.settings.scenario, run.settings.contender), []).append(run)
    return [_row(scenario, contender, found) for (scenario, contender), found in by_key.items()]


def _row(scenario: str, contender: str, runs: list[RunResult]) -> Row:
    refused = {run.settings.seed: run.complaints() for run in runs if run.complaints()}
    counted = [run for run in runs if not run.complaints()] or runs
    delays: dict[int, int] = {}
    links: dict[str, int] = {}
    for run in counted:
        for delay, times in run.delays.items():
            delays[delay] = delays.get(delay, 0) + times
        for link, carried in run.link_bytes.items():
            links[link] = links.get(link, 0) + carried
    updates = sum(run.updates for run in counted)
    dropped = sum(run.dropped for run in counted)
    up = sum(carried for link, carried in links.items() if link.endswith(".up"))
    busiest = max(links, key=lambda link: links[link], default="")
    targets = counted[0].settings.targets
    return Row(
        scenario=scenario,
        contender=contender,
        seeds=[run.settings.seed for run in runs if not run.complaints()],
        refused=refused,
        diverged={r.settings.seed: r.diverged_s for r in runs if r.diverged_s is not None},
        to_target={
            f"{target:g}": Spread.of([_or_never(run.reached(target)) for run in counted])
            for target in targets
        },
        limit_s=max(run.waited_s for run in counted),
        samples_per_s=Spread.of([run.samples_per_s for run in counted]),
        updates_per_s=Spread.of([run.updates / run.seconds if run.seconds else 0.0 for run in counted]),
        delay_mean=mean_delay(delays),
        delay_p99=delay_quantile(delays, 0.99),
        delay_max=max(delays, default=0),
        dropped_share=dropped / (updates + dropped) if updates + dropped else 0.0,
        bytes_per_update=up / updates if updates else 0.0,
        busiest_link=busiest,
        busiest_share=links[busiest] / sum(links.values()) if busiest and sum(links.values()) else 0.0,
        cpu_share=max(run.cpu_share for run in counted),
        overran_share=max(run.overran_share for run in counted),
        exchange_s=statistics.fmean(run.exchange_s for run in counted),
    )


class Pair(msgspec.Struct, frozen=True):
    """How many times sooner ours is than another at a target, seed by seed."""

    scenario: str
    ours: str
    other: str
    target: float
    times: list[float]  # for each seed both have; a least value where the other never came
    at_least: bool  # some are least values

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def pair(runs: Sequence[RunResult], scenario: str, ours: str, other: str, target: float) -> Pair | None:
    """Of runs that count; None where ours did not get there, or no seed was run by both."""
    mine, theirs = (
        {
            run.settings.seed: run
            for run in runs
            if (run.settings.scenario, run.settings.contender) == (scenario, name) and not run.complaints()
        }
        for name in (ours, other)
    )
    times, at_least = [], False
    for seed in sorted(mine.keys() & theirs.keys()):
        own, its = mine[seed].reached(target), theirs[seed].reached(target)
        if own is None:
            return None
        at_least |= its is None
        times.append((its if its is not None else theirs[seed].waited_s) / own)
    return Pair(scenario, ours, other, target, times, at_least) if times else None


def mean_delay(delays: dict[int, int]) -> float:
    total = sum(delays.values())
    return sum(delay * times for delay, times in delays.items()) / total if total else 0.0


def delay_quantile(delays: dict[int, int], share: float) -> int:
    """The least delay that this share of the updates does not exceed."""
    left = share * sum(delays.values())
    for delay in sorted(delays):
        left -= delays[delay]
        if left <= 0:
            return delay
    return 0


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
