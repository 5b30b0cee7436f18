"""Many runs: which are still to be made, one after the other, each in a folder of its own.

A run whose folder holds its result is not made again, so a campaign may be broken off and taken up at any
time. Every seed is run by all contenders before the next one, so that early figures are pairs already.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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

MakeRun = Callable[[RunSettings, Path, Callable[[float], None]], RunResult]
ReadRun = Callable[[Path], RunResult | None]


class Wish(msgspec.Struct, frozen=True):
    """What a campaign compares."""

    contenders: tuple[str, ...]
    scenarios: tuple[str, ...]
    seeds: tuple[int, ...]
    common: RunSettings  # of all runs; its contender, scenario, seed and step size count for nothing
    step_sizes: dict[str, StepSize] = {}  # by contender, where tuned

    def runs(self) -> list[RunSettings]:
        replace = msgspec.structs.replace
        return [
            replace(
                self.common,
                contender=contender,
                scenario=scenario,
                seed=seed,
                step_size=self.step_sizes.get(contender, find_entry(contender).step_size),
            )
            for scenario in self.scenarios
            for seed in self.seeds
            for contender in self.contenders
        ]


def split_done(
    runs: Sequence[RunSettings], root: Path, read: ReadRun
) -> tuple[list[RunResult], list[RunSettings]]:
    """Results that are there, and runs still to be made; a FabricError if one there is of other settings."""
    done, to_do = [], []
    for settings in runs:
        found = read(settings.folder(root))
        if found is None:
            to_do.append(settings)
        elif found.settings != settings:
            raise FabricError(
                f"{settings.folder(root)} holds a run with other settings "
                f"({_difference(found.settings, settings)}); name another --out, or remove it"
            )
        else:
            done.append(found)
    return done, to_do


def carry_out(wish: Wish, root: Path, make: MakeRun, read: ReadRun, quiet: bool = False) -> list[RunResult]:
    """Make the runs that are missing; the results of all, in the order of the wish."""
    runs = wish.runs()
    done, to_do = split_done(runs, root, read)
    results = {result.settings: result for result in done}
    with _Progress(to_do, quiet) as progress:
        for settings in to_do:
            progress.begin(settings)
            result = make(settings, settings.folder(root), progress.at)
            results[settings] = result
            progress.end(result)
    return [results[settings] for settings in runs]


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
        self._number = 0
        self._began = time.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        self._task = self._bar.add_task("", total=max(self._total, 1.0), left=format_time(self._total))
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(None, None, None)

    def begin(self, run: RunSettings) -> None:
        self._number += 1
        self._current = run
        self._bar.update(
            self._task,
            description=f"{self._number}/{len(self._runs)} {run.scenario} {run.contender} seed {run.seed}",
        )
        self.at(0.0)

    def at(self, seconds: float) -> None:
        done = self._before + seconds
        self._bar.update(self._task, completed=done, left=format_time(max(self._total - done, 0.0)))

    def end(self, result: RunResult) -> None:
        run = result.settings
        self._before += run.limit_s + AROUND_S
        self.at(0.0)
        if self._quiet:
            return
        said = []
        for target in run.targets:
            at = result.reached(target)
            said.append(f"{target:g} after {format_time(at)}" if at is not None else f"not at {target:g}")
        self._console.print(
            f"{self._number}/{len(self._runs)} {run.scenario} {run.contender} seed {run.seed}: "
            f"{', '.join(said)} "
            f"({'; '.join(result.complaints()) or 'valid'}); "
            f"{format_time(max(self._total - self._before, 0.0))} left at most"
        )
