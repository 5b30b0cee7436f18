"""Two traces side by side, scale by scale and rate by rate: what a change did to the traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlfabric.traffic.analysis import Analysis, AnalysisOptions, analyze
from mlfabric.traffic.jsonform import analysis_json
from mlfabric.traffic.trace import NS_PER_S, Trace


@dataclass(frozen=True)
class Comparison:
    before: Analysis
    after: Analysis

    def ratios(self) -> list[tuple[int, float | None, float | None, float | None]]:
        """(tau, peak-to-mean before, after, before / after); above one the change smoothed the traffic."""
        rows = []
        for old, new in zip(self.before.scales, self.after.scales, strict=True):
            both = old.peak_to_mean is not None and new.peak_to_mean
            ratio = (
                old.peak_to_mean / new.peak_to_mean
                if both and old.peak_to_mean and new.peak_to_mean
                else None
            )
            rows.append((old.tau_ns, old.peak_to_mean, new.peak_to_mean, ratio))
        return rows


def compare(before: Trace, after: Trace, options: AnalysisOptions) -> Comparison:
    """Both traces under the same scales and rates; rates not given come from the first."""
    first = analyze(before, options)
    rates = options.rates_bps or tuple(stretch.rate_bps for stretch in first.backlog)
    return Comparison(first, analyze(after, replace(options, rates_bps=rates)))


def comparison_json(result: Comparison) -> dict[str, Any]:
    return {
        "before": analysis_json(result.before),
        "after": analysis_json(result.after),
        "scales": [
            {
                "tau_s": tau / NS_PER_S,
                "peak_to_mean_before": old,
                "peak_to_mean_after": new,
                "times_lower": ratio,
            }
            for tau, old, new, ratio in result.ratios()
        ],
        "backlog": [
            {"rate_bps": old.rate_bps, "bytes_before": old.bytes, "bytes_after": new.bytes}
            for old, new in zip(result.before.backlog, result.after.backlog, strict=True)
        ],
    }
