"""What replicas cost while all goes well, and what they save when a server's host is killed.

    python -m experiments.replication.run [--most 3]

Runs that results.json holds are not made again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from experiments.points import MOST_STOLEN, carry_out, table
from experiments.replication.member import Line, Order, log_file, weights_folder
from mlfabric import scenario as scenarios
from mlfabric.bench.train.running import read_links
from mlfabric.bench.train.settings import RunSettings, StepSize, fit
from mlfabric.bench.train.task import find_data
from mlfabric.data import mirror_path
from mlfabric.errors import FabricError
from mlfabric.eventlog import read_log
from mlfabric.lab import Lab, RunOptions
from mlfabric.lab.manifest import MachineLoad
from mlfabric.scenario import FaultSpec, Scenario, Seconds

HERE = Path(__file__).parent
BOUNDS: tuple[float | None, ...] = (None, 0.02, 0.005, 0.002, 0.0)
RATE = "200mbit"
# With momentum there is state to copy: a message in spare time is twice the shard. With this step size eight
# workers learn, and a step moves the model by some 0.0003 of its norm; with 0.001 the loss rises.
STEP_SIZE = StepSize(0.0003, 0.9)
SECONDS = 36.0
FROM_S = 5.0  # first steps, not counted: rates are learned, replicas filled
TURNS = 3
KILLS = 2
KILLED, KILLED_AT_S = 3, 20.0  # rank; rank 0 schedules
OBSERVERS = (1, 4, 6, 7)
WORKERS = 8
LOOKS_BEFORE = 12  # the last ones before the kill: how the loss goes up and down by itself


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """What the kill of a host that leads shards did."""

    shards: int  # that it led
    divergence: float  # the largest of a shard: weights of who took over, against those of the killed
    lost: int  # updates told to be lost
    next_model_s: float | None  # until the first model from the new leaders
    all_have_it_s: float | None  # until every worker has one
    loss_before: float  # mean of the last looks
    loss_before_most: float
    loss_after: float | None  # of the first model from the new leaders
    back_after_updates: int | None  # until a loss no higher than before: than the mean of the looks
    curve: list[tuple[float, int, float]]  # seconds, version, loss


class Run(msgspec.Struct, frozen=True, kw_only=True):
    divergence: float | None  # the bound; None: no replicas
    turn: int
    killed: bool
    updates_per_s: float
    dropped: int
    wire_bytes_per_update: float
    replica_bytes_share: float  # of all payload that arrived
    messages: int  # to replicas
    with_state: int  # of those
    withheld: int  # steps
    divergence_median: float
    divergence_most: float  # of all steps that counted
    busy_share: float
    nice_share: float  # others' work of low priority
    stolen_share: float
    kill: Kill | None = None


Key = tuple[float | None, int, bool]  # bound, turn, whether a host is killed


def wanted() -> list[Key]:
    """By turns."""
    kills = [(bound, turn, True) for turn in range(KILLS) for bound in BOUNDS if bound is not None]
    calm = [(bound, turn, False) for turn in range(TURNS) for bound in BOUNDS]
    first = len(BOUNDS)
    return [*calm[:first], *kills[: first - 1], *calm[first:], *kills[first - 1 :]]


def make_scenario(settings: RunSettings, killed: bool) -> Scenario:
    fitted = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
    if not killed:
        return fitted
    host = fitted.host_names()[KILLED]
    fault = FaultSpec(at=Seconds(KILLED_AT_S), do="kill", host=host)
    return msgspec.structs.replace(fitted, faults=(fault,))


def measure(key: Key) -> Run:
    bound, turn, killed = key
    settings = RunSettings("mlfabric-async", "calm", 1 + turn, STEP_SIZE, rate=RATE, workers=WORKERS)
    order = Order(settings, bound, str(find_data(None)), OBSERVERS if killed else ())
    command = [sys.executable, "-m", "experiments.replication.member", msgspec.json.encode(order).decode()]
    load = MachineLoad()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        options = RunOptions(folder=folder, together=True, until=lambda s: s >= SECONDS, grace_s=2.0)
        with Lab(make_scenario(settings, killed)) as lab:
            done = lab.run(command, options)
        load.update()
        if not done.ok:
            raise FabricError("; ".join(done.complaints))
        return read_run(folder, bound, turn, killed, load)


def read_run(folder: Path, bound: float | None, turn: int, killed: bool, load: MachineLoad) -> Run:
    lines = [read_lines(folder / f"steps-{rank}.jsonl") for rank in range(WORKERS)]
    counted = [line for each in lines for line in each if FROM_S <= line.at_s < SECONDS]
    committed = sum(line.committed for line in counted)
    all_committed = sum(line.committed for each in lines for line in each)
    links = read_links(folder / "links.csv")
    return Run(
        divergence=bound,
        turn=turn,
        killed=killed,
        updates_per_s=committed / (SECONDS - FROM_S),
        dropped=sum(not line.committed for line in counted),
        wire_bytes_per_update=sum(b for link, b in links.items() if link.endswith(".up")) / all_committed,
        **read_replication(folder),
        busy_share=json.loads((folder / "manifest.json").read_text())["busy_share"],
        nice_share=load.nice_share(),
        stolen_share=load.stolen_share(),
        kill=read_kill(folder, lines) if killed else None,
    )


def read_lines(path: Path) -> list[Line]:
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_replication(folder: Path) -> dict[str, Any]:
    """Bytes to replicas and divergence of every step, from the members' event logs."""
    to_replicas = others = messages = with_state = withheld = 0
    divergences: list[float] = []
    for rank in range(WORKERS):
        arriving: dict[str, dict[str, Any]] = {}
        for record in read_log(log_file(folder, rank)):
            what = record.record
            if record.type == "TransferArriving":
                arriving[what["transfer"]] = what
            elif record.type == "TransferFinished" and what["transfer"] in arriving:
                came = arriving.pop(what["transfer"])
                if came["about"]["type"] == "ReplicaPart":
                    to_replicas += came["size_bytes"]
                    messages += 1
                    with_state += came["about"]["with_state"]
                else:
                    others += came["size_bytes"]
            elif record.type == "Note" and what["what"] == "withheld":
                withheld += 1
            # Where no replica is filled there is none to be near to.
            elif record.type == "Send" and what["message"].get("replica_version") is not None:
                divergences.append(what["message"]["divergence"])
    return {
        "replica_bytes_share": to_replicas / (to_replicas + others),
        "messages": messages,
        "with_state": with_state,
        "withheld": withheld,
        "divergence_median": statistics.median(divergences or [0.0]),
        "divergence_most": max(divergences, default=0.0),
    }


def read_kill(folder: Path, lines: list[list[Line]]) -> Kill:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    at_s = next(event["at_s"] for event in events if event["do"] == "kill")
    left = [each for rank, each in enumerate(lines) if rank != KILLED]
    before = max(line.epochs for each in left for line in each if line.at_s < at_s)
    firsts = [
        next((line for line in each if line.at_s > at_s and line.epochs > before), None) for each in left
    ]
    met = sorted(line.at_s - at_s for line in firsts if line is not None)
    looks = sorted((line for each in left for line in each if line.loss is not None), key=lambda x: x.at_s)
    usual = [line.loss for line in looks if line.at_s < at_s and line.loss is not None][-LOOKS_BEFORE:]
    after = [line for line in looks if line.at_s > at_s and line.epochs > before]
    back = next((line for line in after if (line.loss or 0.0) <= statistics.fmean(usual)), None)
    shards, apart = read_divergence(folder)
    return Kill(
        shards=shards,
        divergence=apart,
        lost=sum(each[-1].lost for each in left),
        next_model_s=met[0] if met else None,
        all_have_it_s=met[-1] if len(met) == len(left) else None,
        loss_before=statistics.fmean(usual),
        loss_before_most=max(usual),
        loss_after=after[0].loss if after else None,
        back_after_updates=back.version - after[0].version if back is not None else None,
        curve=[(line.at_s, line.version, line.loss or 0.0) for line in looks],
    )


def read_divergence(folder: Path) -> tuple[int, float]:
    """How many shards were taken over, and the largest ||server - replica|| / ||server|| of them, from the
    weights that both left in files."""
    struck_at = log_file(folder, KILLED).stat().st_mtime
    apart = []
    for last in weights_folder(folder, KILLED).glob("shard*.weights"):
        shard = int(last.name.removeprefix("shard").split(".")[0])
        dumps = [mirror_path(weights_folder(folder, rank), shard, "promoted") for rank in range(WORKERS)]
        taken = [path for path in dumps if path.exists() and path.stat().st_mtime >= struck_at]
        if taken:
            first = min(taken, key=lambda path: path.stat().st_mtime)
            server, replica = np.fromfile(last, np.float32), np.fromfile(first, np.float32)
            apart.append(float(np.linalg.norm(server - replica) / np.linalg.norm(server)))
    return len(apart), max(apart, default=0.0)


def main() -> None:
    runs, plot = carry_out(
        HERE / "results.json", Run, wanted(), lambda run: (run.divergence, run.turn, run.killed), measure
    )
    show(runs)
    draw(runs, plot)


def counting(runs: list[Run], killed: bool) -> dict[float | None, list[Run]]:
    """By bound, without those during which the machine was not ours."""
    return {
        bound: mine
        for bound in BOUNDS
        if (
            mine := [
                run
                for run in runs
                if (run.divergence, run.killed) == (bound, killed) and run.stolen_share <= MOST_STOLEN
            ]
        )
    }


def show(runs: list[Run]) -> None:
    calm, kills = counting(runs, killed=False), counting(runs, killed=True)
    none = [run.updates_per_s for run in calm.get(None, [])]
    rows = []
    for bound, mine in calm.items():
        rates = [run.updates_per_s for run in mine]
        longer = statistics.fmean(none) / statistics.fmean(rates) - 1 if none else float("nan")
        rows.append(
            [
                _name(bound),
                ", ".join(f"{rate:.2f}" for rate in rates),
                f"{longer:+.1%}",
                f"{_mean(mine, 'replica_bytes_share'):.1%}",
                f"{_mean(mine, 'messages') / SECONDS:.1f}, {_mean(mine, 'with_state') / SECONDS:.1f}",
                f"{_mean(mine, 'withheld'):.0f}",
                f"{_mean(mine, 'divergence_median'):.4f}, {max(r.divergence_most for r in mine):.4f}",
                f"{_mean(mine, 'busy_share'):.0%}, {_mean(mine, 'nice_share'):.0%}",
            ]
        )
    columns = [
        "bound",
        "updates/s",
        "step longer by",
        "replicas' share of bytes",
        "messages a second, with state",
    ]
    print(
        table(
            [
                *columns,
                "steps withheld",
                "divergence, median and most",
                "processors busy, of it at low priority",
            ],
            rows,
        )
    )
    rows = []
    for bound, mine in kills.items():
        for kill in [run.kill for run in mine if run.kill is not None]:
            rows.append(
                [
                    _name(bound),
                    str(kill.shards),
                    f"{kill.divergence:.4f}",
                    str(kill.lost),
                    f"{kill.loss_before:.3f} (to {kill.loss_before_most:.3f})",
                    _number(kill.loss_after, ".3f"),
                    _number(kill.back_after_updates, "d"),
                    _number(kill.next_model_s, ".2f"),
                    _number(kill.all_have_it_s, ".2f"),
                ]
            )
    columns = ["bound", "shards taken over", "divergence then", "updates lost", "loss before", "after"]
    print(table([*columns, "back after updates", "next model, s", "all have it, s"], rows))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _mean(runs: list[Run], field: str) -> float:
    return statistics.fmean(getattr(run, field) for run in runs)


def _name(bound: float | None) -> str:
    return "no replicas" if bound is None else f"{bound:g}"


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    calm = counting(runs, killed=False)
    for place, mine in enumerate(calm.values()):
        left.plot([place] * len(mine), [run.updates_per_s for run in mine], "o", color="#1d4ed8")
    left.set_xticks(range(len(calm)), [_name(bound) for bound in calm])
    left.set_ylim(0, None)
    left.set_xlabel("bound")
    left.set_ylabel("updates a second")
    for bound, mine in counting(runs, killed=True).items():
        kill = mine[0].kill
        assert kill is not None
        right.plot([at for at, _, _ in kill.curve], [loss for _, _, loss in kill.curve], ".-", ms=2, lw=0.8,
                   label=f"bound {_name(bound)}")  # fmt: skip
    right.set_xlim(KILLED_AT_S - 10, SECONDS)
    right.set_xlabel("s")
    right.set_ylabel("loss on images that are always the same")
    if right.lines:
        right.legend(fontsize=8)
    right.axvline(KILLED_AT_S, color="#888", linewidth=0.8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
