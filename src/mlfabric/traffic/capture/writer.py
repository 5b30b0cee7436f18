"""Writes a trace as a pcap file that every tool reads: real Ethernet, IPv4, TCP or UDP headers, zero payload.

IP ids and TCP's numbers count on within each flow, and acknowledge what passed the other way: readers that
follow connections would otherwise search through all that was never acknowledged. Checksums are left zero.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

_MAGIC_NS, _MAGIC_US = 0xA1B23C4D, 0xA1B2C3D4
_RECORD_BYTES: Final = 16
_TCP: Final = 6
_TOGETHER: Final = 1 << 16  # packets laid out at once
LEAST_FRAME_BYTES: Final = 54
DEFAULT_SNAPLEN: Final = 96


@dataclass(frozen=True)
class Endpoints:
    """Who a written flow is between."""

    source: str
    destination: str
    source_port: int
    destination_port: int
    protocol: str = "tcp"

    def reversed(self) -> Endpoints:
        return Endpoints(
            self.destination, self.source, self.destination_port, self.source_port, self.protocol
        )

    def header(self) -> NDArray[np.uint8]:
        """The first 54 bytes of its frames; the IP length is filled in per packet."""
        number = {"tcp": 6, "udp": 17}[self.protocol]
        source, target = ipaddress.IPv4Address(self.source), ipaddress.IPv4Address(self.destination)
        ethernet = b"\x02\x00" + target.packed + b"\x02\x00" + source.packed + b"\x08\x00"
        network = (
            struct.pack(">BBHHHBBH", 0x45, 0, 0, 0, 0x4000, 64, number, 0) + source.packed + target.packed
        )
        ports = struct.pack(">HH", self.source_port, self.destination_port)
        if number == 6:
            transport = ports + struct.pack(">IIBBHHH", 0, 0, 0x50, 0x10, 0xFFFF, 0, 0)
        else:
            transport = ports + b"\x00\x00\x00\x00" + bytes(12)
        return np.frombuffer(ethernet + network + transport, np.uint8)


def write_pcap(
    path: str | Path | BinaryIO,
    time_ns: NDArray[np.int64],
    length: NDArray[np.integer[Any]],
    flow: NDArray[np.integer[Any]],
    flows: Sequence[Endpoints],
    snaplen: int = DEFAULT_SNAPLEN,
    nanoseconds: bool = True,
) -> None:
    """Packet i passes at time_ns[i] (since 1970), `length` bytes long (54 or more), in flows[flow[i]]."""
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "wb")) if isinstance(path, str | Path) else path
        magic = _MAGIC_NS if nanoseconds else _MAGIC_US
        file.write(struct.pack("<IHHiIII", magic, 2, 4, 0, 0, snaplen, 1))
        templates = np.stack([each.header() for each in flows])
        numbers = {each: number for number, each in enumerate(flows)}
        reverse = [numbers.get(each.reversed()) for each in flows]
        passed = np.zeros((len(flows), 2), np.int64)  # packets and payload bytes of each flow so far
        for start in range(0, len(time_ns), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            head = templates[flow[part]]
            _count_on(head, flow[part], np.asarray(length[part], np.int64), reverse, passed)
            file.write(_laid_out(time_ns[part], length[part], head, snaplen, nanoseconds))


def _count_on(
    head: NDArray[np.uint8],
    flow: NDArray[np.integer[Any]],
    length: NDArray[np.int64],
    reverse: Sequence[int | None],
    passed: NDArray[np.int64],
) -> None:
    """Fills in IP ids and, for TCP, what was sent and what of the other direction has passed; `passed` goes
    on from piece to piece."""
    payload = np.maximum(length - LEAST_FRAME_BYTES, 0)
    order = np.argsort(flow, kind="stable")
    bounds = np.searchsorted(flow[order], np.arange(len(reverse) + 1))
    places = [order[begin:end] for begin, end in pairwise(bounds)]
    sums = [np.append(0, np.cumsum(payload[place])) for place in places]
    for number, (place, sent) in enumerate(zip(places, sums, strict=True)):
        head[place, 18:20] = _big_endian(passed[number, 0] + np.arange(len(place)), 2)
        if not len(place) or head[place[0], 23] != _TCP:
            continue
        head[place, 38:42] = _big_endian(passed[number, 1] + sent[:-1], 4)
        other = reverse[number]
        if other is not None:
            arrived = sums[other][np.searchsorted(places[other], place)]
            head[place, 42:46] = _big_endian(passed[other, 1] + arrived, 4)
    passed += np.array([(len(place), int(sent[-1])) for place, sent in zip(places, sums, strict=True)])


def _big_endian(values: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    return (values % (1 << 8 * width)).astype(f">u{width}").view(np.uint8).reshape(-1, width)


def _laid_out(
    time_ns: NDArray[np.int64],
    length: NDArray[np.integer[Any]],
    frame: NDArray[np.uint8],
    snaplen: int,
    nanoseconds: bool,
) -> bytes:
    full = np.maximum(length.astype(np.int64), LEAST_FRAME_BYTES)
    captured = np.minimum(full, max(snaplen, LEAST_FRAME_BYTES))
    ends = np.cumsum(captured + _RECORD_BYTES)
    offsets = ends - captured - _RECORD_BYTES
    fields = np.empty((len(full), 4), "<u4")
    fields[:, 0], fraction = np.divmod(time_ns, 1_000_000_000)
    fields[:, 1] = fraction if nanoseconds else fraction // 1000
    fields[:, 2], fields[:, 3] = captured, full
    head = np.empty((len(full), _RECORD_BYTES + LEAST_FRAME_BYTES), np.uint8)
    head[:, :_RECORD_BYTES] = fields.view(np.uint8).reshape(len(full), _RECORD_BYTES)
    head[:, _RECORD_BYTES:] = frame
    network = np.minimum(full - 14, 65_535)
    head[:, _RECORD_BYTES + 16] = network >> 8
    head[:, _RECORD_BYTES + 17] = network & 255
    out = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    out[offsets[:, None] + np.arange(head.shape[1])] = head
    return out.tobytes()
