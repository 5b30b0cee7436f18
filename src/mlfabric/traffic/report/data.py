"""What the report shows beyond the analysis itself: series to draw, hosts over time, verdicts, several
jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.analysis import Analysis
from mlfabric.traffic.envelopes import byte_series
from mlfabric.traffic.extrapolation import Extrapolation, Link, extrapolate
from mlfabric.traffic.trace import NS_PER_S, Trace
from mlfabric.traffic.verdicts import PortVerdict, orchestration

_POINTS: Final = 3000
_PEAK_POINTS: Final = 500
_HEAT_COLUMNS: Final = 400
_MOST_HOSTS: Final = 24
_STANDARD_RATES: Final = (1e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 4e10, 5e10, 1e11, 2e11, 4e11, 8e11)
PEAK_TAU_NS: Final = 5_000_000
JOBS: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class Series:
    start_s: float
    bin_s: float
    rate_bps: NDArray[np.float64]

    @property
    def times_s(self) -> NDArray[np.float64]:
        return np.asarray(self.start_s + (np.arange(len(self.rate_bps)) + 0.5) * self.bin_s, np.float64)


@dataclass(frozen=True)
class HeatMap:
    hosts: list[str]
    bin_s: float
    rate_bps: NDArray[np.float64]  # (hosts, bins)


@dataclass(frozen=True)
class ReportData:
    analysis: Analysis
    overview: Series
    peak: Series | None
    peak_window_s: tuple[float, float] | None
    sending: HeatMap | None
    receiving: HeatMap | None
    verdicts: list[PortVerdict]
    jobs: list[tuple[int, Extrapolation]]
    link: Link
    notes: list[str]


def gather(analysis: Analysis, link_bps: float | None) -> ReportData:
    trace, notes = analysis.trace, []
    link = _link(analysis, link_bps)
    verdicts: list[PortVerdict] = []
    if trace.flow is not None and trace.flows is not None and trace.flows.tells_hosts:
        try:
            verdicts = orchestration(trace, analysis.options.line_rate_bps, shifts=99)
        except FabricError as error:
            notes.append(str(error))
    jobs: list[tuple[int, Extrapolation]] = []
    try:
        jobs = [
            (count, extrapolate([trace], count, link, draws=40, find_fit=count == JOBS[-1])) for count in JOBS
        ]
    except FabricError as error:
        notes.append(str(error))
    peak, window = _peak_series(analysis)
    return ReportData(
        analysis,
        _series(trace, 0, trace.span_ns, _POINTS),
        peak,
        window,
        _heat(trace, "out"),
        _heat(trace, "in"),
        verdicts,
        jobs,
        link,
        notes,
    )


def _link(analysis: Analysis, link_bps: float | None) -> Link:
    """The link of the extrapolation: asked for, or the line, or the next usual rate above what was seen
    in 1 ms."""
    rate = link_bps or analysis.options.line_rate_bps
    if rate is None:
        near = min(analysis.scales, key=lambda scale: abs(scale.tau_ns - 1_000_000))
        seen = near.peak.bytes * 8e9 / near.tau_ns if near.peak else analysis.mean_rate_bps
        rate = next((usual for usual in _STANDARD_RATES if usual >= seen * 0.98), seen)
    buffer = rate / 8 * 0.005  # five milliseconds, about what deep shared buffers hold per port
    return Link(rate, buffer, buffer / 20)


def _series(trace: Trace, begin_ns: int, end_ns: int, points: int) -> Series:
    bin_ns = max(1, -(-(end_ns - begin_ns) // points))
    low, high = np.searchsorted(trace.time_ns, [begin_ns, end_ns], side="left")
    high = max(int(high), int(np.searchsorted(trace.time_ns, end_ns, side="right")))
    part = Trace(trace.time_ns[low:high], trace.size[low:high])
    values = byte_series(part, bin_ns, begin_ns).astype(np.float64) if len(part) else np.zeros(1)
    whole = np.zeros(max(len(values), -(-(end_ns - begin_ns) // bin_ns)))
    whole[: len(values)] = values
    return Series(begin_ns / NS_PER_S, bin_ns / NS_PER_S, whole * 8e9 / bin_ns)


def _peak_series(analysis: Analysis) -> tuple[Series | None, tuple[float, float] | None]:
    known = [scale for scale in analysis.scales if scale.peak is not None]
    if not known:
        return None, None
    scale = min(known, key=lambda each: abs(each.tau_ns - PEAK_TAU_NS))
    assert scale.peak is not None
    start, tau = int(scale.peak.start_ns), scale.tau_ns
    begin, end = max(0, start - 2 * tau), min(analysis.trace.span_ns, start + 3 * tau)
    if end <= begin:
        return None, None
    window = start / NS_PER_S, (start + tau) / NS_PER_S
    return _series(analysis.trace, begin, end, _PEAK_POINTS), window


def _heat(trace: Trace, direction: str) -> HeatMap | None:
    if trace.flow is None or trace.flows is None or not trace.flows.tells_hosts:
        return None
    bin_ns = max(1, -(-(trace.span_ns + 1) // _HEAT_COLUMNS))
    hosts: list[str] = []
    rows: list[Any] = []
    for name, part in trace.by("host", direction):
        if name.startswith("not-ip"):
            continue
        if len(hosts) == _MOST_HOSTS:
            break
        row = np.zeros(_HEAT_COLUMNS)
        values = byte_series(part, bin_ns, 0)
        row[: len(values)] = values * 8e9 / bin_ns
        hosts.append(name)
        rows.append(row)
    return HeatMap(hosts, bin_ns / NS_PER_S, np.array(rows)) if hosts else None
