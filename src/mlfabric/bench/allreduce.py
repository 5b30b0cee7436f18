"""`mlfabric bench allreduce`: how long an all-reduce takes, beside its bound and beside Gloo, in one run.

Under torchrun, on a cluster of one's own, each rank runs this command. With --lab it makes hosts of its own.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.table import Table

from mlfabric.bench.hosts import (
    DEFAULT_SIZES,
    LabWish,
    make_wish,
    median,
    read_assignment,
    read_size,
    run_in_lab,
    shown,
    spread,
)
from mlfabric.bench.rank import Bench, ContenderTimes, OperationTimes, RankOrder, Report
from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.units import format_size, format_time

RANK_MODULE = "mlfabric.bench.rank"


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
    sizes = [read_size(written) for written in (size or DEFAULT_SIZES)]
    contenders = ["mlfabric", *(against or [])]
    if turns < 1 or in_a_row < 1 or idle < 0:
        raise FabricError("--turns and --in-a-row are at least 1, --idle at least 0")
    order = RankOrder(contenders, sizes, turns, in_a_row, idle, tuned=lab is not None and idle > 0)
    if lab is None:
        if change is not None:
            raise FabricError("--change needs --lab: only a lab's links can be changed")
        _under_torchrun(order, as_json)
        return
    wish = make_wish(lab, rate, slow or [], racks, uplink, interleaved)
    if change is not None:
        _show_change(_run_change(wish, sizes[0], *read_assignment(change, lab)), as_json)
        return
    report = _run_lab(wish, order)
    rows = [summarise(times, report.ranks, wish.bound_s(times.size_bytes)) for times in report.times]
    _show(rows, as_json)


def summarise(times: ContenderTimes, ranks: int, bound_s: float | None) -> dict[str, Any]:
    """One line of the result; times in seconds."""
    typical = spread(times.in_a_row)
    return {
        "contender": times.contender,
        "hosts": ranks,
        "size_bytes": times.size_bytes,
        **typical,
        "after_idle_s": median(times.after_idle),
        "after_idle_tuned_s": median(times.after_idle_tuned),
        "bound_s": bound_s,
        "cpu_s_per_gb": times.cpu_s_per_gb,
        "errors": times.errors,
        "algorithm_bytes_per_s": times.size_bytes / typical["median_s"],
        "bus_bytes_per_s": 2 * (ranks - 1) / ranks * times.size_bytes / typical["median_s"],
    }


def _run_lab(wish: LabWish, order: RankOrder) -> Report:
    from mlfabric.lab import Lab

    with Lab(wish.scenario(), verify=not wish.unshaped) as lab:
        return run_in_lab(lab, RANK_MODULE, order, Report)[0]


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

    after = replace(wish, slow={**wish.slow, host: rate})
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
        reports = run_in_lab(lab, RANK_MODULE, order, Report, lambda rank, where, line: begun.set())
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
