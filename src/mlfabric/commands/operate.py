"""`mlfabric status` and `mlfabric drain`: what people ask a running fabric, over a proven connection."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from mlfabric.commands.output import console, print_json
from mlfabric.config import Settings, from_environment
from mlfabric.errors import ConnectError, FabricError
from mlfabric.messages import DrainAnswered, DrainWanted, StatusReport, StatusWanted
from mlfabric.runtime.probe import ask_scheduler
from mlfabric.runtime.tls import Tls
from mlfabric.units import format_rate

status_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
drain_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ASK_AGAIN_S = 0.2

_Address = Annotated[
    str | None, typer.Option("--at", help="address of the scheduler or any member; MLFABRIC_SCHEDULER")
]
_Job = Annotated[str | None, typer.Option("--job", help="whose secret is meant, where each job has one")]
_Wait = Annotated[float, typer.Option("--wait", help="seconds to wait")]


@status_app.command()
def status(
    at: _Address = None,
    job: _Job = None,
    wait: _Wait = 5.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show members, shards, leases and rates of a running fabric."""
    report = _status(_settings(at, job), wait)
    if as_json:
        print_json(report)
    else:
        _print(report)


@drain_app.command()
def drain(
    target: Annotated[str, typer.Argument(help="a host, or one member by name")],
    at: _Address = None,
    job: _Job = None,
    wait: _Wait = 60.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Have a host leave: its leads move to others, its open updates finish, then it goes."""
    settings = _settings(at, job)
    until = time.monotonic() + wait
    answer = _ask(settings, DrainWanted(target), wait)
    if not isinstance(answer, DrainAnswered):
        raise ConnectError("the scheduler answered something else than was asked")
    if answer.error:
        raise FabricError(answer.error)
    left = set(answer.nodes)
    while left:
        if time.monotonic() >= until:
            raise FabricError(
                f"{', '.join(sorted(left))} did not leave within {wait:g} s; it goes on draining"
            )
        time.sleep(ASK_AGAIN_S)
        try:
            left &= {member.node for member in _status(settings, 2.0).members}
        except ConnectError:
            continue  # the scheduler itself may have left; another one comes
    if as_json:
        print_json({"left": answer.nodes})
    else:
        console().print(f"{', '.join(answer.nodes)} left")


def _settings(at: str | None, job: str | None) -> Settings:
    return from_environment(at, job=job, name="operator", embed_scheduler=False)


def _ask(settings: Settings, question: StatusWanted | DrainWanted, wait_s: float) -> object:
    tls = Tls(settings.tls) if settings.tls is not None else None
    return ask_scheduler(settings.scheduler, settings.secret, question, wait_s, settings.job, tls)


def _status(settings: Settings, wait_s: float) -> StatusReport:
    report = _ask(settings, StatusWanted(), wait_s)
    if not isinstance(report, StatusReport):
        raise ConnectError("the scheduler answered something else than was asked")
    return report


def _print(report: StatusReport) -> None:
    screen = console()
    waiting = ", which waits to hear from its members" if report.undecided else ""
    screen.print(f"scheduler {report.scheduler}, term {report.term}{waiting}")
    members = Table("member", "host", "job", "uses", "leads", "follows", "up", "down", "lease", "silent", "")
    for m in report.members:
        members.add_row(
            m.node,
            m.host,
            m.job,
            " ".join(m.roles),
            " ".join(map(str, m.leads)),
            " ".join(map(str, m.follows)),
            format_rate(m.up_bytes_per_s * 8),
            format_rate(m.down_bytes_per_s * 8),
            f"{m.lease_s:.1f} s",
            f"{m.silent_s:.1f} s",
            "draining" if m.draining else "",
        )
    screen.print(members)
    for each in report.jobs:
        state = f"failed: {each.failed}" if each.failed else ("training" if each.ready else "no model yet")
        screen.print(
            f"job {each.name}: {state}, {each.members} members, {each.applied} updates applied "
            f"({each.applied_per_s:.1f} per s), {each.dropped} dropped, {each.waiting} waiting, "
            f"{each.granted} on their way"
        )
        if not each.shards:
            continue
        shards = Table("shard", "leader", "version", "replica", "not there yet")
        for s in each.shards:
            replica = "none" if s.replica is None else s.replica + ("" if s.replica_filled else " (filling)")
            shards.add_row(str(s.index), s.leader, f"{s.epoch}:{s.version}", replica, str(s.undurable))
        screen.print(shards)
