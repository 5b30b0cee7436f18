"""Memory that two processes share: each hands out arrays of its own arena and sees those of the other's.

An arena grows by segments, anonymous files that the other side maps too. What is lent to the other side stays
until it says that nobody there looks at it any more; an array is free when the last view of it is gone, here
and there. Arrays may be dropped on any thread and at any moment, so dropping only leaves a note.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from mlfabric.errors import FabricError
from mlfabric.numerics import Vector

# Segments are at least this large; an array that needs more gets a segment of its own.
SEGMENT_BYTES = 64 * 2**20
ALIGNED_BYTES = 64


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the sender's arena, lent under a number."""

    segment: int
    offset: int
    length: int
    loan: int


class Arena:
    """The segments of one side. `announce(number, descriptor, size)` tells the other side of a new one."""

    def __init__(self, announce: Callable[[int, int, int], None]) -> None:
        self._announce = announce
        self._lock = threading.Lock()
        self._maps: list[mmap.mmap] = []
        self._free: list[list[tuple[int, int]]] = []  # by segment: (offset, length), by offset
        self._starts: list[int] = []  # addresses, ascending
        self._numbers: list[int] = []  # of the segments that begin there
        self._dropped: deque[tuple[int, int, int]] = deque()

    @property
    def size_bytes(self) -> int:
        return sum(len(each) for each in self._maps)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self.size_bytes - sum(length for free in self._free for _, length in free)

    def empty(self, length: int) -> Vector:
        """An array of bytes; it is free again when nothing refers to it."""
        room = max(-(-length // ALIGNED_BYTES), 1) * ALIGNED_BYTES
        with self._lock:
            self._collect()
            segment, offset = self._find_room(room) or self._grow(room)
        array = np.frombuffer(self._maps[segment], np.uint8, length, offset)
        weakref.finalize(array, self._dropped.append, (segment, offset, room)).atexit = False
        return array

    def locate(self, array: Vector) -> tuple[int, int] | None:
        """(segment, offset) of an array's memory; None: it lies elsewhere."""
        address = address_of(array)
        with self._lock:  # another thread may be adding a segment
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            number = self._numbers[index]
            offset = address - self._starts[index]
            return (number, offset) if offset + array.nbytes <= len(self._maps[number]) else None

    def _find_room(self, room: int) -> tuple[int, int] | None:
        for segment, free in enumerate(self._free):
            for index, (offset, length) in enumerate(free):
                if length >= room:
                    free[index : index + 1] = [(offset + room, length - room)] if length > room else []
                    return segment, offset
        return None

    def _grow(self, room: int) -> tuple[int, int]:
        size = max(room, SEGMENT_BYTES)
        try:
            descriptor = os.memfd_create("mlfabric")
            try:
                os.ftruncate(descriptor, size)
                held = mmap.mmap(descriptor, size)
                number = len(self._maps)
                start = address_of(np.frombuffer(held, np.uint8))
                self._announce(number, descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise FabricError(f"can't have {size} bytes of shared memory: {error.strerror}") from None
        self._maps.append(held)
        self._free.append([(room, size - room)] if size > room else [])
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._numbers.insert(index, number)
        return number, 0

    def _collect(self) -> None:
        while self._dropped:
            segment, offset, room = self._dropped.popleft()
            free = self._free[segment]
            index = bisect_right(free, (offset, 0))
            free.insert(index, (offset, room))
            for at in (index, index - 1):  # join with the next, then with the one before
                if at >= 0 and at + 1 < len(free) and sum(free[at]) == free[at + 1][0]:
                    free[at : at + 2] = [(free[at][0], free[at][1] + free[at + 1][1])]


class SharedMemory:
    """Our arena, the other side's, and what is lent to it and borrowed from it."""

    def __init__(self, announce: Callable[[int, int, int], None]) -> None:
        self.arena = Arena(announce)
        self._theirs: dict[int, mmap.mmap] = {}
        self._loans: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._unused: deque[int] = deque()  # loans of theirs that nobody looks at any more

    def empty(self, elements: int, dtype: Any) -> Vector:
        kind = np.dtype(dtype)
        return self.arena.empty(elements * kind.itemsize).view(kind)

    def lend(self, array: Vector, copy: bool = True) -> tuple[Region, Vector | None]:
        """What the other side is told of an array; and the copy, if it had to be made, or the room for it."""
        place = self.arena.locate(array) if array.nbytes else None
        copied: Vector | None = None
        if place is None:
            copied = self.arena.empty(array.nbytes)
            if copy:
                np.copyto(copied, array.reshape(-1).view(np.uint8))
            place = self.arena.locate(copied)
            assert place is not None
        loan = next(self._numbers)
        self._loans[loan] = array if copied is None else copied
        return Region(*place, array.nbytes, loan), copied

    def returned(self, loans: tuple[int, ...]) -> None:
        for loan in loans:
            self._loans.pop(loan, None)

    def add_segment(self, number: int, descriptor: int, size: int) -> None:
        """A segment of theirs; the descriptor is used up."""
        try:
            self._theirs[number] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def borrow(self, region: Region, dtype: Any = np.uint8) -> Vector:
        held = self._theirs[region.segment]
        array = np.frombuffer(held, np.uint8, region.length, region.offset)
        weakref.finalize(array, self._unused.append, region.loan).atexit = False
        return array.view(dtype)

    def to_return(self) -> tuple[int, ...]:
        """Loans of theirs to give back now."""
        loans = []
        while self._unused:
            loans.append(self._unused.popleft())
        return tuple(loans)


def address_of(array: Vector) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
