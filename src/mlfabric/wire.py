"""Frames on a connection: sixteen bytes of header, then a control message or a piece of bulk data.

Pure: no sockets. A reader says where the next bytes should go (`wanted`) and is told how many came
(`advance`), so the same code receives straight into registered buffers and is tested byte by byte. Lengths
are checked before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from mlfabric.messages import ControlMessage, TransferHeader

# magic, kind, reserved, length of what follows, stream
_HEADER: Final = struct.Struct("<BBHIQ")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = 0x4D

MAX_CONTROL_BYTES: Final = 16 * 2**20
MAX_HANDSHAKE_BYTES: Final = 4096
CHUNK_BYTES: Final = 256 * 1024
MAX_DATA_BYTES: Final = 4 * 2**20


class WireError(Exception):
    """What came is not of our protocol; the connection must be closed."""


# What msgspec raises for bytes that are no record: text that is no text is not among its own errors, nor is
# nesting that goes too deep.
NOT_DECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Kind(IntEnum):
    HANDSHAKE = 1
    CONTROL = 2
    OPEN = 3  # announces a transfer; its stream number is in the header
    DATA = 4
    ABORT = 5  # the rest of the stream will not come


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A control message with the role it is for and the id of its cause."""

    role: str
    message: ControlMessage
    cause: str = ""


class Frame(NamedTuple):
    kind: Kind
    stream: int
    body: bytes  # empty for DATA: its bytes are already in their place
    length: int


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_headers = msgspec.msgpack.Decoder(TransferHeader)


def encode_frame(kind: Kind, body: bytes = b"", stream: int = 0) -> bytes:
    return _HEADER.pack(_MAGIC, kind, 0, len(body), stream) + body


def data_header(stream: int, length: int) -> bytes:
    return _HEADER.pack(_MAGIC, Kind.DATA, 0, length, stream)


def encode_message(role: str, message: ControlMessage, cause: str = "") -> bytes:
    return encode_frame(Kind.CONTROL, _encoder.encode(Envelope(role, message, cause)))


def encode_open(header: TransferHeader, stream: int) -> bytes:
    return encode_frame(Kind.OPEN, _encoder.encode(header), stream)


def decode_message(body: bytes) -> Envelope:
    try:
        return _envelopes.decode(body)
    except NOT_DECODABLE as error:
        raise WireError(f"not a control message: {error}") from None


def decode_open(body: bytes) -> TransferHeader:
    try:
        return _headers.decode(body)
    except NOT_DECODABLE as error:
        raise WireError(f"not the header of a transfer: {error}") from None


# Where the bytes of a data frame go: exactly as long as the frame says.
Sink = Callable[[int, int], memoryview]


def _no_sink(stream: int, length: int) -> memoryview:
    raise WireError("bulk data on a connection that carries none")


class FrameReader:
    """Assembles frames from bytes as they come, in pieces of any size."""

    def __init__(self, sink: Sink = _no_sink) -> None:
        self.limit_bytes = MAX_HANDSHAKE_BYTES  # raised once the peer has proved itself
        self._sink = sink
        self._head = bytearray(HEADER_BYTES)
        self._target = memoryview(self._head)
        self._got = 0
        self._kind: Kind | None = None
        self._stream = 0
        self._body: bytearray | None = None

    def wanted(self) -> memoryview:
        """The place for the next bytes; never empty."""
        return self._target[self._got :]

    def missing_data_bytes(self) -> int:
        """Of the piece of data that is coming; zero: none is."""
        return len(self._target) - self._got if self._kind is Kind.DATA else 0

    def advance(self, count: int) -> Frame | None:
        """`count` bytes were put where they were wanted; the frame they complete, if they do."""
        self._got += count
        if self._got < len(self._target):
            return None
        if self._kind is None:
            self._begin_body()
            if len(self._target) > 0:
                return None
        return self._finish()

    def _begin_body(self) -> None:
        magic, kind, _, length, stream = _HEADER.unpack(self._head)
        if magic != _MAGIC:
            raise WireError(f"byte {magic:#04x} where a frame should begin")
        try:
            self._kind = Kind(kind)
        except ValueError:
            raise WireError(f"unknown kind of frame {kind}") from None
        self._stream = stream
        if self._kind is Kind.DATA:
            if not 0 < length <= MAX_DATA_BYTES:
                raise WireError(f"a piece of data of {length} bytes")
            target = self._sink(stream, length)
        else:
            if length > self.limit_bytes:
                raise WireError(f"a message of {length} bytes, allowed are {self.limit_bytes}")
            self._body = bytearray(length)
            target = memoryview(self._body)
        self._target, self._got = target, 0

    def _finish(self) -> Frame:
        assert self._kind is not None
        body = bytes(self._body) if self._body is not None else b""
        frame = Frame(self._kind, self._stream, body, len(self._target))
        self._target, self._got = memoryview(self._head), 0
        self._kind, self._body = None, None
        return frame
