"""Nodes in one process whose frames are carried by hand, in any order a seed says."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from mlfabric.collective.frames import HEADER_BYTES, FrameHeader, unpack_header
from mlfabric.collective.operations import Operation
from mlfabric.collective.switchboard import Switchboard


class Wires:
    """A switchboard per node, links between all of them; every step moves one frame one stage further.

    A frame is copied when it is handed to the kernel, lands later, and its place may be asked for long before
    its last byte is there, as between real hosts.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.names = tuple(f"n{index}" for index in range(size))
        self.boards = {name: Switchboard(name) for name in self.names}
        self._random = random.Random(seed)
        self._flying: dict[tuple[str, str], deque[tuple[FrameHeader, bytes]]] = {}
        self._landing: dict[tuple[str, str], tuple[FrameHeader, bytes, memoryview | None]] = {}
        self.frames = 0
        self.payload_bytes = dict.fromkeys(self.names, 0)
        self.link_bytes: dict[tuple[str, str], int] = {}

    def form(self, number: int = 1, names: tuple[str, ...] | None = None) -> None:
        for name in names or self.names:
            self.boards[name].form(number, "test", names or self.names)

    def post(self, name: str, operation: Operation, number: int = 1) -> list[str | None]:
        """Call an operation; the list gets its outcome."""
        ended: list[str | None] = []
        board = self.boards[name]
        board.post(board.groups[number], operation, ended.append)
        return ended

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        for source in self.names:
            for target in self.names:
                pair = (source, target)
                if target in self.boards[source].woken:
                    moves.append(lambda pair=pair: self._take(*pair))  # type: ignore[misc]
                if pair in self._landing:
                    moves.append(lambda pair=pair: self._land(*pair))  # type: ignore[misc]
                elif self._flying.get(pair):
                    moves.append(lambda pair=pair: self._open(*pair))  # type: ignore[misc]
        return moves

    def _take(self, source: str, target: str) -> None:
        board = self.boards[source]
        frame = board.next_frame(target)
        if frame is None:
            board.woken.discard(target)
            return
        self.frames += 1
        payload = bytes(frame.payload) if frame.payload is not None else frame.head[HEADER_BYTES:]
        self.payload_bytes[source] += len(payload)
        self.link_bytes[source, target] = self.link_bytes.get((source, target), 0) + len(payload)
        self._flying.setdefault((source, target), deque()).append((unpack_header(frame.head), payload))
        board.sent(frame)

    def _open(self, source: str, target: str) -> None:
        header, payload = self._flying[source, target].popleft()
        place = self.boards[target].place(source, header)
        self._landing[source, target] = (header, payload, place)

    def _land(self, source: str, target: str) -> None:
        header, payload, place = self._landing.pop((source, target))
        if place is not None:
            place[:] = payload
        self.boards[target].received(source, header, place)

    def run(self, steps: int | None = None) -> None:
        """Carry frames until none is left, or so many steps."""
        while steps is None or steps > 0:
            moves = self._moves()
            if not moves:
                return
            self._random.choice(moves)()
            if steps is not None:
                steps -= 1

    def deliver(self, name: str) -> None:
        """Carry all that a node has sent to where it goes."""
        for source, target in [pair for pair in (*self._flying, *self._landing) if pair[0] == name]:
            while (source, target) in self._landing or self._flying.get((source, target)):
                if (source, target) in self._landing:
                    self._land(source, target)
                else:
                    self._open(source, target)

    def lose(self, name: str) -> None:
        """A node is gone, with all that was on its way to and from it."""
        for pair in [pair for pair in (*self._flying, *self._landing) if name in pair]:
            self._flying.pop(pair, None)
            self._landing.pop(pair, None)
        for other in self.names:
            if other != name:
                self.boards[other].lost(name, "gone")
        self.boards[name].woken.clear()
