"""The frames nearly every capture is made of, decoded in a few columns: Ethernet, IPv4 without options, TCP
or UDP, not a later fragment, not RoCE.

The general decoder (`headers`) takes any frame and gives the same keys and sizes; this one only saves time.
Source, destination, protocol and ports are thirteen bytes that lie within sixteen, so two words identify a
flow and one gather reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic.capture.frames import Frames, rows_at
from mlfabric.traffic.capture.headers import ETHERNET, Layer, layer_of_wire
from mlfabric.traffic.flows import MULTIPLIERS, ROCE_PORT, FlowIndex, Words

# Bytes 8 to 40 of the frame as four little-endian words: 12 ethertype, 14 version and header length, 16 IP
# length, 20 fragment, 23 protocol, 26 source, 30 destination, 34 ports.
_FROM, _WIDTH = 8, 32
_LEAST_CAPTURED: Final = 38
_IPV4_NO_OPTIONS: Final = np.uint64(0x450008 << 32)
_VERSION_MASK: Final = np.uint64(0xFFFFFF << 32)
_FRAGMENT_MASK: Final = np.uint64(0xFF1F << 32)
_LENGTH_MASK: Final = np.uint64(0xFFFF)
_TCP, _UDP = np.uint64(6), np.uint64(17)
_ROCE_SWAPPED: Final = np.uint64((ROCE_PORT & 255) << 8 | ROCE_PORT >> 8)
_PORTS_MASK: Final = np.uint64((1 << 48) - 1)
_SLOT_BITS: Final = 14
_MAPPED: Final = np.uint64(0xFFFF << 32)


@dataclass(frozen=True)
class PlainFrames:
    """Which frames of a batch are plain, and of those the two words of their flow and their IP length."""

    mask: NDArray[np.bool_] | None  # None: all
    first: Words  # protocol, source, first half of the destination
    second: Words  # the other half, both ports
    ip_length: NDArray[np.uint16]


def plain_frames(frames: Frames, layer: Layer) -> PlainFrames | None:
    """None where too few are plain to gain by it."""
    if not isinstance(frames.link, int) or frames.link != ETHERNET or layer == "payload" or not len(frames):
        return None
    words = rows_at(frames.data, frames.offset + _FROM, _WIDTH).view("<u8")
    head, middle = words[:, 0], words[:, 1]
    protocol = middle >> np.uint64(56)
    second = words[:, 3] & _PORTS_MASK
    odd = (head & _VERSION_MASK) != _IPV4_NO_OPTIONS
    odd |= (middle & _FRAGMENT_MASK) != 0
    odd |= (middle & _LENGTH_MASK) == 0
    odd |= frames.captured < _LEAST_CAPTURED
    tcp = protocol == _TCP
    if not tcp.all():
        odd |= ~tcp & ((protocol != _UDP) | (second >> np.uint64(32) == _ROCE_SWAPPED))
    first = (words[:, 2] & ~_LENGTH_MASK) | protocol
    length = _swapped_halves(middle)
    if not odd.any():
        return PlainFrames(None, first, second, length)
    plain = ~odd
    if int(plain.sum()) * 2 < len(plain):
        return None
    return PlainFrames(plain, first[plain], second[plain], length[plain])


def sizes(frames: Frames, plain: PlainFrames, layer: Layer) -> NDArray[np.uint32]:
    length = frames.length if plain.mask is None else frames.length[plain.mask]
    if layer == "ip":
        return plain.ip_length.astype(np.uint32)
    return layer_of_wire(length.astype(np.int64)) if layer == "wire" else length


class PlainFlows:
    """Flow numbers of plain frames by a table of two words a slot; what is not in it asks the index."""

    def __init__(self, index: FlowIndex) -> None:
        self._index = index
        self._first = np.zeros(1 << _SLOT_BITS, np.uint64)  # never zero where used: it holds a protocol
        self._second = np.zeros(1 << _SLOT_BITS, np.uint64)
        self._number = np.full(1 << _SLOT_BITS, -1, np.int32)

    def known(self, plain: PlainFrames) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
        """Numbers, and the positions of those that are not known here."""
        slot = _slots(plain.first, plain.second)
        strange = self._first.take(slot) != plain.first
        strange |= self._second.take(slot) != plain.second
        return self._number.take(slot), np.flatnonzero(strange)

    def number(self, plain: PlainFrames) -> NDArray[np.int32]:
        """The flow number of every plain frame; new flows are numbered in order of appearance."""
        numbers, strange = self.known(plain)
        if len(strange):
            first, second = plain.first[strange], plain.second[strange]
            numbers[strange] = self._index.number(_key(first, second))
            self.learn(first, second, numbers[strange])
        return numbers

    def learn(self, first: Words, second: Words, numbers: NDArray[np.int32]) -> None:
        slot, one = np.unique(_slots(first, second), return_index=True)
        self._first[slot], self._second[slot], self._number[slot] = first[one], second[one], numbers[one]


def _slots(first: Words, second: Words) -> NDArray[np.int64]:
    mixed = first * MULTIPLIERS[0]
    mixed ^= second * MULTIPLIERS[1]
    mixed >>= np.uint64(64 - _SLOT_BITS)
    return mixed.view(np.int64)


def _swapped_halves(words: Words) -> NDArray[np.uint16]:
    """The first two bytes of each word as the network's number."""
    return words.astype(np.uint16).byteswap()


def _key(first: Words, second: Words) -> tuple[Words, Words, Words, Words, Words]:
    """The five words of `FlowIndex`."""
    source = (first >> np.uint64(16)).astype(np.uint32).byteswap()
    target = ((first >> np.uint64(48)) | (second << np.uint64(16))).astype(np.uint32).byteswap()
    ports = (second >> np.uint64(16)).astype(np.uint32).byteswap()
    zero = np.zeros(len(first), np.uint64)
    return (
        zero,
        source.astype(np.uint64) | _MAPPED,
        zero,
        target.astype(np.uint64) | _MAPPED,
        (first & _LENGTH_MASK) << np.uint64(56) | ports.astype(np.uint64) << np.uint64(24),
    )
