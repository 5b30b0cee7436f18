"""TCP streams between hosts of a lab, made and measured inside the test's own process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from mlfabric.lab import Lab
from mlfabric.lab.manifest import MachineLoad

# From this share of stolen processor time on, how fast something is says nothing of a lab.
MUCH_STOLEN = 0.03
# Streams that are to fill a link do so by a control that waits for no timers, and that every kernel has: on a
# machine whose timers are 0.3 ms late BBR, which paces, fills two thirds of 80 Mb/s.
FILLING = "reno"


@dataclass
class Stream:
    """One TCP stream that never runs dry; `arrived` holds (time, payload bytes so far) of every reading."""

    arrived: list[tuple[float, int]] = field(default_factory=list)

    def bytes_at(self, when: float) -> int:
        return max((count for time_s, count in self.arrived if time_s <= when), default=0)

    def rate(self, begin: float, end: float) -> float:
        """Payload bytes per second between two times."""
        inside = [entry for entry in self.arrived if begin <= entry[0] <= end]
        if len(inside) < 2:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


@contextlib.contextmanager
def streaming(lab: Lab, source: str, target: str, congestion: str | None = None) -> Iterator[Stream]:
    """Send from one host to the other as fast as it goes, for as long as the block lasts."""
    stream = Stream()
    over = threading.Event()
    with lab.host(target).socket() as server, lab.host(source).socket() as out:
        server.bind((lab.host(target).address, 0))
        server.listen(1)
        if congestion is not None:
            out.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        out.connect(server.getsockname())
        inward, _ = server.accept()
        # Closing throws away what is queued instead of sending it.
        out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        threads = [
            threading.Thread(target=_send, args=(out, over)),
            threading.Thread(target=_receive, args=(inward, stream)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield stream
        finally:
            over.set()
            with contextlib.suppress(OSError):
                out.shutdown(socket.SHUT_RDWR)
            out.close()
            with contextlib.suppress(OSError):
                inward.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            inward.close()


def _send(out: socket.socket, over: threading.Event) -> None:
    chunk = bytes(256 * 1024)
    with contextlib.suppress(OSError):
        while not over.is_set():
            out.send(chunk)


def _receive(inward: socket.socket, stream: Stream) -> None:
    total, scratch = 0, bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while count := inward.recv_into(scratch, 0, socket.MSG_TRUNC):
            total += count
            stream.arrived.append((time.monotonic(), total))


def measured_rate(
    lab: Lab,
    source: str,
    target: str,
    warm_s: float = 0.25,
    for_s: float = 0.4,
    congestion: str | None = None,
) -> float:
    """Payload bytes per second of one stream, past its start."""
    with streaming(lab, source, target, congestion) as stream:
        begin = time.monotonic() + warm_s
        time.sleep(warm_s + for_s)
        return stream.rate(begin, begin + for_s)


def steady_rate(lab: Lab, source: str, target: str, asked: float) -> float:
    """The rate of a stream, tried again where a busy machine held it back; it can't make one faster."""
    got = 0.0
    load = MachineLoad()
    for _ in range(6):
        got = max(got, measured_rate(lab, source, target, congestion=FILLING))
        load.update()
        if got > 0.97 * asked:
            return got
    if got < 0.95 * asked and (load.busy_share() > 0.9 or load.stolen_share() > MUCH_STOLEN):
        pytest.skip(
            f"the processors are {load.busy_share():.0%} busy, "
            f"{load.stolen_share():.0%} with other machines, and carry {got / asked:.0%} of the rate"
        )
    return got


def can_reach(lab: Lab, source: str, target: str, timeout_s: float = 0.4) -> bool:
    """Whether a datagram from one host arrives at the other."""
    with (
        lab.host(target).socket(kind=socket.SOCK_DGRAM) as inward,
        lab.host(source).socket(kind=socket.SOCK_DGRAM) as out,
    ):
        inward.bind((lab.host(target).address, 0))
        inward.settimeout(timeout_s / 4)
        for _ in range(4):
            out.sendto(b"hello", inward.getsockname())
            with contextlib.suppress(TimeoutError):
                return inward.recv(16) == b"hello"
    return False
