"""Many runs: which are still to be made, one after the other, each in a folder of its own.

A run whose folder holds its result is not made again, so a campaign may be broken off and taken up at any
time. Every seed is run by all contenders before the next one, so that early figures are pairs already. Ours
go first: who is not at the target after five times what the best of ours took is stopped. A run that fails
does not keep the others from being made.

Contenders that leave most of the processors idle may be run side by side, each in a lab of its own
(`abreast`): first ours, then the others. Those that do not are run before, one at a time. How busy the
processors were, by which a run counts, is told of the whole machine, so of all runs that shared it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.errors import FabricError
from mlfabric.units import format_time

# What a run takes beside its own time: building the lab, importing torch eight times, judging snapshots.
AROUND_S = 45.0
SLACK_S: Final = 1.0  # between when a run is to end and when it does

# A contender has so many times as long as our best of its scenario, seed and class.
PATIENCE: Final = 5.0

# Settings, folder, when to stop at the latest, whom to tell how far it is.
MakeRun = Callable[[RunSettings, Path, float, Callable[[float], None]], RunResult]
ReadRun = Callable[[Path], RunResult | None]
POLL_S: Final = 0.5  # how often runs side by side are looked at


class RunApart(Protocol):
    """A run under way in a process of its own."""

    def over(self) -> bool: ...

    def result(self) -> RunResult:
        """Once it is over; RunFailed where there is none."""
        ...

    def end(self) -> None:
        """Break it off, if it is not over; fine to repeat."""
        ...


# Settings, folder, when to stop at the latest.
BeginRun = Callable[[RunSettings, Path, float], RunApart]


class Abreast(msgspec.Struct, frozen=True):
    """How many runs are made at a time, where they leave processors idle, and how one is begun."""

    most: int
    begin: BeginRun


class RunFailed(FabricError):  # noqa: N818 - what became of a run
    """A worker of a run failed; other runs may do better."""


class Failure(msgspec.Struct, frozen=True):
    settings: RunSettings
    why: str

    def __str__(self) -> str:
        run = self.settings
        return f"{run.scenario} {run.contender} seed {run.seed} failed: {self.why}"


class Outcome(msgspec.Struct, frozen=True):
    """Of a campaign."""

    results: list[RunResult]
    failures: list[Failure]


class Wish(msgspec.Struct, frozen=True):
    """What a campaign compares."""

    contenders: tuple[str, ...]
    scenarios: tuple[str, ...]
    seeds: tuple[int, ...]
    common: RunSettings  # of all runs; its contender, scenario, seed and step size count for nothing
    step_sizes: dict[str, StepSize] = {}  # by contender, where tuned
    limits: dict[str, float] = {}  # seconds, by contender, where it is not the common one
    few_seeds: dict[str, tuple[int, ...]] = {}  # by contender, where it is not run on all of them

    def runs(self) -> list[RunSettings]:
        replace = msgspec.structs.replace
        return [
            replace(
                self.common,
                contender=contender,
                scenario=scenario,
                seed=seed,
                step_size=self.step_sizes.get(contender, find_entry(contender).step_size),
                limit_s=self.limits.get(contender, self.common.limit_s),
            )
            for scenario in self.scenarios
            for seed in self.seeds
            for contender in self.contenders
            if seed in self.few_seeds.get(contender, self.seeds)
        ]


def stop_after(settings: RunSettings, results: Iterable[RunResult]) -> float:
    """Five times our best of the same scenario, seed and class, to the highest target any of them reached."""
    kind = find_entry(settings.contender).kind
    ours = [
        result
        for result in results
        if (result.settings.scenario, result.settings.seed) == (settings.scenario, settings.seed)
        and find_entry(result.settings.contender).ours
        and find_entry(result.settings.contender).kind == kind
        and not result.complaints()
    ]
    for target in sorted(settings.targets, reverse=True):
        times = [at for result in ours if (at := result.reached(target)) is not None]
        if times:
            return PATIENCE * min(times)
    return math.inf


def split_done(
    runs: Sequence[RunSettings], root: Path, read: ReadRun
) -> tuple[list[RunResult], list[RunSettings]]:
    """Results that are there, and runs still to be made; a FabricError if one there is of other settings.

    A run that was stopped sooner than it would be now is to be made again.
    """
    found = {}
    for settings in runs:
        result = read(settings.folder(root))
        if result is None:
            continue
        if result.settings != settings:
            raise FabricError(
                f"{settings.folder(root)} holds a run with other settings "
                f"({_difference(result.settings, settings)}); name another --out, or remove it"
            )
        found[settings] = result
    done = [result for result in found.values() if not _stopped_too_soon(result, found.values())]
    there = {result.settings for result in done}
    return done, [settings for settings in runs if settings not in there]


def _stopped_too_soon(result: RunResult, results: Iterable[RunResult]) -> bool:
    if result.ended_early or result.diverged_s is not None:
        return False
    due_s = min(result.settings.limit_s, stop_after(result.settings, results))
    return result.seconds < due_s - SLACK_S and result.reached(max(result.settings.targets)) is None


def carry_out(
    wish: Wish,
    root: Path,
    make: MakeRun,
    read: ReadRun,
    quiet: bool = False,
    abreast: Abreast | None = None,
) -> Outcome:
    """Make the runs that are missing; the results of all that did not fail, in the order of the wish."""
    runs = wish.runs()
    done, to_do = split_done(runs, root, read)
    results = {result.settings: result for result in done}
    failures: list[Failure] = []
    in_turn = sorted(to_do, key=_ours_first(wish))
    alone = [run for run in in_turn if abreast is None or find_entry(run.contender).heavy]
    together = [run for run in in_turn if run not in alone]
    with _Progress(to_do, quiet) as progress:

        def take(settings: RunSettings, get: Callable[[], RunResult]) -> None:
            try:
                result = get()
            except RunFailed as error:
                failures.append(Failure(settings, str(error)))
                progress.failed(failures[-1])
            else:
                results[settings] = result
                progress.end(result)

        for settings in alone:
            stop_s = stop_after(settings, results.values())
            progress.begin(settings)
            take(settings, partial(make, settings, settings.folder(root), stop_s, progress.at))
        if abreast is not None:

            def begin(settings: RunSettings) -> RunApart:
                progress.begin(settings)
                stop_s = stop_after(settings, results.values())
                return abreast.begin(settings, settings.folder(root), stop_s)

            for ours in (True, False):
                these = [run for run in together if find_entry(run.contender).ours == ours]
                _side_by_side(these, begin, abreast.most, take)
    return Outcome([results[settings] for settings in runs if settings in results], failures)


def _side_by_side(
    runs: Sequence[RunSettings],
    begin: Callable[[RunSettings], RunApart],
    most: int,
    take: Callable[[RunSettings, Callable[[], RunResult]], None],
) -> None:
    """In their order, so many at a time; whatever breaks this off breaks all of them off.

    Results are asked for when all are over: to judge a run while others are under way would load them.
    """
    waiting = list(reversed(runs))
    under_way: dict[RunSettings, RunApart] = {}
    made: dict[RunSettings, RunApart] = {}
    with ExitStack() as ending:
        while waiting or under_way:
            while waiting and len(under_way) < most:
                settings = waiting.pop()
                under_way[settings] = begin(settings)
                ending.callback(under_way[settings].end)
            over = [settings for settings, run in under_way.items() if run.over()]
            made.update((settings, under_way.pop(settings)) for settings in over)
            if not over:
                time.sleep(POLL_S)
        for settings, run in made.items():
            take(settings, run.result)


def _ours_first(wish: Wish) -> Callable[[RunSettings], tuple[int, int, bool]]:
    def place(run: RunSettings) -> tuple[int, int, bool]:
        return (
            wish.scenarios.index(run.scenario),
            wish.seeds.index(run.seed),
            not find_entry(run.contender).ours,
        )

    return place


def _difference(there: RunSettings, asked: RunSettings) -> str:
    before, after = msgspec.to_builtins(there), msgspec.to_builtins(asked)
    return ", ".join(
        f"{key} {before[key]} instead of {after[key]}" for key in after if before[key] != after[key]
    )


class _Progress:
    """A bar with the time left on a terminal, else a line for each run."""

    def __init__(self, runs: Sequence[RunSettings], quiet: bool) -> None:
        self._runs, self._quiet = runs, quiet
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left at most"),
            console=self._console,
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._total = sum(run.limit_s + AROUND_S for run in runs)
        self._before = 0.0
        self._begun = self._ended = 0

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        self._task = self._bar.add_task("", total=max(self._total, 1.0), left=format_time(self._total))
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(None, None, None)

    def begin(self, run: RunSettings) -> None:
        self._begun += 1
        self._bar.update(
            self._task,
            description=f"{self._begun}/{len(self._runs)} {run.scenario} {run.contender} seed {run.seed}",
        )
        self.at(0.0)

    def at(self, seconds: float) -> None:
        done = self._before + seconds
        self._bar.update(self._task, completed=done, left=format_time(max(self._total - done, 0.0)))

    def end(self, result: RunResult) -> None:
        run = result.settings
        said: list[str] = []
        for target in run.targets:
            at = result.reached(target)
            missed = f"not at {target:g} after {format_time(result.seconds)}"
            said.append(f"{target:g} after {format_time(at)}" if at is not None else missed)
        if result.diverged_s is not None:
            said = [f"diverged after {format_time(result.diverged_s)}"]
        self._say(run, f"{', '.join(said)} ({'; '.join(result.complaints()) or 'valid'})")

    def failed(self, failure: Failure) -> None:
        self._say(failure.settings, f"failed: {failure.why}")

    def _say(self, run: RunSettings, what: str) -> None:
        self._ended += 1
        self._before += run.limit_s + AROUND_S
        self.at(0.0)
        if self._quiet:
            return
        self._console.print(
            f"{self._ended}/{len(self._runs)} {run.scenario} {run.contender} seed {run.seed}: {what}; "
            f"{format_time(max(self._total - self._before, 0.0))} left at most"
        )
