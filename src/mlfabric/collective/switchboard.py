"""All of a node's groups, and the frames to and from each peer. Pure: the runtime moves the bytes.

A driver asks for the next frame to a peer, says when it is sent, asks where the bytes of an arriving frame go
and says when they are there. Short frames go first, then chunks by priority and age of their operation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from mlfabric.collective.exchange import Pending
from mlfabric.collective.frames import (
    PROBE_KINDS,
    FrameHeader,
    FrameKind,
    decode_announcement,
    pack_header,
)
from mlfabric.collective.group import Done, Group, Running
from mlfabric.collective.mailbox import MessageChunk, Outgoing, Received, Wanted
from mlfabric.collective.operations import Operation
from mlfabric.collective.probing import Probes
from mlfabric.collective.routes import Shares
from mlfabric.collective.staging import Staging
from mlfabric.errors import FabricError
from mlfabric.messages import SharesPlanned
from mlfabric.wire import WireError


@dataclass(slots=True)
class OutFrame:
    """A frame to send: header (or a whole short frame), payload, and whose chunk it is."""

    head: bytes
    payload: memoryview | None = None
    group: Group | None = None
    sequence: int = 0
    pending: Pending | MessageChunk | None = None
    probed: str = ""  # the peer, of a probe or its answer


class CallListener(Protocol):
    """Hears of every large operation, by its bytes, and of its end."""

    def posted(self, size_bytes: int, done: Done) -> Done: ...


class Switchboard:
    def __init__(self, node: str) -> None:
        self.node = node
        self.listener: CallListener | None = None
        self.groups: dict[int, Group] = {}
        self._urgent: dict[str, deque[bytes]] = {}
        self._order: list[tuple[Group, Running]] = []  # as their chunks take their turn
        self._age = 0
        self._staging = Staging()
        self._dissolved: set[int] = set()
        self._message_turn: set[str] = set()  # peers whose next frame is a message's, if there is one
        self._strays: dict[int, list[tuple[str, FrameHeader, memoryview]]] = {}
        self.woken: set[str] = set()  # peers that something can be sent to now
        self.probes = Probes(self._put)

    # --- groups and calls -------------------------------------------------------------------------------

    def form(self, number: int, name: str, nodes: tuple[str, ...]) -> Group:
        """Have a group; frames for it that came before are looked at now."""
        if number in self.groups:
            raise FabricError(f"group {name} exists already")
        rank = nodes.index(self.node)

        def urgent(to: int, frame: bytes) -> None:
            self._put(nodes[to], frame)

        group = self.groups[number] = Group(number, name, nodes, rank, urgent, self._staging)
        for peer, header, payload in self._strays.pop(number, []):
            self.received(peer, header, payload)
        return group

    def _put(self, peer: str, frame: bytes) -> None:
        self._urgent.setdefault(peer, deque()).append(frame)
        self.woken.add(peer)

    def adopt(self, shares: SharesPlanned) -> None:
        """Have a group's new plan."""
        group = self.groups.get(shares.group)
        if group is not None:
            group.adopt(
                Shares(
                    shares.plan,
                    shares.reduces,
                    shares.broadcasts,
                    shares.gathers,
                    shares.domains,
                    shares.chunk_bytes,
                )
            )

    def farewell(self) -> None:
        """This node is about to leave all of its groups."""
        for group in self.groups.values():
            group.farewell()

    def dissolve(self, number: int, reason: str) -> None:
        """Leave a group."""
        group = self.groups.pop(number, None)
        self._dissolved.add(number)
        if group is not None:
            group.farewell()
            group.fail(reason, tell=False)
            self._order = [entry for entry in self._order if entry[0] is not group]

    def post(self, group: Group, operation: Operation, done: Done) -> int:
        if self.listener is not None and not operation.eager:
            done = self.listener.posted(operation.moved_bytes, done)
        sequence = group.post(operation, done)
        self._follow(group)
        return sequence

    def send(self, group: Group, to: int, tag: int, payload: memoryview, done: Done) -> Outgoing | None:
        """Send a message to a rank; None: the group is over, `done` has heard why."""
        if group.ended(to):
            done(group.broken)
            return None
        sending = group.mailbox.send(to, tag, payload, done)
        self._follow(group)
        return sending

    def receive(
        self, group: Group, source: int, tag: int, place: memoryview, done: Received
    ) -> Wanted | None:
        if group.ended(source):
            done(group.broken, -1)
            return None
        wanted = group.mailbox.receive(source, tag, place, done)
        self._follow(group)
        return wanted

    def _follow(self, group: Group) -> None:
        """Operations that began or ended just now take or leave their place in the order of sending."""
        if group.changed:
            group.changed = False
            for running in group.running.values():
                if not running.age:
                    self._age += 1
                    running.age = self._age
            others = [entry for entry in self._order if entry[0] is not group]
            self._order = others + [(group, running) for running in group.running.values()]
            self._order.sort(key=lambda entry: (entry[1].operation.priority, entry[1].age))
        group.woken |= group.mailbox.woken
        group.mailbox.woken.clear()
        if group.woken:
            nodes = group.nodes
            for rank in group.woken:
                self.woken.add(nodes[rank])
            group.woken.clear()

    @property
    def busy(self) -> bool:
        """Whether any operation is under way."""
        return bool(self._order)

    @property
    def in_use(self) -> bool:
        """Whether the bytes of some operation are on their way."""
        return any(running.exchange is not None for _, running in self._order)

    @property
    def peers_in_use(self) -> set[str]:
        """The peers of all operations whose bytes are on their way."""
        groups = {entry[0].number: entry[0] for entry in self._order if entry[1].exchange is not None}
        return {node for group in groups.values() for node in group.nodes} - {self.node}

    @property
    def bulk_to_come(self) -> int:
        """Bytes that are still to come, if all that runs is large; 0 where something small waits too."""
        if self.probes.awake:
            return 0
        total = 0
        for _, running in self._order:
            if running.operation.eager:
                return 0
            if running.exchange is not None:
                total += running.exchange.bytes_to_come
        return total

    @property
    def overlapping(self) -> bool:
        """Whether all that runs are operations that follow each other: while one waits, another moves."""
        return all(running.operation.follows for _, running in self._order)

    # --- frames out -------------------------------------------------------------------------------------

    def next_frame(self, peer: str, pressed: bool = False) -> OutFrame | None:
        """What to send to a peer now; `pressed` tells it that our bytes wait for it alone."""
        urgent = self._urgent.get(peer)
        if urgent:
            return OutFrame(urgent.popleft())
        probe = self.probes.next_frame(peer)
        if probe is not None:
            return OutFrame(*probe, probed=peer)
        if peer in self._message_turn:
            frame = self._next_message(peer)
            if frame is not None:
                self._message_turn.discard(peer)
                return frame
        self._message_turn.add(peer)
        for group, running in self._order:
            exchange, rank = running.exchange, group.ranks.get(peer)
            if exchange is None or rank is None:
                continue
            pending = exchange.next_frame(rank)
            if pending is not None:
                chunk, payload, sequence = pending.chunk, pending.payload, running.sequence
                head = pack_header(
                    pending.kind, group.number, sequence, chunk.block, chunk.start, len(payload), pressed
                )
                return OutFrame(head, payload, group, sequence, pending)
        return self._next_message(peer)

    def _next_message(self, peer: str) -> OutFrame | None:
        for group in self.groups.values():
            chunk = None if (rank := group.ranks.get(peer)) is None else group.mailbox.next_chunk(rank)
            if chunk is not None:
                outgoing = chunk.outgoing
                head = pack_header(
                    FrameKind.MESSAGE,
                    group.number,
                    outgoing.number,
                    outgoing.tag,
                    chunk.start,
                    len(chunk.payload),
                )
                return OutFrame(head, chunk.payload, group, 0, chunk)
        return None

    def sent(self, frame: OutFrame) -> None:
        group = frame.group
        if frame.probed:
            self.probes.sent(frame.probed, frame.head)
        if frame.pending is None or group is None:
            return
        if isinstance(frame.pending, MessageChunk):
            group.mailbox.chunk_sent(frame.pending)
        else:
            group.chunk_sent(frame.sequence, frame.pending)
        self._follow(group)

    # --- frames in --------------------------------------------------------------------------------------

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Where the bytes that follow a header go; None: nowhere, let them pass."""
        if header.kind in PROBE_KINDS:
            return self.probes.place(peer, header)
        if header.group in self._dissolved:
            return None
        group = self.groups.get(header.group)
        if header.kind in (FrameKind.PART, FrameKind.RESULT) and group is not None:
            return group.place(header)
        if header.kind is FrameKind.MESSAGE and group is not None and peer in group.nodes:
            if group.broken is not None:
                return None
            return group.mailbox.place(group.nodes.index(peer), header)
        return memoryview(bytearray(header.length))

    def received(
        self, peer: str, header: FrameHeader, payload: memoryview | None, bytes_per_s: int = 0
    ) -> None:
        """A frame is complete; `payload` is what `place` gave for it. How fast it came counts for probes."""
        if header.kind in PROBE_KINDS:
            self.probes.received(peer, header, bytes_per_s)
            self.woken.add(peer)
            return
        group = self.groups.get(header.group)
        if group is None:
            if payload is not None:
                strays = self._strays.setdefault(header.group, [])
                if sum(1 for sender, _, _ in strays if sender == peer) >= _MAX_STRAYS:
                    raise WireError(f"too many frames for group {header.group}, which nobody formed here")
                strays.append((peer, header, payload))
            return
        if payload is None:
            return
        rank = group.ranks.get(peer)
        if rank is None:
            raise WireError(f"{peer} is not in {group.title}")
        match header.kind:
            case FrameKind.PART | FrameKind.RESULT | FrameKind.CREDIT:
                group.chunk_received(rank, header, payload)
            case FrameKind.OFFER | FrameKind.ACCEPT | FrameKind.MESSAGE:
                if group.broken is None:
                    group.mailbox.received(rank, header, payload)
            case FrameKind.ANNOUNCE:
                group.announced(rank, header.sequence, decode_announcement(payload))
            case FrameKind.ADOPTED:
                group.adopted(rank, header.offset)
            case FrameKind.LEFT:
                group.lost(rank, "", orderly=True)
            case FrameKind.FAILED:
                group.fail(bytes(payload).decode("utf-8", "replace"), tell=False)
        self._follow(group)

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone: every group it is in ends."""
        self._urgent.pop(peer, None)
        self.probes.forget(peer)
        for group in self.groups.values():
            rank = group.ranks.get(peer)
            if rank is not None:
                group.lost(rank, reason)
                self._follow(group)


# Frames that may wait for a group to be formed here: announcements of a few operations from every peer.
_MAX_STRAYS = 4096
