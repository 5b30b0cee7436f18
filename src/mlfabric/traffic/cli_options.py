"""What the traffic commands share: which packets of which files count and how, and how that becomes a
trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlfabric.errors import FabricError
from mlfabric.option_records import argument, option

if TYPE_CHECKING:
    from mlfabric.traffic.capture.reader import ReadOptions
    from mlfabric.traffic.trace import Trace

# Files that take longer than a blink to read get a progress bar on a terminal.
_LARGE_BYTES: Final = 1 << 28
_DIRECTIONS: Final = ("both", "in", "out")
FILES: Final = "pcap or pcapng (also .gz .zst .xz), .csv, .parquet or an event log; - is standard input"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Which packets count, and which of their bytes."""

    as_json: bool = option(False, "print JSON (documented in docs/traffic.md)", name="json")
    layer: str = option("l2", "which bytes count: l2, ip, payload or wire")
    host: tuple[str, ...] = option(None, "keep flows of this address (repeatable)", several=True)
    net: tuple[str, ...] = option(None, "keep flows of this network, like 10.0.0.0/24", several=True)
    port: tuple[int, ...] = option(None, "keep flows with this port at either end", kind=int, several=True)
    protocol: str | None = option(None, "keep tcp, udp, ... or a protocol number")
    direction: str = option("both", "in, out or both: relative to --host/--net, else by cooked headers")
    interface: int | None = option(None, "pcapng interface number or cooked-v2 interface index", kind=int)
    mtu: int = option(1500, "longer packets are reported as offload or jumbo frames")
    vantage: str = option("not stated", "where this was captured, for the record: 'h1 eth0, sender'")

    def trace(
        self,
        files: Sequence[str],
        *,
        flows: bool = True,
        decode: bool = True,
        layer: str | None = None,
        vantage: str | None = None,
        align: bool = False,
    ) -> Trace:
        """What these files hold, merged by time. `flows` and `decode` say what the command needs; a
        selection may need more."""
        from dataclasses import replace

        from mlfabric.traffic.reading import read

        options = self._read_options(flows, decode, layer or self.layer, vantage or self.vantage)
        with progress_bar(files, self.as_json) as progress:
            return read(list(files), replace(options, progress=progress, align=align))

    def _read_options(self, flows: bool, decode: bool, layer: str, vantage: str) -> ReadOptions:
        from mlfabric.traffic.capture.headers import LAYERS, Wanted
        from mlfabric.traffic.capture.reader import ReadOptions
        from mlfabric.traffic.flows import Selection

        direction = choice(self.direction, _DIRECTIONS, "--direction")
        by_address = bool(self.host or self.net)
        selection = Selection(
            self.host, self.net, self.port, self.protocol, direction if by_address else "both"
        )
        wanted = Wanted(self.interface, "both" if by_address else direction)
        selected = bool(by_address or self.port or self.protocol)
        cooked = wanted.direction != "both" or self.interface is not None
        return ReadOptions(
            layer=choice(layer, LAYERS, "--layer"),
            flows=flows or selected,
            decode=decode or selected or layer != "l2" or cooked,
            interface=self.interface,
            packet_direction=wanted,
            mtu=self.mtu,
            vantage=vantage,
            selection=selection,
        )


@dataclass(frozen=True, kw_only=True)
class CountedFiles(Counted):
    """The same, of files that are named."""

    files: tuple[str, ...] = argument(FILES, several=True)


@dataclass(frozen=True, kw_only=True)
class CountedRun(CountedFiles):
    """The same, of files that belong to one run."""

    align: bool = option(False, "captures of several hosts: bring clocks together, count packets once")

    def merged(self, *, flows: bool = True, decode: bool = True, vantage: str | None = None) -> Trace:
        return self.trace(self.files, flows=flows, decode=decode, vantage=vantage, align=self.align)


@contextmanager
def progress_bar(files: Sequence[str], quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
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


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
