"""All of a node's groups, and the frames to and from each peer. Pure: the runtime moves the bytes.

A driver asks for the next frame to a peer, says when it is sent, asks where the bytes of an arriving frame go
and says when they are there. Short frames go first, then chunks by priority and age of their operation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mlfabric.collective.exchange import Pending
from mlfabric.collective.frames import FrameHeader, FrameKind, decode_announcement, pack_header
from mlfabric.collective.group import Done, Group, Running
from mlfabric.collective.operations import Operation
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
    pending: Pending | None = None


class Switchboard:
    def __init__(self, node: str) -> None:
        self.node = node
        self.groups: dict[int, Group] = {}
        self._urgent: dict[str, deque[bytes]] = {}
        self._order: list[tuple[Group, Running]] = []  # as their chunks take their turn
        self._age = 0
        self._staging = Staging()
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

        group = self.groups[number] = Group(number, name, nodes, rank, urgent, self._staging)
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

    def dissolve(self, number: int, reason: str) -> None:
        group = self.groups.pop(number, None)
        if group is not None:
            group.fail(reason, tell=False)
            self._order = [entry for entry in self._order if entry[0] is not group]

    def post(self, group: Group, operation: Operation, done: Done) -> int:
        sequence = group.post(operation, done)
        self._follow(group)
        return sequence

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
        if group.woken:
            nodes = group.nodes
            for rank in group.woken:
                self.woken.add(nodes[rank])
            group.woken.clear()

    @property
    def busy(self) -> bool:
        """Whether any operation is under way."""
        return bool(self._order)

    # --- frames out -------------------------------------------------------------------------------------

    def next_frame(self, peer: str, pressed: bool = False) -> OutFrame | None:
        """What to send to a peer now; `pressed` tells it that our bytes wait for it alone."""
        urgent = self._urgent.get(peer)
        if urgent:
            return OutFrame(urgent.popleft())
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
        return None

    def sent(self, frame: OutFrame) -> None:
        group = frame.group
        if frame.pending is not None and group is not None:
            group.chunk_sent(frame.sequence, frame.pending)
            if group.changed or group.woken:
                self._follow(group)

    # --- frames in --------------------------------------------------------------------------------------

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Where the bytes that follow a header go; None: nowhere, let them pass."""
        group = self.groups.get(header.group)
        if header.kind in (FrameKind.PART, FrameKind.RESULT) and group is not None:
            return group.place(header)
        return memoryview(bytearray(header.length))

    def received(self, peer: str, header: FrameHeader, payload: memoryview | None) -> None:
        """A frame is complete; `payload` is what `place` gave for it."""
        group = self.groups.get(header.group)
        if group is None:
            if payload is not None:
                strays = self._strays.setdefault(header.group, [])
                if len(strays) >= _MAX_STRAYS:
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
            case FrameKind.ANNOUNCE:
                group.announced(rank, header.sequence, decode_announcement(payload))
            case FrameKind.FAILED:
                group.fail(bytes(payload).decode("utf-8", "replace"), tell=False)
        if group.changed or group.woken:
            self._follow(group)

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone: every group it is in ends."""
        self._urgent.pop(peer, None)
        for group in self.groups.values():
            rank = group.ranks.get(peer)
            if rank is not None:
                group.fail(f"{group.title}: rank {rank} ({peer}) was lost: {reason}", tell=False)
                self._follow(group)


# Frames that may wait for a group to be formed here: announcements of a few operations from every peer.
_MAX_STRAYS = 4096
