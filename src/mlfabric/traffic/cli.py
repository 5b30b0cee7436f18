"""`mlfabric traffic ...`: reads words, calls the library, prints. What is slow to import waits until it
is used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mlfabric.cli_plain import PlainCommand, PlainGroup
from mlfabric.errors import FabricError
from mlfabric.traffic import cli_jobs
from mlfabric.traffic.cli_options import (
    Direction,
    Files,
    Hosts,
    InterfaceOption,
    Json,
    LayerOption,
    LineRate,
    Model,
    Mtu,
    Nets,
    Ports,
    Protocol,
    Vantage,
    choice,
    print_json,
    read_trace,
)
from mlfabric.traffic.scales import DEFAULT_SCALES, one_rate, one_time_ns, parse_rates, parse_scales

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Burstiness of any capture at every time scale, exactly, and what many such jobs do to a link.",
)


@app.command(cls=PlainCommand)
def analyze(
    files: Files,
    scales: Annotated[str, typer.Option(help="10us:10s (steps 1-2-5) or 1ms,5ms,...")] = DEFAULT_SCALES,
    rates: Annotated[str | None, typer.Option(help="1gbit,2.5e9,... or 100mbit:100gbit:50")] = None,
    by: Annotated[str | None, typer.Option(help="also per flow, host, pair or port")] = None,
    theta: Annotated[str | None, typer.Option(help="pause that ends a burst; otherwise found")] = None,
    quick: Annotated[bool, typer.Option(help="no percentiles, dispersion, gaps or logscale")] = False,
    span: Annotated[bool, typer.Option(help="mean over the capture's span, even where it repeats")] = False,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="write a self-contained report")] = None,
    png: Annotated[Path | None, typer.Option(help="write charts into this directory")] = None,
    link: Annotated[str | None, typer.Option(help="link rate for the report's extrapolation chart")] = None,
    layer: LayerOption = "l2",
    model: Model = "instant",
    line_rate: LineRate = None,
    host: Hosts = None,
    net: Nets = None,
    port: Ports = None,
    protocol: Protocol = None,
    direction: Direction = "both",
    interface: InterfaceOption = None,
    mtu: Mtu = 1500,
    vantage: Vantage = "not stated",
) -> None:
    """Burstiness at every time scale, queues at every rate, bursts, rhythm."""
    from mlfabric.traffic.analysis import AnalysisOptions
    from mlfabric.traffic.analysis import analyze as analyze_trace

    options = AnalysisOptions(
        scales_ns=parse_scales(scales),
        rates_bps=parse_rates(rates) if rates else None,
        model=choice(model, ("instant", "fluid"), "--model"),
        line_rate_bps=one_rate(line_rate) if line_rate else None,
        theta_ns=one_time_ns(theta) if theta else None,
        by=choice(by, ("flow", "host", "pair", "port"), "--by") if by else None,
        quick=quick,
        whole_iterations=not span,
    )
    trace = read_trace(
        files, layer=layer, hosts=host, nets=net, ports=port, protocol=protocol, direction=direction,
        interface=interface, mtu=mtu, vantage=vantage, flows=bool(by or html or png), quiet=as_json,
    )  # fmt: skip
    result = analyze_trace(trace, options)
    if as_json:
        from mlfabric.traffic.jsonform import analysis_json

        print_json(analysis_json(result))
    else:
        from mlfabric.traffic.tables import print_analysis

        print_analysis(result)
    _pictures(result, html, png, link)


def _pictures(result: Any, html: Path | None, png: Path | None, link: str | None) -> None:
    if html is not None:
        from mlfabric.traffic.report.html import write_html

        write_html(result, html, one_rate(link) if link else None)
        sys.stderr.write(f"report written to {html}\n")
    if png is not None:
        from mlfabric.traffic.report.png import write_pngs

        for path in write_pngs(result, png):
            sys.stderr.write(f"chart written to {path}\n")


@app.command(cls=PlainCommand)
def bursts(
    files: Files,
    theta: Annotated[str | None, typer.Option(help="pause that ends a burst; otherwise found")] = None,
    rows: Annotated[int, typer.Option("--list", help="how many bursts to show")] = 40,
    as_json: Json = False,
    layer: LayerOption = "l2",
    host: Hosts = None,
    net: Nets = None,
    port: Ports = None,
    protocol: Protocol = None,
    direction: Direction = "both",
    interface: InterfaceOption = None,
    mtu: Mtu = 1500,
    vantage: Vantage = "not stated",
) -> None:
    """Every burst: start, duration, bytes, rate, pause before it."""
    from mlfabric.traffic.bursts import find_bursts

    trace = read_trace(
        files, layer=layer, hosts=host, nets=net, ports=port, protocol=protocol, direction=direction,
        interface=interface, mtu=mtu, vantage=vantage, flows=False, decode=False, quiet=as_json,
    )  # fmt: skip
    trace.needs_packets()
    found = find_bursts(trace, one_time_ns(theta) if theta else None)
    if as_json:
        from mlfabric.traffic.conventions import conventions
        from mlfabric.traffic.jsonform import bursts_json

        shown = bursts_json(found, None)
        shown["conventions"] = conventions(trace, "instant", "span", None)
        shown["warnings"] = list(trace.origin.warnings)
        print_json(shown)
        return
    from mlfabric.traffic.tables import print_bursts

    print_bursts(trace, found, rows)


@app.command(cls=PlainCommand)
def series(
    files: Files,
    bin_width: Annotated[str, typer.Option("--bin", help="width of the aligned bins")] = "5ms",
    as_json: Json = False,
    layer: LayerOption = "l2",
    host: Hosts = None,
    net: Nets = None,
    port: Ports = None,
    protocol: Protocol = None,
    direction: Direction = "both",
    interface: InterfaceOption = None,
    mtu: Mtu = 1500,
    vantage: Vantage = "not stated",
) -> None:
    """Bytes in aligned bins from the first packet, as CSV or JSON: what other tools call an I/O graph."""
    from mlfabric.traffic.envelopes import byte_series

    trace = read_trace(
        files, layer=layer, hosts=host, nets=net, ports=port, protocol=protocol, direction=direction,
        interface=interface, mtu=mtu, vantage=vantage, flows=False, decode=False, quiet=as_json,
    )  # fmt: skip
    trace.needs_packets()
    bin_ns = one_time_ns(bin_width)
    if bin_ns <= 0:
        raise FabricError("--bin must be longer than zero")
    if trace.span_ns // bin_ns > 100_000_000:
        raise FabricError(
            f"{bin_width} bins over {trace.span_ns / 1e9:.0f} s are more than 100 million; widen them"
        )
    values = byte_series(trace, bin_ns).tolist()
    if as_json:
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


@app.command(cls=PlainCommand)
def compare(
    before: Annotated[str, typer.Argument(help="capture before the change")],
    after: Annotated[str, typer.Argument(help="capture after it")],
    scales: Annotated[str, typer.Option(help="10us:10s (steps 1-2-5) or 1ms,5ms,...")] = DEFAULT_SCALES,
    rates: Annotated[
        str | None, typer.Option(help="1gbit,2.5e9,... ; otherwise from the first capture")
    ] = None,
    as_json: Json = False,
    layer: LayerOption = "l2",
    host: Hosts = None,
    net: Nets = None,
    port: Ports = None,
    protocol: Protocol = None,
    direction: Direction = "both",
    mtu: Mtu = 1500,
) -> None:
    """Two captures side by side: before and after pacing, for example."""
    from mlfabric.traffic.analysis import AnalysisOptions
    from mlfabric.traffic.comparison import compare as compare_traces

    options = AnalysisOptions(
        scales_ns=parse_scales(scales), rates_bps=parse_rates(rates) if rates else None, quick=True
    )
    traces = [
        read_trace(
            [name], layer=layer, hosts=host, nets=net, ports=port, protocol=protocol, direction=direction,
            mtu=mtu, flows=False, decode=False, quiet=as_json,
        )
        for name in (before, after)
    ]  # fmt: skip
    result = compare_traces(traces[0], traces[1], options)
    if as_json:
        from mlfabric.traffic.comparison import comparison_json

        print_json(comparison_json(result))
        return
    from mlfabric.traffic.tables_jobs import print_comparison

    print_comparison(result)


cli_jobs.register(app)
