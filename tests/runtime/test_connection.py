"""One connection by itself: what it sends when things change under way."""

from __future__ import annotations

import socket

import numpy as np

from mlfabric.runtime.connection import Connection, Receiving, Sending
from mlfabric.runtime.trust import NONCE_BYTES, Handshake, Purpose
from mlfabric.wire import Kind


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
