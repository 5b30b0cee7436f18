"""Operations of a group that wait for their turn, a lane for each priority.

Few run at the same time, and of large ones so few bytes that a change of plan is not late by all of a large
array. What is urgent has a lane of its own: it does not wait behind what is not. In each lane the order is
that of the calls, which is the same on all ranks, so nobody waits for somebody who waits for them.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from mlfabric.collective.operations import Operation

T = TypeVar("T")

# Operations of one lane that run at the same time, and bytes of their arrays.
IN_FLIGHT = 4
FLIGHT_BYTES = 8 * 2**20


class Lane(Generic[T]):
    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Operation, T]] = deque()
        self.running = 0
        self.running_bytes = 0

    def may_start(self) -> bool:
        if not self.waiting:
            return False
        if not self.running:
            return True
        size = self.waiting[0][1].size_bytes
        return self.running < IN_FLIGHT and self.running_bytes + size <= FLIGHT_BYTES


class Lanes(Generic[T]):
    """`T` goes with each operation."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane[T]] = {}
        self._waiting: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._waiting

    @property
    def sequences(self) -> set[int]:
        """Of those that wait."""
        return self._waiting

    def put(self, sequence: int, operation: Operation, item: T) -> None:
        lane = self._lanes.setdefault(operation.priority, Lane())
        lane.waiting.append((sequence, operation, item))
        self._waiting.add(sequence)

    def next(self) -> tuple[int, Operation, T] | None:
        """What may start now, the most urgent first; it counts as running."""
        for priority in sorted(self._lanes):
            lane = self._lanes[priority]
            if lane.may_start():
                sequence, operation, item = lane.waiting.popleft()
                self._waiting.discard(sequence)
                lane.running += 1
                lane.running_bytes += operation.size_bytes
                return sequence, operation, item
        return None

    def ended(self, operation: Operation) -> None:
        lane = self._lanes[operation.priority]
        lane.running -= 1
        lane.running_bytes -= operation.size_bytes

    def clear(self) -> list[T]:
        """Let nothing wait any more; what went with those that did."""
        items = [item for lane in self._lanes.values() for _, _, item in lane.waiting]
        self._lanes.clear()
        self._waiting.clear()
        return items
