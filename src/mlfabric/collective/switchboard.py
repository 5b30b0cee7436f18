"""All of a node's groups, and the frames to and from each peer. Pure: the runtime moves the bytes.

A driver asks for the next frame to a peer, says when it is sent, asks where the bytes of an arriving frame go
and says when they are there. Short frames go first, then chunks by priority and age of their operation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mlfabric.collective.exchange import Pending
from mlfabric.collective.frames import FrameHeader, FrameKind, decode_announcement, pack_header
from mlfabric.collective.group import Done, Group
from mlfabric.collective.mailbox import MessageChunk, Outgoing, Received, Wanted
from mlfabric.collective.operations import Operation
from mlfabric.collective.routes import Shares
from mlfabric.errors import FabricError
from mlfabric.messages import SharesPlanned
from mlfabric.wire import WireError


@dataclass(frozen=True, slots=True)
class OutFrame:
    """A frame to send: header (or a whole short frame), payload, and whose chunk it is."""

    head: bytes
    payload: memoryview | None = None
    group: Group | None = None
    sequence: int = 0
    pending: Pending | MessageChunk | None = None


class Switchboard:
    def __init__(self, node: str) -> None:
        self.node = node
        self.groups: dict[int, Group] = {}
        self._urgent: dict[str, deque[bytes]] = {}
        self._order: list[tuple[int, int, Group, int]] = []  # priority, age, group, sequence
        self._age = 0
        self._dissolved: set[int] = set()
        self._message_turn: set[str] = set()  # peers whose next frame is a message's, if there is one
        self._strays: dict[int, list[tuple[str, FrameHeader, memoryview]]] = {}
        self.woken: set[str] = set()  # peers that something can be sent to now

    # --- groups and calls -------------------------------------------------------------------------------

    def form(self, number: int, name: str, nodes: tuple[str, ...]) -> Group:
        """Have a group; frames for it that came before are looked at now."""
        if number in self.groups:
            raise FabricError(f"group {name} exists already")
        rank = nodes.index(self.node)

        def urgent(to: int, frame: bytes) -> None:
            peer = nodes[to]
            self._urgent.setdefault(peer, deque()).append(frame)
            self.woken.add(peer)

        group = self.groups[number] = Group(number, name, nodes, rank, urgent)
        for peer, header, payload in self._strays.pop(number, []):
            self.received(peer, header, payload)
        return group

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
            self._order = [entry for entry in self._order if entry[2] is not group]

    def post(self, group: Group, operation: Operation, done: Done) -> int:
        before = set(group.running)
        sequence = group.post(operation, done)
        self._follow(group, before)
        return sequence

    def send(self, group: Group, to: int, tag: int, payload: memoryview, done: Done) -> Outgoing | None:
        """Send a message to a rank; None: the group is over, `done` has heard why."""
        if group.ended(to):
            done(group.broken)
            return None
        sending = group.mailbox.send(to, tag, payload, done)
        self._follow(group, set(group.running))
        return sending

    def receive(
        self, group: Group, source: int, tag: int, place: memoryview, done: Received
    ) -> Wanted | None:
        if group.ended(source):
            done(group.broken, -1)
            return None
        wanted = group.mailbox.receive(source, tag, place, done)
        self._follow(group, set(group.running))
        return wanted

    def _follow(self, group: Group, before: set[int]) -> None:
        """Operations that began just now take their place in the order of sending."""
        for sequence in group.running.keys() - before:
            self._age += 1
            priority = group.running[sequence].operation.priority
            self._order.append((priority, self._age, group, sequence))
        if group.running.keys() != before:
            self._order = [entry for entry in self._order if entry[3] in entry[2].running]
            self._order.sort(key=lambda entry: entry[:2])
        group.woken |= group.mailbox.woken
        group.mailbox.woken.clear()
        if group.woken:
            self.woken |= {group.nodes[rank] for rank in group.woken}
            group.woken.clear()

    # --- frames out -------------------------------------------------------------------------------------

    def next_frame(self, peer: str) -> OutFrame | None:
        urgent = self._urgent.get(peer)
        if urgent:
            return OutFrame(urgent.popleft())
        if peer in self._message_turn:
            frame = self._next_message(peer)
            if frame is not None:
                self._message_turn.discard(peer)
                return frame
        self._message_turn.add(peer)
        for _, _, group, sequence in self._order:
            if sequence not in group.running or peer not in group.nodes:
                continue
            pending = group.next_chunk(sequence, group.nodes.index(peer))
            if pending is not None:
                chunk = pending.chunk
                head = pack_header(
                    pending.kind, group.number, sequence, chunk.block, chunk.start, len(pending.payload)
                )
                return OutFrame(head, pending.payload, group, sequence, pending)
        return self._next_message(peer)

    def _next_message(self, peer: str) -> OutFrame | None:
        for group in self.groups.values():
            chunk = group.mailbox.next_chunk(group.nodes.index(peer)) if peer in group.nodes else None
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
        if frame.pending is None or frame.group is None:
            return
        before = set(frame.group.running)
        if isinstance(frame.pending, MessageChunk):
            frame.group.mailbox.chunk_sent(frame.pending)
        else:
            frame.group.chunk_sent(frame.sequence, frame.pending)
        self._follow(frame.group, before)

    # --- frames in --------------------------------------------------------------------------------------

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Where the bytes that follow a header go; None: nowhere, let them pass."""
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

    def received(self, peer: str, header: FrameHeader, payload: memoryview | None) -> None:
        """A frame is complete; `payload` is what `place` gave for it."""
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
        if peer not in group.nodes:
            raise WireError(f"{peer} is not in {group.title}")
        rank = group.nodes.index(peer)
        before = set(group.running)
        match header.kind:
            case FrameKind.PART | FrameKind.RESULT | FrameKind.CREDIT:
                group.chunk_received(rank, header, payload)
            case FrameKind.OFFER | FrameKind.ACCEPT | FrameKind.MESSAGE:
                if group.broken is None:
                    group.mailbox.received(rank, header, payload)
            case FrameKind.ANNOUNCE:
                group.announced(rank, header.sequence, decode_announcement(payload))
            case FrameKind.LEFT:
                group.lost(rank, "", orderly=True)
            case FrameKind.FAILED:
                group.fail(bytes(payload).decode("utf-8", "replace"), tell=False)
        self._follow(group, before)

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone: every group it is in ends."""
        self._urgent.pop(peer, None)
        for group in self.groups.values():
            if peer in group.nodes:
                group.lost(group.nodes.index(peer), reason)
        self._order = [entry for entry in self._order if entry[3] in entry[2].running]


# Frames that may wait for a group to be formed here: announcements of a few operations from every peer.
_MAX_STRAYS = 4096
