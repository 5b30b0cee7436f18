"""Does a link carry what was asked? Sends real frames through its real queue and counts what comes out.

The frames go to an address that bridges never forward (IEEE 802.1D, 01-80-C2-00-00-01), so a probe loads
one direction of one link and nothing else.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlfabric.errors import FabricError
from mlfabric.lab.shaping import LinkEnd
from mlfabric.lab.wiring import Wiring
from mlfabric.units import FRAME_L2_BYTES, format_rate

TOLERANCE = 0.05
_ATTEMPTS = 6
_WINDOW_S = 0.015
_MIN_FRAMES = 60  # counted in a window, so that one frame more or less is within the tolerance
_MIN_FRAME_BYTES = 100
_GIVE_UP_S = 2.0
_HEADER = bytes.fromhex("0180c2000001 024d4c00ffff 88b5")  # to nobody, from us, local experimental


@dataclass(frozen=True, slots=True)
class Measured:
    link: str
    asked_bps: float
    measured_bps: float

    @property
    def error(self) -> float:
        return self.measured_bps / self.asked_bps - 1


def measure_all(wiring: Wiring) -> list[Measured]:
    """Measure every link of the lab in turn; a FabricError names the first that isn't as asked."""
    results = []
    for port in wiring.blueprint.ports:
        for direction in ("up", "down"):
            result = measure_link(wiring, port.owner, direction)
            if abs(result.error) > TOLERANCE:
                raise FabricError(
                    f"the lab can't be built as asked: {result.link} should carry "
                    f"{format_rate(result.asked_bps)} and measures {format_rate(result.measured_bps)}; "
                    "ask for less, or give the machine more processor time"
                )
            results.append(result)
    return results


def measure_link(wiring: Wiring, owner: str, direction: str) -> Measured:
    """The best of a few tries: a busy machine can only make a link look slower than it is."""
    end = wiring.end(owner, direction)
    namespace, device = wiring.sender(owner, direction)
    received = wiring.received_bytes(owner, direction)
    delay_s = wiring.port(owner).delay_s
    best: Measured | None = None
    with wiring.socket_inside(namespace, socket.AF_PACKET, socket.SOCK_RAW, 0) as source:
        source.bind((device, 0))
        source.setblocking(False)
        source.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        for attempt in range(_ATTEMPTS):
            rate_bps = _rate(source, end, received, _WINDOW_S * (1 + attempt), delay_s)
            now = Measured(end.name, end.shape.rate_bps, rate_bps)
            if best is None or abs(now.error) < abs(best.error):
                best = now
            if abs(best.error) <= TOLERANCE:
                break
    end.empty_queue()
    assert best is not None
    return best


def _rate(
    source: socket.socket, end: LinkEnd, received: Callable[[], int], window_s: float, delay_s: float
) -> float:
    bytes_per_s = end.shape.bytes_per_s
    size = round(min(FRAME_L2_BYTES, max(_MIN_FRAME_BYTES, bytes_per_s * window_s / _MIN_FRAMES)))
    window_s = max(window_s, _MIN_FRAMES * size / bytes_per_s)
    frame = _HEADER.ljust(size, b"\0")
    began = time.monotonic()
    before = received()
    # Past the bucket, the link runs at its rate.
    warm = before + 2 * end.shape.burst_bytes + 4 * size
    while (have := received()) < warm:
        _fill(source, frame)
        if time.monotonic() - began > _GIVE_UP_S + delay_s + (warm - before) / bytes_per_s:
            return 8 * (have - before) / (time.monotonic() - began)
    start, start_bytes = time.monotonic(), received()
    while time.monotonic() - start < window_s:
        _fill(source, frame)
    end_bytes, end_time = received(), time.monotonic()
    return 8 * (end_bytes - start_bytes) / (end_time - start)


def _fill(source: socket.socket, frame: bytes) -> None:
    """Keep the queue full for a moment, then let the link work."""
    try:
        for _ in range(64):
            source.send(frame)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
            raise
        select.select([], [source], [], 0.0002)
