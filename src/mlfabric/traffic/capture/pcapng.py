"""The packets of a pcapng file: sections, interfaces with their own clock and link type, four packet blocks.

Every interface has its own resolution and offset, every section its own byte order and interfaces. Times are
integers throughout. Simple packet blocks carry no time: they are counted and kept out of everything timed.
Unknown blocks are skipped by their length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.capture.buffer import SlidingBuffer
from mlfabric.traffic.capture.frames import Frames, view_at_every_byte
from mlfabric.traffic.capture.notes import Notes
from mlfabric.traffic.capture.walk import Chain, walk

SECTION_HEADER: Final = 0x0A0D0D0A
_INTERFACE, _OLD_PACKET, _SIMPLE_PACKET, _ENHANCED_PACKET = 1, 2, 3, 6
_BYTE_ORDER_MAGIC: Final = 0x1A2B3C4D
_MOST_BLOCK_BYTES: Final = 1 << 26
_KNOWN_TYPES: Final = np.array([1, 2, 3, 4, 5, 6, 9, 10, SECTION_HEADER], np.int64)
_OPTION_NAME, _OPTION_RESOLUTION, _OPTION_OFFSET = 2, 9, 14
_NS: Final = 1_000_000_000


@dataclass(frozen=True)
class Interface:
    link: int
    snaplen: int
    resolution: int  # the if_tsresol byte: a power of ten, or of two with the high bit set
    offset_s: int
    name: str


class PcapngFile:
    """One pcapng stream; iterate it for batches of frames."""

    def __init__(self, buffer: SlidingBuffer, notes: Notes, name: str, interface: int | None = None) -> None:
        self._buffer = buffer
        self._notes = notes
        self._name = name
        self._wanted = interface
        self._order = "<"
        self._interfaces: list[Interface] = []
        self.links: set[int] = set()
        if not self._open_section(buffer.start):
            raise FabricError(
                f"{name} starts like a pcapng file but its section header is cut short or damaged"
            )

    def __iter__(self) -> Iterator[Frames]:
        buffer = self._buffer
        while True:
            chain = Chain(self._order, 4, 0, 12, _MOST_BLOCK_BYTES, 4, 8)
            found = walk(buffer.data, buffer.start, buffer.end, chain, self._plausible)
            offsets, stop, problem = self._until_problem(found.offsets, found.stop, found.broken)
            frames = self._packets(offsets)
            if frames is not None and len(frames):
                yield frames
            buffer.start = stop
            if problem:
                if self._open_section(stop):
                    continue
                self._notes.damage(
                    f"{self._name}: the block at byte {buffer.position():,} is damaged; "
                    f"everything before it was read"
                )
                return
            if not buffer.refill():
                if buffer.left():
                    self._notes.damage(
                        f"{self._name}: the last block is cut short at byte {buffer.position():,}; "
                        f"everything before it was read"
                    )
                return

    def _until_problem(
        self, offsets: NDArray[np.int64], stop: int, broken: bool
    ) -> tuple[NDArray[np.int64], int, bool]:
        """Cuts at the first block whose closing length disagrees, or which opens a new section."""
        number_at = view_at_every_byte(self._buffer.data, self._order + "u4")
        lengths = number_at[offsets + 4].astype(np.int64)
        odd = number_at[offsets + lengths - 4] != lengths
        odd |= number_at[offsets] == SECTION_HEADER
        problems = np.flatnonzero(odd)
        if len(problems):
            return offsets[: problems[0]], int(offsets[problems[0]]), True
        return offsets, stop, broken

    def _open_section(self, at: int) -> bool:
        """Takes byte order from the section header at `at` and moves past it; False where there is none."""
        buffer = self._buffer
        head = bytes(buffer.data[at : at + 12])
        if at + 12 > buffer.end or struct.unpack_from("<I", head)[0] != SECTION_HEADER:
            return False
        orders = [order for order in "<>" if struct.unpack_from(order + "I", head, 8)[0] == _BYTE_ORDER_MAGIC]
        if not orders:
            return False
        length = struct.unpack_from(orders[0] + "I", head, 4)[0]
        if not 28 <= length <= _MOST_BLOCK_BYTES or length % 4:
            return False
        buffer.start = at
        while buffer.left() < length and buffer.refill():
            pass
        if buffer.left() < length:
            return False
        self._order = orders[0]
        self._interfaces = []
        buffer.start += length
        return True

    def _plausible(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which byte positions may start a block. Used to guess; what is kept never depends on it."""
        number_at = view_at_every_byte(self._buffer.data, self._order + "u4")
        result = np.isin(number_at[positions], _KNOWN_TYPES)
        few = np.flatnonzero(result)
        chosen = positions[few]
        length = number_at[chosen + 4].astype(np.int64)
        closing = chosen + length - 4
        inside = (length >= 12) & (length % 4 == 0) & (closing < self._buffer.end)
        result[few] = inside & (number_at[np.where(inside, closing, 0)] == length)
        return result

    def _packets(self, offsets: NDArray[np.int64]) -> Frames | None:
        data = self._buffer.data
        number_at = view_at_every_byte(data, self._order + "u4")
        kinds = number_at[offsets]
        for at in offsets[kinds == _INTERFACE]:
            self._add_interface(int(at), int(number_at[at + 4]))
        self._count_simple(offsets[kinds == _SIMPLE_PACKET], number_at)
        timed = (kinds == _ENHANCED_PACKET) | (kinds == _OLD_PACKET)
        if not timed.all():
            offsets, kinds = offsets[timed], kinds[timed]
        if not len(offsets):
            return None
        interface = number_at[offsets + 8].astype(np.int64)
        old = kinds == _OLD_PACKET
        if old.any():
            # Its interface is the first half of that word, the rest counts drops.
            half_at = view_at_every_byte(data, self._order + "u2")
            interface[old] = half_at[offsets[old] + 8]
        captured = number_at[offsets + 20].astype(np.uint32)
        room = number_at[offsets + 4].astype(np.int64) - 32
        good = (captured <= room) & (interface < len(self._interfaces))
        self._notes.count("pcapng packets with an impossible length or interface", int((~good).sum()))
        if self._wanted is not None:
            good &= interface == self._wanted
        if not good.all():
            offsets, interface, captured = offsets[good], interface[good], captured[good]
        if not len(offsets):
            return None
        stamp = number_at[offsets + 12].astype(np.uint64) << np.uint64(32)
        stamp |= number_at[offsets + 16]
        length = number_at[offsets + 24].astype(np.uint32)
        time_ns, link = self._timed_by_interface(stamp, interface)
        return Frames(data, offsets + 28, time_ns, captured, length, link)

    def _timed_by_interface(
        self, stamp: NDArray[np.uint64], interface: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int | NDArray[np.uint16]]:
        used = np.unique(interface) if len(self._interfaces) > 1 else np.array([0])
        links = {self._interfaces[number].link for number in used}
        self.links |= links
        if len(used) == 1:
            one = self._interfaces[int(used[0])]
            return _stamps_to_ns(stamp, one), one.link
        time_ns = np.empty(len(stamp), np.int64)
        for number in used:
            chosen = interface == number
            time_ns[chosen] = _stamps_to_ns(stamp[chosen], self._interfaces[number])
        if len(links) == 1:
            return time_ns, links.pop()
        return time_ns, np.array([each.link for each in self._interfaces], np.uint16)[interface]

    def _count_simple(self, offsets: NDArray[np.int64], number_at: NDArray[np.unsignedinteger]) -> None:
        if len(offsets):
            self._notes.count("packets without a time", len(offsets))
            self._notes.count("bytes without a time", int(number_at[offsets + 8].sum()))

    def _add_interface(self, at: int, length: int) -> None:
        data, order = self._buffer.data.data, self._order
        link, _, snaplen = struct.unpack_from(order + "HHI", data, at + 8)
        resolution, offset_s, name = 6, 0, ""
        option, end = at + 16, at + length - 4
        while option + 4 <= end:
            code, size = struct.unpack_from(order + "HH", data, option)
            if code == 0 or option + 4 + size > end:
                break
            if code == _OPTION_RESOLUTION and size >= 1:
                resolution = int(data[option + 4])
            elif code == _OPTION_OFFSET and size >= 8:
                offset_s = struct.unpack_from(order + "q", data, option + 4)[0]
            elif code == _OPTION_NAME:
                name = bytes(data[option + 4 : option + 4 + size]).decode("utf-8", "replace").rstrip("\0")
            option += 4 + (size + 3) // 4 * 4
        self._interfaces.append(Interface(link, snaplen, resolution, offset_s, name))


def _stamps_to_ns(stamp: NDArray[np.uint64], interface: Interface) -> NDArray[np.int64]:
    """Nanoseconds since 1970, in integers; finer resolutions are rounded to the nearest."""
    exponent = interface.resolution & 0x7F
    if interface.resolution & 0x80:
        time_ns = _binary_to_ns(stamp, exponent)
    elif exponent <= 9:
        time_ns = stamp * np.uint64(10 ** (9 - exponent))
    else:
        # Beyond 10^-28 every stamp that fits its 64 bits is below a nanosecond.
        unit = np.uint64(10 ** min(exponent - 9, 19))
        time_ns = stamp // unit + (stamp % unit >= unit - unit // np.uint64(2)).astype(np.uint64)
    return time_ns.astype(np.int64) + interface.offset_s * _NS


def _binary_to_ns(stamp: NDArray[np.uint64], exponent: int) -> NDArray[np.uint64]:
    if exponent >= 64:
        return np.zeros_like(stamp)
    shift = np.uint64(exponent)
    whole = stamp >> shift
    fraction = stamp & ((np.uint64(1) << shift) - np.uint64(1))
    # 2^34 * 10^9 still fits 64 bits; finer fractions are below a tenth of a nanosecond.
    surplus = np.uint64(max(0, exponent - 34))
    kept = np.uint64(min(exponent, 34))
    fraction >>= surplus
    half = (np.uint64(1) << kept) >> np.uint64(1)
    return whole * np.uint64(_NS) + ((fraction * np.uint64(_NS) + half) >> kept)
