"""`mlfabric bench allreduce`: how long an all-reduce takes, beside its bound and beside Gloo, in one run.

Under torchrun, on a cluster of one's own, each rank runs this command. With --lab it makes hosts of its own.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from mlfabric.bench.rank import Bench, ContenderTimes, OperationTimes, RankOrder, Report
from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.plan.allreduce import lower_bound, rack_time
from mlfabric.scenario import Scenario, parse
from mlfabric.units import (
    FRAME_L2_BYTES,
    FRAME_PAYLOAD_BYTES,
    format_size,
    format_time,
    parse_rate,
    parse_size,
)

DEFAULT_SIZES = ("8B", "1KiB", "64KiB", "1MB", "16MB")
UNSHAPED = "unshaped"
# No real limit: it is never reached, and never verified.
UNSHAPED_RATE = "100gbit"


@dataclass(frozen=True, slots=True)
class LabWish:
    """The hosts of a lab, as the options describe them."""

    hosts: int
    rate: str
    slow: dict[int, str]
    racks: int = 0
    uplink: str = ""
    interleaved: bool = False

    @property
    def unshaped(self) -> bool:
        return self.rate == UNSHAPED

    def scenario(self) -> Scenario:
        rate = UNSHAPED_RATE if self.unshaped else self.rate
        lines = [f'name = "bench"\nnetwork = {{ rate = "{rate}" }}']
        for rack in range(self.racks):
            lines.append(f'[[racks]]\nname = "rack{rack}"\nrate = "{self.uplink}"')
        for index in range(self.hosts):
            own = f'\nrate = "{self.slow[index]}"' if index in self.slow else ""
            rack_line = f'\nrack = "rack{self.rack_of(index)}"' if self.racks else ""
            lines.append(f'[[hosts]]\nname = "h{index}"{own}{rack_line}')
        return parse("\n".join(lines))

    def rack_of(self, index: int) -> int:
        return index % self.racks if self.interleaved else index * self.racks // self.hosts

    def bound_s(self, size_bytes: int) -> float | None:
        """The least time over these links, in wire bytes."""
        if self.unshaped:
            return None
        wire_bytes = size_bytes * FRAME_L2_BYTES / FRAME_PAYLOAD_BYTES
        rates = [parse_rate(self.slow.get(index, self.rate)) / 8 for index in range(self.hosts)]
        bound = lower_bound(rates, rates, wire_bytes)
        if self.racks > 1:
            inside = [
                [rate for index, rate in enumerate(rates) if self.rack_of(index) == rack]
                for rack in range(self.racks)
            ]
            bound = max(bound, rack_time(inside, [parse_rate(self.uplink) / 8] * self.racks, wire_bytes))
        return bound


def command(
    lab: Annotated[int | None, typer.Option(help="Make a lab of so many hosts.")] = None,
    rate: Annotated[str, typer.Option(help="Link rate in the lab, or 'unshaped'.")] = "200mbit",
    slow: Annotated[
        list[str] | None, typer.Option(help="A host with another rate, both ways: 3=50mbit, from 0.")
    ] = None,
    racks: Annotated[int, typer.Option(help="Put the lab's hosts into so many racks.")] = 0,
    uplink: Annotated[str, typer.Option(help="Rate of each rack's uplink.")] = "100mbit",
    interleaved: Annotated[bool, typer.Option(help="Deal ranks over racks in turn.")] = False,
    size: Annotated[
        list[str] | None, typer.Option(help="Size of the array; may be given several times.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Another contender of the same run: gloo.")
    ] = None,
    turns: Annotated[int, typer.Option(help="How often each contender has its turn.")] = 4,
    in_a_row: Annotated[int, typer.Option(help="Operations back to back in a turn.")] = 4,
    idle: Annotated[float, typer.Option(help="Seconds without traffic before a turn.")] = 2.0,
    change: Annotated[
        str | None,
        typer.Option(help="Change a host's rate in the middle of a run of the lab: 3=50mbit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time all-reduces between all ranks, contenders in turns: median and spread, bound, processor time."""
    sizes = [_size(written) for written in (size or DEFAULT_SIZES)]
    contenders = ["mlfabric", *(against or [])]
    if turns < 1 or in_a_row < 1 or idle < 0:
        raise FabricError("--turns and --in-a-row are at least 1, --idle at least 0")
    order = RankOrder(contenders, sizes, turns, in_a_row, idle, tuned=lab is not None and idle > 0)
    if lab is None:
        if change is not None:
            raise FabricError("--change needs --lab: only a lab's links can be changed")
        _under_torchrun(order, as_json)
        return
    wish = _wish(lab, rate, slow or [], racks, uplink, interleaved)
    if change is not None:
        _show_change(_run_change(wish, sizes[0], *_assignment(change, lab)), as_json)
        return
    report = _run_lab(wish, order)
    rows = [summarise(times, report.ranks, wish.bound_s(times.size_bytes)) for times in report.times]
    _show(rows, as_json)


def summarise(times: ContenderTimes, ranks: int, bound_s: float | None) -> dict[str, Any]:
    """One line of the result; times in seconds."""
    ordered = sorted(times.in_a_row)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "contender": times.contender,
        "hosts": ranks,
        "size_bytes": times.size_bytes,
        "median_s": statistics.median(ordered),
        "p10_s": at(0.1),
        "p90_s": at(0.9),
        "after_idle_s": median(times.after_idle),
        "after_idle_tuned_s": median(times.after_idle_tuned),
        "bound_s": bound_s,
        "cpu_s_per_gb": times.cpu_s_per_gb,
        "errors": times.errors,
        "algorithm_bytes_per_s": times.size_bytes / statistics.median(ordered),
        "bus_bytes_per_s": 2 * (ranks - 1) / ranks * times.size_bytes / statistics.median(ordered),
    }


def _size(written: str) -> int:
    try:
        value = parse_size(written)
    except ValueError as error:
        raise FabricError(str(error)) from None
    if not 4 <= value <= 4 * 10**9:
        raise FabricError(f"{written!r} is not between 4 bytes and 4 GB")
    return value


def _assignment(written: str, hosts: int) -> tuple[int, str]:
    index, _, rate = written.partition("=")
    try:
        parse_rate(rate)
        number = int(index)
    except ValueError:
        raise FabricError(
            f"{written!r} is not like 3=50mbit: a host's number, from 0, and its rate"
        ) from None
    if not 0 <= number < hosts:
        raise FabricError(f"{written!r} names host {number}; the lab has hosts 0 to {hosts - 1}")
    return number, rate


def _wish(hosts: int, rate: str, slow: Sequence[str], racks: int, uplink: str, interleaved: bool) -> LabWish:
    if not 2 <= hosts <= 64:
        raise FabricError(f"a lab for this has 2 to 64 hosts, not {hosts}")
    if racks and not 2 <= racks <= hosts:
        raise FabricError(f"{racks} racks for {hosts} hosts; give 2 to {hosts}")
    for written in (uplink, *([] if rate == UNSHAPED else [rate])):
        try:
            parse_rate(written)
        except ValueError as error:
            raise FabricError(str(error)) from None
    return LabWish(hosts, rate, dict(_assignment(one, hosts) for one in slow), racks, uplink, interleaved)


def _run_lab(wish: LabWish, order: RankOrder) -> Report:
    from mlfabric.lab import Lab

    with Lab(wish.scenario(), verify=not wish.unshaped) as lab:
        return _in_lab(lab, order)[0]


def _in_lab(
    lab: Any, order: RankOrder, on_line: Callable[[int, str, str], None] | None = None
) -> list[Report]:
    """The reports of all ranks."""
    from mlfabric.lab import RunOptions

    with tempfile.TemporaryDirectory(prefix="mlfabric-bench-") as folder:
        argv = [sys.executable, "-m", "mlfabric.bench.rank", msgspec.json.encode(order).decode()]
        result = lab.run(argv, RunOptions(folder=Path(folder) / "run", timeout_s=3600, on_line=on_line))
        said = [Path(rank.log).read_text(errors="replace").splitlines() for rank in result.ranks]
        reports = [next((line for line in lines if line.startswith("{")), None) for lines in said]
        if not result.ok or None in reports:
            failed = next(lines for lines, report in zip(said, reports, strict=True) if report is None)
            raise FabricError(f"the ranks failed: {failed[-1] if failed else 'they said nothing'}")
        return [msgspec.json.decode(report or "", type=Report) for report in reports]


# --- links that change ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """How a run took a changed link; times in seconds from the change."""

    size_bytes: int
    bound_before_s: float
    bound_after_s: float
    noticed_s: float | None
    in_flight_s: float  # the operation that was under way, from its beginning
    settled_s: list[float]  # operations that began half a second or more after the change


def _run_change(wish: LabWish, size: int, host: int, rate: str) -> ChangeResult:
    from mlfabric.lab import Lab

    after = LabWish(
        wish.hosts, wish.rate, {**wish.slow, host: rate}, wish.racks, wish.uplink, wish.interleaved
    )
    before_s, after_s = wish.bound_s(size), after.bound_s(size)
    if before_s is None or after_s is None:
        raise FabricError("--change needs shaped links: give a --rate")
    changes_in = 4.5 * max(before_s, 0.5)  # a few operations, and half of one
    order = RankOrder(["mlfabric"], [size], 1, 1, 0.0, run_s=changes_in + 6 * max(after_s, 0.5))
    moment: list[float] = []
    begun = threading.Event()
    with Lab(wish.scenario()) as lab:

        def change() -> None:
            begun.wait()
            time.sleep(changes_in)
            lab.host(f"h{host}").set_rate(rate)
            moment.append(time.monotonic())

        thread = threading.Thread(target=change, daemon=True)
        thread.start()
        reports = _in_lab(lab, order, lambda rank, where, line: begun.set())
        thread.join(10)
    runs = [report.run for report in reports if report.run is not None]
    return _judge(size, before_s, after_s, moment[0], runs, host)


def _judge(
    size: int, before_s: float, after_s: float, at: float, runs: list[OperationTimes], host: int
) -> ChangeResult:
    began = [min(times) for times in zip(*(run.began_s for run in runs), strict=True)]
    ended = [max(times) for times in zip(*(run.ended_s for run in runs), strict=True)]
    flight = [(first, last) for first, last in zip(began, ended, strict=True) if first <= at < last]
    settled = [last - first for first, last in zip(began, ended, strict=True) if first >= at + 0.5]
    noticed = min((notice for notice in runs[host].noticed_s if notice > at), default=None)
    return ChangeResult(
        size,
        before_s,
        after_s,
        noticed - at if noticed is not None else None,
        flight[0][1] - flight[0][0] if flight else 0.0,
        settled,
    )


def _show_change(result: ChangeResult, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    worst = max(result.settled_s, default=float("nan"))
    middle = statistics.median(result.settled_s) if result.settled_s else float("nan")
    out = console()
    out.print(f"bound {format_time(result.bound_before_s)} before, {format_time(result.bound_after_s)} after")
    noticed = "not noticed" if result.noticed_s is None else f"noticed after {format_time(result.noticed_s)}"
    out.print(f"{noticed}; the all-reduce under way took {format_time(result.in_flight_s)}")
    out.print(
        f"{len(result.settled_s)} that began half a second later or more: median {format_time(middle)} "
        f"({middle / result.bound_after_s:.2f} x the new bound), longest {format_time(worst)}"
    )


# --- a cluster of one's own -------------------------------------------------------------------------------


def _under_torchrun(order: RankOrder, as_json: bool) -> None:
    from mlfabric.api import join

    if "RANK" not in os.environ and "MLFABRIC_SCHEDULER" not in os.environ:
        raise FabricError(
            "run it on each of your hosts under torchrun, or let it make hosts: "
            "mlfabric bench allreduce --lab 8"
        )
    with join(timeout=60.0) as fabric:
        rank, ranks = fabric.rank_and_size()
        times = Bench(fabric, rank, ranks, order).measure()
        if rank == 0:
            _show([summarise(each, ranks, None) for each in times], as_json)


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    table = Table(title=f"all-reduce between {rows[0]['hosts']} ranks", title_justify="left")
    for name in ("size", "contender", "median", "p10 - p90", "after idle", "tuned", "bound", "x bound"):
        table.add_column(name, justify="left" if name == "contender" else "right", no_wrap=True)
    for name in ("bus MB/s", "cpu s/GB", "errors"):
        table.add_column(name, justify="right")

    def shown(value: float | None) -> str:
        return format_time(value) if value is not None else "-"

    for row in rows:
        bound = row["bound_s"]
        table.add_row(
            format_size(row["size_bytes"]),
            row["contender"],
            shown(row["median_s"]),
            f"{shown(row['p10_s'])} - {shown(row['p90_s'])}",
            shown(row["after_idle_s"]),
            shown(row["after_idle_tuned_s"]),
            shown(bound),
            f"{row['median_s'] / bound:.2f}" if bound else "-",
            f"{row['bus_bytes_per_s'] / 1e6:.1f}",
            f"{row['cpu_s_per_gb']:.2f}",
            str(row["errors"]),
        )
    console().print(table)
    console().print(
        "times: the slowest rank's; after idle: the first operation after a pause; tuned: the same with "
        "net.ipv4.tcp_slow_start_after_idle=0;\ncpu: processor seconds of one rank per GB of its array; "
        "bound: in bytes on the wire",
        style="dim",
    )
