"""Asks who listens at an address, before anything else is started: errors here are the clearest to tell."""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from mlfabric.config import format_address, parse_address
from mlfabric.errors import ConnectError
from mlfabric.messages import ControlMessage, DrainWanted, LimitWanted, StatusWanted
from mlfabric.runtime.tls import Tls
from mlfabric.runtime.trust import NONCE_BYTES, Handshake, Purpose, Refused
from mlfabric.wire import (
    MAX_CONTROL_BYTES,
    Frame,
    FrameReader,
    Kind,
    WireError,
    decode_message,
    encode_frame,
    encode_message,
)

RETRY_S = 0.1


class NobodyThereError(ConnectError):
    """No scheduler was found in time, and nobody who knows one."""


class NoSchedulerError(NobodyThereError):
    """A member answered, who knows of no scheduler at present."""


class Found(NamedTuple):
    """Who schedules, where, and our own address on the way there."""

    scheduler: str
    address: tuple[str, int]
    ours: str


def find_scheduler(
    address: tuple[str, int],
    name: str,
    secret: bytes,
    timeout_s: float,
    job: str = "",
    tls: Tls | None = None,
    others: Sequence[tuple[str, int]] = (),
) -> Found:
    """Ask at an address, or at several by turns, and wait for somebody to come up there; any member knows who
    schedules."""
    ways = itertools.cycle((address, *others))
    address = next(ways)
    where = format_address(*address)
    listed = where if not others else " or ".join(format_address(*each) for each in (address, *others))
    until = time.monotonic() + timeout_s
    while True:
        left = until - time.monotonic()
        try:
            with socket.create_connection(address, timeout=max(min(left, 5.0), 0.05)) as plain:
                plain.settimeout(max(min(left, 5.0), 0.05))
                ours = plain.getsockname()[0]
                with _secured(plain, where, tls) as sock:
                    scheduler, elsewhere = _ask(sock, where, _hello(name, secret, Purpose.PROBE, job))
                if not elsewhere:
                    return Found(scheduler, address, ours)
            address, where = parse_address(elsewhere), elsewhere
            if time.monotonic() + RETRY_S >= until:
                raise NobodyThereError(
                    f"{scheduler} at {where} is said to schedule, but did not answer in time"
                )
            continue
        except NoSchedulerError:
            if time.monotonic() + RETRY_S >= until:
                raise
        except socket.gaierror:
            raise ConnectError(
                f"the host name in {where} is unknown; check the scheduler's address"
            ) from None
        except (ConnectionRefusedError, ConnectionResetError, TimeoutError, OSError) as error:
            why = "it did not answer" if isinstance(error, TimeoutError) else (error.strerror or "it hung up")
            if time.monotonic() + RETRY_S >= until:
                raise NobodyThereError(
                    f"no scheduler answered at {listed} within {timeout_s:g} s ({why.lower()}); "
                    f"start one with `mlfabric scheduler --listen {format_address(*next(ways))}` "
                    "or check the address"
                ) from None
        time.sleep(RETRY_S)
        # Whom a member took for the scheduler may be gone: ask again where we were told to.
        address = next(ways)
        where = format_address(*address)


def _hello(name: str, secret: bytes, purpose: Purpose, job: str) -> Handshake:
    return Handshake(name, secret, secrets.token_bytes(NONCE_BYTES), purpose, job=job)


def ask_scheduler(
    address: tuple[str, int],
    secret: bytes,
    question: StatusWanted | DrainWanted | LimitWanted,
    timeout_s: float,
    job: str = "",
    tls: Tls | None = None,
) -> ControlMessage:
    """The scheduler's answer; `address` is any member's."""
    name = f"operator-{secrets.token_hex(4)}"
    found = find_scheduler(address, name, secret, timeout_s, job, tls)
    where = format_address(*found.address)
    try:
        with (
            socket.create_connection(found.address, timeout=timeout_s) as plain,
            _secured(plain, where, tls) as sock,
        ):
            _shake_hands(sock, where, _hello(name, secret, Purpose.QUERY, job))
            sock.sendall(encode_message("scheduler", question))
            return decode_message(_next_frame(sock, MAX_CONTROL_BYTES).body).message
    except OSError as error:
        why = "it did not answer" if isinstance(error, TimeoutError) else (error.strerror or "it hung up")
        raise ConnectError(f"the scheduler at {where} was asked in vain: {why.lower()}") from None
    except WireError as error:
        raise ConnectError(f"the scheduler at {where} answered something else: {error}") from None


def _secured(sock: socket.socket, where: str, tls: Tls | None) -> socket.socket:
    if tls is None:
        return sock
    try:
        return tls.wrap_blocking(sock)
    except Refused as refusal:
        raise ConnectError(f"what listens at {where} was refused: {refusal}") from None


def _next_frame(sock: socket.socket, limit_bytes: int) -> Frame:
    reader = FrameReader()
    reader.limit_bytes = limit_bytes
    while True:
        count = sock.recv_into(reader.wanted())
        if count == 0:
            raise ConnectionResetError("it hung up")
        frame = reader.advance(count)
        if frame is not None:
            return frame


def _ask(sock: socket.socket, where: str, handshake: Handshake) -> tuple[str, str]:
    """(who schedules, at which other address; none: it is who answered)."""
    _shake_hands(sock, where, handshake)
    scheduler, elsewhere = handshake.scheduler
    if scheduler != handshake.peer and not elsewhere:
        raise NoSchedulerError(
            f"{handshake.peer} at {where} is a member of a fabric that has no scheduler now"
        )
    return scheduler, elsewhere


def _shake_hands(sock: socket.socket, where: str, handshake: Handshake) -> None:
    reader = FrameReader()
    sock.sendall(encode_frame(Kind.HANDSHAKE, handshake.begin()))
    while not handshake.done:
        count = sock.recv_into(reader.wanted())
        if count == 0:
            raise ConnectionResetError("it hung up")
        try:
            frame = reader.advance(count)
            if frame is None:
                continue
            answer = handshake.feed(frame.body)
        except WireError:
            raise ConnectError(
                f"what listens at {where} is not an MLfabric scheduler; check the address and port"
            ) from None
        except Refused as refusal:
            raise ConnectError(f"the scheduler at {where} did not let us in: {refusal}") from None
        if answer is not None:
            sock.sendall(encode_frame(Kind.HANDSHAKE, answer))
