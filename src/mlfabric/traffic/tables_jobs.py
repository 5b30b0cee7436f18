"""Extrapolations, verdicts, comparisons and live readings as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from mlfabric.traffic.comparison import Comparison
from mlfabric.traffic.control import ControlResult
from mlfabric.traffic.extrapolation import Extrapolation
from mlfabric.traffic.meter import Reading
from mlfabric.traffic.tables import console, number, print_conventions, print_warnings, size, table, time
from mlfabric.traffic.trace import NS_PER_S, Trace
from mlfabric.traffic.verdicts import PortVerdict
from mlfabric.units import format_rate, format_size, format_time


def print_extrapolation(
    result: Extrapolation, closed: Sequence[tuple[str, ControlResult]], traces: Sequence[Trace]
) -> None:
    out = console()
    link = result.link
    offered = sum(cycle.mean_rate_bps for cycle in result.cycles)
    out.print(
        f"[bold]{len(result.cycles)} jobs[/bold] on {format_rate(link.rate_bps)} with a buffer of "
        f"{format_size(link.buffer_bytes)}, marking at {format_size(link.mark_bytes)}; they offer "
        f"{format_rate(offered)} ({offered / link.rate_bps:.0%}) on average"
    )
    for trace in traces:
        print_conventions(out, trace, "instant", "whole iterations", None)
    print_warnings(out, result.warnings)
    shown = table(
        "open loop, by how the phases fall",
        ["phases", "draws", "backlog median", "p95", "max", "loss mean", "95 % band", "no loss", "above ECN",
         "least rate"],
    )  # fmt: skip
    for law in result.laws:
        backlog = law.values("backlog")
        mean, low, high = law.band("loss")
        least = result.least_rate_bps[law.law]
        shown.add_row(
            law.law,
            str(len(law.draws)),
            size(float(np.median(backlog))),
            size(float(np.quantile(backlog, 0.95))),
            size(float(backlog.max())),
            f"{mean:.2%}",
            f"{low:.2%} to {high:.2%}",
            f"{law.no_loss_share:.0%}",
            f"{law.band('marked')[0]:.1%}",
            "-" if least is None else format_rate(least),
        )
    out.print(shown)
    worst = result.worst
    if math.isinf(worst.at_most_bytes):
        out.print("worst case: unbounded, the jobs offer more than the link carries")
    elif worst.at_least_bytes == worst.at_most_bytes:
        out.print(f"worst case over all phases: {format_size(worst.at_most_bytes)} (exact)")
    else:
        bounds = f"{format_size(worst.at_least_bytes)} and {format_size(worst.at_most_bytes)}"
        out.print(f"worst case over all phases: between {bounds}")
    if result.fit is not None:
        fit = result.fit
        out.print(
            f"[bold]jobs that fit without loss[/bold]: {fit.worst_case} whatever their phases, "
            f"{fit.random_95} at "
            f"random phases (95 %), {fit.best_case} interleaved; {fit.by_mean_rate} by mean rate alone"
        )
    loop = table(
        "closed loop, one cycle of every job",
        [
            "phases",
            "control",
            "burst stretch",
            "p95",
            "max",
            "iteration",
            "marked",
            "paused",
            "lost",
            "queue",
        ],
        left=2,
    )
    for law_name, each in closed:
        loop.add_row(
            law_name,
            each.control,
            f"{each.stretch_mean:.2f}x",
            f"{each.stretch_p95:.2f}x",
            f"{each.stretch_max:.2f}x",
            "unfinished" if math.isinf(each.round_stretch) else f"{each.round_stretch:.3f}x",
            f"{each.marked_share:.1%}",
            time(each.pause_s),
            size(each.lost_bytes),
            size(each.most_queue_bytes),
        )
    out.print(loop)


def print_orchestration(verdicts: Sequence[PortVerdict], trace: Trace) -> None:
    out = console()
    print_conventions(out, trace, "instant", "span", None)
    print_warnings(out, trace.origin.warnings)
    shown = table(
        "does the application collide with itself?",
        [
            "receiving host",
            "verdict",
            "sources",
            "bytes",
            "overlap",
            "E_port/ΣE (5 ms)",
            "backlog",
            "at random",
            "p",
        ],
        left=2,
    )
    for each in verdicts:
        ratio = dict(each.multiplexing).get(5_000_000)
        shown.add_row(
            each.host,
            each.verdict,
            f"{each.sources}" + (f" (+{each.minor_sources} minor)" if each.minor_sources else ""),
            size(each.bytes),
            "-" if each.overlap_share is None else f"{each.overlap_share:.1%}",
            number(ratio),
            size(each.backlog_bytes),
            size(each.random_backlog_bytes),
            number(each.p_value),
        )
    out.print(shown)
    for each in verdicts:
        out.print(f"[dim]{each.host}: {each.reason} (port rate {format_rate(each.port_rate_bps)})[/dim]")


def print_comparison(result: Comparison) -> None:
    out = console()
    for name, side in (("before", result.before), ("after", result.after)):
        out.print(
            f"[bold]{name}[/bold] {', '.join(side.trace.origin.files)}: {side.packets:,} packets, "
            f"{format_size(side.bytes)}, mean {format_rate(side.mean_rate_bps)}, period "
            f"{format_time(side.rhythm.period_s) if side.rhythm else 'none'}"
        )
        print_conventions(out, side.trace, side.options.model, side.observation, None)
        print_warnings(out, side.warnings)
    shown = table("peak to mean", ["window", "before", "after", "times lower", "E before", "E after"])
    for old, new, row in zip(result.before.scales, result.after.scales, result.ratios(), strict=True):
        shown.add_row(
            time(row[0] / NS_PER_S),
            number(row[1]),
            number(row[2]),
            number(row[3]),
            size(old.peak.bytes if old.peak else None),
            size(new.peak.bytes if new.peak else None),
        )
    out.print(shown)
    queues = table("queue at a link of this rate", ["rate", "before", "after"])
    for before, after in zip(result.before.backlog, result.after.backlog, strict=True):
        queues.add_row(format_rate(before.rate_bps), size(before.bytes), size(after.bytes))
    out.print(queues)


def print_reading(reading: Reading) -> None:
    at = datetime.fromtimestamp(reading.start_ns / NS_PER_S, UTC).strftime("%H:%M:%S")
    peaks = "  ".join(f"{format_time(tau / NS_PER_S)} {ratio:.1f}:1" for tau, _, ratio in reading.peaks())
    dropped = f"  [red]{reading.dropped:,} dropped by the kernel[/red]" if reading.dropped else ""
    console().print(
        f"{at}  {len(reading.trace):>9,} packets  {format_rate(reading.mean_rate_bps):>10}  peak to mean  "
        f"{peaks or '-'}{dropped}"
    )
