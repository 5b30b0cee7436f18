"""Setting a member's engine up: where to listen, whom to follow, which roles to begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mlfabric.config import Settings, format_address
from mlfabric.data import ArrayData
from mlfabric.errors import ConnectError
from mlfabric.eventlog import FileLog, LogSink, NoLog
from mlfabric.messages import MemberInfo
from mlfabric.roles.actions import MemberSettings, SchedulerSettings
from mlfabric.runtime.engine import Engine
from mlfabric.runtime.probe import Found, NobodyThereError, find_scheduler
from mlfabric.runtime.tls import Tls

# How long the first of several addresses looks for a scheduler at the others before it becomes one; after a
# restart the others may have to agree on a successor first.
ALONE_S = 1.0
ALONE_RESTARTED_S = 8.0

AnyEngine = TypeVar("AnyEngine", bound=Engine)
MakeEngine = Callable[[str, ArrayData, LogSink, tuple[str, int], bytes, bool, Tls | None, bool], AnyEngine]


def make_engine(
    name: str,
    data: ArrayData,
    log: LogSink,
    listen: tuple[str, int],
    secret: bytes,
    insecure: bool,
    tls: Tls | None,
    pace: bool,
) -> Engine:
    return Engine(name, data, log, listen, secret, insecure, tls=tls, pace=pace)


def prepare_engine(
    settings: Settings, roles: tuple[str, ...], timeout: float, data: ArrayData, make: MakeEngine[AnyEngine]
) -> tuple[AnyEngine, str]:
    """An engine that has yet to be started and to join, and the name of whoever schedules."""
    log: LogSink = FileLog(settings.log) if settings.log is not None else NoLog()
    tls = Tls(settings.tls) if settings.tls is not None else None
    found = None if settings.embed_scheduler else _find(settings, timeout, tls)
    if found is None:
        listen, leader = settings.scheduler, settings.name
    else:
        # The address by which the scheduler is reached is the one by which it reaches us.
        listen, leader = settings.listen or (found.ours, 0), found.scheduler
    engine = make(settings.name, data, log, listen, settings.secret, settings.insecure, tls, settings.pace)
    engine.reception.job = settings.job
    if found is None:
        engine.node.start_role(
            "scheduler", SchedulerSettings(settings.name, least_lease_s=settings.least_lease_s)
        )
    else:
        engine.know(leader, found.address)
    member = MemberInfo(
        node=settings.name,
        host=settings.host,
        address=format_address(*engine.address),
        roles=roles,
        up_bytes_per_s=settings.up_bytes_per_s,
        down_bytes_per_s=settings.down_bytes_per_s,
        job=settings.job,
        rack=settings.rack,
        rates_guessed=settings.rates_guessed,
        max_rate_bytes_per_s=settings.max_rate_bytes_per_s,
        job_max_rate_bytes_per_s=settings.job_max_rate_bytes_per_s,
    )
    engine.node.start_role("member", MemberSettings(member, leader, settings.expected))
    return engine, leader


def _find(settings: Settings, timeout: float, tls: Tls | None) -> Found | None:
    """Who schedules; None: we do, as nobody else does and it is ours to begin."""
    who = (settings.name, settings.secret)
    if not settings.embeds_if_alone:
        try:
            return find_scheduler(settings.scheduler, *who, timeout, settings.job, tls, settings.others)
        except NobodyThereError:
            if not settings.awaits_rank_0:
                raise
            where = format_address(*settings.scheduler)
            raise ConnectError(
                f"rank 0, which schedules the job at {where}, did not come within {timeout:.3g} s"
            ) from None
    first, *rest = settings.others
    patience = ALONE_RESTARTED_S if settings.restarted else ALONE_S
    try:
        return find_scheduler(first, *who, patience, settings.job, tls, rest)
    except NobodyThereError:
        return None
