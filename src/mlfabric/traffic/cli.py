"""`mlfabric traffic ...`: reads words, calls the library, prints. Everything slow is imported where it is
used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlfabric.errors import FabricError
from mlfabric.traffic.scales import DEFAULT_SCALES, one_rate, one_size, one_time_ns, parse_rates, parse_scales

if TYPE_CHECKING:
    from mlfabric.traffic.trace import Trace

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Burstiness of any capture at every time scale, exactly, and what many such jobs do to a link.",
)

# Files that take longer than a blink to read get a progress bar on a terminal.
_LARGE_BYTES = 1 << 28

Files = Annotated[
    list[str], typer.Argument(help="pcap, pcapng (also .gz .zst .xz), .csv or .parquet; - is stdin")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON (documented in docs/traffic.md)")]
LayerOption = Annotated[str, typer.Option("--layer", help="which bytes count: l2, ip, payload or wire")]
Hosts = Annotated[list[str] | None, typer.Option("--host", help="keep flows of this address (repeatable)")]
Nets = Annotated[list[str] | None, typer.Option("--net", help="keep flows of this network, like 10.0.0.0/24")]
Ports = Annotated[list[int] | None, typer.Option("--port", help="keep flows with this port at either end")]
Protocol = Annotated[str | None, typer.Option("--protocol", help="keep tcp, udp, ... or a protocol number")]
Direction = Annotated[
    str, typer.Option("--direction", help="in, out or both: relative to --host/--net, else by cooked headers")
]
InterfaceOption = Annotated[
    int | None, typer.Option("--interface", help="pcapng interface number or cooked-v2 interface index")
]
Mtu = Annotated[int, typer.Option("--mtu", help="longer packets are reported as offload or jumbo frames")]
Vantage = Annotated[
    str, typer.Option("--vantage", help="where this was captured, for the record: 'h1 eth0, sender'")
]
Model = Annotated[
    str, typer.Option("--model", help="instant: a frame at its stamp; fluid: spread over the wire")
]
LineRate = Annotated[str | None, typer.Option("--line-rate", help="rate of the link, like 10gbit")]


@contextmanager
def _progress(files: list[str], quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal for large files; nothing otherwise."""
    total = sum(Path(name).stat().st_size for name in files if name != "-" and Path(name).is_file())
    if quiet or total < _LARGE_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    with Progress(
        "reading",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda done, _: bar.update(task, completed=done)


def _choice(value: str, known: tuple[str, ...], option: str) -> Any:
    if value not in known:
        raise FabricError(f"{option} {value!r} is not one of {', '.join(known)}")
    return value


def _read(
    files: list[str],
    *,
    layer: str = "l2",
    hosts: list[str] | None = None,
    nets: list[str] | None = None,
    ports: list[int] | None = None,
    protocol: str | None = None,
    direction: str = "both",
    interface: int | None = None,
    mtu: int = 1500,
    vantage: str = "not stated",
    flows: bool = True,
    decode: bool = True,
    quiet: bool = False,
) -> Trace:
    from mlfabric.traffic.capture.headers import LAYERS, Wanted
    from mlfabric.traffic.capture.reader import ReadOptions
    from mlfabric.traffic.flows import Selection
    from mlfabric.traffic.read import read

    _choice(direction, ("both", "in", "out"), "--direction")
    selected = bool(hosts or nets or ports or protocol)
    by_address = bool(hosts or nets)
    selection = Selection(
        tuple(hosts or ()), tuple(nets or ()), tuple(ports or ()), protocol,
        _choice(direction if by_address else "both", ("both", "in", "out"), "--direction"),
    )  # fmt: skip
    wanted = Wanted(
        interface, _choice("both" if by_address else direction, ("both", "in", "out"), "--direction")
    )
    cooked = wanted.direction != "both" or interface is not None
    with _progress(files, quiet) as progress:
        return read(
            list(files),
            ReadOptions(
                layer=_choice(layer, LAYERS, "--layer"),
                flows=flows or selected,
                decode=decode or selected or layer != "l2" or cooked,
                interface=interface,
                packet_direction=wanted,
                mtu=mtu,
                vantage=vantage,
                selection=selection,
                progress=progress,
            ),
        )


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


@app.command()
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
        model=_choice(model, ("instant", "fluid"), "--model"),
        line_rate_bps=one_rate(line_rate) if line_rate else None,
        theta_ns=one_time_ns(theta) if theta else None,
        by=_choice(by, ("flow", "host", "pair", "port"), "--by") if by else None,
        quick=quick,
        whole_iterations=not span,
    )
    trace = _read(
        files, layer=layer, hosts=host, nets=net, ports=port, protocol=protocol, direction=direction,
        interface=interface, mtu=mtu, vantage=vantage, flows=bool(by or html or png), quiet=as_json,
    )  # fmt: skip
    result = analyze_trace(trace, options)
    if as_json:
        from mlfabric.traffic.jsonform import analysis_json

        _print_json(analysis_json(result))
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


@app.command()
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

    trace = _read(
        files, layer=layer, hosts=host, nets=net, ports=port, protocol=protocol, direction=direction,
        interface=interface, mtu=mtu, vantage=vantage, flows=False, decode=False, quiet=as_json,
    )  # fmt: skip
    trace.needs_packets()
    found = find_bursts(trace, one_time_ns(theta) if theta else None)
    if as_json:
        from mlfabric.traffic.jsonform import bursts_json, conventions

        shown = bursts_json(found, None)
        shown["conventions"] = conventions(trace, "instant", "span", None)
        shown["warnings"] = list(trace.origin.warnings)
        _print_json(shown)
        return
    from mlfabric.traffic.tables import print_bursts

    print_bursts(trace, found, rows)


@app.command()
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
    from mlfabric.traffic.envelope import byte_series

    trace = _read(
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
        from mlfabric.traffic.jsonform import conventions

        _print_json(
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


_ = one_size  # used by the commands below
