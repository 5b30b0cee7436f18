"""Every figure of one trace, computed once, with the conventions it was computed under.

This is what `mlfabric traffic analyze` prints and what the report draws. It computes nothing itself: it asks
each metric in turn and keeps the answers together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal

from mlfabric.errors import FabricError
from mlfabric.traffic import native
from mlfabric.traffic.arrivals import Arrivals, fluid, instant
from mlfabric.traffic.backlogs import Backlog, Stretch
from mlfabric.traffic.bursts import Bursts, find_bursts
from mlfabric.traffic.dispersion import Spread, spread
from mlfabric.traffic.envelopes import Peak, byte_series, envelope, envelopes_by_bins
from mlfabric.traffic.flows import GroupKind
from mlfabric.traffic.gaps import GapStatistics, gap_statistics
from mlfabric.traffic.logscales import Logscale, logscale
from mlfabric.traffic.rhythm import Rhythm, find_rhythm
from mlfabric.traffic.scales import DEFAULT_SCALES, default_rates, parse_scales
from mlfabric.traffic.trace import NS_PER_S, Trace
from mlfabric.units import format_time

_MOST_GROUPS: Final = 64
_LOGSCALE_BINS: Final = 1 << 16


@dataclass(frozen=True)
class AnalysisOptions:
    """What to compute, and under which conventions."""

    scales_ns: tuple[int, ...] = field(default_factory=lambda: parse_scales(DEFAULT_SCALES))
    rates_bps: tuple[float, ...] | None = None  # None: from the mean rate to the highest seen
    model: Literal["instant", "fluid"] = "instant"
    line_rate_bps: float | None = None
    theta_ns: int | None = None
    by: GroupKind | None = None
    quick: bool = False  # leave out percentiles, dispersion, gaps and the logscale diagram
    whole_iterations: bool = True  # take the mean rate over whole rounds where there is a rhythm


@dataclass(frozen=True)
class Scale:
    """All that is known about windows of one length; None throughout where no such window fits."""

    tau_ns: int
    peak: Peak | None
    peak_to_mean: float | None
    binned_bytes: int | None
    spread: Spread | None
    most_by_line_rate: float | None  # C / rho
    most_by_period: float | None  # T / tau, for strictly periodic traffic


@dataclass(frozen=True)
class Group:
    """One flow, pair, host or port and its own figures."""

    name: str
    packets: int
    bytes: int
    mean_rate_bps: float
    scales: tuple[Scale, ...]
    bursts: int
    on_share: float
    period_s: float | None
    jitter_s: float | None
    bytes_per_round: float | None


@dataclass(frozen=True)
class Analysis:
    """One trace and every figure of it."""

    trace: Trace
    options: AnalysisOptions
    packets: int
    bytes: int
    span_s: float
    observation_s: float
    observed_bytes: int
    observation: str  # what the mean rate was taken over
    mean_rate_bps: float
    scales: tuple[Scale, ...]
    backlog: tuple[Stretch, ...]
    bursts: Bursts
    rhythm: Rhythm | None
    gaps: GapStatistics | None
    logscale: Logscale | None
    groups: tuple[Group, ...]
    groups_left_out: int
    warnings: tuple[str, ...]

    def scale(self, tau_ns: int) -> Scale | None:
        return next((each for each in self.scales if each.tau_ns == tau_ns), None)


def analyze(trace: Trace, options: AnalysisOptions | None = None) -> Analysis:
    """Every figure of a trace."""
    options = options or AnalysisOptions()
    trace.needs_packets()
    warnings = [*trace.origin.warnings, *_finer_than_clocks(trace, options)]
    arrivals = _arrivals(trace, options)
    rhythm = find_rhythm(trace)
    observation_ns, observed, observation = _observation(trace, rhythm, options)
    mean_bps = observed * 8e9 / observation_ns if observation_ns else 0.0
    trace.running  # noqa: B018 - computed once, before threads ask for it
    if not observation_ns:
        warnings.append("all packets carry one time stamp, so no rate can be given")
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        known = pool.submit(_backlog, arrivals, options.rates_bps) if options.rates_bps else None
        scales = _scales(trace, arrivals, options, mean_bps, rhythm, pool)
        if known is None:
            highest = next((s.peak.bytes * 8e9 / s.tau_ns for s in scales if s.peak is not None), 0.0)
            rates = default_rates(mean_bps, max(options.line_rate_bps or 0.0, highest))
        queues = _backlog(arrivals, rates) if known is None else known.result()
    bursts = find_bursts(trace, options.theta_ns)
    warnings += bursts.notes
    groups, left_out = _groups(trace, options) if options.by else ((), 0)
    return Analysis(
        trace=trace,
        options=options,
        packets=len(trace),
        bytes=trace.total_bytes,
        span_s=trace.span_ns / NS_PER_S,
        observation_s=observation_ns / NS_PER_S,
        observed_bytes=observed,
        observation=observation,
        mean_rate_bps=mean_bps,
        scales=scales,
        backlog=queues,
        bursts=bursts,
        rhythm=rhythm,
        gaps=None if options.quick else gap_statistics(trace),
        logscale=None if options.quick else _logscale(trace, rhythm, warnings),
        groups=groups,
        groups_left_out=left_out,
        warnings=tuple(warnings),
    )


def _finer_than_clocks(trace: Trace, options: AnalysisOptions) -> list[str]:
    error_ns = trace.origin.clock_error_ns
    finer = [tau_ns for tau_ns in options.scales_ns if tau_ns < error_ns]
    if not finer:
        return []
    return [
        f"windows up to {format_time(finer[-1] / NS_PER_S)} are finer than the captures' clocks agree "
        f"({format_time(error_ns / NS_PER_S)}): what they say of packets from different captures is noise"
    ]


def _arrivals(trace: Trace, options: AnalysisOptions) -> Arrivals:
    if options.model == "instant":
        return instant(trace)
    if options.line_rate_bps is None:
        raise FabricError("the fluid model needs the line's rate; pass --line-rate, for example 10gbit")
    return fluid(trace, options.line_rate_bps)


def _observation(trace: Trace, rhythm: Rhythm | None, options: AnalysisOptions) -> tuple[int, int, str]:
    if rhythm is None or not options.whole_iterations:
        return trace.span_ns, trace.total_bytes, "span"
    return rhythm.observation_ns, int(rhythm.bytes.sum()), f"{rhythm.rounds} whole iterations"


def _backlog(arrivals: Arrivals, rates_bps: Sequence[float]) -> tuple[Stretch, ...]:
    return tuple(Backlog(arrivals).at_many(rates_bps))


def _scales(
    trace: Trace,
    arrivals: Arrivals,
    options: AnalysisOptions,
    mean_bps: float,
    rhythm: Rhythm | None,
    pool: ThreadPoolExecutor | None = None,
) -> tuple[Scale, ...]:
    def one(tau_ns: int, binned: int | None) -> Scale:
        peak = envelope(arrivals, tau_ns)
        mean = mean_bps / 8e9 * tau_ns
        scattered = None
        if not options.quick and peak is not None:
            instant_peak = peak if arrivals.model == "instant" else envelope(trace, tau_ns)
            most = int(instant_peak.bytes) if instant_peak is not None else None
            scattered = spread(trace, tau_ns, most_bytes=most)
        return Scale(
            tau_ns,
            peak,
            peak.bytes / mean if peak is not None and mean > 0 else None,
            binned,
            scattered,
            options.line_rate_bps / mean_bps if options.line_rate_bps and mean_bps else None,
            rhythm.period_s * NS_PER_S / tau_ns if rhythm is not None else None,
        )

    by_bins = envelopes_by_bins(trace, options.scales_ns)
    if pool is None or native.library() is None:
        # NumPy's sweeps need memory for each thread and gain little from a second one.
        return tuple(map(one, options.scales_ns, by_bins))
    return tuple(pool.map(one, options.scales_ns, by_bins))


def _logscale(trace: Trace, rhythm: Rhythm | None, warnings: list[str]) -> Logscale | None:
    if trace.span_ns < _LOGSCALE_BINS:
        return None
    bin_ns = max(1000, trace.span_ns // _LOGSCALE_BINS)
    try:
        return logscale(byte_series(trace, bin_ns), bin_ns / NS_PER_S, rhythm is not None)
    except FabricError as error:
        warnings.append(str(error))
        return None


def _groups(trace: Trace, options: AnalysisOptions) -> tuple[tuple[Group, ...], int]:
    """Figures of every flow, pair, host (out, then in) or port; the mean rate of each is over the whole
    span."""
    kind = options.by
    assert kind is not None
    found: list[tuple[str, Trace]] = []
    if kind == "host" and trace.flows is not None and trace.flows.tells_hosts:
        for direction in ("out", "in"):
            found += [(f"{name} {direction}", part) for name, part in trace.by("host", direction)]
        found.sort(key=lambda pair: -pair[1].total_bytes)
    else:
        found = list(trace.by(kind))
    groups = tuple(_group(name, part, trace, options) for name, part in found[:_MOST_GROUPS])
    return groups, max(0, len(found) - _MOST_GROUPS)


def _group(name: str, part: Trace, whole: Trace, options: AnalysisOptions) -> Group:
    rhythm = find_rhythm(part)
    mean_bps = part.total_bytes * 8e9 / whole.span_ns if whole.span_ns else 0.0
    quick = AnalysisOptions(
        options.scales_ns, model=options.model, line_rate_bps=options.line_rate_bps, quick=True
    )
    bursts = find_bursts(part, options.theta_ns)
    return Group(
        name,
        len(part),
        part.total_bytes,
        mean_bps,
        _scales(part, _arrivals(part, options), quick, mean_bps, rhythm),
        len(bursts),
        bursts.on_share,
        rhythm.period_s if rhythm else None,
        rhythm.jitter_s if rhythm else None,
        float(rhythm.bytes.mean()) if rhythm else None,
    )
