"""One collective link: a duplex socket to another member.

Bytes go from the caller's array to the socket and from the socket to where they belong, without a stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import socket
import struct
import termios
import time
from collections import deque

from mlfabric.collective.frames import HEADER_BYTES, FrameHeader, FrameKind, unpack_header
from mlfabric.collective.probing import Mark, rate_of
from mlfabric.collective.switchboard import OutFrame, Switchboard
from mlfabric.runtime.allowance import Allowance
from mlfabric.runtime.bandwidth import PRESSED_S, FlowState
from mlfabric.runtime.counters import Traffic
from mlfabric.runtime.tls import AnySocket, TlsSocket

# Bytes read beyond a chunk: the next header, and short frames that follow each other.
SCRATCH_BYTES = 4096
# A link that is read as bytes come wakes us when so many are there, or the rest of the chunk.
LOW_WATER_BYTES = 256 * 1024
# While a probe comes we look so often at least, if it is left to us.
PROBE_MARKS = 8
# Handed to the kernel in one call.
BATCH_BYTES = 512 * 1024
BATCH_FRAMES = 16
# In the kernel's struct tcp_info: the round trip in microseconds, bytes acknowledged, received and not sent
# yet, the shortest round trip, microseconds busy.
_ROUND_TRIP_AT = 68
_TCP_INFO = struct.Struct("=I48xQQ8xII16xQ")
# What one link may read before others get their turn.
READS_PER_TURN = 8
BULK_KINDS = (FrameKind.PART, FrameKind.RESULT)
MEASURED_KINDS = (FrameKind.PROBE, FrameKind.PROBED)


class Closed(Exception):  # noqa: N818 - how a link ends
    """The other side has closed the link."""


class Link:
    def __init__(
        self,
        sock: AnySocket,
        peer: str,
        board: Switchboard,
        allowance: Allowance | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.sock = sock
        # TLS takes and gives a record at a time, and may hold bytes that the kernel knows nothing of.
        self._sealed = isinstance(sock, TlsSocket)
        self.peer = peer
        self.received_bytes = 0
        self.moved_bytes = 0  # both ways, since the mesh looked
        self.sent_bytes = 0  # given to the kernel, ever
        self._board = board
        self._allowance = allowance or Allowance()
        self._traffic = traffic or Traffic()
        self.held = False  # it may send no more for now
        self._frames: deque[OutFrame] = deque()  # handed out, not yet all in the kernel's hands
        self._out: list[memoryview] = []
        self._left: deque[int] = deque()  # bytes of each of those frames still to go
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._have = 0
        self._header: FrameHeader | None = None
        self._place: memoryview | None = None  # None under a header: its bytes go nowhere
        self._target = memoryview(b"")
        self._got = 0
        self._low_water = 1
        self._marks: list[Mark] = []  # of the probe that is coming
        self.blocked = False  # the kernel takes no more for now
        self.pressed = False  # our bytes wait for this peer alone
        self.pressed_until = 0.0  # its bytes wait for us alone, as it said lately

    # --- sending ----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send until the kernel takes no more (`blocked`), we may not (`held`), or nothing is left."""
        self.blocked = self.held = False
        allowance = self._allowance
        while self._out or self._load():
            if allowance.limit_bytes_per_s is not None and not allowance.may_send(time.monotonic()):
                self.held = True
                break
            allowed = self._out if self._sealed else allowance.cut(self._out)
            try:
                count = self.sock.sendmsg(allowed)
            except BlockingIOError:
                self.blocked = True
                break
            allowance.took(count)
            self.moved_bytes += count
            self.sent_bytes += count
            if not self._advance(count) and not self._sealed and allowed is self._out:
                self.blocked = True
                break

    @property
    def limited(self) -> bool:
        """Whether we may send less than the link can carry."""
        return self._allowance.limit_bytes_per_s is not None

    def unsent(self) -> int:
        """Bytes that the kernel holds and the peer has not acknowledged."""
        with contextlib.suppress(OSError):
            count: int = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0]
            return count
        return 0

    def _load(self) -> bool:
        size = 0
        while size < BATCH_BYTES and len(self._frames) < BATCH_FRAMES:
            frame = self._board.next_frame(self.peer, self.pressed)
            if frame is None:
                break
            length = len(frame.head)
            self._out.append(memoryview(frame.head))
            if frame.payload is not None:
                length += len(frame.payload)
                self._out.append(frame.payload)
            self._frames.append(frame)
            self._left.append(length)
            size += length
        return bool(self._out)

    def _advance(self, count: int) -> bool:
        """So many bytes are gone; whether that was all."""
        out = self._out
        gone, rest = 0, count
        while gone < len(out) and rest >= len(out[gone]):
            rest -= len(out[gone])
            gone += 1
        del out[:gone]
        if rest:
            out[0] = out[0][rest:]
        done = []
        while self._left and count >= self._left[0]:
            count -= self._left.popleft()
            done.append(self._frames.popleft())
        if self._left:
            self._left[0] -= count
        for frame in done:
            if frame.payload is not None:
                self._traffic.count_sent(self.peer, len(frame.payload))
            self._board.sent(frame)
        return not out

    def state(self, now: float, far: bool, used: bool) -> FlowState:
        """What the kernel knows of this link."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 176)
        trip, acked, received, waiting, shortest, busy = _TCP_INFO.unpack_from(info, _ROUND_TRIP_AT)
        # Once its last chunk is here, how fast bytes come says nothing of us.
        pressed = self.pressed_until > now and self._header is not None
        return FlowState(acked, received, waiting, busy, pressed, far, used, max(trip - shortest, 0))

    # --- receiving --------------------------------------------------------------------------------------

    def receive(self, rests: bool = False) -> bool:
        """Take what is there; whether there is more. A link that `rests` between turns is read in any case.

        Raises Closed at the end of the stream, WireError for nonsense.
        """
        more = False
        for turn in itertools.count():
            if turn >= READS_PER_TURN and not (self._sealed and self.sock.pending()):
                more = True
                break
            try:
                if self._header is None:
                    count = self.sock.recv_into(self._scratch[self._have :])
                    wanted = SCRATCH_BYTES - self._have
                else:
                    rest = self._target[self._got :]
                    count = self.sock.recvmsg_into([rest, self._scratch])[0]
                    wanted = len(rest)
            except BlockingIOError:
                break
            if count == 0:
                raise Closed
            self.received_bytes += count
            self.moved_bytes += count
            if self._marks:
                self._mark()
            self._sort(count)
            if count < wanted and not self._sealed:
                break
        if not self._sealed:
            self._set_low_water(rests)
        return more

    def _sort(self, count: int) -> None:
        if self._header is None:
            self._have += count
        else:
            direct = min(count, len(self._target) - self._got)
            self._got += direct
            self._have = count - direct
            if self._got == len(self._target):
                self._complete()
        at = 0
        while True:
            if self._header is None:
                if self._have - at < HEADER_BYTES:
                    break
                self._open(unpack_header(self._scratch, at))
                at += HEADER_BYTES
            else:
                take = min(self._have - at, len(self._target) - self._got)
                self._target[self._got : self._got + take] = self._scratch[at : at + take]
                self._got += take
                at += take
                if self._got < len(self._target):
                    break
                self._complete()
        if at and at < self._have:
            self._scratch[: self._have - at] = bytes(self._scratch[at : self._have])
        self._have -= at

    def _open(self, header: FrameHeader) -> None:
        self._header = header
        if header.kind in BULK_KINDS:
            self.pressed_until = time.monotonic() + PRESSED_S if header.pressed else 0.0
        self._place = self._board.place(self.peer, header)
        self._target = self._place if self._place is not None else memoryview(bytearray(header.length))
        self._got = 0
        if header.kind in MEASURED_KINDS:
            self._mark()

    def _mark(self) -> None:
        """Note what the kernel has received by now, be it read or not."""
        before = time.monotonic()
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 176)
        received: int = _TCP_INFO.unpack_from(info, _ROUND_TRIP_AT)[2]
        self._marks.append(Mark(before, received, time.monotonic()))

    def _complete(self) -> None:
        header, place = self._header, self._place
        assert header is not None
        self._header, self._place, self._target = None, None, memoryview(b"")
        self._traffic.count_received(self.peer, header.length)
        marks, self._marks = self._marks, []
        self._board.received(self.peer, header, place, rate_of(marks, header.length))

    def _set_low_water(self, rests: bool) -> None:
        rest = len(self._target) - self._got if self._header is not None and not rests else 1
        most = len(self._target) // PROBE_MARKS if self._marks else LOW_WATER_BYTES
        level = min(rest, most) if rest > SCRATCH_BYTES else 1
        if level != self._low_water:
            self._low_water = level
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, level)
