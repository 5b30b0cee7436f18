"""`mlfabric scheduler` and `mlfabric node`: members of a fabric that no training script runs."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from mlfabric.api import join_with
from mlfabric.config import format_address, from_environment, parse_address
from mlfabric.data import ArrayData
from mlfabric.eventlog import FileLog, NoLog
from mlfabric.roles.actions import SchedulerSettings
from mlfabric.runtime.engine import Engine

scheduler_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
node_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_Log = Annotated[Path | None, typer.Option("--log", help="write the event log here")]
_Insecure = Annotated[bool, typer.Option("--insecure", help="listen beyond loopback without a secret")]


@scheduler_app.command()
def scheduler(
    listen: Annotated[str, typer.Option("--listen", help="address and port")] = "127.0.0.1:7070",
    name: Annotated[str, typer.Option("--name")] = "scheduler",
    log: _Log = None,
    insecure: _Insecure = False,
) -> None:
    """Run a scheduler of its own; members join it with mf.join(address). MLFABRIC_SECRET guards it."""
    settings = from_environment(listen, name=name, log=log, insecure=insecure or None)
    _log_to_terminal()
    engine = Engine(
        name,
        ArrayData(),
        FileLog(settings.log) if settings.log else NoLog(),
        parse_address(listen),
        settings.secret,
        settings.insecure,
    )
    engine.node.start_role("scheduler", SchedulerSettings(name))
    engine.start()
    typer.echo(f"scheduler {name} listens on {format_address(*engine.address)}; Ctrl-C ends it")
    _wait_for_signal()
    engine.stop()


@node_app.command()
def node(
    address: Annotated[str, typer.Argument(help="the scheduler's address, host:port")],
    roles: Annotated[str, typer.Option("--roles", help="its uses")] = "aggregator,server,replica",
    job: Annotated[str, typer.Option("--job")] = "job",
    name: Annotated[str | None, typer.Option("--name")] = None,
    up: Annotated[str | None, typer.Option("--up", help="rate of the uplink, for example 200mbit")] = None,
    down: Annotated[str | None, typer.Option("--down", help="rate of the downlink")] = None,
    wait: Annotated[float, typer.Option("--wait", help="seconds to wait for the scheduler")] = 10.0,
    log: _Log = None,
    insecure: _Insecure = False,
) -> None:
    """Join a fabric as a host that aggregates, serves or follows, without training itself."""
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
    )
    _log_to_terminal()
    with join_with(settings, wanted, wait) as fabric:
        typer.echo(f"{fabric.name} joined job {job} as {', '.join(wanted)}; Ctrl-C leaves")
        _wait_for_signal()


def _log_to_terminal() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def _wait_for_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
