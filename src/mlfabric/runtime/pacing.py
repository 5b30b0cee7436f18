"""Socket settings that shape what we send; the kernel paces TCP by itself, without a queueing discipline."""

from __future__ import annotations

import contextlib
import socket
import struct

# Not in Python's socket module; see socket(7) of the Linux kernel, asm-generic/socket.h.
SO_MAX_PACING_RATE = 47
TCP_NOTSENT_LOWAT = 25
_UNLIMITED = 2**64 - 1

# Unsent data that the kernel holds for us; more would only make us late in changing our mind.
NOTSENT_BYTES = 256 * 1024
# A host that answers none of so many probes, one each so many seconds, is gone.
KEEPALIVE_S = 5
KEEPALIVE_PROBES = 4


def set_pace(sock: socket.socket, rate_bytes_per_s: float | None) -> None:
    """Let the kernel send at most so many payload bytes per second; None: as fast as TCP allows."""
    rate = _UNLIMITED if rate_bytes_per_s is None else max(int(rate_bytes_per_s), 1)
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", min(rate, _UNLIMITED)))


def share_evenly(sock: socket.socket) -> None:
    """Use a congestion control whose flows share a link evenly.

    The flows of an all-reduce have to progress abreast. BBR flows of one host take very unequal shares of its
    link: on eight hosts of 200 Mb/s an all-reduce took 1.13 times its bound by bbr, 1.02 by cubic. Pushes of
    32 MB over a path of 20 ms and 200 Mb/s took 2.9 s by bbr, 1.7 s by cubic, on a machine busy with more.
    """
    with contextlib.suppress(OSError):  # not in this kernel, or not allowed: the default then
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def prepare_socket(sock: socket.socket, bulk: bool) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if bulk:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, NOTSENT_BYTES)
        share_evenly(sock)


def notice_death(sock: socket.socket) -> None:
    """Have the kernel find out when the other host is gone; a process that is only busy still answers."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, KEEPALIVE_S * KEEPALIVE_PROBES * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
