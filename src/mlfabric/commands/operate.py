"""`mlfabric status`, `drain` and `doctor`: what people ask a running fabric, and the host they are on."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer
from rich.table import Table

from mlfabric.commands.output import console, print_json
from mlfabric.config import Settings, from_environment, read_limit
from mlfabric.doctor import Facts, examine
from mlfabric.errors import ConnectError, FabricError
from mlfabric.messages import (
    DrainAnswered,
    DrainWanted,
    LimitAnswered,
    LimitWanted,
    StatusReport,
    StatusWanted,
)
from mlfabric.runtime.host import gather
from mlfabric.runtime.probe import ask_scheduler
from mlfabric.runtime.tls import Tls
from mlfabric.units import format_rate, wire_rate

status_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
drain_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
limit_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
doctor_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ASK_AGAIN_S = 0.2
CLOCK_SAMPLES = 5
# Of a question: two connections with two exchanges of the handshake each, then the answer.
ROUND_TRIPS = 7

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


@limit_app.command()
def limit(
    target: Annotated[str, typer.Argument(help="a job, or a host; job:NAME or host:NAME where both exist")],
    rate: Annotated[str, typer.Argument(help="the most it may send, for example 100mbit; none: no limit")],
    at: _Address = None,
    job: _Job = None,
    wait: _Wait = 5.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Limit what a host may send, or what a job may send from each host; in force at once."""
    limit_bytes_per_s = read_limit(rate)
    kind, _, name = target.rpartition(":")
    if kind not in ("", "job", "host"):
        raise FabricError(f"{target!r} names no job or host; write NAME, job:NAME or host:NAME")
    answer = _ask(_settings(at, job), LimitWanted(name, limit_bytes_per_s, kind), wait)
    if not isinstance(answer, LimitAnswered):
        raise ConnectError("the scheduler answered something else than was asked")
    if answer.error:
        raise FabricError(answer.error)
    if as_json:
        print_json({"kind": answer.kind, "target": name, "max_bytes_per_s": limit_bytes_per_s})
        return
    where = f"host {name}" if answer.kind == "host" else f"job {name}, from each host,"
    most = (
        "as much as its links carry" if limit_bytes_per_s is None else f"at most {_wire(limit_bytes_per_s)}"
    )
    console().print(f"{where} sends {most}")


@doctor_app.command()
def doctor(
    at: _Address = None,
    job: _Job = None,
    wait: _Wait = 5.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Check this host for what costs speed and say what to set. Changes nothing. With --at (or
    MLFABRIC_SCHEDULER) also the way to the scheduler and the clock."""
    findings = examine(_facts(at, job, wait))
    if as_json:
        print_json(findings)
        return
    screen = console()
    for finding in findings:
        screen.print(f"{'ok  ' if finding.good else 'slow'} {finding.what}: {finding.found}")
        if finding.advice:
            screen.print(f"     set: {finding.advice}")
            screen.print(f"     gain: {finding.gain}")


def _facts(at: str | None, job: str | None, wait_s: float) -> Facts:
    if at is None and "MLFABRIC_SCHEDULER" not in os.environ:
        return gather()
    settings = _settings(at, job)
    samples = []
    for _ in range(CLOCK_SAMPLES):
        began, asked = time.time(), time.monotonic()
        report = _status(settings, wait_s)
        took = time.monotonic() - asked
        samples.append((took, report.now_s - (began + took / 2), len(report.members)))
    took, offset, members = min(samples)
    # The clock was read at the end of the last exchange, so half a question is how wrong it may be.
    return gather(settings.scheduler, took / ROUND_TRIPS, (offset, took / 2), members)


def _settings(at: str | None, job: str | None) -> Settings:
    return from_environment(at, job=job, name="operator", embed_scheduler=False)


def _ask(settings: Settings, question: StatusWanted | DrainWanted | LimitWanted, wait_s: float) -> object:
    tls = Tls(settings.tls) if settings.tls is not None else None
    return ask_scheduler(settings.scheduler, settings.secret, question, wait_s, settings.job, tls)


def _status(settings: Settings, wait_s: float) -> StatusReport:
    report = _ask(settings, StatusWanted(), wait_s)
    if not isinstance(report, StatusReport):
        raise ConnectError("the scheduler answered something else than was asked")
    return report


def _wire(payload_bytes_per_s: float) -> str:
    """A limit as it was given: in bits on the wire."""
    return format_rate(wire_rate(payload_bytes_per_s))


def _print(report: StatusReport) -> None:
    screen = console()
    waiting = ", which waits to hear from its members" if report.undecided else ""
    screen.print(f"scheduler {report.scheduler}, term {report.term}{waiting}")
    members = Table(
        "member", "host", "job", "uses", "leads", "follows", "up", "down", "limit", "lease", "silent", ""
    )
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
            "" if m.limit_bytes_per_s is None else _wire(m.limit_bytes_per_s),
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
            + (f", limit {_wire(each.max_rate_bytes_per_s)}" if each.max_rate_bytes_per_s else "")
        )
        if not each.shards:
            continue
        shards = Table("shard", "leader", "version", "replica", "not there yet")
        for s in each.shards:
            replica = "none" if s.replica is None else s.replica + ("" if s.replica_filled else " (filling)")
            shards.add_row(str(s.index), s.leader, f"{s.epoch}:{s.version}", replica, str(s.undurable))
        screen.print(shards)
