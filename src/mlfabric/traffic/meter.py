"""The live meter: packets from an interface as they pass, burstiness every interval.

Uses a Linux packet socket with the kernel's own stamps and needs root (CAP_NET_RAW). What the kernel drops
because the meter is too slow is counted and said; nothing is estimated.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from mlfabric.errors import FabricError
from mlfabric.traffic.envelopes import envelope
from mlfabric.traffic.trace import NS_PER_S, Origin, Trace

_ETH_P_ALL: Final = 0x0003
_SO_TIMESTAMPNS: Final = 35  # also the type of the control message that carries the stamp
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_PACKET_OUTGOING: Final = 4
_RECEIVE_BUFFER: Final = 1 << 26
METER_SCALES_NS: Final = (100_000, 1_000_000, 10_000_000, 100_000_000)


@dataclass(frozen=True)
class Reading:
    """One interval of the meter."""

    start_ns: int  # since 1970
    length_s: float
    trace: Trace
    dropped: int  # by the kernel, in this interval

    @property
    def mean_rate_bps(self) -> float:
        return self.trace.total_bytes * 8 / self.length_s

    def peaks(self) -> list[tuple[int, float, float]]:
        """(tau, most bytes, peak to mean) for the scales that fit the interval."""
        if not len(self.trace) or not self.mean_rate_bps:
            return []
        rows = []
        for tau in METER_SCALES_NS:
            if tau > self.length_s * NS_PER_S:
                continue
            peak = envelope(self.trace, min(tau, self.trace.span_ns))
            held = peak.bytes if peak else 0
            rows.append((tau, held, held * 8e9 / tau / self.mean_rate_bps))
        return rows


class Meter:
    """An open packet socket; iterate `readings`."""

    def __init__(self, interface: str, direction: str = "both", write: Path | None = None, snaplen: int = 96):
        self._interface, self._direction, self._snaplen = interface, direction, snaplen
        self._file: BinaryIO | None = None
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        except PermissionError:
            raise FabricError("a live capture needs root (or CAP_NET_RAW); run it with sudo") from None
        except (AttributeError, OSError) as error:
            raise FabricError(f"packet sockets are not available here: {error}") from None
        try:
            self._socket.bind((interface, 0))
        except OSError:
            self._socket.close()
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise FabricError(f"there is no interface {interface!r}; there are {known}") from None
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        if write is not None:
            self._file = open(write, "wb")  # noqa: SIM115 - closed with the meter
            self._file.write(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, snaplen, 1))

    def close(self) -> None:
        self._socket.close()
        if self._file is not None:
            self._file.close()

    def readings(self, interval_s: float, duration_s: float | None) -> Iterator[Reading]:
        """One reading per interval until the duration is over (None: until stopped)."""
        begin = time.monotonic()
        while duration_s is None or time.monotonic() - begin < duration_s - 1e-6:
            yield self._one(interval_s)

    def _one(self, interval_s: float) -> Reading:
        times: list[int] = []
        sizes: list[int] = []
        started = time.time_ns()
        finish = time.monotonic() + interval_s
        while (left := finish - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data, control, flags, address = self._socket.recvmsg(self._snaplen, 64, socket.MSG_TRUNC)
            except TimeoutError:
                break
            length = self._length(data, flags)
            if not self._wanted(address[2]):
                continue
            stamp = _stamp(control) or time.time_ns()
            times.append(stamp)
            sizes.append(length)
            if self._file is not None:
                head = struct.pack(
                    "<IIII", stamp // NS_PER_S, stamp % NS_PER_S, len(data), max(length, len(data))
                )
                self._file.write(head + data)
        origin = Origin(format="live", vantage=f"{socket.gethostname()} {self._interface}")
        trace = Trace.from_arrays(times, sizes, origin=origin)
        return Reading(started, interval_s, trace, self._dropped())

    def _length(self, data: bytes, flags: int) -> int:
        """The frame's length from its own IP header where the socket gave only a part of it."""
        if not flags & socket.MSG_TRUNC or len(data) < 20:
            return len(data)
        kind = data[12:14]
        if kind == b"\x08\x00":
            total = int.from_bytes(data[16:18], "big")
            return max(14 + total, len(data))
        if kind == b"\x86\xdd":
            return max(54 + int.from_bytes(data[18:20], "big"), len(data))
        return len(data)

    def _wanted(self, kind: int) -> bool:
        if self._interface == "lo" and kind == _PACKET_OUTGOING:
            return False  # the loopback shows every packet twice
        if self._direction == "both":
            return True
        return (kind == _PACKET_OUTGOING) == (self._direction == "out")

    def _dropped(self) -> int:
        """Packets the kernel dropped since the last call; reading the counter clears it."""
        _, dropped = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        return int(dropped)


def _stamp(control: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
            second, nanosecond = struct.unpack("qq", data[:16])
            return int(second) * NS_PER_S + int(nanosecond)
    return None
