"""One connection by itself: what it sends when things change under way, and when it wants to be woken."""

from __future__ import annotations

import select
import socket
import time

import numpy as np

from mlfabric.runtime.connection import Connection, Receiving, Sending
from mlfabric.runtime.trust import NONCE_BYTES, Handshake, Purpose
from mlfabric.wire import Kind, data_header, encode_frame


def test_a_cancelled_transfer_reads_its_memory_no_more() -> None:
    """A late update is dropped while its last chunk is half sent: its worker computes the next one there."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        for sock in (ours, theirs):
            sock.setblocking(False)
        hello = Handshake("w0", b"", bytes(NONCE_BYTES), Purpose.BULK)
        sender, receiver = (Connection(each, hello, "peer", True, 0.0) for each in (ours, theirs))
        sender.become_ready()
        update = np.arange(100_000, dtype=np.uint8)
        sender.sendings.append(Sending("u/0/1", 1, b"", update.data, None, update.nbytes))
        place = np.zeros_like(update)
        receiver.receiving[1] = Receiving("u/0/1", update.nbytes, place.data)
        before = update.copy()
        sender.pump()
        assert sender.cancel("u/0/1")
        update[:] = 0  # the next one
        kinds = []
        while Kind.ABORT not in kinds:
            sender.pump()
            kinds += [frame.kind for frame in receiver.receive() if frame is not None]
    assert kinds == [Kind.DATA, Kind.ABORT]
    assert (place == before).all()


def test_nobody_is_woken_for_less_than_the_rest_of_a_piece_of_data() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here = server.accept()[0]
    with there, here:
        here.setblocking(False)
        receiver = Connection(here, Handshake("w0", b"", bytes(NONCE_BYTES)), "peer", False, 0.0)
        sent = np.arange(10_000, dtype=np.uint32).view(np.uint8)
        place = np.zeros_like(sent)
        receiver.receiving[1] = Receiving("u/0/1", sent.nbytes, place.data)

        def readable(after: int) -> bool:
            """Whether one who waits would be woken, once so many bytes are there."""
            until = time.monotonic() + 10
            while len(here.recv(after, socket.MSG_PEEK)) < after:
                assert time.monotonic() < until
            return bool(select.select([here], [], [], 0)[0])

        there.sendall(data_header(1, 20_000) + sent[:5_000].tobytes())
        assert readable(5_016)
        assert list(receiver.receive()) == []
        there.sendall(sent[5_000:19_999].tobytes())
        assert not readable(14_999)
        there.sendall(sent[19_999:20_000].tobytes() + encode_frame(Kind.CONTROL, b"word"))
        assert readable(15_000)
        kinds = [frame.kind for frame in receiver.receive() if frame is not None]
        kinds += [frame.kind for frame in receiver.receive() if frame is not None]
        assert kinds == [Kind.DATA, Kind.CONTROL]
        assert bytes(place[:20_000]) == bytes(sent[:20_000])
        there.sendall(data_header(1, 20_000) + b"a little")
        assert readable(24)
        assert list(receiver.receive()) == []
        there.close()  # the end is told at once, whatever is missing
        assert select.select([here], [], [], 10)[0]
        assert list(receiver.receive()) == [None]
