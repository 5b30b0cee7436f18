"""The facts of this host that `mlfabric.doctor` judges: read from /proc, /sys and the kernel, never set."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from pathlib import Path

from mlfabric.doctor import SYSCTLS, Facts, Interface
from mlfabric.runtime.pacing import share_evenly

SIOCGIFADDR = 0x8915  # see netdevice(7)


def gather(
    scheduler: tuple[str, int] | None = None,
    round_trip_s: float | None = None,
    clock: tuple[float, float] | None = None,
    members: int | None = None,
) -> Facts:
    """The facts of this host; what only a scheduler can tell comes from whoever asked it."""
    return Facts(
        sysctls={key: value for key in SYSCTLS if (value := _read(_proc(key))) is not None},
        congestion=_congestion(),
        interfaces=_interfaces(Path("/sys/class/net")),
        route=_route(scheduler) if scheduler is not None else None,
        round_trip_s=round_trip_s,
        clock_offset_s=clock[0] if clock else None,
        clock_uncertainty_s=clock[1] if clock else None,
        members=members,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=len(os.sched_getaffinity(0)),
    )


def link_towards(address: tuple[str, int]) -> tuple[str | None, float | None]:
    """The interface that leads there, and the bits per second it can carry; None: nobody knows."""
    if address[0] in ("", "0.0.0.0", "::"):
        return None, None  # all of them
    name = _route(address)
    found = (each for each in _interfaces(Path("/sys/class/net")) if each.name == name)
    return name, next((each.speed_bps for each in found), None)


def _congestion() -> str | None:
    """Of a socket that is prepared as those for bulk data are; who may not choose gets the system's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            share_evenly(sock)
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    except OSError:
        return None


def _proc(key: str) -> Path:
    return Path("/proc/sys", *key.split("."))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _interfaces(folder: Path) -> tuple[Interface, ...]:
    found = []
    for place in sorted(folder.iterdir()) if folder.is_dir() else []:
        mtu, speed = _read(place / "mtu"), _read(place / "speed")
        if place.name == "lo" or mtu is None or _read(place / "operstate") not in ("up", "unknown"):
            continue
        known = speed is not None and speed.isdigit() and int(speed) > 0
        found.append(Interface(place.name, int(speed) * 1e6 if known and speed else None, int(mtu)))
    return tuple(found)


def _route(scheduler: tuple[str, int]) -> str | None:
    """The interface that the kernel would use; a datagram socket is connected without sending anything."""
    family = socket.AF_INET6 if ":" in scheduler[0] else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(scheduler)
            ours = sock.getsockname()[0]
    except OSError:
        return None
    return next((name for name, address in _addresses() if address == ours), None)


def _addresses() -> list[tuple[str, str]]:
    """(interface, address) of all addresses of this host."""
    pairs: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                pairs.append(
                    (name, socket.inet_ntoa(fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)[20:24]))
                )
            except OSError:
                continue  # it has none
    for line in (_read(Path("/proc/net/if_inet6")) or "").splitlines():
        words = line.split()
        if len(words) == 6:
            pairs.append((words[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))))
    return pairs
