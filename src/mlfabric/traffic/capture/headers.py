"""Headers of a batch of frames, decoded column by column: flow keys and the bytes of each layer.

Lengths come from the record and the IP header, never from how many bytes are present, so a capture cut at 96
bytes counts like a whole one. What can't be decoded still counts; it just has no ports, or no flow of its
own. The compiled form (`native`) must give equal results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic.capture.frames import Frames, view_at_every_byte
from mlfabric.traffic.flows import NOT_IP, ROCE_PORT, Words

Layer = Literal["l2", "ip", "payload", "wire"]
LAYERS: Final[tuple[Layer, ...]] = ("l2", "ip", "payload", "wire")

# Link types (tcpdump.org/linktypes.html): length of the header before the network packet.
NULL, ETHERNET, LOOP, SLL, IPV4, IPV6, SLL2 = 0, 1, 108, 113, 228, 229, 276
RAW_LINKS: Final = frozenset({12, 14, 101, IPV4, IPV6})
LINK_NAMES: Final = {
    NULL: "BSD loopback", ETHERNET: "Ethernet", LOOP: "OpenBSD loopback", SLL: "Linux cooked",
    SLL2: "Linux cooked v2", 12: "raw IP", 14: "raw IP", 101: "raw IP", IPV4: "raw IPv4", IPV6: "raw IPv6",
}  # fmt: skip
_VLAN_TYPES: Final = (0x8100, 0x88A8, 0x9100)
_MOST_TAGS: Final = 4
_EXTENSIONS: Final = (0, 43, 44, 51, 60, 135, 139, 140)
_MOST_EXTENSIONS: Final = 8
_PORTED: Final = (6, 17, 33, 132)
_WIRE_LEAST, _WIRE_EXTRA = 60, 24  # padding to the least frame; FCS, preamble and gap
_OUTGOING: Final = 4  # packet type of a cooked header

# What the decoders count, by position; both forms fill the same array.
STATISTICS: Final = (
    "frames too short to decode",
    "frames with VLAN tags",
    "later fragments (no ports)",
    "frames whose IP length is 0",
    "frames with a TCP header cut off",
    "RoCE data packets",
    "RoCE acknowledgements",
    "RoCE congestion notifications",
    "frames of an unknown link type",
    "frames that are not IP",
)
SHORT, TAGGED, FRAGMENTS, NO_IP_LENGTH, CUT_TCP, ROCE_DATA, ROCE_ACK, ROCE_CNP, UNKNOWN_LINK, NON_IP = range(
    10
)


@dataclass(frozen=True)
class Wanted:
    """Restrictions that only the cooked headers can answer."""

    interface: int | None = None  # SLL2 interface index
    direction: Literal["both", "in", "out"] = "both"


@dataclass
class Decoded:
    keys: tuple[Words, Words, Words, Words, Words]
    size: NDArray[np.uint32]  # bytes of the chosen layer
    kept: NDArray[np.bool_] | None  # None: all
    interfaces: set[int]  # SLL2 interface indices seen


class PacketBytes:
    """Gathers numbers at computed positions of a batch's data, big-endian as networks write them."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.u1 = data
        self.u2 = view_at_every_byte(data, ">u2")
        self.u4 = view_at_every_byte(data, ">u4")
        self.u8 = view_at_every_byte(data, ">u8")


def decode(frames: Frames, layer: Layer, wanted: Wanted, statistics: NDArray[np.int64]) -> Decoded:
    """Keys and sizes of every frame of a batch; `statistics` is added to."""
    if isinstance(frames.link, int):
        return _decode_one_link(frames, frames.link, layer, wanted, statistics)
    total = len(frames)
    keys = tuple(np.zeros(total, np.uint64) for _ in range(5))
    size = np.zeros(total, np.uint32)
    kept = np.ones(total, bool)
    interfaces: set[int] = set()
    for link in np.unique(frames.link):
        chosen = np.flatnonzero(frames.link == link)
        part = _decode_one_link(frames.take(chosen), int(link), layer, wanted, statistics)
        for whole, column in zip(keys, part.keys, strict=True):
            whole[chosen] = column
        size[chosen] = part.size
        if part.kept is not None:
            kept[chosen] = part.kept
        interfaces |= part.interfaces
    return Decoded((keys[0], keys[1], keys[2], keys[3], keys[4]), size, kept, interfaces)


def _decode_one_link(
    frames: Frames, link: int, layer: Layer, wanted: Wanted, statistics: NDArray[np.int64]
) -> Decoded:
    at = PacketBytes(frames.data)
    start = frames.offset
    captured = frames.captured.astype(np.int64)
    network, ethertype = network_start(at, start, captured, link, statistics)
    kept, interfaces = _cooked_choice(at, start, captured, link, wanted)
    total = len(frames)
    source_hi, source_lo, target_hi, target_lo = (np.zeros(total, np.uint64) for _ in range(4))
    present = captured - network
    absolute = start + network
    is_v4 = (ethertype == 0x0800) & (present >= 20)
    is_v6 = (ethertype == 0x86DD) & (present >= 40)
    statistics[SHORT] += int((((ethertype == 0x0800) & ~is_v4) | ((ethertype == 0x86DD) & ~is_v6)).sum())
    is_ip = is_v4 | is_v6
    statistics[NON_IP] += total - int(((ethertype == 0x0800) | (ethertype == 0x86DD)).sum())
    protocol = np.full(total, NOT_IP, np.int64)
    transport = network.copy()  # where the transport header starts, from the frame's first byte
    portless = ~is_ip
    ip_length = np.zeros(total, np.int64)

    chosen = _some(is_v4)
    if chosen is not None:
        here = absolute[chosen]
        first = at.u1.take(here)
        transport[chosen] += (first & 15).astype(np.int64) * 4
        protocol[chosen] = at.u1.take(here + 9)
        source_lo[chosen] = at.u4[here + 12].astype(np.uint64) | np.uint64(0xFFFF << 32)
        target_lo[chosen] = at.u4[here + 16].astype(np.uint64) | np.uint64(0xFFFF << 32)
        later = (at.u2[here + 6] & 0x1FFF) != 0
        portless[chosen] = later
        statistics[FRAGMENTS] += int(later.sum())
        ip_length[chosen] = at.u2[here + 2]
    chosen = _some(is_v6)
    if chosen is not None:
        here = absolute[chosen]
        source_hi[chosen], source_lo[chosen] = at.u8[here + 8], at.u8[here + 16]
        target_hi[chosen], target_lo[chosen] = at.u8[here + 24], at.u8[here + 32]
        length = at.u2[here + 4].astype(np.int64)
        ip_length[chosen] = np.where(length > 0, length + 40, 0)
        skipped, following, later = _skip_extensions(at, here, at.u1.take(here + 6), present[chosen])
        transport[chosen] += skipped
        protocol[chosen] = following
        portless[chosen] = later
        statistics[FRAGMENTS] += int(later.sum())

    ports = _ports(at, start, captured, transport, protocol, portless, statistics)
    ports[~is_ip] = (np.uint64(NOT_IP) << np.uint64(56)) | (
        ethertype[~is_ip].astype(np.uint64) << np.uint64(40)
    )
    length = frames.length.astype(np.int64)
    statistics[NO_IP_LENGTH] += int((is_ip & (ip_length == 0)).sum())
    ip_length = np.where(is_ip & (ip_length == 0), length - network, ip_length)
    if layer == "l2":
        size = frames.length
    elif layer == "wire":
        ethernet = length if link == ETHERNET or link not in LINK_NAMES else length - _base_header(link) + 14
        size = layer_of_wire(ethernet)
    elif layer == "ip":
        size = np.maximum(ip_length, 0).astype(np.uint32)
    else:
        header = _transport_header(at, start, captured, transport, protocol, portless, statistics)
        payload = np.where(is_ip, ip_length - (transport - network) - header, 0)
        size = np.maximum(payload, 0).astype(np.uint32)
    return Decoded((source_hi, source_lo, target_hi, target_lo, ports), size, kept, interfaces)


def layer_of_wire(ethernet: NDArray[np.int64]) -> NDArray[np.uint32]:
    """What Ethernet frames of these lengths take on the wire."""
    return (np.maximum(ethernet, _WIRE_LEAST) + _WIRE_EXTRA).astype(np.uint32)


def _some(mask: NDArray[np.bool_]) -> NDArray[np.intp] | slice | None:
    """The true positions in the cheapest form to index with."""
    if mask.all():
        return slice(None)
    chosen = np.flatnonzero(mask)
    return chosen if len(chosen) else None


def _base_header(link: int) -> int:
    return {ETHERNET: 14, SLL: 16, SLL2: 20, NULL: 4, LOOP: 4}.get(link, 0)


def network_start(
    at: PacketBytes,
    start: NDArray[np.int64],
    captured: NDArray[np.int64],
    link: int,
    statistics: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes from the frame's start to its network header, and that header's ethertype (0: unknown)."""
    base = _base_header(link)
    network = np.full(len(start), base, np.int64)
    if link in RAW_LINKS or link in (NULL, LOOP):
        version = at.u1.take(start + base) >> 4
        ethertype = np.where(version == 4, 0x0800, np.where(version == 6, 0x86DD, 0))
        return network, np.where(captured > base, ethertype, 0)
    if link not in (ETHERNET, SLL, SLL2):
        statistics[UNKNOWN_LINK] += len(start)
        return network, np.zeros(len(start), np.int64)
    field = {ETHERNET: 12, SLL: 14, SLL2: 0}[link]
    ethertype = at.u2[start + field].astype(np.int64)
    short = captured < base
    if short.any():
        ethertype[short] = 0
        statistics[SHORT] += int(short.sum())
    tagged = np.flatnonzero(np.isin(ethertype, _VLAN_TYPES)) if _any_tag(ethertype) else np.zeros(0, np.intp)
    statistics[TAGGED] += len(tagged)
    for _ in range(_MOST_TAGS):
        if not len(tagged):
            break
        whole = captured[tagged] >= network[tagged] + 4
        ethertype[tagged[~whole]] = 0
        tagged = tagged[whole]
        ethertype[tagged] = at.u2[start[tagged] + network[tagged] + 2]
        network[tagged] += 4
        tagged = tagged[np.isin(ethertype[tagged], _VLAN_TYPES)]
    return network, ethertype


def _any_tag(ethertype: NDArray[np.int64]) -> bool:
    return any((ethertype == tag).any() for tag in _VLAN_TYPES)


def _cooked_choice(
    at: PacketBytes, start: NDArray[np.int64], captured: NDArray[np.int64], link: int, wanted: Wanted
) -> tuple[NDArray[np.bool_] | None, set[int]]:
    if link not in (SLL, SLL2):
        return None, set()
    kept = np.ones(len(start), bool)
    interfaces: set[int] = set()
    if link == SLL2:
        whole = captured >= 20
        index = np.where(whole, at.u4[start + 4], 0).astype(np.int64)
        interfaces = {int(number) for number in np.unique(index[whole])}
        if wanted.interface is not None:
            kept &= index == wanted.interface
        kind = at.u1.take(start + 10)
    else:
        kind = at.u2[start].astype(np.uint8)
    if wanted.direction == "out":
        kept &= kind == _OUTGOING
    elif wanted.direction == "in":
        kept &= kind != _OUTGOING
    return (None if kept.all() else kept), interfaces


def _skip_extensions(
    at: PacketBytes, here: NDArray[np.int64], following: NDArray[np.uint8], present: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Length of the IPv6 header with its extensions, the protocol after them, and who is a later fragment."""
    skipped = np.full(len(here), 40, np.int64)
    protocol = following.astype(np.int64)
    later = np.zeros(len(here), bool)
    active = np.flatnonzero(np.isin(protocol, _EXTENSIONS))
    for _ in range(_MOST_EXTENSIONS):
        active = active[present[active] >= skipped[active] + 8]
        if not len(active):
            break
        position = here[active] + skipped[active]
        kind = protocol[active]
        units = at.u1.take(position + 1).astype(np.int64)
        length = np.where(kind == 44, 8, np.where(kind == 51, (units + 2) * 4, (units + 1) * 8))
        later[active] |= (kind == 44) & ((at.u2[position + 2] >> 3) != 0)
        protocol[active] = at.u1.take(position)
        skipped[active] += length
        active = active[np.isin(protocol[active], _EXTENSIONS) & ~later[active]]
    return skipped, protocol, later


def _ports(
    at: PacketBytes,
    start: NDArray[np.int64],
    captured: NDArray[np.int64],
    transport: NDArray[np.int64],
    protocol: NDArray[np.int64],
    portless: NDArray[np.bool_],
    statistics: NDArray[np.int64],
) -> Words:
    """Protocol, ports and RoCE queue pair as the fifth word of the key."""
    words: Words = protocol.astype(np.uint64) << np.uint64(56)
    ported = (protocol == 6) | (protocol == 17)
    if not ported.all():
        ported |= (protocol == 33) | (protocol == 132)
    ported &= ~portless & (captured >= transport + 4)
    chosen = _some(ported)
    if chosen is None:
        return words
    both = at.u4[start[chosen] + transport[chosen]].astype(np.uint64)
    words[chosen] |= both << np.uint64(24)
    roce = (both & np.uint64(0xFFFF)) == ROCE_PORT
    if roce.any():
        members = np.flatnonzero(ported)[roce]
        members = members[(protocol[members] == 17) & (captured[members] >= transport[members] + 20)]
        base = start[members] + transport[members] + 8
        words[members] |= (at.u4[base + 4] & 0xFFFFFF).astype(np.uint64)
        opcode = at.u1.take(base)
        acknowledgement, notification = opcode == 0x11, opcode == 0x81
        statistics[ROCE_ACK] += int(acknowledgement.sum())
        statistics[ROCE_CNP] += int(notification.sum())
        statistics[ROCE_DATA] += len(members) - int(acknowledgement.sum()) - int(notification.sum())
    return words


def _transport_header(
    at: PacketBytes,
    start: NDArray[np.int64],
    captured: NDArray[np.int64],
    transport: NDArray[np.int64],
    protocol: NDArray[np.int64],
    portless: NDArray[np.bool_],
    statistics: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Bytes of the transport header; a TCP header that was not captured counts as 20."""
    header = np.where((protocol == 17) & ~portless, 8, 0)
    tcp = np.flatnonzero((protocol == 6) & ~portless)
    whole = captured[tcp] >= transport[tcp] + 13
    statistics[CUT_TCP] += int((~whole).sum())
    words = at.u1.take(np.where(whole, start[tcp] + transport[tcp] + 12, 0)) >> 4
    header[tcp] = np.where(whole, words.astype(np.int64) * 4, 20)
    return header
