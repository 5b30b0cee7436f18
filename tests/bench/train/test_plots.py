"""What the picture of a campaign shows of its runs."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from mlfabric.bench.train.plots import BEGINS_S, PLOTS
from tests.bench.train.results import some_result, some_settings


def test_classes_are_apart_and_curves_are_at_a_target_when_runs_are() -> None:
    curve = [(2.0 * number, 0.9 if number == 6 or number > 14 else 0.72) for number in range(60)]
    names = "gloo", "mlfabric-rolling", "gloo-fp16"
    runs = [some_result(some_settings(name, targets=(0.85,)), curve) for name in names]
    figure = Figure()
    PLOTS["accuracy"](figure, runs)
    panels: list[Any] = figure.axes
    shown = [[line.get_label() for line in panel.lines if len(line.get_xdata()) > 2] for panel in panels]
    assert shown == [["mlfabric-rolling", "gloo"], ["gloo-fp16"]]
    at, accuracy = panels[0].lines[0].get_data()
    assert at[0] >= BEGINS_S
    assert runs[0].reached(0.85) == 30.0
    assert 28.0 < at[accuracy >= 0.85][0] < 31.0  # not when a single model was above it


def test_runs_too_short_for_a_curve_are_drawn_without_one() -> None:
    for draw in PLOTS.values():
        draw(Figure(), [some_result(some_settings(), [(2.0, 0.8)], seconds=2.5)])
