"""Results as tables for people, with the conventions stated above the figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from mlfabric.traffic.analysis import Analysis
from mlfabric.traffic.bursts import Bursts
from mlfabric.traffic.trace import NS_PER_S, Trace
from mlfabric.units import format_rate, format_size, format_time

_TOP: int = 10


class _Output(Console):
    """Standard output whose reader may go away (`| head`): the command line ends quietly then."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Standard output; into a file or pipe tables get the room they need, as no one will wrap them there."""
    result = _Output(highlight=False)
    return result if result.is_terminal else _Output(highlight=False, width=160)


def table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    """A table whose first `left` columns are words and the rest numbers."""
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, name in enumerate(columns):
        result.add_column(
            name, justify="left" if index < left else "right", no_wrap=True, overflow="ellipsis"
        )
    return result


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.{digits}g}"
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def size(value: float | None) -> str:
    return "-" if value is None else format_size(value)


def time(value_s: float | None) -> str:
    return "-" if value_s is None else format_time(value_s)


def print_warnings(out: Console, warnings: Sequence[str]) -> None:
    for sentence in warnings:
        out.print(f"[yellow]note:[/yellow] {sentence}")


def print_conventions(
    out: Console, trace: Trace, model: str, observation: str, line_rate: float | None
) -> None:
    origin = trace.origin
    line = f", line rate {format_rate(line_rate)}" if line_rate else ""
    out.print(
        f"[dim]bytes: {origin.layer} · arrivals: {model}{line} · windows: closed, sliding · mean "
        f"over: {observation} · "
        f"vantage: {origin.vantage} · packets: {origin.selection}[/dim]"
    )


def print_analysis(result: Analysis) -> None:
    out = console()
    trace = result.trace
    out.print(
        f"[bold]{', '.join(trace.origin.files) or 'trace'}[/bold]: {result.packets:,} packets, "
        f"{format_size(result.bytes)} in {format_time(result.span_s)}, mean "
        f"{format_rate(result.mean_rate_bps)}"
    )
    print_conventions(out, trace, result.options.model, result.observation, result.options.line_rate_bps)
    if result.rhythm is not None:
        rhythm = result.rhythm
        out.print(
            f"period {format_time(rhythm.period_s)} ± {format_time(rhythm.jitter_s)}, {rhythm.rounds} whole "
            f"iterations of {format_size(float(rhythm.bytes.mean()))}, ON {rhythm.on_share:.0%} of the time"
        )
    else:
        out.print("no period found")
    print_warnings(out, result.warnings)
    out.print(_scale_table(result))
    out.print(_backlog_table(result))
    bursts = result.bursts
    out.print(
        f"[bold]bursts[/bold]: {len(bursts):,} after pauses above "
        f"{format_time(bursts.theta_ns / NS_PER_S)} ({bursts.theta_from}); "
        f"ON {bursts.on_share:.1%}; median {format_size(float(np.median(bursts.bytes)))} in "
        f"{format_time(float(np.median(bursts.duration_ns)) / NS_PER_S)}, largest "
        f"{format_size(float(bursts.bytes.max()))}"
    )
    if result.gaps is not None and result.gaps.burstiness is not None:
        memory = "-" if result.gaps.memory is None else f"{result.gaps.memory:.3f}"
        out.print(
            f"[bold]gaps[/bold]: burstiness {result.gaps.burstiness:.3f} (-1 regular, 0 random, 1 "
            f"extreme), memory {memory}"
        )
    if result.logscale is not None:
        known = result.logscale.hurst
        out.print(
            f"[bold]logscale[/bold]: H = {known:.2f}"
            if known is not None
            else f"[bold]logscale[/bold]: no H: {result.logscale.why_not}"
        )
    _print_flows(out, trace)
    _print_groups(out, result)


def _scale_table(result: Analysis) -> Table:
    shown = table(
        "burstiness by time scale",
        [
            "window",
            "E",
            "rate in it",
            "peak:mean",
            "≤ C/rho",
            "≤ T/tau",
            "peak at",
            "p99",
            "IDC",
            "CV",
            "binned E",
        ],
    )
    for each in result.scales:
        peak, spread = each.peak, each.spread
        shown.add_row(
            time(each.tau_ns / NS_PER_S),
            size(peak.bytes if peak else None),
            format_rate(peak.bytes * 8e9 / each.tau_ns) if peak else "-",
            number(each.peak_to_mean),
            number(each.most_by_line_rate),
            number(each.most_by_period),
            f"{peak.start_ns / NS_PER_S:.6f} s" if peak else "-",
            size(spread.quantile_bytes[2] if spread else None),
            number(spread.idc if spread else None),
            number(spread.cv if spread else None),
            size(each.binned_bytes),
        )
    return shown


def _backlog_table(result: Analysis) -> Table:
    shown = table(
        "queue that builds up at a link of this rate", ["rate", "B_max", "delay", "from", "lasting"]
    )
    every = max(1, len(result.backlog) // 20)
    for each in result.backlog[::every]:
        shown.add_row(
            format_rate(each.rate_bps),
            size(each.bytes),
            time(each.delay_s),
            f"{each.start_ns / NS_PER_S:.6f} s",
            time(each.duration_ns / NS_PER_S),
        )
    return shown


def _print_flows(out: Console, trace: Trace) -> None:
    flows = trace.flows
    if flows is None or not len(flows):
        return
    shown = table(f"flows ({len(flows):,})", ["flow", "packets", "bytes", "first", "last"])
    for index in np.argsort(-flows.bytes, kind="stable")[:_TOP]:
        if flows.packets[index]:
            shown.add_row(
                flows.label(int(index)),
                f"{flows.packets[index]:,}",
                size(float(flows.bytes[index])),
                f"{flows.first_ns[index] / NS_PER_S:.6f} s",
                f"{flows.last_ns[index] / NS_PER_S:.6f} s",
            )
    out.print(shown)


def _print_groups(out: Console, result: Analysis) -> None:
    if not result.groups:
        return
    middle = min(result.options.scales_ns, key=lambda tau: abs(tau - 5_000_000))
    shown = table(
        f"by {result.options.by}",
        [str(result.options.by), "packets", "bytes", "mean", f"E({time(middle / NS_PER_S)})", "peak:mean",
         "bursts", "ON", "period", "jitter", "per iteration"],
    )  # fmt: skip
    for each in result.groups:
        scale = next(scale for scale in each.scales if scale.tau_ns == middle)
        shown.add_row(
            each.name,
            f"{each.packets:,}",
            size(each.bytes),
            format_rate(each.mean_rate_bps),
            size(scale.peak.bytes if scale.peak else None),
            number(scale.peak_to_mean),
            f"{each.bursts:,}",
            f"{each.on_share:.1%}",
            time(each.period_s),
            time(each.jitter_s),
            size(each.bytes_per_round),
        )
    out.print(shown)
    if result.groups_left_out:
        out.print(f"[dim]{result.groups_left_out:,} smaller ones are not shown[/dim]")


def print_bursts(trace: Trace, bursts: Bursts, most: int) -> None:
    out = console()
    out.print(
        f"[bold]{', '.join(trace.origin.files)}[/bold]: {len(bursts):,} bursts after pauses above "
        f"{format_time(bursts.theta_ns / NS_PER_S)} ({bursts.theta_from}); "
        f"{format_size(trace.total_bytes)} in all"
    )
    print_conventions(out, trace, "instant", "span", None)
    print_warnings(out, (*trace.origin.warnings, *bursts.notes))
    shown = table("", ["#", "start", "duration", "bytes", "packets", "mean rate", "pause before"], left=0)
    for index in range(min(most, len(bursts))):
        rate = bursts.rate_bps[index]
        shown.add_row(
            str(index),
            f"{bursts.start_ns[index] / NS_PER_S:.6f} s",
            time(float(bursts.duration_ns[index]) / NS_PER_S),
            size(float(bursts.bytes[index])),
            f"{bursts.packets[index]:,}",
            "-" if np.isnan(rate) else format_rate(float(rate)),
            "-" if index == 0 else time(float(bursts.gap_before_ns[index]) / NS_PER_S),
        )
    out.print(shown)
    if len(bursts) > most:
        out.print(f"[dim]{len(bursts) - most:,} more; --list N shows them, --json gives all[/dim]")
