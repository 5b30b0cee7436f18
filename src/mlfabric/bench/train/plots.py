"""Plots of a campaign: accuracy against time, delays, what each link carried; a PNG of each per scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.judging import RunResult, lasting
from mlfabric.bench.train.settings import REACHED_IN_A_ROW
from mlfabric.errors import FabricError

# What is further below the first target is a moment at the beginning, and is not shown.
BELOW_TARGET: Final = 0.15
MOMENTS: Final = 300  # of a curve
BEGINS_S: Final = 4.0
TICKS_S: Final = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def _names(runs: Sequence[RunResult]) -> list[str]:
    return list(dict.fromkeys(run.settings.contender for run in runs))


def _colour(number: int) -> Any:
    """Ten full ones, then ten pale ones, then again."""
    from matplotlib import colormaps

    pale, place = divmod(number % 20, 10)
    return colormaps["tab20"](2 * place + pale)


def _accuracy(figure: Any, runs: Sequence[RunResult]) -> None:
    """A panel for each class, ours first; so many times as soon are the same distance everywhere."""
    kinds = list(dict.fromkeys(find_entry(name).kind for name in _names(runs)))
    figure.set_figwidth(max(figure.get_figwidth(), 4.5 * len(kinds)))
    panels = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    moments = np.geomspace(BEGINS_S, max(2 * BEGINS_S, *(run.seconds for run in runs)), MOMENTS)
    ticks = [tick for tick in TICKS_S if moments[0] <= tick <= moments[-1]]
    for kind, axes in zip(kinds, panels, strict=True):
        mine = [run for run in runs if find_entry(run.settings.contender).kind == kind]
        names = sorted(_names(mine), key=lambda name: not find_entry(name).ours)
        for number, name in enumerate(names):
            _course(axes, moments, [run for run in mine if run.settings.contender == name], _colour(number))
        for target in runs[0].settings.targets:
            axes.axhline(target, color="grey", linewidth=0.6, linestyle="--")
        axes.set_title(kind, loc="left", fontsize=9)
        axes.set_xscale("log", subs=[])
        axes.set_xlim(moments[0], moments[-1])
        axes.set_xticks(ticks, labels=map(str, ticks))
        axes.set_xlabel("seconds")
        _legend(axes, loc="lower right")
    panels[0].set_ylim(bottom=min(runs[0].settings.targets) - BELOW_TARGET)
    panels[0].set_ylabel(f"test accuracy, the least of {REACHED_IN_A_ROW} in a row")


def _course(axes: Any, moments: Any, runs: Sequence[RunResult], colour: Any) -> None:
    """The median of the seeds, and all of them in its shadow; a run that is over stays where it was."""
    name = runs[0].settings.contender
    curves = [np.array(curve).T for run in runs if (curve := lasting(run.curve))]
    if not curves:
        return
    seen = np.array([np.interp(moments, times, found, left=np.nan) for times, found in curves])
    shown = (moments <= max(run.seconds for run in runs)) & ~np.isnan(seen).any(axis=0)
    at, seen = moments[shown], seen[:, shown]
    label = name if not all(run.complaints() for run in runs) else f"{name} (not valid)"
    axes.plot(at, np.median(seen, axis=0), color=colour, linewidth=1.4, label=label)
    axes.fill_between(at, seen.min(axis=0), seen.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def _delays(figure: Any, runs: Sequence[RunResult]) -> None:
    axes = figure.subplots()
    for number, name in enumerate(_names(runs)):
        counts: dict[int, int] = {}
        for run in (run for run in runs if run.settings.contender == name):
            for delay, times in run.delays.items():
                counts[delay] = counts.get(delay, 0) + times
        total = sum(counts.values())
        if total and max(counts) > 0:
            delays = range(max(counts) + 1)
            shares = [counts.get(delay, 0) / total for delay in delays]
            axes.step(delays, shares, where="mid", color=_colour(number), label=name)
    axes.set_xlabel("delay of an applied update, in updates")
    axes.set_ylabel("share of updates")
    _legend(axes)


def _links(figure: Any, runs: Sequence[RunResult]) -> None:
    axes = figure.subplots()
    names = _names(runs)
    links = sorted({link for run in runs for link in run.link_bytes})
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        mine = [run for run in runs if run.settings.contender == name]
        seconds = sum(run.seconds for run in mine)
        rates = [sum(run.link_bytes.get(link, 0) for run in mine) * 8e-6 / seconds for link in links]
        places = [index + (number - (len(names) - 1) / 2) * width for index in range(len(links))]
        axes.bar(places, rates, width, color=_colour(number), label=name)
    axes.set_xticks(range(len(links)), links, rotation=60, fontsize=7)
    axes.set_ylabel("Mb/s on the wire, mean over the run")
    _legend(axes)


def _legend(axes: Any, **where: Any) -> None:
    """Of what is drawn: runs may be too short for anything, and matplotlib warns of an empty one."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **where)


PLOTS: Final[dict[str, Callable[[Any, Sequence[RunResult]], None]]] = {
    "accuracy": _accuracy,
    "delays": _delays,
    "links": _links,
}


def draw(
    runs: Sequence[RunResult], folder: Path, names: Sequence[str] = tuple(PLOTS), dpi: int = 110
) -> list[Path]:
    """Which files were written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise FabricError("plots need matplotlib: pip install 'mlfabric[bench]'") from None
    written = []
    for scenario in dict.fromkeys(run.settings.scenario for run in runs):
        here = [run for run in runs if run.settings.scenario == scenario]
        for name in names:
            figure = pyplot.figure(figsize=(7, 4), layout="constrained")
            PLOTS[name](figure, here)
            figure.suptitle(scenario, x=0.01, ha="left")
            path = folder / f"{scenario}-{name}.png"
            figure.savefig(path, dpi=dpi)
            pyplot.close(figure)
            written.append(path)
    return written
