"""`mlfabric traffic ...`: reads words, calls the library, prints. What is slow to import waits until it
is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mlfabric.errors import FabricError
from mlfabric.option_records import Command, CommandGroup, argument, option
from mlfabric.traffic.cli_options import Counted, CountedRun, choice, print_json
from mlfabric.traffic.scales import DEFAULT_SCALES, one_rate, one_time_ns, parse_rates, parse_scales

if TYPE_CHECKING:
    from mlfabric.traffic.analysis import Analysis

_SCALES: Final = "10us:10s (steps 1-2-5) or 1ms,5ms,..."
_THETA: Final = "pause that ends a burst; otherwise found"
_MOST_BINS: Final = 100_000_000


@dataclass(frozen=True, kw_only=True)
class AnalyzeWords(CountedRun):
    """What `analyze` is asked."""

    scales: str = option(DEFAULT_SCALES, _SCALES)
    rates: str | None = option(None, "1gbit,2.5e9,... or 100mbit:100gbit:50")
    by: str | None = option(None, "also per flow, host, pair or port")
    theta: str | None = option(None, _THETA)
    quick: bool = option(False, "no percentiles, dispersion, gaps or logscale")
    span: bool = option(False, "mean over the capture's span, even where it repeats")
    model: str = option("instant", "instant: a frame at its stamp; fluid: spread over the wire")
    line_rate: str | None = option(None, "rate of the link, like 10gbit")
    html: Path | None = option(None, "write a self-contained report", kind=Path)
    png: Path | None = option(None, "write charts into this directory", kind=Path)
    link: str | None = option(None, "link rate for the report's extrapolation chart")


def analyze(words: AnalyzeWords) -> None:
    """Burstiness at every time scale, queues at every rate, bursts, rhythm."""
    from mlfabric.traffic.analysis import AnalysisOptions
    from mlfabric.traffic.analysis import analyze as analyze_trace

    options = AnalysisOptions(
        scales_ns=parse_scales(words.scales),
        rates_bps=parse_rates(words.rates) if words.rates else None,
        model=choice(words.model, ("instant", "fluid"), "--model"),
        line_rate_bps=one_rate(words.line_rate) if words.line_rate else None,
        theta_ns=one_time_ns(words.theta) if words.theta else None,
        by=choice(words.by, ("flow", "host", "pair", "port"), "--by") if words.by else None,
        quick=words.quick,
        whole_iterations=not words.span,
    )
    result = analyze_trace(words.merged(flows=bool(words.by or words.html or words.png)), options)
    if words.as_json:
        from mlfabric.traffic.jsonform import analysis_json

        print_json(analysis_json(result))
    else:
        from mlfabric.traffic.tables import print_analysis

        print_analysis(result)
    _pictures(result, words)


def _pictures(result: Analysis, words: AnalyzeWords) -> None:
    if words.html is not None:
        from mlfabric.traffic.report.html import write_html

        write_html(result, words.html, one_rate(words.link) if words.link else None)
        sys.stderr.write(f"report written to {words.html}\n")
    if words.png is not None:
        from mlfabric.traffic.report.png import write_pngs

        for path in write_pngs(result, words.png):
            sys.stderr.write(f"chart written to {path}\n")


@dataclass(frozen=True, kw_only=True)
class BurstsWords(CountedRun):
    """What `bursts` is asked."""

    theta: str | None = option(None, _THETA)
    rows: int = option(40, "how many bursts to show", name="list")


def bursts(words: BurstsWords) -> None:
    """Every burst: start, duration, bytes, rate, pause before it."""
    from mlfabric.traffic.bursts import find_bursts

    if words.rows < 0:
        raise FabricError("--list takes how many bursts to show, none or more")
    trace = words.merged(flows=False, decode=False).needs_packets()
    found = find_bursts(trace, one_time_ns(words.theta) if words.theta else None)
    if words.as_json:
        from mlfabric.traffic.conventions import conventions
        from mlfabric.traffic.jsonform import bursts_json

        shown = bursts_json(found, None)
        shown["conventions"] = conventions(trace, "instant", "span", None)
        shown["warnings"] = [*trace.origin.warnings, *found.notes]
        print_json(shown)
        return
    from mlfabric.traffic.tables import print_bursts

    print_bursts(trace, found, words.rows)


@dataclass(frozen=True, kw_only=True)
class SeriesWords(CountedRun):
    """What `series` is asked."""

    width: str = option("5ms", "width of the aligned bins", name="bin")


def series(words: SeriesWords) -> None:
    """Bytes in aligned bins from the first packet, as CSV or JSON: what other tools call an I/O graph."""
    from mlfabric.traffic.envelopes import byte_series

    trace = words.merged(flows=False, decode=False).needs_packets()
    bin_ns = one_time_ns(words.width)
    if bin_ns <= 0:
        raise FabricError("--bin must be longer than zero")
    if trace.span_ns // bin_ns > _MOST_BINS:
        raise FabricError(
            f"{words.width} bins over {trace.span_ns / 1e9:.0f} s are more than 100 million; widen them"
        )
    values = byte_series(trace, bin_ns).tolist()
    if words.as_json:
        from mlfabric.traffic.conventions import conventions

        print_json(
            {
                "packets": len(trace),
                "bytes": trace.total_bytes,
                "bin_s": bin_ns / 1e9,
                "bytes_per_bin": values,
                "conventions": conventions(trace, "instant", "span", None),
                "warnings": list(trace.origin.warnings),
            }
        )
        return
    lines = [
        f"{number * bin_ns // 10**9}.{number * bin_ns % 10**9:09d},{value}"
        for number, value in enumerate(values)
    ]
    sys.stdout.write("time_s,bytes\n" + "\n".join(lines) + "\n")
    for sentence in trace.origin.warnings:
        sys.stderr.write(f"note: {sentence}\n")


@dataclass(frozen=True, kw_only=True)
class CompareWords(Counted):
    """What `compare` is asked."""

    before: str = argument("capture before the change")
    after: str = argument("capture after it")
    scales: str = option(DEFAULT_SCALES, _SCALES)
    rates: str | None = option(None, "1gbit,2.5e9,... ; otherwise from the first capture")


def compare(words: CompareWords) -> None:
    """Two captures side by side: before and after pacing, for example."""
    from mlfabric.traffic.analysis import AnalysisOptions
    from mlfabric.traffic.comparison import compare as compare_traces

    options = AnalysisOptions(
        scales_ns=parse_scales(words.scales),
        rates_bps=parse_rates(words.rates) if words.rates else None,
        quick=True,
    )
    before, after = (words.trace([name], flows=False, decode=False) for name in (words.before, words.after))
    result = compare_traces(before, after, options)
    if words.as_json:
        from mlfabric.traffic.comparison import comparison_json

        print_json(comparison_json(result))
        return
    from mlfabric.traffic.tables_jobs import print_comparison

    print_comparison(result)


def _job_commands() -> Sequence[Command]:
    from mlfabric.traffic.cli_jobs import JOB_COMMANDS

    return JOB_COMMANDS


group = CommandGroup(
    "mlfabric traffic",
    "Burstiness of any capture at every time scale, exactly, and what many such jobs do to a link.",
    [
        Command(AnalyzeWords, analyze),
        Command(BurstsWords, bursts),
        Command(SeriesWords, series),
        Command(CompareWords, compare),
    ],
    _job_commands,
)
