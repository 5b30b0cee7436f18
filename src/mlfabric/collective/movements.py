"""The collective operations that only move blocks, without arithmetic, and the barrier, which moves none.

What a rank brings to such an operation is copied into its own result by the caller; blocks here are those
that go from one rank to others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlfabric.collective import operations
from mlfabric.collective.exchange import Buffers
from mlfabric.collective.frames import Announcement, Sizes
from mlfabric.collective.operations import Operation
from mlfabric.collective.routes import Route, Segment, Shares, broadcast_segments, spread_route


def broadcast(
    rank: int, size: int, root: int, array: memoryview, itemsize: int, dtype: str, priority: int = 0
) -> Operation:
    """The root's array goes to all. A large one leaves the root once, in shares that the others pass on."""
    elements = len(array) // itemsize
    eager = len(array) <= operations.EAGER_BYTES

    def segments(shares: Shares) -> list[Segment]:
        if not eager and size > 2:
            return broadcast_segments(elements, itemsize, shares, root, rank)
        return [Segment(0, 0, len(array), _from_one(rank, root, _others(rank, size)))]

    announcement = Announcement("broadcast", dtype, "", root, (elements,))
    return Operation(announcement, Buffers({}, {0: array}), segments, eager, priority=priority)


def all_gather(
    rank: int,
    size: int,
    mine: memoryview,
    others: Mapping[int, memoryview],
    itemsize: int,
    dtype: str,
    priority: int = 0,
) -> Operation:
    """Everybody's block goes to all; `others` are the places for theirs, which may differ in size.

    A large one enters each host or rack once.
    """
    views = {**others, rank: mine}
    counts = tuple(len(views[block]) // itemsize for block in range(size))

    def segments(shares: Shares) -> list[Segment]:
        return [
            Segment(block, 0, len(views[block]), spread_route(rank, block, size, shares))
            for block in range(size)
        ]

    eager = sum(len(view) for view in views.values()) <= operations.EAGER_BYTES
    announcement = Announcement("all_gather", dtype, "", -1, counts)
    return Operation(announcement, Buffers({}, views), segments, eager, priority=priority)


def gather(
    rank: int,
    size: int,
    root: int,
    mine: memoryview,
    others: Mapping[int, memoryview],
    itemsize: int,
    dtype: str,
    priority: int = 0,
) -> Operation:
    """Everybody's block goes to the root; only the root has places for the others."""

    def segments(shares: Shares) -> list[Segment]:
        if rank != root:
            return [Segment(rank, 0, len(mine), Route(forward=(root,)))]
        return [Segment(block, 0, len(view), Route(source=block)) for block, view in others.items()]

    announcement = Announcement("gather", dtype, "", root, (len(mine) // itemsize,))
    targets = others if rank == root else {rank: mine}
    eager = len(mine) <= operations.EAGER_BYTES
    return Operation(announcement, Buffers({}, targets), segments, eager, priority=priority)


def scatter(
    rank: int,
    size: int,
    root: int,
    mine: memoryview,
    others: Mapping[int, memoryview],
    itemsize: int,
    dtype: str,
    priority: int = 0,
) -> Operation:
    """The root sends each of the others its block; `mine` is where ours goes."""

    def segments(shares: Shares) -> list[Segment]:
        if rank != root:
            return [Segment(rank, 0, len(mine), Route(source=root))]
        return [Segment(block, 0, len(view), Route(forward=(block,))) for block, view in others.items()]

    announcement = Announcement("scatter", dtype, "", root, (len(mine) // itemsize,))
    targets = others if rank == root else {rank: mine}
    eager = len(mine) <= operations.EAGER_BYTES
    return Operation(announcement, Buffers({}, targets), segments, eager, priority=priority)


def all_to_all(
    rank: int,
    size: int,
    outgoing: Sequence[memoryview],
    incoming: Sequence[memoryview],
    itemsize: int,
    dtype: str,
    priority: int = 0,
) -> Operation:
    """A block of its own from everybody to everybody; what goes to ourselves is the caller's to copy."""
    counts = tuple(len(view) // itemsize for view in (*outgoing, *incoming))
    targets: dict[int, memoryview] = {}
    plan: list[Segment] = []
    for other in _others(rank, size):
        there, back = rank * size + other, other * size + rank
        targets[there], targets[back] = outgoing[other], incoming[other]
        plan.append(Segment(there, 0, len(outgoing[other]), Route(forward=(other,))))
        plan.append(Segment(back, 0, len(incoming[other]), Route(source=other)))
    # Each rank sees only its own sizes, so that no rank can tell whether the others take it for small.
    announcement = Announcement("all_to_all", dtype, "", -1, counts, sizes=Sizes.PAIRS)
    return Operation(announcement, Buffers({}, targets), lambda shares: plan, False, priority=priority)


def all_gather_any(
    rank: int, size: int, mine: memoryview, room: Callable[[int, int], memoryview], name: str, dtype: str
) -> Operation:
    """Everybody's bytes go to all, as many as each has; `room(rank, length)` makes the places for theirs."""

    def prepare(announced: Mapping[int, Announcement]) -> tuple[Buffers, list[Segment]]:
        targets = {rank: mine}
        segments = []
        for block in range(size):
            if block != rank:
                targets[block] = room(block, announced[block].elements[0])
            route = _from_one(rank, block, _others(rank, size))
            segments.append(Segment(block, 0, len(targets[block]), route))
        return Buffers({}, targets), segments

    announcement = Announcement(name, dtype, "", -1, (len(mine),), sizes=Sizes.OWN)
    return Operation(announcement, Buffers({}, {}), lambda shares: [], False, prepare=prepare)


def barrier() -> Operation:
    """Over once everybody has come."""
    return Operation(Announcement("barrier", "", "", -1, ()), Buffers({}, {}), lambda shares: [], False)


def _others(rank: int, size: int) -> tuple[int, ...]:
    """The other ranks, the next one first: not everybody begins with the same."""
    return tuple((rank + step) % size for step in range(1, size))


def _from_one(rank: int, root: int, others: tuple[int, ...]) -> Route:
    return Route(forward=others) if rank == root else Route(source=root)
