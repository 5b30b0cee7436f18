"""How ranks that share nothing but torch's store find each other: who is here, where to go, the secret.

Every rank says what it takes the world for; rank 0 looks whether all agree and answers with an address and a
fresh secret, or with what is wrong. So a rank that is missing or disagrees is named on every rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from mlfabric.api import Fabric, join_with
from mlfabric.config import TorchSettings, format_address, from_environment, is_loopback, parse_address
from mlfabric.errors import FabricError
from mlfabric.torch.errors import CollectiveError, CollectiveTimeoutError

# The others wait so much longer for rank 0's answer than rank 0 waits for them.
ANSWER_S = 5.0
# A rank that says nothing for so long, or for the time-out of the job if that is longer, is taken for lost.
SILENCE_S = 600.0
# The job's name where it has a scheduler of its own.
EMBEDDED = "torch"


class Presence(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    size: int
    network: str  # equal where ranks share a loopback interface


class Verdict(msgspec.Struct, frozen=True):
    """What rank 0 answers."""

    error: str = ""
    address: str = ""
    secret: str = ""  # empty: everybody has been given one
    job: str = EMBEDDED


def node_name(job: str, rank: int) -> str:
    """What a rank is called in its fabric."""
    return f"rank{rank}" if job == EMBEDDED else f"{job}.rank{rank}"


def meet(
    store: Any, rank: int, ranks: Sequence[int], timeout: timedelta, settings: TorchSettings
) -> tuple[Fabric, str]:
    """Become a member of a fabric of these ranks; the fabric, and the name of the job in it.

    The first of them embeds the scheduler, unless one was named.
    """
    until = time.monotonic() + timeout.total_seconds()
    presence = Presence(len(ranks), _network())
    store.set(f"here/{rank}", msgspec.json.encode(presence).decode())
    if rank:
        return _follow(store, rank, ranks, until, settings)
    try:
        others = _collect(store, presence, len(ranks), until)
        fabric, verdict = _lead(store, ranks, others, settings, until)
    except FabricError as error:
        store.set("verdict", msgspec.json.encode(Verdict(error=str(error))).decode())
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(str(error)) from None
    store.set("verdict", msgspec.json.encode(verdict).decode())
    return fabric, verdict.job


def _collect(store: Any, mine: Presence, size: int, until: float) -> list[Presence]:
    others = []
    missing = []
    for rank in range(1, size):
        left = max(until - time.monotonic(), 0.05)
        written = _read(store, f"here/{rank}", left)
        if written is None:
            missing.append(rank)
            continue
        theirs = msgspec.json.decode(written, type=Presence)
        if theirs.size != mine.size:
            raise CollectiveError(
                f"the ranks disagree on the world: rank 0 was told of {mine.size} ranks, "
                f"rank {rank} of {theirs.size}; give all the same world size"
            )
        others.append(theirs)
    if missing:
        listed = ", ".join(f"rank {rank}" for rank in missing)
        raise CollectiveTimeoutError(f"{listed} did not come to init_process_group in time")
    return others


def _lead(
    store: Any, ranks: Sequence[int], others: list[Presence], settings: TorchSettings, until: float
) -> tuple[Fabric, Verdict]:
    drawn = "" if settings.secret else secrets.token_hex(32)
    secret = settings.secret or drawn.encode()
    embedded = settings.scheduler is None
    job = EMBEDDED
    if settings.scheduler is not None:
        address = settings.scheduler
        job = f"torch-{secrets.token_hex(4)}"  # other jobs may be there
    elif settings.address is not None:
        host, _ = parse_address(settings.address)
        address = settings.address if settings.address != host else format_address(host, 0)
    elif all(other.network == _network() for other in others):
        address = "127.0.0.1:0"
    else:
        address = format_address(_own_address(store), 0)
    if not embedded and drawn:
        raise CollectiveError("a scheduler is named by MLFABRIC_SCHEDULER; set MLFABRIC_SECRET to its secret")
    fabric = _join(address, ranks[0], job, len(ranks), embedded, secret, until, settings)
    return fabric, Verdict(address=fabric.address if embedded else address, secret=drawn, job=job)


def _follow(
    store: Any, rank: int, ranks: Sequence[int], until: float, settings: TorchSettings
) -> tuple[Fabric, str]:
    written = _read(store, "verdict", max(until - time.monotonic(), 0.05) + ANSWER_S)
    if written is None:
        raise CollectiveTimeoutError("rank 0 did not come to init_process_group in time")
    verdict = msgspec.json.decode(written, type=Verdict)
    if verdict.error:
        kind = CollectiveTimeoutError if "did not come" in verdict.error else CollectiveError
        raise kind(verdict.error)
    secret = settings.secret or verdict.secret.encode()
    if not secret:
        raise CollectiveError(
            "rank 0 was given a secret by MLFABRIC_SECRET and this rank was not; set it for all"
        )
    try:
        until += ANSWER_S
        fabric = _join(verdict.address, ranks[rank], verdict.job, len(ranks), False, secret, until, settings)
    except FabricError as error:
        raise CollectiveError(str(error)) from None
    return fabric, verdict.job


def _join(
    address: str,
    rank: int,
    job: str,
    size: int,
    embed: bool,
    secret: bytes,
    until: float,
    wishes: TorchSettings,
) -> Fabric:
    settings = from_environment(
        address,
        job=job,
        name=node_name(job, rank),
        embed_scheduler=embed,
        secret=secret,
        expected=size,
        engine=wishes.engine,
        pace=wishes.pace,
    )
    left = max(until - time.monotonic(), 1.0)
    # A script may hold the interpreter for long: silence alone must not end a job. Lost connections do.
    settings = dataclasses.replace(settings, least_lease_s=max(left, SILENCE_S))
    return join_with(settings, ("worker",), timeout=left)


def _read(store: Any, key: str, timeout_s: float) -> bytes | None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:  # torch's DistStoreError and DistNetworkError
        return None
    written: bytes = store.get(key)
    return written


def _network() -> str:
    """Names the network stack of this process: processes that see the same loopback say the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_address(store: Any) -> str:
    """An address of this host that other hosts reach: the one towards the store, or the host name's."""
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    where = getattr(base, "host", None)
    if where is not None and not is_loopback(where):
        with contextlib.suppress(OSError):
            return _towards(where)
    with contextlib.suppress(OSError):
        found: str = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
        if not is_loopback(found):
            return found
    raise CollectiveError(
        "can't tell which address of this host the other ranks reach; set MLFABRIC_ADDRESS on rank 0"
    )


def _towards(where: str) -> str:
    family, kind, _, _, address = socket.getaddrinfo(where, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)  # nothing is sent: the kernel only chooses the way
        own: str = sock.getsockname()[0]
    if is_loopback(own):  # the store is on this very host, under an address of its own
        own = str(address[0])
    return own
