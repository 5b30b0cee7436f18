"""Records between a training process and its engine's process, over a socket pair; descriptors go along.

A record is a msgspec struct behind its length. Only these two processes have the socket.
"""

from __future__ import annotations

import array
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

LENGTH_BYTES = 4
READ_BYTES = 2**18
MAX_DESCRIPTORS = 64
# Answers that may wait for a training process that does not get to read them.
SEND_BUFFER_BYTES = 4 * 2**20


class Channel:
    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        """`incoming` is the union of the records that may come."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._lock = threading.Lock()
        self._data = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, *records: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """May wait for the other side to read. OSError: it is gone."""
        bodies = [self._encoder.encode(record) for record in records]
        data = b"".join(len(body).to_bytes(LENGTH_BYTES, "big") + body for body in bodies)
        with self._lock:
            sent = 0
            if descriptors:
                rights = array.array("i", descriptors)
                sent = self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self.sock.sendall(memoryview(data)[sent:])

    def receive(self, wait: bool = True) -> Iterator[Any] | None:
        """What has come, some bytes at least unless told not to wait; None: the other side is gone."""
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            data, messages, _, _ = self.sock.recvmsg(READ_BYTES, space, flags)
        except BlockingIOError:
            return iter(())
        except OSError:
            return None
        for level, kind, payload in messages:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
                self._descriptors.extend(got)
        if not data:
            return None
        self._data += data
        return self._records()

    def _records(self) -> Iterator[Any]:
        while len(self._data) >= LENGTH_BYTES:
            length = int.from_bytes(self._data[:LENGTH_BYTES], "big")
            if len(self._data) < LENGTH_BYTES + length:
                return
            body = bytes(self._data[LENGTH_BYTES : LENGTH_BYTES + length])
            del self._data[: LENGTH_BYTES + length]
            yield self._decoder.decode(body)

    def descriptor(self) -> int:
        """The next that came; those of a record are here before the record is."""
        return self._descriptors.popleft()

    def close(self) -> None:
        self.sock.close()
