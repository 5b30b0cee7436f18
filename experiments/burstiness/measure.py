"""What a run's captures say: peak to mean per host and direction, the verdict, the extrapolation.

The observation is the measured steps, from the begin of the first to the end of the last by the ranks' own
clock, which also stamps the packets; so the mean includes the pauses, and the first steps are left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlfabric.errors import FabricError
from mlfabric.traffic import (
    Link,
    Origin,
    ReadOptions,
    Selection,
    Trace,
    envelope,
    extrapolate,
    orchestration,
    read,
    schedules,
    simulate,
)

TAU_S = 0.005
# Of the link that several jobs would share: its queue, and where it marks.
SHARED_BUFFER_BYTES = 4_000_000
SHARED_MARK_BYTES = 200_000
JOBS = (2, 4, 8)
MOST_ROUND_TRIPS = 100_000


@dataclass(frozen=True)
class Steps:
    """The measured steps of a run."""

    begin_s: float
    end_s: float
    durations_s: tuple[float, ...]  # of the slowest rank, step by step
    parameters: int
    losses: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def read_steps(folder: Path, ranks: int, skip: int) -> Steps:
    records = [json.loads((folder / f"steps-{rank}.json").read_text()) for rank in range(ranks)]
    begins = np.array([record["begins_s"][skip:] for record in records])
    if begins.shape[1] < 2:
        raise FabricError(f"no step is left to measure after the first {skip}")
    edges = begins.max(axis=0)
    return Steps(
        float(begins[:, 0].min()), float(edges[-1]), tuple(float(each) for each in np.diff(edges)),
        int(records[0]["parameters"]), tuple(records[0]["losses"]),
    )  # fmt: skip


def read_host(file: Path, address: str, direction: str, steps: Steps) -> Trace:
    """What a host sent ("out") or received during the steps, at its own port of the switch."""
    chosen = Selection(hosts=(address,), direction=direction)  # type: ignore[arg-type]
    trace = read(file, ReadOptions(selection=chosen, vantage=f"switch port of {address}"))
    stamps = trace.origin_ns + trace.time_ns
    inside = (stamps >= int(steps.begin_s * 1e9)) & (stamps < int(steps.end_s * 1e9))
    return trace.chosen(inside).rebased()


def curve(trace: Trace, steps: Steps, rate_bps: float, scales_ns: Sequence[int]) -> dict[str, Any]:
    """E and peak to mean at every scale, with both bounds."""
    mean_bps = trace.total_bytes * 8 / steps.seconds
    step_s = steps.seconds / len(steps.durations_s)
    rows = []
    for tau_ns in scales_ns:
        peak = envelope(trace, tau_ns)
        if peak is not None:
            ratio = peak.bytes * 8e9 / tau_ns / mean_bps
            rows.append([tau_ns / 1e9, int(peak.bytes), round(ratio, 3)])
    at_tau = next((row[2] for row in rows if row[0] == TAU_S), None)
    return {
        "bytes_per_step": round(trace.total_bytes / len(steps.durations_s)),
        "mean_rate_bps": round(mean_bps),
        "utilisation": round(mean_bps / rate_bps, 5),
        "peak_to_mean_5ms": at_tau,
        "most_by_line_rate": round(rate_bps / mean_bps, 2),
        "most_by_period": round(step_s / TAU_S, 1),
        "scales": rows,
    }


def verdicts(sent: dict[str, Trace], rate_bps: float) -> list[dict[str, Any]]:
    """Per receiving host, from what all others sent, stamped where they sent it."""
    times, sizes, names = [], [], []
    for trace in sent.values():
        assert trace.flow is not None
        assert trace.flows is not None
        flows = [trace.flows.flow(number) for number in range(len(trace.flows))]
        labels = np.array([f"{each.source} > {each.destination}" for each in flows])
        times.append(trace.origin_ns + trace.time_ns)
        sizes.append(trace.size.astype(np.int64))
        names.append(labels[trace.flow])
    origin = Origin(format="lab captures", vantage="switch ports of the senders")
    merged = Trace.of_named_flows(np.concatenate(times), np.concatenate(sizes), np.concatenate(names), origin)
    return [
        {
            "host": each.host, "sources": each.sources, "overlap_share": each.overlap_share,
            "backlog_bytes": each.backlog_bytes, "random_backlog_bytes": each.random_backlog_bytes,
            "p_value": each.p_value, "verdict": each.verdict,
        }
        for each in orchestration(merged, rate_bps, "sender", shifts=99)
    ]  # fmt: skip


def several(trace: Trace, jobs: int, link: Link) -> dict[str, Any]:
    """That many such jobs on one link: open loop by all laws, closed loop for jobs together or apart."""
    result = extrapolate([trace], jobs, link, draws=50, find_fit=False)
    worst = result.worst.at_most_bytes
    found: dict[str, Any] = {"worst_backlog_bytes": round(worst) if math.isfinite(worst) else None}
    for law in result.laws:
        found[law.law] = {
            "backlog_median_bytes": round(float(np.median(law.values("backlog")))),
            "loss_mean": round(law.band("loss")[0], 6),
            "no_loss_share": round(law.no_loss_share, 3),
        }
    for name in ("aligned", "best"):
        plans = schedules(result.cycles, result.law(name).draws[0].shifts_ns)
        # The loop walks in round trips: of long runs, longer ones.
        round_trip_s = max(1e-3, result.cycles[0].length_ns / 1e9 / MOST_ROUND_TRIPS)
        closed = simulate(plans, link, "none", round_trip_s)
        found[name]["closed_loop_stretch"] = round(closed.round_stretch, 4)
    return found


def measure(
    files: dict[str, Path],
    addresses: dict[str, str],
    steps: Steps,
    rate_bps: float,
    scales_ns: Sequence[int],
) -> dict[str, Any]:
    """All figures of one run."""
    hosts: dict[str, Any] = {}
    sent: dict[str, Trace] = {}
    for host, file in files.items():
        sent[host] = read_host(file, addresses[host], "out", steps)
        received = read_host(file, addresses[host], "in", steps)
        hosts[host] = {
            "out": curve(sent[host], steps, rate_bps, scales_ns),
            "in": curve(received, steps, rate_bps, scales_ns),
        }
    first = next(iter(sent.values()))
    link = Link(rate_bps, SHARED_BUFFER_BYTES, SHARED_MARK_BYTES)
    return {
        "parameters": steps.parameters,
        "steps": len(steps.durations_s),
        "step_s": {
            "mean": round(statistics.fmean(steps.durations_s), 4),
            "median": round(statistics.median(steps.durations_s), 4),
            "all": [round(each, 3) for each in steps.durations_s],
        },
        "losses": [round(each, 3) for each in steps.losses],
        "hosts": hosts,
        "orchestration": verdicts(sent, rate_bps),
        "extrapolation": {str(jobs): several(first, jobs, link) for jobs in JOBS},
        "extrapolation_link": {
            "rate_bps": rate_bps, "buffer_bytes": SHARED_BUFFER_BYTES, "mark_bytes": SHARED_MARK_BYTES,
        },
    }  # fmt: skip
