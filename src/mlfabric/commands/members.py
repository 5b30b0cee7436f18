"""`mlfabric scheduler` and `mlfabric node`: members of a fabric that no training script runs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from mlfabric.api import join_with
from mlfabric.commands.logs import log_to_terminal
from mlfabric.config import format_address, from_environment, parse_address, read_secrets
from mlfabric.data import ArrayData
from mlfabric.eventlog import FileLog, NoLog
from mlfabric.roles.actions import SchedulerSettings
from mlfabric.runtime.engine import Engine
from mlfabric.runtime.tls import Tls

scheduler_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
node_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# How long a node that is told to end tries to hand on what it leads.
DRAIN_S = 30.0

_Log = Annotated[Path | None, typer.Option("--log", help="write the event log here")]
_LogFormat = Annotated[str, typer.Option("--log-format", help="text, or json: one object per line")]
_Insecure = Annotated[bool, typer.Option("--insecure", help="listen beyond loopback without a secret")]


@scheduler_app.command()
def scheduler(
    listen: Annotated[str, typer.Option("--listen", help="address and port")] = "127.0.0.1:7070",
    name: Annotated[str, typer.Option("--name")] = "scheduler",
    secrets: Annotated[
        Path | None,
        typer.Option("--secrets", help="a file with a line `job secret` for each job it serves"),
    ] = None,
    log: _Log = None,
    log_format: _LogFormat = "text",
    insecure: _Insecure = False,
) -> None:
    """Run a scheduler of its own; members join it with mf.join(address). MLFABRIC_SECRET guards it, or a
    secret for each of several jobs."""
    settings = from_environment(listen, name=name, log=log, insecure=insecure or None)
    log_to_terminal(log_format)
    ended = _signalled()
    engine = Engine(
        name,
        ArrayData(),
        FileLog(settings.log) if settings.log else NoLog(),
        parse_address(listen),
        settings.secret,
        settings.insecure,
        read_secrets(secrets) if secrets is not None else None,
        Tls(settings.tls) if settings.tls is not None else None,
    )
    engine.node.start_role("scheduler", SchedulerSettings(name))
    engine.start()
    typer.echo(f"scheduler {name} listens on {format_address(*engine.address)}; Ctrl-C ends it")
    ended.wait()
    engine.stop(0.0)  # its members choose another


@node_app.command()
def node(
    address: Annotated[str, typer.Argument(help="the address of the scheduler or of any member, host:port")],
    roles: Annotated[str, typer.Option("--roles", help="its uses")] = "aggregator,server,replica",
    job: Annotated[str, typer.Option("--job")] = "job",
    name: Annotated[str | None, typer.Option("--name")] = None,
    up: Annotated[str | None, typer.Option("--up", help="rate of the uplink, for example 200mbit")] = None,
    down: Annotated[str | None, typer.Option("--down", help="rate of the downlink")] = None,
    wait: Annotated[float, typer.Option("--wait", help="seconds to wait for the scheduler")] = 10.0,
    listen: Annotated[
        str | None, typer.Option("--listen", help="own address and port; found by the route otherwise")
    ] = None,
    log: _Log = None,
    log_format: _LogFormat = "text",
    insecure: _Insecure = False,
) -> None:
    """Join a fabric as a host that aggregates, serves or follows, without training itself. SIGTERM and
    Ctrl-C hand on what it leads, then it leaves."""
    wanted = tuple(role.strip() for role in roles.split(",") if role.strip())
    settings = from_environment(
        address,
        job=job,
        name=name,
        up=up,
        down=down,
        log=log,
        insecure=insecure or None,
        embed_scheduler=False,
        listen=listen,
    )
    log_to_terminal(log_format)
    ended = _signalled()
    with join_with(settings, wanted, wait) as fabric:
        typer.echo(f"{fabric.name} joined job {job} as {', '.join(wanted)}; Ctrl-C leaves")
        while not ended.wait(0.2):
            if fabric.gone:
                typer.echo(f"{fabric.name} has left the fabric")
                return
        fabric.drain(DRAIN_S)


def _signalled() -> threading.Event:
    """Set by SIGINT and SIGTERM."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended
