"""Extrapolations, verdicts and live readings as plain JSON values; docs/traffic.md lists the names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlfabric.traffic.control import ControlResult
from mlfabric.traffic.conventions import conventions
from mlfabric.traffic.extrapolation import Extrapolation, LawResult
from mlfabric.traffic.jsonform import SCHEMA
from mlfabric.traffic.meter import Reading
from mlfabric.traffic.trace import NS_PER_S, Trace
from mlfabric.traffic.verdicts import PortVerdict


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def extrapolation_json(
    result: Extrapolation, closed: Sequence[tuple[str, ControlResult]], traces: Sequence[Trace]
) -> dict[str, Any]:
    fit = result.fit
    return {
        "schema": SCHEMA,
        "jobs": len(result.cycles),
        "link_bps": result.link.rate_bps,
        "buffer_bytes": result.link.buffer_bytes,
        "ecn_bytes": result.link.mark_bytes,
        "offered_bps": sum(cycle.mean_rate_bps for cycle in result.cycles),
        "iteration_s": [cycle.period_ns / NS_PER_S for cycle in result.cycles],
        "grain_bytes": max(cycle.grain_bytes for cycle in result.cycles),
        "laws": {each.law: _law(each, result) for each in result.laws},
        "worst_case": {
            "backlog_at_least_bytes": _finite(result.worst.at_least_bytes),
            "backlog_at_most_bytes": _finite(result.worst.at_most_bytes),
        },
        "envelopes": [
            {"tau_s": tau / NS_PER_S, "aligned_bytes": _finite(aligned), "random_bytes": _finite(random)}
            for tau, aligned, random in result.envelopes
        ],
        "jobs_that_fit": None
        if fit is None
        else {
            "by_mean_rate": fit.by_mean_rate,
            "worst_case": fit.worst_case,
            "random_95_percent": fit.random_95,
            "interleaved": fit.best_case,
        },
        "closed_loop": [{"law": law, **_control(each)} for law, each in closed],
        "conventions": [conventions(trace, "instant", "whole iterations", None) for trace in traces],
        "warnings": [*result.warnings, *(sentence for trace in traces for sentence in trace.origin.warnings)],
    }


def _law(each: LawResult, result: Extrapolation) -> dict[str, Any]:
    backlog = each.values("backlog")
    mean, low, high = each.band("loss")
    return {
        "draws": len(each.draws),
        "backlog_bytes": {
            "median": float(np.median(backlog)),
            "p95": float(np.quantile(backlog, 0.95)),
            "max": float(backlog.max()),
        },
        "loss_ratio": {"mean": mean, "low": low, "high": high, "max": float(each.values("loss").max())},
        "no_loss_share": each.no_loss_share,
        "above_ecn_share": {"mean": each.band("marked")[0], "max": float(each.values("marked").max())},
        "least_rate_bps": _finite(result.least_rate_bps[each.law]),
        "least_buffer_bytes": float(backlog.max()),
    }


def _control(each: ControlResult) -> dict[str, Any]:
    return {
        "control": each.control,
        "burst_stretch": {"mean": each.stretch_mean, "p95": each.stretch_p95, "max": each.stretch_max},
        "iteration_stretch": _finite(each.round_stretch),
        "marked_share": each.marked_share,
        "pause_s": each.pause_s,
        "lost_bytes": each.lost_bytes,
        "largest_queue_bytes": each.most_queue_bytes,
        "bursts": each.bursts,
        "finished": each.finished,
    }


def orchestration_json(verdicts: Sequence[PortVerdict], trace: Trace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "hosts": [
            {
                "host": each.host,
                "sources": each.sources,
                "minor_sources": each.minor_sources,
                "bytes": each.bytes,
                "on_share": each.on_share,
                "overlap_share": each.overlap_share,
                "multiplexing": [
                    {"tau_s": tau / NS_PER_S, "ratio": ratio} for tau, ratio in each.multiplexing
                ],
                "port_rate_bps": each.port_rate_bps,
                "backlog_bytes": each.backlog_bytes,
                "random_backlog_bytes": each.random_backlog_bytes,
                "p_value": each.p_value,
                "verdict": each.verdict,
                "reason": each.reason,
            }
            for each in verdicts
        ],
        "conventions": conventions(trace, "instant", "span", None),
        "warnings": list(trace.origin.warnings),
    }


def reading_json(reading: Reading) -> dict[str, Any]:
    return {
        "start_ns": reading.start_ns,
        "length_s": reading.length_s,
        "packets": len(reading.trace),
        "bytes": reading.trace.total_bytes,
        "mean_rate_bps": reading.mean_rate_bps,
        "dropped": reading.dropped,
        "scales": [
            {"tau_s": tau / NS_PER_S, "envelope_bytes": held, "peak_to_mean": ratio}
            for tau, held, ratio in reading.peaks()
        ],
    }
