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


class Presence(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    size: int
    network: str  # equal where ranks share a loopback interface


class Verdict(msgspec.Struct, frozen=True):
    """What rank 0 answers."""

    error: str = ""
    address: str = ""
    secret: str = ""  # empty: everybody has been given one


def meet(
    store: Any, rank: int, names: Sequence[str], job: str, timeout: timedelta, settings: TorchSettings
) -> Fabric:
    """Become a member of a fabric of these ranks; rank 0 embeds its scheduler unless one was named."""
    until = time.monotonic() + timeout.total_seconds()
    presence = Presence(len(names), _network())
    store.set(f"here/{rank}", msgspec.json.encode(presence).decode())
    if rank:
        return _follow(store, rank, names, job, until, settings)
    try:
        others = _collect(store, presence, len(names), until)
        fabric, verdict = _lead(store, names, job, others, settings, until)
    except FabricError as error:
        store.set("verdict", msgspec.json.encode(Verdict(error=str(error))).decode())
        raise CollectiveError(str(error)) from None
    store.set("verdict", msgspec.json.encode(verdict).decode())
    return fabric


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
    store: Any,
    names: Sequence[str],
    job: str,
    others: list[Presence],
    settings: TorchSettings,
    until: float,
) -> tuple[Fabric, Verdict]:
    drawn = "" if settings.secret else secrets.token_hex(32)
    secret = settings.secret or drawn.encode()
    embedded = settings.scheduler is None
    if settings.scheduler is not None:
        address = settings.scheduler
    elif settings.address is not None:
        host, _ = parse_address(settings.address)
        address = settings.address if settings.address != host else format_address(host, 0)
    elif all(other.network == _network() for other in others):
        address = "127.0.0.1:0"
    else:
        address = format_address(_own_address(store), 0)
    fabric = _join(address, names[0], job, len(names), embedded, secret, until)
    return fabric, Verdict(address=fabric.address if embedded else address, secret=drawn)


def _follow(
    store: Any, rank: int, names: Sequence[str], job: str, until: float, settings: TorchSettings
) -> Fabric:
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
        return _join(verdict.address, names[rank], job, len(names), False, secret, until + ANSWER_S)
    except FabricError as error:
        raise CollectiveError(str(error)) from None


def _join(address: str, name: str, job: str, size: int, embed: bool, secret: bytes, until: float) -> Fabric:
    settings = from_environment(
        address, job=job, name=name, embed_scheduler=embed, secret=secret, expected=size
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
        boot = open("/proc/sys/kernel/random/boot_id", encoding="ascii").read().strip()  # noqa: SIM115
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
