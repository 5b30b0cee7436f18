"""What the traffic commands share: their options in words, and how those become a trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlfabric.errors import FabricError

if TYPE_CHECKING:
    from mlfabric.traffic.trace import Trace

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
def progress_bar(files: list[str], quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
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


def choice(value: str, known: tuple[str, ...], option: str) -> Any:
    if value not in known:
        raise FabricError(f"{option} {value!r} is not one of {', '.join(known)}")
    return value


def read_trace(
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
    from mlfabric.traffic.reading import read

    choice(direction, ("both", "in", "out"), "--direction")
    selected = bool(hosts or nets or ports or protocol)
    by_address = bool(hosts or nets)
    selection = Selection(
        tuple(hosts or ()), tuple(nets or ()), tuple(ports or ()), protocol,
        choice(direction if by_address else "both", ("both", "in", "out"), "--direction"),
    )  # fmt: skip
    wanted = Wanted(
        interface, choice("both" if by_address else direction, ("both", "in", "out"), "--direction")
    )
    cooked = wanted.direction != "both" or interface is not None
    with progress_bar(files, quiet) as progress:
        return read(
            list(files),
            ReadOptions(
                layer=choice(layer, LAYERS, "--layer"),
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


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
