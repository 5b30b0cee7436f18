"""What goes over a collective link: a fixed header, then an announcement, a chunk of bytes, or nothing.

Links are between members that have proved themselves; still every length is checked against what is expected
before a byte is placed.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from mlfabric.wire import NOT_DECODABLE, WireError

# magic, kind, flags, group, sequence number, block, offset in the block, length of what follows
_HEADER: Final = struct.Struct("<BBHIIIQI")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = 0x6D
_PRESSED: Final = 1

MAX_ANNOUNCEMENT_BYTES: Final = 2**20
MAX_CHUNK_BYTES: Final = 8 * 2**20
# No probe is longer.
MAX_PROBE_BYTES: Final = 512 * 1024


class FrameKind(IntEnum):
    ANNOUNCE = 1  # a rank has come to an operation: which, with what, by which plan
    PART = 2  # a contribution on its way to where it is summed
    RESULT = 3  # final bytes
    CREDIT = 4  # a part was used up, where no result comes back to say so
    FAILED = 5  # the operation failed at the sender
    OFFER = 6  # a message for a receiver that has not asked yet; its bytes follow on request
    ACCEPT = 7  # the receiver of an offered message has a place for it
    MESSAGE = 8  # the bytes of an accepted message, or a small one unasked
    LEFT = 9  # the sender is in the group no more; all it had to send came before
    ADOPTED = 10  # the sender holds a plan, whose number is in the place of the offset
    KNOCK = 11  # a probe is about to come: be awake for it
    AWAKE = 12  # it may come
    PROBE = 13  # bytes whose rate the receiver measures
    PROBED = 14  # as many bytes back; what was measured, in bytes per second, is in the place of the offset


class FrameHeader(NamedTuple):
    kind: FrameKind
    group: int
    sequence: int
    block: int
    offset: int
    length: int
    pressed: bool = False  # bytes wait at the sender for this receiver alone


class Sizes(IntEnum):
    """How the sizes that ranks announce have to fit together."""

    SAME = 0  # everybody's are the same
    PAIRS = 1  # first what we send to each rank, then what we expect from each: both ends must agree
    OWN = 2  # each has its own, and the others take what comes


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings to an operation; all must agree in everything but the plan, and as `sizes` says."""

    operation: str
    dtype: str
    combine: str
    root: int
    elements: tuple[int, ...]  # by block
    plan: int = 0  # the newest that the rank holds
    sizes: Sizes = Sizes.SAME
    mistake: str = ""  # why this call can't be carried out; all is well if everybody made the same one
    common: int = 0  # the newest plan that the rank knows all to hold

    def describe(self) -> str:
        if not self.dtype:
            return self.operation
        what = f"{sum(self.elements)} elements"
        if self.sizes is Sizes.PAIRS:
            half = len(self.elements) // 2
            what = f"{list(self.elements[:half])} elements for {list(self.elements[half:])}"
        detail = f" by {self.combine}" if self.combine else ""
        towards = f" with root {self.root}" if self.root >= 0 else ""
        wrong = f" ({self.mistake})" if self.mistake else ""
        return f"{self.operation} of {what} of {self.dtype}{detail}{towards}{wrong}"


_encoder = msgspec.msgpack.Encoder()
_announcements = msgspec.msgpack.Decoder(Announcement)


def pack_header(
    kind: FrameKind,
    group: int,
    sequence: int,
    block: int = 0,
    offset: int = 0,
    length: int = 0,
    pressed: bool = False,
) -> bytes:
    flags = _PRESSED if pressed else 0
    return _HEADER.pack(_MAGIC, kind, flags, group, sequence, block, offset, length)


_KINDS: Final = {int(kind): kind for kind in FrameKind}
_LONGEST: Final = dict.fromkeys(FrameKind, MAX_CHUNK_BYTES) | {
    FrameKind.ANNOUNCE: MAX_ANNOUNCEMENT_BYTES,
    FrameKind.FAILED: MAX_ANNOUNCEMENT_BYTES,
    FrameKind.CREDIT: 0,
    FrameKind.OFFER: 0,
    FrameKind.ACCEPT: 0,
    FrameKind.LEFT: 0,
    FrameKind.ADOPTED: 0,
    FrameKind.KNOCK: 0,
    FrameKind.AWAKE: 0,
    FrameKind.PROBE: MAX_PROBE_BYTES,
    FrameKind.PROBED: MAX_PROBE_BYTES,
}
PROBE_KINDS: Final = (FrameKind.KNOCK, FrameKind.AWAKE, FrameKind.PROBE, FrameKind.PROBED)


def unpack_header(buffer: memoryview | bytes | bytearray, at: int = 0) -> FrameHeader:
    magic, number, flags, group, sequence, block, offset, length = _HEADER.unpack_from(buffer, at)
    kind = _KINDS.get(number)
    if magic != _MAGIC or kind is None:
        raise WireError(f"bytes {magic:#04x} {number:#04x} where a frame should begin")
    if length > _LONGEST[kind]:
        raise WireError(f"a frame of {length} bytes, allowed are {_LONGEST[kind]}")
    return FrameHeader(kind, group, sequence, block, offset, length, bool(flags & _PRESSED))


def encode_announcement(announcement: Announcement) -> bytes:
    return _encoder.encode(announcement)


def decode_announcement(body: bytes | memoryview) -> Announcement:
    try:
        return _announcements.decode(body)
    except NOT_DECODABLE as error:
        raise WireError(f"not an announcement: {error}") from None
