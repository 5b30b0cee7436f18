"""One TCP connection: frames out of a queue, frames in as they come, bulk bytes straight from and to buffers.

It knows nothing of roles. A connection carries control messages or bulk transfers, one way each; the other
way carries only the handshake. One for collectives becomes a link after its handshake (`runtime.mesh`), which
goes both ways. The engine owns it and decides when to read and write.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlfabric.roles.flows import HEADROOM, RAISE, BulkState
from mlfabric.runtime.allowance import Allowance
from mlfabric.runtime.link import Link
from mlfabric.runtime.pacing import set_pace
from mlfabric.runtime.tls import AnySocket, TlsSocket
from mlfabric.runtime.trust import Handshake, Purpose
from mlfabric.wire import CHUNK_BYTES, MAX_DATA_BYTES, Frame, FrameReader, Kind, data_header, encode_frame

# How much one connection may receive before others get their turn.
READ_BUDGET_BYTES = 4 * 2**20
# It is woken when the rest of a piece of data is there, or so much of it; below the least it is not worth
# telling the kernel.
MOST_LOW_WATER_BYTES = 256 * 1024
LEAST_LOW_WATER_BYTES = 4096
# In the kernel's struct tcp_info: bytes acknowledged, microseconds busy, and of them held back by the window.
_ACKED_AT = 120
_TCP_INFO = struct.Struct("=Q40xQQ")
_MOVED = struct.Struct("=QQ")  # bytes acknowledged, bytes received


@dataclass(slots=True, eq=False)
class Sending:
    """An outgoing transfer: announced by `opening`, then its payload in chunks, as far as that is there."""

    transfer: str
    stream: int
    opening: bytes
    payload: memoryview
    rate_bytes_per_s: float | None
    there: int  # bytes of the payload; more of what is passed on are yet to come
    chunk_bytes: int = CHUNK_BYTES
    offset: int = 0
    opened: bool = False
    aborted: bool = False

    @property
    def starved(self) -> bool:
        return self.opened and not self.aborted and self.there <= self.offset < len(self.payload)


@dataclass(slots=True)
class Receiving:
    """An incoming transfer and where its bytes go; None: they are thrown away."""

    transfer: str
    size_bytes: int
    place: memoryview | None
    offset: int = 0


class Connection:
    def __init__(
        self, sock: AnySocket, handshake: Handshake, peer: str, outbound: bool, deadline_s: float
    ) -> None:
        self.sock = sock
        self.handshake = handshake
        self.peer = peer  # known from the start where we call
        self.outbound = outbound
        self.origin = ""  # "ip:port" of whoever called; a socket that was reset forgets it
        self.connected = not outbound
        self.ready = False
        self.link: Link | None = None  # the mesh reads and writes here, once there is one
        self.deadline_s: float | None = deadline_s  # for the handshake
        self.reader = FrameReader(self._sink)
        self.receiving: dict[int, Receiving] = {}
        self.sendings: deque[Sending] = deque()
        self._frames: deque[bytes] = deque()
        self._held: list[bytes] = []  # waiting for the handshake
        self._buffers: list[memoryview] = []
        self._current: Sending | None = None
        self._chunk = 0
        self._paced_for: Sending | None = None
        self._pace = float("inf")  # bytes per second that the kernel sends at most
        self._raised = 0.0  # what went that fast since there was nothing to send
        self._scratch: bytearray | None = None
        self._low_water = 1
        self.allowance: Allowance | None = None  # of bulk bytes

    @property
    def purpose(self) -> Purpose | None:
        return self.handshake.purpose

    # --- sending ----------------------------------------------------------------------------------------

    def queue_frame(self, frame: bytes, during_handshake: bool = False) -> None:
        if self.ready or during_handshake:
            self._frames.append(frame)
        else:
            self._held.append(frame)

    def become_ready(self) -> None:
        self.ready, self.deadline_s = True, None
        self._frames.extend(self._held)
        self._held.clear()

    def cancel(self, transfer: str) -> bool:
        """Stop sending a transfer; at a chunk's end if it has begun. Its memory is free at once: the rest of
        a chunk whose beginning is on its way is kept here."""
        for sending in self.sendings:
            if sending.transfer == transfer:
                sending.aborted = True
                if sending is self._current:
                    self._buffers = [memoryview(bytes(buffer)) for buffer in self._buffers]
                return True
        return False

    def wants_write(self) -> bool:
        if self.connected and getattr(self.sock, "waits_to_read", False):
            return False
        if self.connected and self.allowance is not None and not self.allowance.may_send(time.monotonic()):
            return False
        return not self.connected or bool(self._buffers or self._frames or (self.ready and self._next()))

    def pump(self) -> list[Sending]:
        """Send what the socket takes; the transfers that are now completely on their way."""
        finished: list[Sending] = []
        allowance = self.allowance
        while self._buffers or self._load(finished):
            if allowance is not None and not allowance.may_send(time.monotonic()):
                break
            try:
                sent = self.sock.sendmsg(self._allowed())
            except BlockingIOError:
                break
            if allowance is not None:
                allowance.took(sent)
            while sent:
                first = self._buffers[0]
                if sent >= len(first):
                    sent -= len(first)
                    self._buffers.pop(0)
                else:
                    self._buffers[0] = first[sent:]
                    sent = 0
            if not self._buffers and self._current is not None:
                self._current.offset += self._chunk
                self._current = None
        return finished

    def _allowed(self) -> Sequence[memoryview]:
        if self.allowance is None or isinstance(self.sock, TlsSocket):  # TLS can't take a piece back
            return self._buffers
        return self.allowance.cut(self._buffers)

    def _load(self, finished: list[Sending]) -> bool:
        """Choose the next bytes to send; False: there are none."""
        if self._frames:
            self._buffers = [memoryview(self._frames.popleft())]
            return True
        while self.ready and (sending := self._next()):
            if sending.aborted or (sending.opened and sending.offset >= len(sending.payload)):
                self.sendings.remove(sending)
                if not sending.aborted:
                    finished.append(sending)
                elif sending.opened:
                    self._buffers = [memoryview(encode_frame(Kind.ABORT, stream=sending.stream))]
                    return True
                continue
            self._buffers = self._chunk_of(sending)
            return True
        self._raised = 0.0
        return False

    def _next(self) -> Sending | None:
        """The first with something to send: where one waited for the bytes of another, and that one for its,
        all would wait."""
        return next((sending for sending in self.sendings if not sending.starved), None)

    def _chunk_of(self, sending: Sending) -> list[memoryview]:
        if self._paced_for is not sending:
            self._paced_for = sending
            planned = sending.rate_bytes_per_s
            self._set_pace(float("inf") if planned is None else max(HEADROOM * planned, self._raised))
        buffers = []
        if not sending.opened:
            sending.opened = True
            buffers.append(memoryview(sending.opening))
        until = min(sending.offset + sending.chunk_bytes, sending.there)
        chunk = sending.payload[sending.offset : until]
        self._current, self._chunk = sending, len(chunk)
        if len(chunk):
            buffers += [memoryview(data_header(sending.stream, len(chunk))), chunk]
        return buffers

    def _set_pace(self, pace: float) -> None:
        if pace != self._pace:
            self._pace = pace
            set_pace(self.sock, pace if pace < float("inf") else None)

    def raise_pace(self) -> None:
        """What is being sent goes as fast as it may: let it, and what follows it, go faster."""
        self._raised = RAISE * self._pace
        self._set_pace(self._raised)

    def bulk_state(self) -> BulkState:
        """How the transfers on this connection fare, as the kernel sees it."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        acked, busy, window = _TCP_INFO.unpack_from(info, _ACKED_AT)
        return BulkState(acked, busy, window, self._pace, self._next() is not None)

    def moved_bytes(self) -> tuple[int, int]:
        """What was ever sent and acknowledged, and what came, as the kernel counts it."""
        sent, received = _MOVED.unpack_from(
            self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), _ACKED_AT
        )
        return sent, received

    def crosses_links(self) -> bool:
        """Whether it leads to another host."""
        try:
            here, there = self.sock.getsockname(), self.sock.getpeername()
        except OSError:
            return False  # not connected yet, or no more
        return bool(here[0] != there[0])

    # --- receiving --------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Frame | None]:
        """Frames as they complete; None at the end means that the other side has closed."""
        budget = READ_BUDGET_BYTES
        sealed = isinstance(self.sock, TlsSocket)  # it gives a record at a time
        while budget > 0:
            wanted = self.reader.wanted()
            try:
                count = self.sock.recv_into(wanted)
            except BlockingIOError:
                break
            if count == 0:
                yield None
                return
            budget -= count
            frame = self.reader.advance(count)
            if frame is not None:
                yield frame
            if count < len(wanted) and not sealed:
                break
        if not sealed:
            self._set_low_water()

    def _set_low_water(self) -> None:
        """Waking up costs more than reading: nobody is woken for less than the rest of a piece of data."""
        missing = self.reader.missing_data_bytes()
        level = min(missing, MOST_LOW_WATER_BYTES) if missing > LEAST_LOW_WATER_BYTES else 1
        if level != self._low_water:
            self._low_water = level
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, level)

    def _sink(self, stream: int, length: int) -> memoryview:
        receiving = self.receiving.get(stream)
        if receiving is None or receiving.offset + length > receiving.size_bytes or receiving.place is None:
            # Bytes of a transfer that was refused or cancelled were already on their way.
            if self._scratch is None:
                self._scratch = bytearray(MAX_DATA_BYTES)
            return memoryview(self._scratch)[:length]
        return receiving.place[receiving.offset : receiving.offset + length]

    def close(self) -> None:
        self.sock.close()
