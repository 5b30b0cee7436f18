"""`mlfabric lab`: a cluster in a box with real kernels and real TCP."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlfabric.errors import FabricError
from mlfabric.lab.record import Record, find, lab_name, labs_folder, records
from mlfabric.lab.run import Progress, RunOptions, place_ranks
from mlfabric.lab.session import Lab, take_down
from mlfabric.scenario import find as scenario_path
from mlfabric.scenario import load_named
from mlfabric.units import format_rate, format_size, format_time, parse_time

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A cluster in a box: hosts, racks and links of a scenario, with real kernels and real TCP.",
)

_COMPLAINTS_SHOWN = 3

ScenarioArgument = Annotated[str, typer.Argument(help="A scenario file, or the name of a shipped scenario.")]
LabArgument = Annotated[str, typer.Argument(help="The scenario it was made from, or the lab's name.")]


@app.command()
def up(
    scenario: ScenarioArgument,
    still: Annotated[
        bool, typer.Option("--still", help="Do not play its trace, faults and traffic.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Measure every link after building it.")] = True,
) -> None:
    """Build a lab that stays until `lab down`, and play its scenario."""
    lab = Lab(scenario, verify=verify)
    lab.up(attached=False)
    if not still:
        lab.play()
    typer.echo(
        f"lab {lab.name} is up: {len(lab.hosts)} hosts. Look inside: mlfabric lab shell {lab.name} HOST"
    )


@app.command()
def down(
    lab: Annotated[str, typer.Argument(help="The scenario or lab; all of yours if left out.")] = "",
) -> None:
    """Remove a lab and all that runs in it; fine to repeat, also after a crash."""
    if lab:
        name = _name(lab)
        typer.echo(f"lab {name} is down" if take_down(name) else f"lab {name} was not up")
        return
    gone = 0
    for record in list(records()):
        # A lab attached to a living process goes with that process.
        if not record.read().get("attached") or record.anchor() is None:
            record.remove()
            gone += 1
    typer.echo(f"{gone} lab(s) taken down")


@app.command()
def status(lab: Annotated[str, typer.Argument(help="The scenario or lab; all if left out.")] = "") -> None:
    """Show labs, or the hosts and links of one."""
    if lab:
        _show(Lab.attach(_name(lab)))
        return
    found = list(records())
    if not found:
        typer.echo(f"no lab is up (records would be in {labs_folder()})")
    for record in found:
        typer.echo(_one_line(record))


@app.command()
def shell(lab: LabArgument, host: Annotated[str, typer.Argument(help="Where to go.")]) -> None:
    """Open a shell on a host of a lab."""
    _become(lab, host, [os.environ.get("SHELL", "/bin/sh")])


@app.command("exec")
def execute(
    lab: LabArgument,
    host: Annotated[str, typer.Argument(help="Where to run it.")],
    command: Annotated[list[str], typer.Argument(help="What to run, after --.")],
) -> None:
    """Run a command on a host of a lab."""
    _become(lab, host, command)


@app.command()
def run(
    scenario: ScenarioArgument,
    command: Annotated[list[str], typer.Argument(help="What every rank runs, after --.")],
    capture: Annotated[
        Path | None, typer.Option(help="Capture packets of every host into this folder.")
    ] = None,
    capture_pieces: Annotated[
        bool, typer.Option("--capture-pieces", help="Capture several frames of a stream as one; costs less.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The run folder; default runs/NAME-TIME.")
    ] = None,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="Hosts (patterns) to place ranks on.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    timeout: Annotated[
        str | None, typer.Option(help="End the run after this time, for example 10min.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no output of the ranks.")] = False,
) -> None:
    """Build a lab, run a command with one rank on each host while the scenario plays, and take it down."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    console = Console(stderr=True, highlight=False)
    view = _RunView(console, quiet)
    options = RunOptions(
        hosts=hosts, ranks_per_host=ranks_per_host, folder=folder, capture=capture,
        capture_pieces=capture_pieces, timeout_s=_seconds(timeout),
        on_line=view.line, on_progress=view.progress,
    )  # fmt: skip
    lab = Lab(scenario)
    place_ranks(lab.scenario, options)  # complain before building anything
    with lab:
        console.print(f"lab {lab.name}: {len(lab.hosts)} hosts, every link measured as asked")
        with view:
            result = lab.run(command, options)
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False)
    for complaint in result.complaints[:_COMPLAINTS_SHOWN]:
        console.print(f"mlfabric: {complaint}", markup=False, soft_wrap=True)
    if len(result.complaints) > _COMPLAINTS_SHOWN:
        console.print(f"mlfabric: and {len(result.complaints) - _COMPLAINTS_SHOWN} more in manifest.json")
    console.print(
        f"{format_time(result.seconds)}; all of it in {result.folder}", markup=False, soft_wrap=True
    )
    raise typer.Exit(0 if result.ok else 1)


class _RunView:
    """Lines of the ranks and, on a terminal, a status line below them."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._status = console.status("starting") if console.is_terminal else None
        self._next_s = 10.0

    def __enter__(self) -> None:
        if self._status is not None:
            self._status.start()

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def line(self, rank: int, host: str, line: str) -> None:
        if not self._quiet:
            print(f"[{rank} {host}] {line}", flush=True)

    def progress(self, now: Progress) -> None:
        text = (
            f"{now.seconds:.0f} s, {now.running} of {now.ranks} ranks running, "
            f"{format_rate(now.wire_bps)} on the wire, {now.dropped_frames} frames dropped"
        )
        if self._status is not None:
            self._status.update(text)
        elif now.seconds >= self._next_s:
            self._console.print(text, markup=False)
            self._next_s = now.seconds + 10.0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _seconds(written: str | None) -> float | None:
    if written is None:
        return None
    try:
        return parse_time(written)
    except ValueError as error:
        raise FabricError(f"--timeout: {error}") from None


def _name(given: str) -> str:
    """The lab that a lab's name or a scenario means."""
    if "/" not in given and find(given) is not None:
        return given
    path = scenario_path(given)
    return lab_name(load_named(given), path)


def _become(given: str, host: str, argv: list[str]) -> None:
    record = find(_name(given))
    if record is None:
        raise FabricError(f"lab {_name(given)} is not up; make it with: mlfabric lab up {given}")
    entry = record.entry(host, argv)
    sys.stdout.flush()
    os.execv(entry[0], entry)


def _one_line(record: Record) -> str:
    content = record.read()
    name = content.get("name", record.folder.name)
    if record.anchor() is None:
        return f"{name}: dead, its process was killed; clean up with: mlfabric lab down {record.folder.name}"
    hosts = max(0, len(content.get("namespaces", {})) - 1)
    how = "belongs to a running command" if content.get("attached") else "up"
    return f"{name}: {how}, {hosts} hosts, process {content['anchor']}"


def _show(lab: Lab) -> None:
    described, counters = lab.describe(), lab.counters()
    table = Table(title=f"lab {lab.name}", title_justify="left")
    for column in ("link", "address", "rate", "queue", "measured", "sent", "dropped", "queued"):
        table.add_column(column, justify="left" if column in ("link", "address") else "right")
    measured = {entry["link"]: entry["measured_bps"] for entry in described["measured"]}
    for name, link in described["links"].items():
        owner = name.rpartition(".")[0]
        count = counters[name]
        table.add_row(
            name, described["hosts"].get(owner, "") or "rack",
            "cut" if link["cut"] else format_rate(link["rate_bps"]),
            format_size(link["queue_bytes"]),
            format_rate(measured[name]) if name in measured else "not measured",
            format_size(count["sent_bytes"]), str(count["dropped_frames"]),
            format_size(count["backlog_bytes"]),
        )  # fmt: skip
    Console().print(table)
