"""Plots of a campaign: accuracy against time, delays, what each link carried; a PNG of each per scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from mlfabric.bench.train.judging import RunResult
from mlfabric.errors import FabricError

# What is further below the first target is a moment at the beginning, and is not shown.
BELOW_TARGET: Final = 0.15


def _names(runs: Sequence[RunResult]) -> list[str]:
    return list(dict.fromkeys(run.settings.contender for run in runs))


def _colour(number: int) -> Any:
    """Ten full ones, then ten pale ones, then again."""
    from matplotlib import colormaps

    pale, place = divmod(number % 20, 10)
    return colormaps["tab20"](2 * place + pale)


def _accuracy(axes: Any, runs: Sequence[RunResult]) -> None:
    for number, name in enumerate(_names(runs)):
        for run in (run for run in runs if run.settings.contender == name):
            first = run.settings.seed == min(r.settings.seed for r in runs if r.settings.contender == name)
            axes.plot(
                [at for at, _ in run.curve],
                [accuracy for _, accuracy in run.curve],
                color=_colour(number),
                linewidth=1.2 if first else 0.6,
                label=name if first else None,
            )
    axes.set_ylim(bottom=min(runs[0].settings.targets) - BELOW_TARGET)
    for target in runs[0].settings.targets:
        axes.axhline(target, color="grey", linewidth=0.6, linestyle="--")
    axes.set_xlabel("seconds")
    axes.set_ylabel("accuracy on the test images")
    axes.legend(fontsize=8)


def _delays(axes: Any, runs: Sequence[RunResult]) -> None:
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
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _links(axes: Any, runs: Sequence[RunResult]) -> None:
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
    axes.legend(fontsize=8)


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
            figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
            PLOTS[name](axes, here)
            axes.set_title(scenario, loc="left")
            path = folder / f"{scenario}-{name}.png"
            figure.savefig(path, dpi=dpi)
            pyplot.close(figure)
            written.append(path)
    return written
