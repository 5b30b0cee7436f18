"""`mlfabric sim run` and `mlfabric sim compare`: whole training runs in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mlfabric import scenario as scenarios
from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.scenario import Scenario, Seconds
from mlfabric.sim.resizing import ASSUMED_JOB, resize, with_a_job
from mlfabric.sim.results import DEFAULT_POLICIES, MODE_POLICIES, POLICIES, Result, find_policy, simulate
from mlfabric.sim.workload import Learner
from mlfabric.units import format_size, format_time, parse_time

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Whole training runs in virtual time, at the level of flows.",
)

ScenarioName = Annotated[str, typer.Argument(help="a scenario file, or the name of a shipped one")]
Seed = Annotated[int | None, typer.Option("--seed", help="another seed than the scenario's")]
Workers = Annotated[int | None, typer.Option("--workers", help="resize the cluster to this many hosts")]
Duration = Annotated[str, typer.Option("--duration", help="another duration than the scenario's")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Log = Annotated[
    Path | None, typer.Option("--log", help="also append the results to this file, as JSON lines")
]
Train = Annotated[bool, typer.Option("--train", help="compute real gradients of a small classifier")]
Target = Annotated[float, typer.Option("--target", help="accuracy to reach with --train")]


@app.command()
def run(
    scenario: ScenarioName,
    policy: Annotated[
        str, typer.Option("--policy", help=f"{', '.join(POLICIES)}; else by the job's mode")
    ] = "",
    seed: Seed = None,
    workers: Workers = None,
    duration: Duration = "",
    train: Train = False,
    target: Target = 0.93,
    log: Log = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a scenario's training run under one policy."""
    written = _prepare(scenario, seed, workers, duration)
    chosen = policy or MODE_POLICIES[with_a_job(written).jobs[0].mode]
    _simulate(written, [chosen], train, target, log, as_json)


@app.command()
def compare(
    scenario: ScenarioName,
    policies: Annotated[str, typer.Option("--policies", help="comma-separated")] = ",".join(DEFAULT_POLICIES),
    seed: Seed = None,
    workers: Workers = None,
    duration: Duration = "",
    train: Train = False,
    target: Target = 0.93,
    log: Log = None,
    as_json: AsJson = False,
) -> None:
    """Simulate the same run, with the same seed, under several policies."""
    wanted = [name.strip() for name in policies.split(",") if name.strip()]
    _simulate(_prepare(scenario, seed, workers, duration), wanted, train, target, log, as_json)


def _prepare(name: str, seed: int | None, workers: int | None, duration: str) -> Scenario:
    written = scenarios.load(scenarios.find(name))
    if workers is not None:
        written = resize(written, workers)
    if seed is not None:
        written = msgspec.structs.replace(written, seed=seed)
    if duration:
        try:
            seconds = parse_time(duration)
        except ValueError as error:
            raise FabricError(str(error)) from None
        if seconds <= 0:
            raise FabricError(f"a duration of {duration!r} leaves nothing to simulate")
        written = msgspec.structs.replace(written, duration=Seconds(seconds))
    return written


def _simulate(
    written: Scenario, policies: list[str], train: bool, target: float, log: Path | None, as_json: bool
) -> None:
    if not policies:
        raise FabricError("no policy is named; give --policies a comma-separated list")
    if not 0 < target < 1:
        raise FabricError(f"a target accuracy of {target} is not within 0 and 1")
    for name in policies:
        find_policy(name)
    results = []
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[at]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bars:
        for name in policies:
            task = bars.add_task(name, total=float(written.duration), at="")

            def told(now: float, task: object = task) -> None:
                bars.update(task, completed=now, at=format_time(now))  # type: ignore[arg-type]

            results += _trained(written, name, target, told) if train else simulate(written, name, told)
    if log is not None:
        try:
            with log.open("ab") as file:
                file.writelines(msgspec.json.encode(result) + b"\n" for result in results)
        except OSError as error:
            raise FabricError(f"can't write {log}: {error.strerror or error}") from None
    if as_json:
        print_json({"scenario": written.name, "seed": written.seed, "results": results})
    else:
        _print(written, results, target if train else None)


def _trained(written: Scenario, policy: str, target: float, told: Callable[[float], None]) -> list[Result]:
    from mlfabric.sim.training import DigitsLearner, read_digits

    digits = read_digits()
    learners: list[DigitsLearner] = []

    def make() -> Learner:
        learners.append(DigitsLearner(digits, target, written.seed))
        return learners[-1]

    results = simulate(written, policy, told, make)
    done = []
    for result, learner in zip(results, learners, strict=True):
        _, at, curve = learner.best()
        done.append(msgspec.structs.replace(result, time_to_target_s=at, accuracy=curve))
    return done


def _print(written: Scenario, results: list[Result], target: float | None) -> None:
    out = console()
    out.print(
        f"{written.name or 'scenario'}: {len(written.host_names())} hosts, seed {written.seed}, "
        f"{format_time(results[0].simulated_s)} simulated at flow level."
    )
    if not written.jobs:
        out.print(
            f"It describes no job: one with updates of {format_size(written.size_bytes(ASSUMED_JOB))} and "
            f"{ASSUMED_JOB.compute_transfers:g} transfer times of computing a step is assumed."
        )
    several = len(written.jobs) > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["policy", *(["job"] if several else []), "updates/s", "in bound/s", "an update is"]
    columns += ["delay", "std", "p99", "max", "bound", "drops", "late", "servers busy"]
    columns += [f"by {kind}" for kind in results[0].bytes_by_link]
    if target is not None:
        columns += [f"to {target:.0%}", "best"]
    for column in columns:
        left = column in ("policy", "job", "an update is")
        table.add_column(column, justify="left" if left else "right", no_wrap=column == "policy")
    for result in results:
        table.add_row(*_row(result, several, target is not None))
    out.print(table)
    for name in dict.fromkeys(result.policy for result in results):
        out.print(f"{name}: {POLICIES[name].about}", style="dim")


def _row(result: Result, several: bool, trained: bool) -> list[str]:
    row = [
        result.policy,
        *([result.job] if several else []),
        f"{result.updates_per_s:.3g}",
        f"{result.within_per_s:.3g}",
        "1 gradient" if result.local_steps == 1 else f"{result.local_steps} local steps",
        f"{result.delay_mean:.1f}",
        f"{result.delay_std:.1f}",
        f"{result.delay_p99:.0f}",
        str(result.delay_max),
        "-" if not result.bounded else "none" if result.bound is None else str(result.bound),
        str(result.dropped),
        str(result.dropped_late),
        f"{result.server_busy:.0%}" if result.policy != "alone" else "-",
        *(format_size(carried) for carried in result.bytes_by_link.values()),
    ]
    if trained:
        at = result.time_to_target_s
        best = max((right for _, right in result.accuracy), default=0.0)
        row += [format_time(at) if at is not None else "not reached", f"{best:.1%}"]
    return row
