"""Captures as bytes, written by hand field by field, so that tests do not depend on the project's own
writer."""

from __future__ import annotations

import struct
from dataclasses import dataclass

PACKETS = 10
LENGTH = 1514
STEP_NS = 100_000_000
EPOCH_S = 1_700_000_000


@dataclass(frozen=True)
class Packet:
    time_ns: int
    data: bytes
    length: int


def mac() -> bytes:
    return b"\x02\x00\x00\x00\x00\x02\x02\x00\x00\x00\x00\x01"


def tcp(source_port: int = 40000, target_port: int = 5001) -> bytes:
    return struct.pack(">HHIIBBHHH", source_port, target_port, 0, 0, 0x50, 0x10, 0xFFFF, 0, 0)


def udp(source_port: int, target_port: int) -> bytes:
    return struct.pack(">HHHH", source_port, target_port, 0, 0)


def ipv4(protocol: int = 6, total: int = LENGTH - 14, fragment: int = 0, last: int = 1) -> bytes:
    return struct.pack(
        ">BBHHHBBH4s4s",
        0x45,
        0,
        total,
        7,
        fragment,
        64,
        protocol,
        0,
        bytes([10, 0, 0, last]),
        bytes([10, 0, 0, 9]),
    )


def ipv6(following: int = 6, payload: int = LENGTH - 54) -> bytes:
    source = bytes.fromhex("fd000000000000000000000000000001")
    target = bytes.fromhex("fd000000000000000000000000000009")
    return struct.pack(">IHBB", 0x60000000, payload, following, 64) + source + target


def ethernet(payload: bytes, kind: int = 0x0800) -> bytes:
    return mac() + struct.pack(">H", kind) + payload


def frame(snaplen: int = 96) -> bytes:
    """A plain TCP frame, cut at the snaplen."""
    return (ethernet(ipv4() + tcp()) + bytes(LENGTH))[:snaplen]


def plain(count: int = PACKETS, snaplen: int = 96) -> list[Packet]:
    start = EPOCH_S * 10**9
    return [Packet(start + index * STEP_NS, frame(snaplen), LENGTH) for index in range(count)]


def each_with(data: bytes, length: int = LENGTH) -> list[Packet]:
    return [Packet(packet.time_ns, data, length) for packet in plain()]


def pcap(
    packets: list[Packet],
    order: str = "<",
    magic: int = 0xA1B2C3D4,
    link: int = 1,
    snaplen: int = 262144,
) -> bytes:
    out = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, snaplen, link)
    for packet in packets:
        out += record(packet, order, magic)
    return out


def record(packet: Packet, order: str = "<", magic: int = 0xA1B2C3D4) -> bytes:
    second, rest = divmod(packet.time_ns, 10**9)
    fraction = rest if magic == 0xA1B23C4D else rest // 1000
    extra = bytes(8) if magic == 0xA1B2CD34 else b""
    return (
        struct.pack(order + "IIII", second, fraction, len(packet.data), packet.length) + extra + packet.data
    )


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    body += bytes(-len(body) % 4)
    total = struct.pack(order + "I", len(body) + 12)
    return struct.pack(order + "I", kind) + total + body + total


def option(code: int, value: bytes, order: str = "<") -> bytes:
    return struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def section(order: str = "<") -> bytes:
    return block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def interface(
    link: int = 1,
    resolution: int | None = None,
    offset_s: int | None = None,
    order: str = "<",
    snaplen: int = 0,
) -> bytes:
    body = struct.pack(order + "HHI", link, 0, snaplen)
    if resolution is not None:
        body += option(9, bytes([resolution]), order)
    if offset_s is not None:
        body += option(14, struct.pack(order + "q", offset_s), order)
    if resolution is not None or offset_s is not None:
        body += option(0, b"", order)
    return block(1, body, order)


def enhanced(
    stamp: int, data: bytes, length: int = LENGTH, number: int = 0, order: str = "<", options: bytes = b""
) -> bytes:
    body = struct.pack(order + "IIIII", number, stamp >> 32, stamp & 0xFFFFFFFF, len(data), length)
    return block(6, body + data + bytes(-len(data) % 4) + options, order)


def old_packet(stamp: int, data: bytes, length: int = LENGTH, order: str = "<") -> bytes:
    body = struct.pack(order + "HHIIII", 0, 5, stamp >> 32, stamp & 0xFFFFFFFF, len(data), length)
    return block(2, body + data, order)


def simple(data: bytes, length: int = LENGTH, order: str = "<") -> bytes:
    return block(3, struct.pack(order + "I", length) + data, order)


def stamps(units_per_s: int, start_s: int = EPOCH_S) -> list[int]:
    return [start_s * units_per_s + index * units_per_s // 10 for index in range(PACKETS)]
