"""The command `mlfabric bench train`."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mlfabric.bench.train import campaign, tuning
from mlfabric.bench.train.entries import ENTRIES, QUICK, find_entry
from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.settings import DEFAULT_BATCH, DEFAULT_RATE, RunSettings
from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.scenario import find as find_scenario
from mlfabric.units import parse_time

QUICK_S = 45.0


def command(
    scenario: Annotated[
        list[str] | None, typer.Option(help="A scenario file or a shipped one; may be given several times.")
    ] = None,
    contenders: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(ENTRIES)}.")] = ",".join(
        QUICK
    ),
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "1",
    target: Annotated[
        list[float] | None, typer.Option(help="Accuracy to reach; may be given several times.")
    ] = None,
    limit: Annotated[str, typer.Option(help="How long a run may take to get there.")] = "10min",
    rate: Annotated[str, typer.Option(help="Of the fastest link; the others in proportion.")] = DEFAULT_RATE,
    compute: Annotated[
        float, typer.Option(help="Nominal compute time of a step, in times a transfer of the model takes.")
    ] = 1.75,
    workers: Annotated[int, typer.Option(help="Hosts, each with a worker.")] = 8,
    batch: Annotated[int, typer.Option(help="Images per step of a worker.")] = DEFAULT_BATCH,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search each contender's step size instead, on other seeds.")
    ] = False,
    tuned: Annotated[Path | None, typer.Option(help="Take step sizes from this result of --tune.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with Fashion-MNIST's four files.")] = None,
    out: Annotated[
        Path, typer.Option(help="Where runs and results go; runs there are not made again.")
    ] = Path("runs/train"),
    abreast: Annotated[
        int,
        typer.Option(
            help="So many runs at a time of contenders that leave processors idle, each in a lab of its own."
        ),
    ] = 1,
    virtual: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Under the virtual clock instead of in a lab; same task, real gradients."
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A few minutes: short runs, a low target; shows that it works."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a real model to a target accuracy in a lab, through each contender: who is there first."""
    for module, extra in (("torch", "torch"), ("pyroute2", "lab"), ("matplotlib", "bench")):
        if importlib.util.find_spec(module) is None:
            raise FabricError(f"this benchmark needs {module}: pip install 'mlfabric[{extra}]'")
    wish = _wish(scenario, contenders, seeds, target, limit, rate, compute, workers, batch, quick)
    if virtual and (unknown := [name for name in wish.contenders if not find_entry(name).policy]):
        raise FabricError(f"the simulator has no policy that stands for {', '.join(unknown)}")
    if abreast < 1:
        raise FabricError("--abreast is at least 1")
    if abreast > 1 and (virtual or tune):
        raise FabricError("--abreast is for runs in a lab, and goes neither with --simulate nor with --tune")
    if tuned is not None:
        wish = msgspec.structs.replace(wish, step_sizes=tuning.read_tuned(tuned))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))

    from mlfabric.bench.train.machine import strains
    from mlfabric.bench.train.running import make_run, read_run, runs_abreast
    from mlfabric.bench.train.task import find_data
    from mlfabric.bench.train.virtual import simulate_run

    found = find_data(data)
    run_once = simulate_run if virtual else make_run
    out = out / "simulated" if virtual else out
    if not virtual:
        # Trials have folders of their own.
        to_do = wish.runs() if tune else campaign.split_done(wish.runs(), out, read_run)[1]
        for each in strains(to_do, found):
            sys.stderr.write(f"mlfabric: {each}\n")

    def make(settings: RunSettings, folder: Path, stop_s: float, told: Callable[[float], None]) -> RunResult:
        return run_once(settings, folder, found, stop_s, told)

    if tune:
        failures = _tune(wish, out, make, read_run, as_json)
    else:
        outcome = campaign.carry_out(wish, out, make, read_run, abreast=runs_abreast(abreast, found))
        _show(outcome.results, out, as_json)
        failures = outcome.failures
    for failure in failures:
        sys.stderr.write(f"mlfabric: {failure}\n")
    if failures:
        raise typer.Exit(1)


def _show(runs: list[RunResult], out: Path, as_json: bool) -> None:
    from mlfabric.bench.train import plots, report

    made = report.make_report(runs)
    report.write_report(made, runs, out)
    plots.draw(runs, out)
    if as_json:
        print_json(report.as_json(made, runs))
    else:
        console().print(report.markdown(made), soft_wrap=True)
        console().print(f"results and plots are in {out}", style="dim")


def _tune(
    wish: campaign.Wish, out: Path, make: campaign.MakeRun, read: campaign.ReadRun, as_json: bool
) -> list[campaign.Failure]:
    """Failures; a contender one of whose trials failed has no result, the others go on."""
    found, failures = [], []
    goal = max(wish.common.targets)
    for scenario in wish.scenarios:
        for contender in wish.contenders:

            def run(settings: RunSettings) -> RunResult:
                size = settings.step_size
                root = out / "tuning" / f"lr{size.lr:g}-momentum{size.momentum:g}"
                one = campaign.Wish(
                    (settings.contender,),
                    (settings.scenario,),
                    (settings.seed,),
                    settings,
                    {settings.contender: size},
                )
                outcome = campaign.carry_out(one, root, make, read)
                failures.extend(outcome.failures)
                if outcome.failures:
                    raise campaign.RunFailed(outcome.failures[0].why)
                return outcome.results[0]

            common = msgspec.structs.replace(
                wish.common, contender=contender, scenario=scenario, seed=tuning.FIRST_TUNING_SEED
            )
            with contextlib.suppress(campaign.RunFailed):  # told at the end
                found.append(tuning.tune(common, goal, run))
            tuning.write_tuned(out / "tuned.json", found)
    if as_json:
        print_json(found)
        return failures
    for each in found:
        edge = ", on the edge of what was tried" if each.on_edge else ""
        console().print(
            f"{each.scenario} {each.contender}: lr {each.chosen.lr:g}, momentum "
            f"{each.chosen.momentum:g}{edge}"
        )
    console().print(f"use it by --tuned {out / 'tuned.json'}", style="dim")
    return failures


def _wish(
    scenario: list[str] | None,
    contenders: str,
    seeds: str,
    target: list[float] | None,
    limit: str,
    rate: str,
    compute: float,
    workers: int,
    batch: int,
    quick: bool,
) -> campaign.Wish:
    names = tuple(name.strip() for name in contenders.split(",") if name.strip())
    if not names:
        raise FabricError("no contender is named; give --contenders a comma-separated list")
    for name in names:
        find_entry(name)
    scenario_names = tuple(scenario or ["dynamic-stragglers"])
    for each in scenario_names:
        find_scenario(each)
    try:
        numbers = tuple(int(seed) for seed in seeds.split(","))
        limit_s = parse_time(limit)
    except ValueError:
        raise FabricError(
            f"--seeds are whole numbers and --limit a time, not {seeds!r} and {limit!r}"
        ) from None
    targets = tuple(sorted(target or ([0.6] if quick else [0.85])))
    if not all(0 < each < 1 for each in targets):
        raise FabricError("a target accuracy is between 0 and 1")
    if max(numbers) >= tuning.FIRST_TUNING_SEED:
        raise FabricError(f"seeds from {tuning.FIRST_TUNING_SEED} on are for --tune")
    if not (limit_s > 0 and compute > 0 and batch > 0):
        raise FabricError("--limit, --compute and --batch are above zero")
    common = RunSettings(
        names[0],
        scenario_names[0],
        numbers[0],
        find_entry(names[0]).step_size,
        rate=rate,
        workers=workers,
        batch=batch,
        compute=compute,
        targets=targets,
        limit_s=min(limit_s, QUICK_S) if quick else limit_s,
    )
    return campaign.Wish(names, scenario_names, numbers, common)
