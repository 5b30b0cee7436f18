"""Probes: how a node that takes part in no operation finds out about its own link. Pure: times are passed in.

The prober knocks. The peer says that it is awake when it moves no bytes of operations, or after a short while
if it does all the time: a probe between them takes nothing from them, and they nothing from it. From then on
it rests no more and reads what comes as it comes; the probe's bytes follow, and as many come back. Whoever
receives them measures their rate; the answer brings the peer's figure along. Each of the two has at most one
probe under way with the other: whatever else comes is a breach, and all bytes go to one place that nobody
reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from mlfabric.collective.frames import MAX_PROBE_BYTES, FrameHeader, FrameKind, pack_header, unpack_header
from mlfabric.wire import WireError

# A probe begins so long after the last one began.
PROBE_EVERY_S = 0.25
# A peer that has not answered by then is skipped; what it says later is heard, and counts for nothing.
ANSWER_S = 2.0
# Whoever is knocked at waits so long at most for the end of its operations.
BETWEEN_S = 0.1
# A peer that is told that we are awake has sent its probe and got its answer by then, or we rest again.
GUEST_S = 0.5
# A probe is as long as takes so many seconds, as far as is known, within bounds: what it takes from the peer
# does not come back, and fewer bytes say little.
PROBE_S = 0.016
LEAST_PROBE_BYTES = 128 * 1024
UNKNOWN_BYTES = 256 * 1024
# In the beginning of a probe, this part of it, TCP finds its window. The rate is that of what follows, if
# it is not less than another such part.
BEGINNING = 0.25


class Mark(NamedTuple):
    """So many bytes had come over a link at some time between the two."""

    before_s: float
    came: int
    after_s: float


class Probed(NamedTuple):
    """What a probe showed, in bytes per second; None: it could not be told."""

    peer: str
    up: float | None
    down: float | None


def size_for(bytes_per_s: float | None) -> int:
    """How long a probe has to be that is to show such a rate, or another."""
    if bytes_per_s is None:
        return UNKNOWN_BYTES
    return int(min(max(PROBE_S * bytes_per_s, LEAST_PROBE_BYTES), MAX_PROBE_BYTES))


def rate_of(marks: Sequence[Mark], length: int) -> int:
    """The rate at which the bytes of a probe came, at least, from marks made on the way; 0: no telling."""
    if not marks:
        return 0
    least = BEGINNING * length
    first, last = marks[0], marks[-1]
    began = next((mark for mark in marks if mark.came - first.came >= least), last)
    if last.came - began.came < least:
        began = first
    took_s = last.after_s - began.before_s
    if last.came - began.came < least or took_s <= 0:
        return 0
    return int((last.came - began.came) / took_s)


class _Asked(Enum):
    """How far our probe of a peer has come."""

    KNOCKED = "it is to say that it is awake"
    SENT = "it is to answer"


class _Guest(Enum):
    """How far a peer's probe of us has come."""

    KNOCKED = "it is to hear that we are awake"
    EXPECTED = "its bytes are to come"
    ANSWERED = "its answer is on its way out"


class Probes:
    """The probes of a node and of its peers. `urgent(peer, frame)` puts out a short frame."""

    def __init__(self, urgent: Callable[[str, bytes], None]) -> None:
        self.results: list[Probed] = []  # for whoever looks
        self._urgent = urgent
        self._bytes = memoryview(bytes(MAX_PROBE_BYTES))
        self._sink = memoryview(b"")  # made when the first probe comes
        self._lengths: dict[str, int] = {}  # of the probes that we asked for
        self._asked: dict[str, _Asked] = {}
        self._guests: dict[str, _Guest] = {}
        self._knocked: dict[str, float | None] = {}  # when; None: just now
        self._until: dict[str, float] = {}  # we don't rest for guests, until then
        self._to_send: dict[str, deque[bytes]] = {}  # headers, by peer

    # --- asking -----------------------------------------------------------------------------------------

    def is_open(self, peer: str) -> bool:
        """Whether a probe of this peer is not over yet."""
        return peer in self._asked

    def knock(self, peer: str, length: int) -> None:
        """Begin a probe of so many bytes."""
        self._asked[peer] = _Asked.KNOCKED
        self._lengths[peer] = length
        self._urgent(peer, pack_header(FrameKind.KNOCK, 0, 0))

    def forget(self, peer: str) -> None:
        """Its link is gone, and with it all that was on its way."""
        self._asked.pop(peer, None)
        self._to_send.pop(peer, None)
        self._leaves(peer)

    # --- being asked ------------------------------------------------------------------------------------

    @property
    def awake(self) -> bool:
        """Whether somebody's probe is about to come or being answered: whoever rests now spoils it."""
        return bool(self._until)

    def tend(self, now: float, moving: bool) -> None:
        """Let those come who have knocked, now if we move no bytes of operations or have for long enough; and
        wait no longer for those who could and did not."""
        for peer, at in list(self._knocked.items()):
            if at is None:
                self._knocked[peer] = at = now
            if not moving or now >= at + BETWEEN_S:
                del self._knocked[peer]
                self._guests[peer] = _Guest.EXPECTED
                self._until[peer] = now + GUEST_S
                self._urgent(peer, pack_header(FrameKind.AWAKE, 0, 0))
        for peer in [peer for peer, until in self._until.items() if now >= until]:
            del self._until[peer]

    def _leaves(self, peer: str) -> None:
        self._guests.pop(peer, None)
        self._knocked.pop(peer, None)
        self._until.pop(peer, None)

    # --- frames -----------------------------------------------------------------------------------------

    def next_frame(self, peer: str) -> tuple[bytes, memoryview] | None:
        """The probe or answer that is to be sent now, if there is one."""
        heads = self._to_send.get(peer)
        if not heads:
            return None
        head = heads.popleft()
        return head, self._bytes[: unpack_header(head).length]

    def sent(self, peer: str, head: bytes) -> None:
        """The bytes of a probe or answer are all on their way."""
        if unpack_header(head).kind is FrameKind.PROBED:
            self._leaves(peer)

    def _send(self, peer: str, kind: FrameKind, length: int, rate: int = 0) -> None:
        head = pack_header(kind, 0, 0, offset=rate, length=length)
        self._to_send.setdefault(peer, deque()).append(head)

    def place(self, peer: str, header: FrameHeader) -> memoryview:
        """Where the bytes after a header go."""
        self._check(peer, header)
        if not header.length:
            return memoryview(bytearray())
        if not self._sink:
            self._sink = memoryview(bytearray(MAX_PROBE_BYTES))
        return self._sink[: header.length]

    def received(self, peer: str, header: FrameHeader, rate: int) -> None:
        """A frame is complete, its bytes came at such a rate."""
        self._check(peer, header)
        match header.kind:
            case FrameKind.KNOCK:
                self._guests[peer] = _Guest.KNOCKED
                self._knocked[peer] = None
            case FrameKind.AWAKE:
                self._asked[peer] = _Asked.SENT
                self._send(peer, FrameKind.PROBE, self._lengths[peer])
            case FrameKind.PROBE:
                self._guests[peer] = _Guest.ANSWERED
                self._send(peer, FrameKind.PROBED, header.length, rate)
            case FrameKind.PROBED:
                del self._asked[peer]
                self.results.append(Probed(peer, header.offset or None, rate or None))

    def _check(self, peer: str, header: FrameHeader) -> None:
        kind, length = header.kind, header.length
        expected = {
            FrameKind.KNOCK: peer not in self._guests,
            FrameKind.AWAKE: self._asked.get(peer) is _Asked.KNOCKED,
            FrameKind.PROBE: self._guests.get(peer) is _Guest.EXPECTED and length > 0,
            FrameKind.PROBED: self._asked.get(peer) is _Asked.SENT and length == self._lengths[peer],
        }
        if not expected[kind]:
            raise WireError(f"{kind.name} of {length} bytes by {peer}, which nobody asked for")


class Prober:
    """Probes peers in turn, one at a time."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._peers: deque[str] = deque()
        self._asked: str | None = None
        self._began = float("-inf")

    def probe(self, peers: tuple[str, ...]) -> None:
        """Probe these from now on."""
        if set(peers) != set(self._peers):
            self._peers = deque(peers)

    def next_s(self, now: float) -> float | None:
        """When to look again; None: when something comes."""
        if not self._peers:
            return None
        wait_s = ANSWER_S if self._waits() else PROBE_EVERY_S
        return max(self._began + wait_s, now)

    def turn(self, now: float, reachable: Callable[[str], bool], bytes_per_s: float | None) -> None:
        """Begin a probe if it is time for one; such a rate is what we know so far."""
        due = self.next_s(now)
        if due is None or due > now:
            return
        self._began, self._asked = now, None
        for _ in range(len(self._peers)):
            peer = self._peers[0]
            self._peers.rotate(-1)
            if reachable(peer) and not self._probes.is_open(peer):
                self._asked = peer
                self._probes.knock(peer, size_for(bytes_per_s))
                return

    def _waits(self) -> bool:
        return self._asked is not None and self._probes.is_open(self._asked)
