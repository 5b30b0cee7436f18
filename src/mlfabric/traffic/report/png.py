"""The main charts as PNG files, for papers and tickets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlfabric.errors import FabricError
from mlfabric.traffic.analysis import Analysis
from mlfabric.traffic.report.data import ReportData, gather
from mlfabric.traffic.trace import NS_PER_S
from mlfabric.units import format_time


def write_pngs(analysis: Analysis, directory: Path, link_bps: float | None = None) -> list[Path]:
    """Writes one file per chart and returns their paths."""
    try:
        import matplotlib
    except ImportError:
        raise FabricError("PNG charts need matplotlib; install mlfabric[traffic]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FabricError(f"{directory} can't be made: {error.strerror}") from None
    report = gather(analysis, link_bps)
    written = []
    for name, draw in (
        ("time", _time), ("peak-to-mean", _peak_to_mean), ("envelope", _envelope), ("backlog", _backlog),
        ("jobs", _jobs),
    ):  # fmt: skip
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        if draw(axes, report):
            path = directory / f"{name}.png"
            figure.savefig(path, dpi=150)
            written.append(path)
        pyplot.close(figure)
    return written


def _time(axes: Any, report: ReportData) -> bool:
    series = report.overview
    axes.fill_between(series.times_s, series.rate_bps / 1e9, step="mid", alpha=0.8, linewidth=0)
    axes.axhline(report.analysis.mean_rate_bps / 1e9, color="C1", linestyle="--", label="mean")
    axes.set(xlabel="time from the first packet (s)", ylabel=f"Gbit/s in {format_time(series.bin_s)} bins")
    axes.legend()
    return True


def _log_axes(axes: Any, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()


def _peak_to_mean(axes: Any, report: ReportData) -> bool:
    analysis = report.analysis
    known = [scale for scale in analysis.scales if scale.peak_to_mean]
    if not known:
        return False
    tau = np.array([scale.tau_ns for scale in known]) / NS_PER_S
    axes.plot(tau, [scale.peak_to_mean for scale in known], "o-", label="peak to mean, exact")
    if analysis.rhythm is not None:
        inside = tau[tau <= analysis.rhythm.period_s]
        axes.plot(inside, analysis.rhythm.period_s / inside, "--", label="T / tau")
    if analysis.options.line_rate_bps:
        axes.axhline(
            analysis.options.line_rate_bps / analysis.mean_rate_bps, color="C3", ls=":", label="C / rho"
        )
    axes.axvline(0.005, color="grey", linestyle=":", linewidth=1)
    _log_axes(axes, "window length tau (s)", "peak : mean")
    return True


def _envelope(axes: Any, report: ReportData) -> bool:
    known = [scale for scale in report.analysis.scales if scale.peak is not None]
    if not known:
        return False
    tau = np.array([scale.tau_ns for scale in known]) / NS_PER_S
    axes.plot(tau, [scale.peak.bytes for scale in known if scale.peak], "o-", label="E, most in any window")
    axes.plot(tau, report.analysis.mean_rate_bps / 8 * tau, "--", label="mean")
    if report.analysis.options.line_rate_bps:
        axes.plot(tau, report.analysis.options.line_rate_bps / 8 * tau, ":", label="line rate")
    _log_axes(axes, "window length tau (s)", "bytes")
    return True


def _backlog(axes: Any, report: ReportData) -> bool:
    points = [stretch for stretch in report.analysis.backlog if stretch.bytes > 0]
    if not points:
        return False
    axes.plot(
        [point.rate_bps for point in points], [point.bytes for point in points], "o-", label="buffer needed"
    )
    _log_axes(axes, "link rate (bit/s)", "largest queue (bytes)")
    return True


def _jobs(axes: Any, report: ReportData) -> bool:
    if not report.jobs:
        return False
    counts = [count for count, _ in report.jobs]
    laws = (("aligned", "all at once"), ("random", "random phases, median"), ("best", "interleaved"))
    for law, label in laws:
        values = [float(np.median(result.law(law).values("backlog"))) for _, result in report.jobs]  # type: ignore[arg-type]
        axes.plot(counts, np.maximum(values, 1), "o-", label=label)
    axes.axhline(report.link.buffer_bytes, color="grey", linestyle=":", label="buffer")
    _log_axes(axes, "jobs like this one on the link", "largest queue (bytes)")
    axes.set_xticks(counts, [str(count) for count in counts])
    return True
