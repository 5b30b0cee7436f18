"""Where a member's engine runs if nobody said: in a thread of its process, or in a process of its own.

A thread takes the interpreter from the training script again and again; a process takes nothing but the
memory it shares. It has to be decided before the member joins: its roles and groups stay where they began.
`choose` is pure; the rest looks at this host and process, and starts what was chosen.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlfabric.config import Settings, is_loopback
from mlfabric.data import ArrayData
from mlfabric.runtime.engine import Engine
from mlfabric.runtime.host import link_towards
from mlfabric.runtime.lag import NAP_S, NAPS, STARVED_S, mean_lag
from mlfabric.runtime.membership import make_engine, prepare_engine
from mlfabric.runtime.remote import NoProcessError, RemoteEngine
from mlfabric.units import format_rate, wire_rate

logger = logging.getLogger("mlfabric")

# Up to this link rate a thread costs a training step less than 5 % (benchmarks/interference.py).
SLOW_BPS = 100e6
# With fewer processors for each member the engine takes turns with training wherever it is, and the copies
# between two processes come on top.
LEAST_PROCESSORS = 1.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be known of a member that has yet to join."""

    works: bool  # it may be a worker: something is trained here
    members: int  # of its job; 0: unknown
    loopback: bool  # the job is on this host alone
    neighbours: int  # other members in this process
    processors: float  # for each member on this machine
    link_bps: float | None = None  # what its link carries at most; None: nobody knows
    obstacle: str = ""  # why no process can be had


@dataclass(frozen=True, slots=True)
class Choice:
    engine: str  # "thread" or "process"
    reason: str
    doubtful: bool = False  # what is trained may make it a bad one: worth watching
    forced: bool = False  # the other one would have been better


def choose(facts: Facts, lag_s: Callable[[], float]) -> Choice:
    """`lag_s` measures how late a thread of this process gets the interpreter, and is asked if it matters."""
    if not facts.works:
        return Choice("thread", "nothing is trained here")
    if facts.members == 1:
        return Choice("thread", "the job has no other member")
    if facts.loopback:
        return Choice("thread", "all members are on this host")
    if facts.neighbours:
        return Choice("thread", "this process has another member")
    if facts.processors < LEAST_PROCESSORS:
        few = f"{facts.processors:.2g} processors for each member are too few for two processes"
        return Choice("thread", few)
    rate = facts.link_bps
    if rate is not None and rate <= SLOW_BPS:
        late = lag_s()
        if late <= STARVED_S:
            return Choice("thread", f"a link of {format_rate(rate)} takes little of the interpreter", True)
        reason = f"other threads keep the interpreter for {late * 1e3:.1f} ms"
    elif rate is None:
        reason = "nobody said how fast the link is (up, down)"
    else:
        reason = f"a link of {format_rate(rate)} would take much of the interpreter"
    if facts.obstacle:
        return Choice("thread", f"{facts.obstacle}, though {reason}", forced=True)
    return Choice("process", reason)


def gather(settings: Settings, roles: tuple[str, ...], neighbours: int) -> Facts:
    interface, rate = link_towards(settings.scheduler)
    if not settings.rates_guessed:
        rate = wire_rate(max(settings.up_bytes_per_s, settings.down_bytes_per_s))
    return Facts(
        works="worker" in roles,
        members=settings.expected,
        loopback=is_loopback(settings.scheduler[0]) or interface == "lo",
        neighbours=neighbours,
        processors=settings.processors,
        link_bps=rate,
        obstacle=_obstacle(),
    )


def place_engine(settings: Settings, roles: tuple[str, ...], neighbours: int) -> Choice:
    """What was asked for, or what is best; then it is said why."""
    if settings.engine != "auto":
        return Choice(settings.engine, "it was asked for")
    facts = gather(settings, roles, neighbours)
    choice = choose(facts, lambda: mean_lag(NAPS, NAP_S))
    where = "a thread" if choice.engine == "thread" else "a process of its own"
    # Where nothing is trained nobody wonders.
    level = logging.WARNING if choice.forced else logging.INFO if facts.works else logging.DEBUG
    logger.log(level, "%s serves the network from %s: %s", settings.name, where, choice.reason)
    return choice


def start_engine(
    settings: Settings, roles: tuple[str, ...], choice: Choice, timeout: float
) -> tuple[Engine | RemoteEngine, str]:
    """The engine, and the name of whoever schedules. A process that can't be had, and that nobody asked for,
    becomes a thread."""
    if choice.engine == "process":
        try:
            remote = RemoteEngine(settings, roles, timeout)
            return remote, remote.leader
        except NoProcessError as error:
            if settings.engine == "process":
                raise
            logger.warning("%s; %s serves the network from a thread instead", error, settings.name)
    data = ArrayData(mirror=settings.mirror)
    engine, leader = prepare_engine(settings, roles, timeout, data, make_engine)
    engine.start()
    return engine, leader


def _obstacle() -> str:
    """Memory that is shared is no file in /dev/shm: limits of that do not count, but a sandbox's may."""
    if "python" not in Path(sys.executable or "").name.lower():
        return "this program is not run by a Python of its own"
    try:
        os.close(os.memfd_create("mlfabric"))
    except OSError as error:
        return f"memory can't be shared here ({(error.strerror or str(error)).lower()})"
    return ""
