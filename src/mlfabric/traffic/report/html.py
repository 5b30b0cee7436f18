"""The HTML report: one file that works offline, on a phone, in the dark. Plotly's script comes from its
package."""

from __future__ import annotations

import html
import json
from importlib import metadata, resources
from pathlib import Path

from mlfabric.errors import FabricError
from mlfabric.traffic.analysis import Analysis
from mlfabric.traffic.report.charts import all_figures
from mlfabric.traffic.report.data import PEAK_TAU_NS, ReportData, gather
from mlfabric.traffic.trace import NS_PER_S
from mlfabric.units import format_rate, format_size, format_time

_GOOD = ("orchestrated", "partly orchestrated", "no contention", "no collision")
_BAD = ("collides",)


def write_html(analysis: Analysis, path: Path, link_bps: float | None = None) -> None:
    """Writes the report of one analysis."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise FabricError("the HTML report needs plotly; install mlfabric[traffic]") from None
    page = render(gather(analysis, link_bps), get_plotlyjs())
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise FabricError(f"{path} can't be written: {error.strerror}") from None


def render(report: ReportData, script: str) -> str:
    template = resources.files("mlfabric.traffic.report").joinpath("page.html").read_text(encoding="utf-8")
    figures = json.dumps(all_figures(report), allow_nan=False).replace("</", "<\\/")
    files = ", ".join(Path(name).name for name in report.analysis.trace.origin.files) or "trace"
    parts = {
        "%TITLE%": html.escape(f"Traffic of {files}"),
        "%CONVENTIONS%": html.escape(_conventions(report)),
        "%CARDS%": _cards(report),
        "%NOTES%": _notes(report),
        "%TABLES%": _verdict_table(report) + _scale_table(report) + _flow_table(report),
        "%VERSION%": html.escape(metadata.version("mlfabric")),
        "%FIGURES%": figures,
        "%PLOTLY%": script,
    }
    for name, value in parts.items():
        template = template.replace(name, value)
    return template


def _conventions(report: ReportData) -> str:
    analysis = report.analysis
    origin = analysis.trace.origin
    line = (
        f", line rate {format_rate(analysis.options.line_rate_bps)}" if analysis.options.line_rate_bps else ""
    )
    return (
        f"Bytes: {origin.layer}. Arrivals: {analysis.options.model}{line}. Windows: closed, sliding "
        "over arrivals. "
        f"Mean over: {analysis.observation}. Captured at: {origin.vantage}. Packets: {origin.selection}."
    )


def _cards(report: ReportData) -> str:
    analysis = report.analysis
    near = min(analysis.scales, key=lambda scale: abs(scale.tau_ns - PEAK_TAU_NS))
    cards = [
        ("packets", f"{analysis.packets:,}"),
        ("bytes", format_size(analysis.bytes)),
        ("span", format_time(analysis.span_s)),
        ("mean rate", format_rate(analysis.mean_rate_bps)),
    ]
    if near.peak_to_mean is not None:
        cards.insert(
            0, (f"peak to mean, {format_time(near.tau_ns / NS_PER_S)}", f"{near.peak_to_mean:.3g} : 1")
        )
    if analysis.rhythm is not None:
        rhythm = analysis.rhythm
        cards.append((f"period, ± {format_time(rhythm.jitter_s)}", format_time(rhythm.period_s)))
        cards.append(("per iteration", format_size(float(rhythm.bytes.mean()))))
    cards.append(("bursts", f"{len(analysis.bursts):,}"))
    return "".join(
        f"<div class=card><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in cards
    )


def _notes(report: ReportData) -> str:
    sentences = [*report.analysis.warnings, *report.notes]
    if not sentences:
        return ""
    rows = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f'<section><h2 class="warn">Notes on this capture</h2><ul>{rows}</ul></section>'


def _table(title: str, says: str, head: list[str], rows: list[list[str]], words: int = 1) -> str:
    def cell(tag: str, text: str, index: int) -> str:
        kind = " class=words" if index < words else ""
        return f"<{tag}{kind}>{text}</{tag}>"

    header = "".join(cell("th", html.escape(name), index) for index, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(cell("td", text, index) for index, text in enumerate(row)) + "</tr>" for row in rows
    )
    return (
        f"<section><h2>{html.escape(title)}</h2><p class=soft>{html.escape(says)}</p>"
        f"<div class=scroll><table><tr>{header}</tr>{body}</table></div></section>"
    )


def _verdict_table(report: ReportData) -> str:
    if not report.verdicts:
        return ""
    rows = []
    for each in report.verdicts[:24]:
        kind = "good" if each.verdict in _GOOD else "bad" if each.verdict in _BAD else "soft"
        rows.append(
            [
                html.escape(each.host),
                f'<span class="pill {kind}">{html.escape(each.verdict)}</span>'
                f'<span class="why">{html.escape(each.reason)}</span>',
                str(each.sources),
                "-" if each.overlap_share is None else f"{each.overlap_share:.1%}",
                "-" if each.backlog_bytes is None else format_size(each.backlog_bytes),
                "-" if each.random_backlog_bytes is None else format_size(each.random_backlog_bytes),
                "-" if each.p_value is None else f"{each.p_value:.2f}",
            ]
        )
    rate = format_rate(report.verdicts[0].port_rate_bps)
    return _table(
        "Does the application collide with itself?",
        f"Per receiving host, at a port of {rate}; p is the rank of its backlog among random phases "
        "of its sources.",
        ["receiving host", "verdict", "sources", "overlap", "backlog", "at random", "p"],
        rows,
        words=2,
    )


def _scale_table(report: ReportData) -> str:
    rows = []
    for scale in report.analysis.scales:
        if scale.peak is None:
            continue
        spread = scale.spread
        rows.append(
            [
                format_time(scale.tau_ns / NS_PER_S),
                format_size(scale.peak.bytes),
                format_rate(scale.peak.bytes * 8e9 / scale.tau_ns),
                "-" if scale.peak_to_mean is None else f"{scale.peak_to_mean:,.3g}",
                f"{scale.peak.start_ns / NS_PER_S:.6f} s",
                "-" if spread is None else format_size(spread.quantile_bytes[2]),
                "-" if spread is None or spread.idc is None else f"{spread.idc:,.3g}",
                "-" if spread is None or spread.cv is None else f"{spread.cv:.3g}",
                "-" if scale.binned_bytes is None else format_size(scale.binned_bytes),
            ]
        )
    head = [
        "window",
        "E",
        "rate in it",
        "peak : mean",
        "peak at",
        "99 % hold less",
        "IDC",
        "CV",
        "aligned bins",
    ]
    return _table("Every time scale", "Exact, by sliding windows.", head, rows)


def _flow_table(report: ReportData) -> str:
    flows = report.analysis.trace.flows
    if flows is None or not len(flows):
        return ""
    order = sorted(range(len(flows)), key=lambda number: -int(flows.bytes[number]))[:20]
    rows = [
        [
            html.escape(flows.label(number)),
            f"{int(flows.packets[number]):,}",
            format_size(float(flows.bytes[number])),
        ]
        for number in order
        if flows.packets[number]
    ]
    return _table("Largest flows", f"{len(flows):,} in all.", ["flow", "packets", "bytes"], rows)
