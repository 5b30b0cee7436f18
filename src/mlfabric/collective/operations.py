"""The collective operations, each as blocks of memory and the routes its pieces take.

An operation that moves few bytes is *eager*: its plan needs no agreement, so its bytes leave with the
announcement. The others wait until every rank has come, and take the newest plan that all of them know. Where
many alike follow each other (`follows`), each takes the plan that was agreed on a few before it, and begins
as soon as it is called: nobody waits for words that are under way behind the bytes of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mlfabric.collective.exchange import Buffers, Combine
from mlfabric.collective.frames import Announcement
from mlfabric.collective.routes import (
    Route,
    Segment,
    Shares,
    all_reduce_segments,
    cut,
    reduce_to_segments,
    sum_at_routes,
)

# Arrays of at most this size go whole from everyone to everyone: one trip instead of two.
WHOLE_BYTES = 2048
# Up to this size equal shares leave with the announcement: what a plan could gain is less than a round trip.
EAGER_BYTES = 256 * 1024
# A large array is reduced in rounds, so that a change of plan is not late by a whole operation. They overlap.
ROUND_BYTES = 2 * 2**20
ROUND_BYTES_PER_RANK = 256 * 1024
# Parts on their way to one rank, unanswered; and to all ranks together.
WINDOW_BYTES = 512 * 1024
FLIGHT_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Operation:
    """What one rank has to do with one collective call."""

    announcement: Announcement
    buffers: Buffers
    segments: Callable[[Shares], list[Segment]]  # as seen by this rank
    eager: bool
    follows: bool = False  # it goes by the plan agreed on a while before, and need not wait for all to come
    combine: Combine | None = None
    answers: bool = False  # parts are answered by frames of their own, as no result comes back
    priority: int = 0  # lower goes first
    size_bytes: int = 0  # of the array that is reduced, where it is large
    rounds: tuple[Operation, ...] = ()  # done one after the other instead, each by the newest plan
    # Where memory can be had only when all sizes are known: the announcements by rank, ours included.
    prepare: Callable[[Mapping[int, Announcement]], tuple[Buffers, list[Segment]]] | None = None

    @property
    def moved_bytes(self) -> int:
        """How large it is, in bytes of this rank's memory."""
        if self.rounds:
            return sum(each.moved_bytes for each in self.rounds)
        return self.size_bytes or sum(len(view) for view in self.buffers.sources.values()) or 1


def window_for(size: int, chunk_bytes: int) -> int:
    """Few ranks have to keep more on the way to each than many have."""
    return max(WINDOW_BYTES, 2 * chunk_bytes, FLIGHT_BYTES // max(size - 1, 1))


def all_reduce(
    rank: int,
    size: int,
    array: memoryview,
    itemsize: int,
    dtype: str,
    combine_name: str,
    combine: Combine,
    priority: int = 0,
    follows: bool = False,
) -> Operation:
    """Reduce an array, in place, bit-identical on all ranks."""
    elements = len(array) // itemsize
    announcement = Announcement("all_reduce", dtype, combine_name, -1, (elements,))

    def part(start: int, stop: int) -> Operation:
        view = array[start * itemsize : stop * itemsize]
        return _all_reduce_round(announcement, rank, size, view, itemsize, combine, priority, follows)

    step = max(ROUND_BYTES, size * ROUND_BYTES_PER_RANK)
    count = round(len(array) / step)
    if size <= 2 or count < 2:
        return part(0, elements)
    rounds = tuple(part(*bounds) for bounds in pairwise(elements * i // count for i in range(count + 1)))
    return replace(rounds[0], rounds=rounds)


def _all_reduce_round(
    announcement: Announcement,
    rank: int,
    size: int,
    array: memoryview,
    itemsize: int,
    combine: Combine,
    priority: int,
    follows: bool,
) -> Operation:
    elements = len(array) // itemsize
    whole = len(array) <= WHOLE_BYTES

    def segments(shares: Shares) -> list[Segment]:
        if whole:
            return _everyone_sums(rank, size, len(array))
        return all_reduce_segments(elements, itemsize, shares, rank)

    if whole:
        # The sum may be complete before the last of our own copies has left.
        own = memoryview(bytearray(array))
        buffers = Buffers(dict.fromkeys(range(size), own), dict.fromkeys(range(size), array))
    else:
        buffers = Buffers({0: array}, {0: array})
    eager = len(array) <= EAGER_BYTES
    return Operation(
        announcement, buffers, segments, eager, follows, combine, priority=priority, size_bytes=len(array)
    )


def _everyone_sums(rank: int, size: int, length: int) -> list[Segment]:
    """Block r is the array as rank r sums it: every rank sends its own to all, and sums all, in one order."""
    segments = []
    for root in range(size):
        if root == rank:
            route = Route(children=tuple(other for other in range(size) if other != rank))
        else:
            route = Route(parent=root)
        if length:
            segments.append(Segment(root, 0, length, route))
    return segments


def reduce(
    rank: int,
    size: int,
    root: int,
    array: memoryview,
    itemsize: int,
    dtype: str,
    combine_name: str,
    combine: Combine,
    priority: int = 0,
) -> Operation:
    """Reduce an array into the root's; the others' stay as they are.

    A large one is summed in shares that the root collects: it takes in twice the array, not everybody's.
    """
    elements = len(array) // itemsize
    eager = len(array) <= EAGER_BYTES
    # What this rank sums for the root, it sums beside its own array. Sized when the shares are known.
    targets: dict[int, memoryview] = {}

    def segments(shares: Shares) -> list[Segment]:
        if eager:
            targets[0] = array
            return [Segment(0, 0, len(array), sum_at_routes(size, root, rank))]
        bounds = [bound * itemsize for bound in cut(elements, shares.reduces)]
        for block in range(size):
            sources[block] = array[bounds[block] : bounds[block + 1]]
            if rank == root:
                targets[block] = sources[block]
            elif block == rank:
                targets[block] = memoryview(bytearray(len(sources[block])))
        return reduce_to_segments([len(sources[block]) for block in range(size)], root, rank)

    sources = {0: array}
    return Operation(
        Announcement("reduce", dtype, combine_name, root, (elements,)),
        Buffers(sources, targets),
        segments,
        eager=eager,
        combine=combine,
        answers=not eager,
        priority=priority,
    )


def reduce_scatter(
    rank: int,
    size: int,
    inputs: Sequence[memoryview],
    output: memoryview,
    itemsize: int,
    dtype: str,
    combine_name: str,
    combine: Combine,
    priority: int = 0,
) -> Operation:
    """Reduce everybody's array for each rank into that rank's output."""
    counts = tuple(len(view) // itemsize for view in inputs)
    eager = sum(len(view) for view in inputs) <= EAGER_BYTES
    if size == 1:
        output[:] = inputs[0]

    def segments(shares: Shares) -> list[Segment]:
        return [
            Segment(block, 0, len(inputs[block]), sum_at_routes(size, block, rank))
            for block in [(rank + step) % size for step in range(size)]
        ]

    return Operation(
        Announcement("reduce_scatter", dtype, combine_name, -1, counts),
        Buffers(dict(enumerate(inputs)), {rank: output}),
        segments,
        eager=eager,
        combine=combine,
        answers=not eager,
        priority=priority,
    )


def refused(
    operation: str, dtype: str, combine_name: str, root: int, counts: tuple[int, ...], why: str
) -> Operation:
    """A call that can't be carried out: it takes its turn, so that all hear of it and stay in step."""
    return Operation(
        Announcement(operation, dtype, combine_name, root, counts, mistake=why),
        Buffers({}, {}),
        lambda shares: [],
        eager=False,
    )
