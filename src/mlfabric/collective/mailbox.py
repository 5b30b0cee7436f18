"""Messages from one rank of a group to another: each with a tag, in order for each sender and tag.

A small message leaves at once, as long as few bytes that the receiver has not asked for are with it; any
other is offered first and follows when the receiver has a place for it. So a receiver's memory is bounded,
and a sender waits for nothing but the receive that its message is meant for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlfabric.collective.frames import FrameHeader, FrameKind, pack_header
from mlfabric.wire import WireError

ANY_SOURCE = -1
# A message of at most this size may leave unasked,
SMALL_BYTES = 64 * 1024
# as long as no more than this many bytes wait at its receiver unasked for.
UNASKED_BYTES = 2**20
# What a small message counts for at least: the receiver keeps a record of it.
LEAST_BYTES = 256
CHUNK_BYTES = 256 * 1024
# Offers nobody has accepted; each costs the receiver a record, not a buffer.
MAX_OFFERS = 2**20
_NUMBERS = 2**32

Received = Callable[[str | None, int], None]  # error, rank of the sender


@dataclass(slots=True)
class Outgoing:
    to: int
    number: int
    tag: int
    payload: memoryview
    done: Callable[[str | None], None]
    handed_out: int = 0
    sent: int = 0


@dataclass(slots=True)
class Wanted:
    """A receive that waits for its message."""

    source: int
    tag: int
    place: memoryview
    done: Received


@dataclass(slots=True)
class Arrival:
    """A message that waits for its receive: with its bytes if it came unasked."""

    rank: int
    number: int
    tag: int
    size: int
    payload: memoryview | None


@dataclass(slots=True)
class Incoming:
    wanted: Wanted
    rank: int
    size: int
    got: int = 0


@dataclass(frozen=True, slots=True)
class MessageChunk:
    """Bytes of an accepted message to send next."""

    outgoing: Outgoing
    start: int
    payload: memoryview


class Mailbox:
    """`urgent(rank, frame)` puts out short frames, which keep their order; chunks are asked for."""

    def __init__(
        self,
        group: int,
        rank: int,
        size: int,
        urgent: Callable[[int, bytes], None],
        fail: Callable[[str], None],
        names: Callable[[list[int]], str],
    ) -> None:
        self._group = group
        self._rank = rank
        self._urgent = urgent
        self._fail = fail
        self._names = names
        self._next = [0] * size
        self._unasked: list[dict[int, int]] = [{} for _ in range(size)]  # cost by number, at that receiver
        self._offered: dict[tuple[int, int], Outgoing] = {}
        self._accepted: dict[int, deque[Outgoing]] = {}
        self._wanted: list[Wanted] = []  # in the order they were called
        self._arrived: list[Arrival] = []  # in the order they came
        self._held = [0] * size  # bytes here unasked, by sender
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self.woken: set[int] = set()

    # --- calls ------------------------------------------------------------------------------------------

    def send(self, to: int, tag: int, payload: memoryview, done: Callable[[str | None], None]) -> Outgoing:
        number = self._next[to]
        self._next[to] = (number + 1) % _NUMBERS
        outgoing = Outgoing(to, number, tag, payload, done)
        cost = max(len(payload), LEAST_BYTES)
        if len(payload) <= SMALL_BYTES and sum(self._unasked[to].values()) + cost <= UNASKED_BYTES:
            self._unasked[to][number] = cost
            head = pack_header(FrameKind.MESSAGE, self._group, number, tag, 0, len(payload))
            self._urgent(to, head + bytes(payload))
            done(None)
        else:
            self._offered[to, number] = outgoing
            self._urgent(to, pack_header(FrameKind.OFFER, self._group, number, tag, len(payload)))
        return outgoing

    def receive(self, source: int, tag: int, place: memoryview, done: Received) -> Wanted:
        """Take the next message with a tag from a rank, or from any; it may be shorter than its place."""
        wanted = Wanted(source, tag, place, done)
        for index, arrival in enumerate(self._arrived):
            if arrival.tag == tag and source in (ANY_SOURCE, arrival.rank):
                del self._arrived[index]
                self._match(wanted, arrival)
                return wanted
        self._wanted.append(wanted)
        return wanted

    # --- frames -----------------------------------------------------------------------------------------

    def next_chunk(self, to: int) -> MessageChunk | None:
        queue = self._accepted.get(to)
        if not queue:
            return None
        outgoing = queue[0]
        start = outgoing.handed_out
        stop = min(start + CHUNK_BYTES, len(outgoing.payload))
        outgoing.handed_out = stop
        if stop == len(outgoing.payload):
            queue.popleft()
        return MessageChunk(outgoing, start, outgoing.payload[start:stop])

    def chunk_sent(self, chunk: MessageChunk) -> None:
        outgoing = chunk.outgoing
        outgoing.sent += len(chunk.payload)
        if outgoing.sent == len(outgoing.payload):
            gone = self._offered.pop((outgoing.to, outgoing.number), None)
            if gone is not None:
                outgoing.done(None)

    def place(self, rank: int, header: FrameHeader) -> memoryview:
        """Where the bytes of a message go."""
        incoming = self._incoming.get((rank, header.sequence))
        if incoming is not None:
            place = incoming.wanted.place
            if header.offset + header.length > incoming.size or header.offset != incoming.got:
                raise WireError(f"bytes {header.offset} of a message, where none are expected")
            return place[header.offset : header.offset + header.length]
        if header.length > SMALL_BYTES or self._held[rank] + header.length > UNASKED_BYTES:
            raise WireError(f"a message of {header.length} bytes that nobody asked for")
        return memoryview(bytearray(header.length))

    def received(self, rank: int, header: FrameHeader, payload: memoryview) -> None:
        key = (rank, header.sequence)
        match header.kind:
            case FrameKind.MESSAGE if key in self._incoming:
                incoming = self._incoming[key]
                incoming.got += len(payload)
                if incoming.got == incoming.size:
                    del self._incoming[key]
                    incoming.wanted.done(None, rank)
            case FrameKind.MESSAGE:
                self._held[rank] += max(len(payload), LEAST_BYTES)
                self._arrive(Arrival(rank, header.sequence, header.block, len(payload), payload))
            case FrameKind.OFFER:
                if len(self._arrived) >= MAX_OFFERS:
                    raise WireError(f"over {MAX_OFFERS} messages that nobody receives")
                self._arrive(Arrival(rank, header.sequence, header.block, header.offset, None))
            case FrameKind.ACCEPT:
                self._accept(rank, header.sequence)

    def _accept(self, rank: int, number: int) -> None:
        if self._unasked[rank].pop(number, None) is not None:
            return  # it was small, and has been taken
        outgoing = self._offered.get((rank, number))
        if outgoing is None:
            raise WireError(f"message {number} was accepted, which was not offered")
        if not len(outgoing.payload):
            del self._offered[rank, number]
            outgoing.done(None)
            return
        self._accepted.setdefault(rank, deque()).append(outgoing)
        self.woken.add(rank)

    def _arrive(self, arrival: Arrival) -> None:
        for index, wanted in enumerate(self._wanted):
            if arrival.tag == wanted.tag and wanted.source in (ANY_SOURCE, arrival.rank):
                del self._wanted[index]
                self._match(wanted, arrival)
                return
        self._arrived.append(arrival)

    def _match(self, wanted: Wanted, arrival: Arrival) -> None:
        if arrival.size > len(wanted.place):
            reason = (
                f"{self._names([arrival.rank])} sent {arrival.size} bytes with tag {arrival.tag}, "
                f"{self._names([self._rank])} has room for {len(wanted.place)}"
            )
            self._fail(reason)
            wanted.done(reason, arrival.rank)
            return
        self._urgent(arrival.rank, pack_header(FrameKind.ACCEPT, self._group, arrival.number, arrival.tag))
        if arrival.payload is not None:
            wanted.place[: arrival.size] = arrival.payload
            self._held[arrival.rank] -= max(arrival.size, LEAST_BYTES)
            wanted.done(None, arrival.rank)
        elif arrival.size:
            self._incoming[arrival.rank, arrival.number] = Incoming(wanted, arrival.rank, arrival.size)
        else:
            wanted.done(None, arrival.rank)

    # --- trouble ----------------------------------------------------------------------------------------

    def needs(self, rank: int, anybody: bool) -> bool:
        """Whether a call waits for a rank; `anybody`: those that take what comes count too."""
        return (
            any(to == rank for to, _ in self._offered)
            or any(source == rank for source, _ in self._incoming)
            or any(
                wanted.source == rank or (anybody and wanted.source == ANY_SOURCE) for wanted in self._wanted
            )
        )

    def end(self, reason: str) -> None:
        """Nothing comes any more."""
        sends, self._offered = list(self._offered.values()), {}
        waits = [*self._wanted, *(incoming.wanted for incoming in self._incoming.values())]
        self._wanted, self._incoming = [], {}
        self._accepted.clear()
        self._arrived.clear()
        for outgoing in sends:
            outgoing.done(reason)
        for wanted in waits:
            wanted.done(reason, -1)

    def describe(self, call: Outgoing | Wanted) -> str:
        """Whom a call waits for, in words."""
        if isinstance(call, Outgoing):
            whom = self._names([call.to])
            if call.handed_out:
                return f"{whom} has taken {call.sent} of {len(call.payload)} bytes with tag {call.tag}"
            return f"{whom} did not receive the message with tag {call.tag}"
        for incoming in self._incoming.values():
            if incoming.wanted is call:
                return f"{self._names([incoming.rank])} sent {incoming.got} of {incoming.size} bytes"
        whom = "nobody" if call.source == ANY_SOURCE else self._names([call.source])
        sent = "sent anything" if call.source == ANY_SOURCE else "did not send anything"
        return f"{whom} {sent} with tag {call.tag}"
