"""What the picture of a campaign shows of its runs."""

from __future__ import annotations

from matplotlib.figure import Figure

from mlfabric.bench.train.plots import BEGINS_S, PLOTS
from tests.bench.train.results import some_result, some_settings


def test_classes_are_apart_and_curves_are_at_a_target_when_runs_are() -> None:
    curve = [(2.0 * number, 0.9 if number == 6 or number > 14 else 0.72) for number in range(60)]
    names = "gloo", "mlfabric-rolling", "gloo-fp16"
    runs = [some_result(some_settings(name, targets=(0.85,)), curve) for name in names]
    figure = Figure()
    PLOTS["accuracy"](figure, runs)
    shown = [[line.get_label() for line in panel.lines if len(line.get_xdata()) > 2] for panel in figure.axes]
    assert shown == [["mlfabric-rolling", "gloo"], ["gloo-fp16"]]
    line = figure.axes[0].lines[0]
    assert BEGINS_S <= line.get_xdata()[0]
    above = [at for at, accuracy in zip(line.get_xdata(), line.get_ydata(), strict=True) if accuracy >= 0.85]
    assert runs[0].reached(0.85) == 30.0
    assert 28.0 < above[0] < 31.0  # not when a single model was above it
