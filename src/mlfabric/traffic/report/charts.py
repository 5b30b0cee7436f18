"""The charts of the HTML report as plain plotly figures: data and layout, no colours but named roles.

Colours are put in by the page, which knows whether it is dark: every trace names a role ("main", "second",
...) in its `meta`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlfabric.traffic.report.data import PEAK_TAU_NS, HeatMap, ReportData, Series
from mlfabric.traffic.trace import NS_PER_S
from mlfabric.units import format_rate, format_size, format_time

Figure = dict[str, Any]


def _numbers(values: Any, digits: int = 6) -> list[float | None]:
    return [
        None if not np.isfinite(value) else float(f"{value:.{digits}g}")
        for value in np.asarray(values, float)
    ]


def _line(name: str, x: Any, y: Any, role: str, **more: Any) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter", "mode": "lines", "name": name, "x": _numbers(x, 9), "y": _numbers(y), "meta": role,
    }  # fmt: skip
    trace.update(more)
    return trace


def _layout(x: str, y: str, log: bool = False, **more: Any) -> dict[str, Any]:
    kind = "log" if log else "linear"
    # Powers of ten in SI letters: 1M is a megabyte.
    axis = {"type": kind, "exponentformat": "SI", "automargin": True}
    layout: dict[str, Any] = {
        "xaxis": {**axis, "title": {"text": x}}, "yaxis": {**axis, "title": {"text": y, "standoff": 10}},
        "legend": {"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0},
        "margin": {"l": 60, "r": 16, "t": 34, "b": 48}, "hovermode": "closest", "height": 380,
    }  # fmt: skip
    layout.update(more)
    return layout


def _over_scales(y: str) -> dict[str, Any]:
    """Axes of a curve over window lengths, with the 5 ms mark."""
    layout = _layout("window length tau", y, log=True, shapes=[_five_ms()], annotations=[_five_ms_label()])
    ticks = [10.0**power for power in range(-9, 4)]
    layout["xaxis"].update({"tickvals": ticks, "ticktext": [format_time(tick) for tick in ticks]})
    layout["yaxis"]["dtick"] = 1
    return layout


def _figure(name: str, title: str, says: str, data: list[dict[str, Any]], layout: dict[str, Any]) -> Figure:
    return {"id": name, "title": title, "says": says, "data": data, "layout": layout}


def all_figures(report: ReportData) -> list[Figure]:
    """Every chart for which there is something to draw, in reading order."""
    made = [
        _over_time(report),
        _peak(report),
        _peak_to_mean(report),
        _envelope(report),
        _backlog(report),
        _bursts(report),
        _jobs(report),
        _heat("sending", "Sending hosts over time", report.sending),
        _heat("receiving", "Receiving hosts over time", report.receiving),
    ]
    return [figure for figure in made if figure is not None]


def _filled(series: Series, name: str) -> dict[str, Any]:
    return _line(name, series.times_s, series.rate_bps, "main", fill="tozeroy", line={"width": 1})


def _over_time(report: ReportData) -> Figure:
    series = report.overview
    data = [_filled(series, f"rate in {format_time(series.bin_s)} bins")]
    mean = report.analysis.mean_rate_bps
    ends = [series.times_s[0], series.times_s[-1]]
    data.append(_line("mean", ends, [mean, mean], "second", line={"dash": "dash"}))
    layout = _layout("time from the first packet (s)", "rate (bit/s)")
    layout["xaxis"]["rangeslider"] = {"visible": True, "thickness": 0.08}
    layout["legend"] = {"orientation": "h", "x": 0.5, "xanchor": "center", "y": 1.03, "yanchor": "bottom"}
    layout["margin"]["t"] = 48
    if report.peak_window_s is not None:
        low, high = report.peak_window_s
        room = 20 * (high - low)
        nearby = [low - room, high + room]
        layout["updatemenus"] = [
            {
                "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.03, "yanchor":
                "bottom", "showactive": False, "pad": {"b": 2, "t": 2}, "buttons": [ {"label": "all",
                "method": "relayout", "args": [{"xaxis.autorange": True}]}, {"label": "peak", "method":
                "relayout", "args": [{"xaxis.range": nearby}]}, ],
            }
        ]  # fmt: skip
        layout["shapes"] = [_band(low, high)]
    return _figure(
        "time", "Traffic over time", "Drag to zoom; 'peak' goes to the fullest window.", data, layout
    )


def _band(low: float, high: float) -> dict[str, Any]:
    return {
        "type": "rect", "xref": "x", "yref": "paper", "x0": low, "x1": high, "y0": 0, "y1": 1, "meta": "mark",
        "line": {"width": 0},
    }  # fmt: skip


def _peak(report: ReportData) -> Figure | None:
    if report.peak is None or report.peak_window_s is None:
        return None
    low, high = report.peak_window_s
    layout = _layout("time from the first packet (s)", "rate (bit/s)", shapes=[_band(low, high)])
    data = [_filled(report.peak, f"rate in {format_time(report.peak.bin_s)} bins")]
    line = report.analysis.options.line_rate_bps
    if line:
        ends = [report.peak.times_s[0], report.peak.times_s[-1]]
        data.append(_line("line rate", ends, [line, line], "third", line={"dash": "dot"}))
    says = f"The fullest window of {format_time(high - low)}, shaded, and its surroundings."
    return _figure("peak", "The peak window", says, data, layout)


def _peak_to_mean(report: ReportData) -> Figure | None:
    analysis = report.analysis
    known = [scale for scale in analysis.scales if scale.peak_to_mean]
    if not known:
        return None
    tau = np.array([scale.tau_ns for scale in known]) / NS_PER_S
    ratio = np.array([scale.peak_to_mean for scale in known], float)
    data = [_line("peak to mean, exact", tau, ratio, "main", mode="lines+markers")]
    ends = np.array([tau[0], tau[-1]])
    if analysis.options.line_rate_bps and analysis.mean_rate_bps:
        bound = analysis.options.line_rate_bps / analysis.mean_rate_bps
        data.append(_line("C / rho, the line's limit", ends, [bound, bound], "third", line={"dash": "dot"}))
    if analysis.rhythm is not None:
        inside = tau[tau <= analysis.rhythm.period_s]
        data.append(
            _line(
                "T / tau, the period's limit",
                inside,
                analysis.rhythm.period_s / inside,
                "second",
                line={"dash": "dash"},
            )
        )
    near = min(known, key=lambda scale: abs(scale.tau_ns - PEAK_TAU_NS))
    says = (
        f"In its fullest {format_time(near.tau_ns / NS_PER_S)} the traffic runs at "
        f"{near.peak_to_mean:.3g} times "
        f"its mean rate. "
    )
    line_limit = near.most_by_line_rate
    if line_limit is not None and ratio.max() > 1.05 * line_limit:
        says += "It exceeds C / rho, so the capture joins the traffic of more than one such link."
    elif len(data) > 1:
        says += "No traffic of this line and period can exceed the limits drawn."
    layout = _over_scales("peak : mean")
    return _figure("ptm", "Peak to mean at every time scale", says, data, layout)


def _five_ms() -> dict[str, Any]:
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": 0.005, "x1": 0.005, "y0": 0, "y1": 1, "meta":
        "rule", "line": {"width": 1, "dash": "dot"},
    }  # fmt: skip


def _five_ms_label() -> dict[str, Any]:
    # Annotations on a log axis take the logarithm.
    return {
        "text": "5 ms", "xref": "x", "yref": "paper", "x": float(np.log10(0.005)), "y": 1, "yanchor":
        "bottom", "showarrow": False, "font": {"size": 11},
    }  # fmt: skip


def _envelope(report: ReportData) -> Figure | None:
    known = [scale for scale in report.analysis.scales if scale.peak is not None]
    if not known:
        return None
    tau = np.array([scale.tau_ns for scale in known]) / NS_PER_S
    held = [scale.peak.bytes for scale in known if scale.peak is not None]
    data = [_line("E, most in any window", tau, held, "main", mode="lines+markers")]
    spreads = [scale.spread for scale in known]
    if all(spread is not None for spread in spreads):
        high = [spread.quantile_bytes[2] or np.nan for spread in spreads if spread is not None]
        data.append(_line("99 % of windows hold less", tau, high, "second"))
    data.append(
        _line(
            "aligned bins only",
            tau,
            [scale.binned_bytes or np.nan for scale in known],
            "muted",
            line={"dash": "dot"},
        )
    )
    data.append(_line("mean", tau, report.analysis.mean_rate_bps / 8 * tau, "fourth", line={"dash": "dash"}))
    line = report.analysis.options.line_rate_bps
    if line:
        data.append(_line("line rate", tau, line / 8 * tau, "third", line={"dash": "dot"}))
    layout = _over_scales("bytes")
    says = "Windows slide over arrivals; bins, as most tools draw them, may miss up to half of a peak."
    return _figure("envelope", "Burstiness curve E(tau)", says, data, layout)


def _backlog(report: ReportData) -> Figure | None:
    points = [stretch for stretch in report.analysis.backlog if stretch.bytes > 0]
    if not points:
        return None
    rate = [stretch.rate_bps for stretch in points]
    wait = [[format_time(stretch.delay_s)] for stretch in points]
    data = [
        _line(
            "buffer needed", rate, [stretch.bytes for stretch in points], "main", mode="lines+markers",
            customdata=wait, hovertemplate="%{x:.4s}bit/s: %{y:.4s}B, waits %{customdata[0]}<extra></extra>",
        )
    ]  # fmt: skip
    layout = _layout("link rate (bit/s)", "largest queue (bytes)", log=True)
    says = "The queue this traffic alone builds at a link of each rate: the buffer that loses nothing."
    return _figure("backlog", "Buffer needed at each link rate", says, data, layout)


def _bursts(report: ReportData) -> Figure | None:
    bursts = report.analysis.bursts
    if len(bursts) < 2:
        return None
    every = max(1, len(bursts) // 2000)
    chosen = slice(None, None, every)
    data = [
        {
            "type": "scatter", "mode": "markers", "name": "bursts", "meta": "main",
            "x": _numbers(bursts.start_ns[chosen] / NS_PER_S, 9), "y": _numbers(bursts.bytes[chosen]),
            "customdata": [[format_time(each / NS_PER_S)] for each in bursts.duration_ns[chosen]],
            "hovertemplate": "at %{x:.6f} s: %{y:.4s}B in %{customdata[0]}<extra></extra>",
            "marker": {"size": 6},
        }
    ]  # fmt: skip
    layout = _layout("start (s)", "bytes")
    layout["yaxis"]["rangemode"] = "tozero"
    says = (
        f"{len(bursts):,} bursts, parted by pauses above {format_time(bursts.theta_ns / NS_PER_S)}; "
        "the median holds "
        f"{format_size(float(np.median(bursts.bytes)))}. Something is under way {bursts.on_share:.1%} "
        "of the time."
    )
    return _figure("bursts", "Bursts", says, data, layout)


def _heat(name: str, title: str, heat: HeatMap | None) -> Figure | None:
    if heat is None:
        return None
    times = (np.arange(heat.rate_bps.shape[1]) + 0.5) * heat.bin_s
    data = [
        {
            "type": "heatmap", "meta": "heat", "x": _numbers(times, 9), "y": heat.hosts,
            "z": [_numbers(row, 4) for row in heat.rate_bps],
            "colorbar": {"title": {"text": "bit/s"}, "exponentformat": "SI"},
            "hovertemplate": "%{y} at %{x:.3f} s: %{z:.3s}bit/s<extra></extra>",
        }
    ]  # fmt: skip
    layout = _layout("time from the first packet (s)", "", height=140 + 26 * max(4, len(heat.hosts)))
    layout["yaxis"] = {"type": "category", "automargin": True, "autorange": "reversed"}
    return _figure(name, title, f"Rate of each host in bins of {format_time(heat.bin_s)}.", data, layout)


def _jobs(report: ReportData) -> Figure | None:
    if not report.jobs:
        return None
    counts = [count for count, _ in report.jobs]
    data = []
    for law, label, role in (
        ("aligned", "all at once", "third"), ("random", "random phases, median", "main"), ("best",
        "interleaved", "second"),
    ):  # fmt: skip
        values = [float(np.median(result.law(law).values("backlog"))) for _, result in report.jobs]  # type: ignore[arg-type]
        data.append(_line(label, counts, np.maximum(values, 1), role, mode="lines+markers"))
    high = [float(np.quantile(result.law("random").values("backlog"), 0.95)) for _, result in report.jobs]
    data.append(_line("random phases, 95 %", counts, np.maximum(high, 1), "main", line={"dash": "dash"}))
    buffer = report.link.buffer_bytes
    data.append(_line("buffer", [counts[0], counts[-1]], [buffer, buffer], "muted", line={"dash": "dot"}))
    layout = _layout("jobs like this one on the link", "largest queue (bytes)", log=True)
    layout["xaxis"].update({"tickvals": counts, "ticktext": [str(count) for count in counts]})
    layout["yaxis"]["dtick"] = 1
    fit = report.jobs[-1][1].fit
    fits = (
        f" Without loss fit: {fit.worst_case} whatever their phases, {fit.random_95} at random phases "
        "(95 %), "
        f"{fit.best_case} interleaved."
        if fit
        else ""
    )
    link = f"Link {format_rate(report.link.rate_bps)}, buffer {format_size(buffer)}"
    says = f"{link}; open loop, so upper figures.{fits}"
    return _figure("jobs", "Several such jobs on one link", says, data, layout)
