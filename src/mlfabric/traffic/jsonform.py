"""Results as plain JSON values. The names here are a promise to scripts; docs/traffic.md lists them."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from mlfabric.traffic.analysis import Analysis, Group, Scale
from mlfabric.traffic.backlogs import Stretch
from mlfabric.traffic.bursts import Bursts
from mlfabric.traffic.conventions import conventions
from mlfabric.traffic.trace import NS_PER_S, Trace

SCHEMA: Final = 1
_MOST_FLOWS: Final = 1000


def analysis_json(result: Analysis) -> dict[str, Any]:
    trace, rhythm = result.trace, result.rhythm
    return {
        "schema": SCHEMA,
        "packets": result.packets,
        "bytes": result.bytes,
        "span_s": result.span_s,
        "observation_s": result.observation_s,
        "mean_rate_bps": result.mean_rate_bps,
        "period_s": rhythm.period_s if rhythm else None,
        "conventions": conventions(
            trace, result.options.model, result.observation, result.options.line_rate_bps
        ),
        "scales": [_scale(each) for each in result.scales],
        "backlog": [_stretch(each) for each in result.backlog],
        "bursts": bursts_json(result.bursts),
        "rhythm": None
        if rhythm is None
        else {
            "period_s": rhythm.period_s,
            "jitter_s": rhythm.jitter_s,
            "iterations": rhythm.rounds,
            "bytes_per_iteration": float(rhythm.bytes.mean()),
            "on_share": rhythm.on_share,
            "autocorrelation": rhythm.resemblance,
        },
        "gaps": None
        if result.gaps is None
        else {
            "count": result.gaps.count,
            "mean_s": result.gaps.mean_ns / NS_PER_S,
            "burstiness": result.gaps.burstiness,
            "memory": result.gaps.memory,
        },
        "logscale": None
        if result.logscale is None
        else {
            "bin_s": result.logscale.bin_s,
            "octaves": result.logscale.octaves.tolist(),
            "log2_energy": [_finite(value) for value in result.logscale.log2_energy],
            "hurst": result.logscale.hurst,
            "why_no_hurst": result.logscale.why_not,
        },
        "flows": flows_json(trace),
        "flows_total": len(trace.flows) if trace.flows is not None else None,
        "groups": [_group(each) for each in result.groups],
        "groups_left_out": result.groups_left_out,
        "warnings": list(result.warnings),
        "damaged": trace.origin.damaged,
        "facts": trace.origin.facts,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _scale(each: Scale) -> dict[str, Any]:
    peak, spread = each.peak, each.spread
    quantiles = spread.quantile_bytes if spread else (None, None, None)
    return {
        "tau_s": each.tau_ns / NS_PER_S,
        "envelope_bytes": peak.bytes if peak else None,
        "peak_to_mean": each.peak_to_mean,
        "peak_start_s": peak.start_ns / NS_PER_S if peak else None,
        "p50_bytes": quantiles[0],
        "p90_bytes": quantiles[1],
        "p99_bytes": quantiles[2],
        "idc": spread.idc if spread else None,
        "idc_bytes": spread.idc_bytes if spread else None,
        "cv": spread.cv if spread else None,
        "binned_bytes": each.binned_bytes,
        "most_by_line_rate": each.most_by_line_rate,
        "most_by_period": each.most_by_period,
    }


def _stretch(each: Stretch) -> dict[str, Any]:
    return {
        "rate_bps": each.rate_bps,
        "bytes": each.bytes,
        "delay_s": _finite(each.delay_s),
        "start_s": each.start_ns / NS_PER_S,
        "duration_s": each.duration_ns / NS_PER_S,
    }


def bursts_json(bursts: Bursts, rows: int | None = 0) -> dict[str, Any]:
    """Totals of the bursts, and the first `rows` of them (None: all)."""
    result: dict[str, Any] = {
        "theta_s": bursts.theta_ns / NS_PER_S,
        "theta_from": bursts.theta_from,
        "count": len(bursts),
        "on_share": bursts.on_share,
        "bytes": _summary(bursts.bytes, 1),
        "duration_s": _summary(bursts.duration_ns, NS_PER_S),
        "gap_s": _summary(bursts.gap_before_ns[1:], NS_PER_S),
        "rate_bps": _summary(bursts.rate_bps[~np.isnan(bursts.rate_bps)], 1),
    }
    if rows != 0:
        result["list"] = burst_rows(bursts, rows)
    return result


def burst_rows(bursts: Bursts, rows: int | None) -> list[dict[str, Any]]:
    rate = bursts.rate_bps
    return [
        {
            "start_s": int(bursts.start_ns[index]) / NS_PER_S,
            "duration_s": int(bursts.duration_ns[index]) / NS_PER_S,
            "bytes": int(bursts.bytes[index]),
            "packets": int(bursts.packets[index]),
            "rate_bps": _finite(rate[index]),
            "gap_before_s": int(bursts.gap_before_ns[index]) / NS_PER_S if index else None,
        }
        for index in range(len(bursts) if rows is None else min(rows, len(bursts)))
    ]


def _summary(values: Any, unit: float) -> dict[str, float] | None:
    if not len(values):
        return None
    return {
        "min": float(values.min()) / unit,
        "median": float(np.median(values)) / unit,
        "mean": float(values.mean()) / unit,
        "max": float(values.max()) / unit,
    }


def flows_json(trace: Trace, most: int = _MOST_FLOWS) -> list[dict[str, Any]]:
    table = trace.flows
    if table is None:
        return []
    order = np.argsort(-table.bytes, kind="stable")[:most]
    return [
        {
            "flow": table.label(int(number)),
            "packets": int(table.packets[number]),
            "bytes": int(table.bytes[number]),
            "first_s": int(table.first_ns[number]) / NS_PER_S,
            "last_s": int(table.last_ns[number]) / NS_PER_S,
        }
        for number in order
        if table.packets[number]
    ]


def _group(each: Group) -> dict[str, Any]:
    return {
        "name": each.name,
        "packets": each.packets,
        "bytes": each.bytes,
        "mean_rate_bps": each.mean_rate_bps,
        "bursts": each.bursts,
        "on_share": each.on_share,
        "period_s": each.period_s,
        "jitter_s": each.jitter_s,
        "bytes_per_iteration": each.bytes_per_round,
        "scales": [
            {key: value for key, value in _scale(scale).items() if key in _GROUP_SCALE_KEYS}
            for scale in each.scales
        ],
    }


_GROUP_SCALE_KEYS: Final = ("tau_s", "envelope_bytes", "peak_to_mean", "peak_start_s", "binned_bytes")
