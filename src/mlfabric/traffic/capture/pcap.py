"""The records of a classic pcap file: four magics and the modified one, either byte order.

Trusts the chain of record lengths and little else: the header's snaplen bounds nothing, a fraction of a
second may exceed a second, a record may claim less than it holds. Where a record can't be right it says at
which byte and looks for the next run of plausible ones; where another file's header stands in a record's
place (two files run together) it starts over with that header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic import native
from mlfabric.traffic.capture.buffer import SlidingBuffer
from mlfabric.traffic.capture.frames import Frames, view_at_every_byte
from mlfabric.traffic.capture.notes import Notes
from mlfabric.traffic.capture.walk import Chain, Walk, walk

FILE_HEADER_BYTES: Final = 24
# libpcap's MAXIMUM_SNAPLEN: no record is longer unless the file's own snaplen says so.
_MOST_CAPTURED: Final = 262_144
_MOST_BELIEVED_SNAPLEN: Final = 1 << 26
# Magic number -> (nanoseconds per unit of the fraction, bytes of a record header).
_MAGICS: Final = {0xA1B2C3D4: (1000, 16), 0xA1B23C4D: (1, 16), 0xA1B2CD34: (1000, 24)}
# Records of one capture are this close together when a lost position is searched for.
_TIME_BEFORE_S: Final = 3_600
_TIME_AFTER_S: Final = 7 * 86_400
_CHAINED_TO_RESYNC: Final = 3
_SEARCHED_AT_ONCE: Final = 1 << 18


@dataclass(frozen=True)
class PcapHeader:
    order: str
    fraction_ns: int
    record_bytes: int
    link: int
    most_captured: int

    @property
    def chain(self) -> Chain:
        return Chain(self.order, 8, self.record_bytes, 0, self.most_captured, 1, 16)


def parse_header(head: bytes) -> PcapHeader | None:
    """The meaning of a pcap file header, or None where these bytes are not one."""
    if len(head) < FILE_HEADER_BYTES:
        return None
    for order in "<>":
        magic, major, _, _, _, snaplen, link = struct.unpack_from(order + "IHHiIII", head)
        if magic in _MAGICS and major == 2:
            fraction_ns, record_bytes = _MAGICS[magic]
            most = max(_MOST_CAPTURED, snaplen if snaplen < _MOST_BELIEVED_SNAPLEN else 0)
            # The upper bits of the link-type word tell of frame check sequences.
            return PcapHeader(order, fraction_ns, record_bytes, link & 0xFFFF, most)
    return None


def looks_like_pcap(head: bytes) -> bool:
    return any(len(head) >= 4 and struct.unpack_from(order + "I", head)[0] in _MAGICS for order in "<>")


class PcapFile:
    """One pcap stream; iterate it for batches of frames."""

    def __init__(self, buffer: SlidingBuffer, notes: Notes, name: str) -> None:
        self._buffer = buffer
        self._notes = notes
        self._name = name
        header = parse_header(bytes(buffer.data[buffer.start : min(buffer.end, FILE_HEADER_BYTES)]))
        if header is None:
            raise FabricError(f"{name} starts like a pcap file but its header is cut short or not version 2")
        self.header = header
        buffer.start += FILE_HEADER_BYTES
        self.links = {header.link}
        self._good_second = 0

    def __iter__(self) -> Iterator[Frames]:
        buffer = self._buffer
        while True:
            frames, stop, broken = self._records()
            if len(frames):
                self._good_second = int(frames.time_ns[-1] // 1_000_000_000)
                yield frames
            buffer.start = stop
            if broken:
                if not (self._starts_over() or self._resync()):
                    return
            elif not buffer.refill():
                if buffer.left():
                    self._notes.damage(
                        f"{self._name}: the last record is cut short at byte {buffer.position():,}; "
                        f"everything before it was read"
                    )
                return

    def _records(self) -> tuple[Frames, int, bool]:
        """Whole records from the start of the buffer, where they end, and whether what follows is no
        record."""
        header, buffer = self.header, self._buffer
        data = buffer.data
        library = native.library()
        if library is not None:
            columns = native.pcap_records(library, data, buffer.start, buffer.end, header)
            frames, stop, broken = Frames(data, *columns[:4], header.link), columns[4], columns[5]
        else:
            found = walk(data, buffer.start, buffer.end, header.chain, self._plausible)
            frames, stop, broken = self._gather(found), found.stop, found.broken
        # A file header in a record's place reads as a record of length zero.
        empty = np.flatnonzero((frames.captured == 0) & (frames.length == 0))
        for index in empty:
            at = int(frames.offset[index]) - header.record_bytes
            if parse_header(bytes(data[at : at + FILE_HEADER_BYTES])) is not None:
                return frames.take(np.arange(index)), at, True
        return frames, stop, broken

    def _gather(self, found: Walk) -> Frames:
        header, data = self.header, self._buffer.data
        seconds, fraction, captured, length = found.numbers(data, header.chain).T
        time_ns = seconds * np.int64(1_000_000_000)
        time_ns += fraction * np.int64(header.fraction_ns)
        offset = found.offsets + header.record_bytes
        return Frames(
            data, offset, time_ns, captured.astype(np.uint32), length.astype(np.uint32), header.link
        )

    def _plausible(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which byte positions may start a record. Used to guess; what is kept never depends on it."""
        header = self.header
        number_at = view_at_every_byte(self._buffer.data, header.order + "u4")
        second = self._good_second or int(number_at[self._buffer.start])
        earliest = max(0, second - _TIME_BEFORE_S)
        result = number_at[positions].astype(np.int64)
        result -= earliest
        near = result.view(np.uint64) < np.uint64(_TIME_BEFORE_S + _TIME_AFTER_S)
        few = np.flatnonzero(near)
        chosen = positions[few]
        fraction = number_at[chosen + 4]
        captured = number_at[chosen + 8]
        length = number_at[chosen + 12]
        near[few] = (
            (fraction < 2_000_000_000 // header.fraction_ns)
            & (captured <= header.most_captured)
            & (length < _MOST_BELIEVED_SNAPLEN)
            & ((length >= captured) | (length == 0))
            & (length > 0)
        )
        return near

    def _starts_over(self) -> bool:
        """Another file's header here: two captures run together."""
        buffer = self._buffer
        while buffer.left() < FILE_HEADER_BYTES and buffer.refill():
            pass
        header = parse_header(bytes(buffer.data[buffer.start : buffer.start + FILE_HEADER_BYTES]))
        if header is None or buffer.left() < FILE_HEADER_BYTES:
            return False
        self._notes.say(
            f"{self._name}: a second capture file begins at byte {buffer.position():,} (files run together); "
            f"its records were read with its own header"
        )
        self.header = header
        self.links.add(header.link)
        buffer.start += FILE_HEADER_BYTES
        self._good_second = 0
        return True

    def _resync(self) -> bool:
        """Looks for the next run of plausible records; says how much was passed over."""
        buffer = self._buffer
        lost_at = buffer.position()
        buffer.start += 1
        while True:
            last = buffer.end - self.header.record_bytes
            while buffer.start <= last:
                positions = np.arange(buffer.start, min(buffer.start + _SEARCHED_AT_ONCE, last + 1))
                found = self._first_chained(positions[self._plausible(positions)])
                if found is not None:
                    buffer.start = found
                    self._notes.damage(
                        f"{self._name}: the record at byte {lost_at:,} is damaged; "
                        f"{buffer.position() - lost_at:,} "
                        f"bytes were passed over up to byte {buffer.position():,}"
                    )
                    return True
                buffer.start += len(positions)
            if not buffer.refill():
                self._notes.damage(
                    f"{self._name}: the record at byte {lost_at:,} is damaged and no good one follows it"
                )
                return False

    def _first_chained(self, positions: NDArray[np.int64]) -> int | None:
        """The first position that plausible records follow, or from which they reach the end of the data."""
        buffer, header = self._buffer, self.header
        for position in positions:
            at = int(position)
            for _ in range(_CHAINED_TO_RESYNC):
                captured = struct.unpack_from(header.order + "I", buffer.data.data, at + 8)[0]
                at += header.record_bytes + captured
                if at + header.record_bytes > buffer.end or not self._plausible(np.array([at]))[0]:
                    break
            else:
                return int(position)
            if at == buffer.end:
                return int(position)
        return None
