"""Frames and messages: what goes in comes out, in whatever pieces; what is not ours is refused early."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric import messages
from mlfabric.messages import ControlMessage, Heartbeat, Message, TransferAbout, TransferHeader, Version
from mlfabric.wire import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_DATA_BYTES,
    MAX_HANDSHAKE_BYTES,
    Frame,
    FrameReader,
    Kind,
    WireError,
    data_header,
    decode_message,
    decode_open,
    encode_frame,
    encode_message,
    encode_open,
)
from tests.records import records

MESSAGES = typing.get_args(ControlMessage)
ABOUTS = typing.get_args(TransferAbout)
roles = st.text(max_size=10)


def test_every_message_is_of_the_control_union_or_heads_a_transfer() -> None:
    defined = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
    assert defined == {*MESSAGES, *ABOUTS}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), role=roles, cause=roles)
def test_a_control_message_comes_back_as_it_went(
    kind: type[Message], data: st.DataObject, role: str, cause: str
) -> None:
    message = data.draw(records(kind))
    frame = encode_message(role, message, cause)
    envelope = decode_message(frame[HEADER_BYTES:])
    assert (envelope.role, envelope.message, envelope.cause) == (role, message, cause)
    assert type(envelope.message) is kind


@pytest.mark.parametrize("kind", ABOUTS, ids=lambda kind: kind.__name__)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), role=roles)
def test_the_header_of_a_transfer_comes_back_as_it_went(
    kind: type[Message], data: st.DataObject, role: str
) -> None:
    header = TransferHeader("t", role, 10, "float32", data.draw(records(kind)), "c")
    assert decode_open(encode_open(header, 3)[HEADER_BYTES:]) == header


# --- frames in pieces ---------------------------------------------------------------------------------------


class Sink:
    """Collects the bytes of data frames by stream."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytearray]] = []

    def __call__(self, stream: int, length: int) -> memoryview:
        place = bytearray(length)
        self.pieces.append((stream, place))
        return memoryview(place)


def feed(reader: FrameReader, stream: bytes, sizes: typing.Iterator[int]) -> list[Frame]:
    """Give a reader the bytes in pieces, never more than it wants."""
    frames, at = [], 0
    while at < len(stream):
        wanted = reader.wanted()
        assert len(wanted) > 0
        piece = stream[at : at + max(1, min(next(sizes), len(wanted)))]
        wanted[: len(piece)] = piece
        at += len(piece)
        frame = reader.advance(len(piece))
        if frame is not None:
            frames.append(frame)
    return frames


def whole() -> typing.Iterator[int]:
    while True:
        yield 1 << 30


def bytewise() -> typing.Iterator[int]:
    while True:
        yield 1


def pieces(seed: int) -> typing.Iterator[int]:
    draw = random.Random(seed)
    while True:
        yield draw.randint(1, 40)


frame_lists = st.lists(
    st.tuples(
        st.sampled_from([Kind.HANDSHAKE, Kind.CONTROL, Kind.OPEN, Kind.DATA, Kind.ABORT]),
        st.integers(0, 2**64 - 1),
        st.binary(min_size=1, max_size=80) | st.just(b""),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(frame_lists, st.integers(0, 10**6))
def test_the_same_frames_come_whole_byte_by_byte_and_in_random_pieces(
    sent: list[tuple[Kind, int, bytes]], seed: int
) -> None:
    sent = [
        (kind, stream, body or b"x") if kind is Kind.DATA else (kind, stream, body)
        for kind, stream, body in sent
    ]
    raw = b"".join(
        data_header(stream, len(body)) + body if kind is Kind.DATA else encode_frame(kind, body, stream)
        for kind, stream, body in sent
    )
    expected = [
        Frame(kind, stream, b"" if kind is Kind.DATA else body, len(body)) for kind, stream, body in sent
    ]
    data = [(stream, body) for kind, stream, body in sent if kind is Kind.DATA]
    for sizes in (whole(), bytewise(), pieces(seed)):
        sink = Sink()
        assert feed(FrameReader(sink), raw, sizes) == expected
        assert [(stream, bytes(place)) for stream, place in sink.pieces] == data


def test_data_lands_in_the_sinks_own_memory_and_nowhere_else() -> None:
    target = bytearray(b"-" * 100)
    reader = FrameReader(lambda stream, length: memoryview(target)[10 : 10 + length])
    feed(reader, data_header(1, 30) + b"a" * 30, pieces(1))
    assert bytes(target) == b"-" * 10 + b"a" * 30 + b"-" * 60


# --- what is not ours ---------------------------------------------------------------------------------------


def raw_header(magic: int = 0x4D, kind: int = Kind.CONTROL, length: int = 0) -> bytes:
    return struct.pack("<BBHIQ", magic, kind, 0, length, 0)


@pytest.mark.parametrize(
    ("header", "limit", "sentence"),
    [
        (b"GET / HTTP/1.1\r\n", MAX_CONTROL_BYTES, "0x47 where a frame should begin"),
        (raw_header(magic=0), MAX_CONTROL_BYTES, "0x00 where a frame should begin"),
        (raw_header(kind=0), MAX_CONTROL_BYTES, "unknown kind of frame 0"),
        (raw_header(kind=99), MAX_CONTROL_BYTES, "unknown kind of frame 99"),
        (raw_header(length=MAX_HANDSHAKE_BYTES + 1), MAX_HANDSHAKE_BYTES, "allowed are 4096"),
        (raw_header(length=MAX_CONTROL_BYTES + 1), MAX_CONTROL_BYTES, "allowed are 16777216"),
        (raw_header(length=2**32 - 1), MAX_CONTROL_BYTES, "4294967295 bytes"),
        (raw_header(kind=Kind.OPEN, length=2**32 - 1), MAX_CONTROL_BYTES, "4294967295 bytes"),
        (raw_header(kind=Kind.ABORT, length=2**32 - 1), MAX_CONTROL_BYTES, "4294967295 bytes"),
        (raw_header(kind=Kind.DATA, length=MAX_DATA_BYTES + 1), MAX_CONTROL_BYTES, "a piece of data"),
        (raw_header(kind=Kind.DATA, length=0), MAX_CONTROL_BYTES, "a piece of data of 0 bytes"),
        (raw_header(kind=Kind.DATA, length=8), MAX_CONTROL_BYTES, "carries none"),
    ],
)
def test_a_frame_that_cannot_be_is_refused_before_anything_is_allocated(
    header: bytes, limit: int, sentence: str
) -> None:
    reader = FrameReader()
    reader.limit_bytes = limit
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=sentence):
            feed(reader, header, whole())
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_the_longest_allowed_frame_passes() -> None:
    body = b"x" * MAX_HANDSHAKE_BYTES
    assert feed(FrameReader(), encode_frame(Kind.HANDSHAKE, body), whole()) == [
        Frame(Kind.HANDSHAKE, 0, body, len(body))
    ]


NOT_MESSAGES = [
    b"",
    b"\xc1",
    b"\x93",
    msgspec.msgpack.encode(3),
    msgspec.msgpack.encode(["worker", {"type": "NoSuchMessage"}, ""]),
    msgspec.msgpack.encode(["worker", {"type": "Heartbeat", "sent_s": "soon"}, ""]),
    msgspec.msgpack.encode(["worker", {"type": "Heartbeat"}, ""]),
    b"\x93\xa1\xff\x82\xa4type\xa9Heartbeat\xa6sent_s\x01\xa0",  # a name that is no text
    b"\x91" * 20_000,  # deeper than any message
    b"\x93\xa1w\x82\xa4type\xa5Leave\xa1x" + b"\x91" * 20_000,  # the same in a field that nobody knows
    msgspec.msgpack.encode(["worker", {"type": "Leave", "node": "w0"}, ""]) + b"\x00",
]


@pytest.mark.parametrize("body", NOT_MESSAGES, ids=range(len(NOT_MESSAGES)))
def test_a_body_that_is_no_message_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError, match="not a control message"):
        decode_message(body)
    with pytest.raises(WireError, match="not the header of a transfer"):
        decode_open(body)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_a_message_or_a_wire_error_and_nothing_else(body: bytes) -> None:
    for decode in (decode_message, decode_open):
        with contextlib.suppress(WireError):
            decode(body)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6))
def test_a_damaged_message_is_a_message_or_a_wire_error(seed: int) -> None:
    draw = random.Random(seed)
    body = bytearray(encode_message("scheduler", Heartbeat(draw.random()), "w0:7")[HEADER_BYTES:])
    for _ in range(draw.randint(1, 3)):
        body[draw.randrange(len(body))] = draw.randrange(256)
    with contextlib.suppress(WireError):
        decode_message(bytes(body))


def test_versions_are_ordered_by_epoch_then_count() -> None:
    assert Version(0, 9) < Version(1, 2) < Version(1, 3)
    assert (str(Version(0, 9)), str(Version(2, 9))) == ("9", "2:9")


@given(st.text(max_size=8), st.integers(0, 10**9))
def test_an_update_id_comes_apart_as_it_was_put_together(label: str, number: int) -> None:
    assert messages.split_update_id(messages.update_id(label, number)) == (label, number)
