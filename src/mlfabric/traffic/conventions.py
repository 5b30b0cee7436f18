"""The conventions a result was computed under, as every JSON output states them."""

from __future__ import annotations

from typing import Any

from mlfabric.traffic.trace import NS_PER_S, Trace


def conventions(trace: Trace, model: str, observation: str, line_rate_bps: float | None) -> dict[str, Any]:
    return {
        "layer": trace.origin.layer,
        "arrivals": model,
        "line_rate_bps": line_rate_bps,
        "windows": "closed, sliding over arrivals; binned_* are aligned bins from the first packet",
        "observation": observation,
        "time_origin": "first packet",
        "first_packet_ns": trace.origin_ns,
        "vantage": trace.origin.vantage,
        "selection": trace.origin.selection,
        "files": list(trace.origin.files),
        "format": trace.origin.format,
        "links": list(trace.origin.links),
        "clock_error_s": trace.origin.clock_error_ns / NS_PER_S,
    }
