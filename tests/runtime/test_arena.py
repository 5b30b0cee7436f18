"""Memory shared by two processes, and the records that go between them: here between two ends in one."""

from __future__ import annotations

import gc
import os
import socket
import threading
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.config import from_environment
from mlfabric.runtime import arena as arena_module
from mlfabric.runtime import orders
from mlfabric.runtime.arena import Arena, SharedMemory
from mlfabric.runtime.channel import Channel


def no_one(number: int, descriptor: int, size: int) -> None:
    pass


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=60))
def test_arrays_never_overlap_and_all_room_comes_back(steps: list[tuple[int, bool]]) -> None:
    arena = Arena(no_one)
    held: list[Any] = []
    for number, (length, keep) in enumerate(steps):
        held.append((number, arena.empty(length)))
        held[-1][1][:] = number
        if not keep:
            held.pop(len(held) // 2)
    assert all((each == number).all() for number, each in held)
    held.clear()
    assert arena.used_bytes == 0
    assert all(len(free) == 1 for free in arena._free)


def test_an_array_that_needs_more_gets_a_segment_of_its_own() -> None:
    made: list[int] = []
    arena = Arena(lambda number, descriptor, size: made.append(size))
    large = arena.empty(arena_module.SEGMENT_BYTES + 1)
    small = arena.empty(10)
    assert made == [arena_module.SEGMENT_BYTES + 64, arena_module.SEGMENT_BYTES]
    assert arena.locate(large[5:]) == (0, 5)
    assert arena.locate(small) == (1, 0)
    assert arena.locate(np.zeros(4)) is None


def ends() -> tuple[SharedMemory, SharedMemory]:
    """Two sides; a segment of the one is the other's at once."""
    sides: list[SharedMemory] = []

    def to(other: int) -> Any:
        return lambda number, descriptor, size: sides[other].add_segment(number, os.dup(descriptor), size)

    sides.extend([SharedMemory(to(1)), SharedMemory(to(0))])
    return sides[0], sides[1]


def test_what_is_lent_is_seen_and_stays_until_nobody_looks_at_it() -> None:
    here, there = ends()
    mine = here.empty(1000, np.float32)
    mine[:] = 7
    region, copied = here.lend(mine[100:200])
    assert copied is None  # it lies in shared memory already
    seen = there.borrow(region, "float32")
    mine[150] = 8
    assert seen[50] == 8
    assert len(seen) == 100
    part = seen[10:20].data
    del mine, seen
    assert here.arena.used_bytes
    assert not there.to_return()
    del part
    gc.collect()
    here.returned(there.to_return())
    assert not here.arena.used_bytes


def test_what_lies_elsewhere_is_copied_once() -> None:
    here, there = ends()
    region, copied = here.lend(np.arange(10, dtype=np.int64))
    assert copied is not None
    assert there.borrow(region, np.int64).tolist() == list(range(10))
    empty, _ = here.lend(np.zeros(0, np.float32))
    assert len(there.borrow(empty)) == 0


def test_records_and_descriptors_come_in_order_however_they_are_cut() -> None:
    left, right = socket.socketpair()
    sender, receiver = Channel(left, orders.ToEngine), Channel(right, orders.ToApplication)
    with left, right:
        held = os.memfd_create("test")
        os.write(held, b"words")
        sender.send(orders.Logged(30, "x" * 300_000))
        sender.send(orders.SegmentMade(3, 5), descriptors=[held])
        sender.send(orders.LoansReturned((1, 2)), orders.Logged(20, "last"))
        os.close(held)
        got: list[Any] = []
        while len(got) < 4:
            records = receiver.receive()
            assert records is not None
            got += records
        assert [type(record).__name__ for record in got] == [
            "Logged",
            "SegmentMade",
            "LoansReturned",
            "Logged",
        ]
        descriptor = receiver.descriptor()
        assert os.pread(descriptor, 10, 0) == b"words"
        os.close(descriptor)
        assert list(receiver.receive(wait=False) or ()) == []
        left.close()
        assert receiver.receive() is None


def test_settings_come_over_as_they_are() -> None:
    told = from_environment(
        "a:1,b:2", name="n", secret=b"\x00\xff", log="/tmp/x/log", tls="/tmp/t", listen="c:3", environment={}
    )
    there, back = socket.socketpair()
    with there, back:
        Channel(there, orders.ToApplication).send(
            orders.Begin(orders.to_plain(told), ("worker",), 1.0, 20, 1, True)
        )
        records = Channel(back, orders.ToEngine).receive()
        assert records is not None
        begin = next(records)
    assert orders.from_plain(begin.settings) == told


def test_an_array_is_found_while_another_thread_adds_a_segment(monkeypatch: Any) -> None:
    monkeypatch.setattr(arena_module, "SEGMENT_BYTES", 4096)
    arena = Arena(no_one)
    held = [arena.empty(4096) for _ in range(8)]
    places = [arena.locate(each) for each in held]
    found: list[Any] = []

    class Slow(list[int]):
        """Is in the middle of a change for long enough to be seen."""

        def insert(self, index: Any, number: int) -> None:
            other = threading.Thread(target=lambda: found.extend(arena.locate(each) for each in held))
            other.start()
            other.join(0.1)
            super().insert(index, number)
            threads.append(other)

    threads: list[threading.Thread] = []
    arena._numbers = Slow(arena._numbers)
    arena.empty(4096)
    threads[0].join(10)
    assert found == places
