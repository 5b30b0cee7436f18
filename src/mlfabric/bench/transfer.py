"""`mlfabric bench push` and `pull`: how long a round of all workers takes, beside the planner's prediction.

Under torchrun, on a cluster of one's own, each rank runs this command: rank 0 serves. With --lab it makes a
host for the server and one for each worker.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import typer
from rich.table import Table

from mlfabric.bench.hosts import (
    DEFAULT_SIZES,
    LabWish,
    make_wish,
    median,
    read_size,
    run_in_lab,
    shown,
    spread,
)
from mlfabric.bench.prediction import predict_pull, predict_push
from mlfabric.bench.transfer_rank import Belief, TransferBench, TransferOrder, TransferReport, TransferTimes
from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.topology import Host, Network
from mlfabric.units import format_size

RANK_MODULE = "mlfabric.bench.transfer_rank"
# Below this a prediction in bytes says nothing about a round.
TELLING_S = 0.005

_Lab = Annotated[int | None, typer.Option(help="Make a lab of so many workers, and a host for the server.")]
_Rate = Annotated[str, typer.Option(help="Link rate in the lab, or 'unshaped'.")]
_Slow = Annotated[
    list[str] | None,
    typer.Option(help="A host with another rate, both ways: 3=50mbit; 0 is the server."),
]
_Delay = Annotated[str, typer.Option(help="One-way delay of the server's link: 10ms makes paths of 20 ms.")]
_Size = Annotated[list[str] | None, typer.Option(help="Size of the model; may be given several times.")]
_Rounds = Annotated[int, typer.Option(help="Rounds that are timed, after a few that are not.")]
_Idle = Annotated[float, typer.Option(help="Seconds that workers sleep before a round, as if they computed.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def push(
    lab: _Lab = None,
    rate: _Rate = "200mbit",
    slow: _Slow = None,
    delay: _Delay = "",
    size: _Size = None,
    rounds: _Rounds = 8,
    idle: _Idle = 0.2,
    direct: Annotated[bool, typer.Option(help="Sum nothing on the way to the server.")] = False,
    as_json: _Json = False,
) -> None:
    """Time rounds in which every worker pushes one update to the server, through planned aggregators."""
    _run("push", lab, rate, slow or [], delay, size, rounds, idle, as_json, aggregate=not direct)


def pull(
    lab: _Lab = None,
    rate: _Rate = "200mbit",
    slow: _Slow = None,
    delay: _Delay = "",
    size: _Size = None,
    rounds: _Rounds = 8,
    idle: _Idle = 0.2,
    direct: Annotated[bool, typer.Option(help="Have every copy sent by the server.")] = False,
    as_json: _Json = False,
) -> None:
    """Time rounds in which every worker pulls the model, which workers pass on to each other."""
    _run("pull", lab, rate, slow or [], delay, size, rounds, idle, as_json, aggregate=not direct)


def _run(
    kind: str,
    lab: int | None,
    rate: str,
    slow: list[str],
    delay: str,
    size: list[str] | None,
    rounds: int,
    idle: float,
    as_json: bool,
    aggregate: bool = True,
) -> None:
    sizes = [read_size(written) for written in (size or DEFAULT_SIZES)]
    if rounds < 1 or idle < 0:
        raise FabricError("--rounds is at least 1, --idle at least 0")
    order = TransferOrder(kind, sizes, rounds, idle, aggregate)
    if lab is None:
        report, truth = TransferBench(order).run(), None
        if not report.times:
            return  # another rank tells
    else:
        wish = make_wish(lab + 1, rate, slow, delay=delay)
        report, truth = _in_lab(wish, order), wish.network()
    _show(order, [summarise(order, report, times, truth) for times in report.times], as_json)


def _in_lab(wish: LabWish, order: TransferOrder) -> TransferReport:
    from mlfabric.lab import Lab

    with Lab(wish.scenario(), verify=not wish.unshaped) as lab:
        return run_in_lab(lab, RANK_MODULE, order, TransferReport)[0]


def summarise(
    order: TransferOrder, report: TransferReport, times: TransferTimes, truth: Network | None
) -> dict[str, Any]:
    """One line of the result; times in seconds."""

    def predict(network: Network) -> float:
        places = (network, report.server, report.workers, times.size_bytes)
        predicted = predict_push if order.kind == "push" else predict_pull
        return predicted(*places, order.aggregate)

    typical = spread(times.seconds)
    believed = [predict(_network(beliefs)) for beliefs in times.beliefs]
    true_s = predict(truth) if truth is not None else None
    ratios = [seconds / each for seconds, each in zip(times.seconds, believed, strict=True)]
    return {
        "kind": order.kind,
        "workers": len(report.workers),
        "size_bytes": times.size_bytes,
        **typical,
        "predicted_s": median(believed),
        "over_predicted": statistics.median(ratios),
        "predicted_true_s": true_s,
        "over_predicted_true": typical["median_s"] / true_s if true_s else None,
        "worker_bytes_per_s": times.size_bytes / typical["median_s"],
        "all_bytes_per_s": len(report.workers) * times.size_bytes / typical["median_s"],
        "cpu_s_per_gb": times.cpu_s_per_gb,
        "errors": times.errors,
        "dropped": times.dropped,
        "rounds_s": times.seconds,
        "rates": times.beliefs[-1],
    }


def _network(beliefs: list[Belief]) -> Network:
    return Network.of(Host(b.host, b.up_bytes_per_s, b.down_bytes_per_s) for b in beliefs)


def _show(order: TransferOrder, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    what = "push to" if order.kind == "push" else "pull from"
    table = Table(title=f"{rows[0]['workers']} workers {what} one server", title_justify="left")
    for name in ("size", "median", "p10 - p90", "predicted", "x", "by true rates", "x"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("MB/s each", "MB/s all", "cpu s/GB", "errors"):
        table.add_column(name, justify="right")

    def times(predicted_s: float | None, over: float | None) -> str:
        """A round of few bytes takes as long as its messages, of which no prediction tells."""
        return f"{over:.2f}" if over is not None and (predicted_s or 0.0) >= TELLING_S else "-"

    for row in rows:
        table.add_row(
            format_size(row["size_bytes"]),
            shown(row["median_s"]),
            f"{shown(row['p10_s'])} - {shown(row['p90_s'])}",
            shown(row["predicted_s"]),
            times(row["predicted_s"], row["over_predicted"]),
            shown(row["predicted_true_s"]),
            times(row["predicted_true_s"], row["over_predicted_true"]),
            f"{row['worker_bytes_per_s'] / 1e6:.1f}",
            f"{row['all_bytes_per_s'] / 1e6:.1f}",
            f"{row['cpu_s_per_gb']:.2f}",
            str(row["errors"]),
        )
    console().print(table)
    console().print(
        "times: the slowest worker's; predicted: the plan's end by the rates the planner had learned before "
        "the round, and by\nthe lab's true rates (bytes alone: no latency, no processor time); "
        "cpu: processor seconds of all ranks per GB",
        style="dim",
    )
