"""The chunks of one operation at one rank: what goes to whom next, what is still to come, when it is over.

Segments are cut into chunks, so that the sum of one overlaps the sending of another. A rank sends a part only
while it waits for the results of few bytes it sent to the same place: the returning result is the credit that
keeps the flows of an operation abreast of each other, without a message of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mlfabric.collective.frames import FrameHeader, FrameKind
from mlfabric.collective.routes import Route, Segment
from mlfabric.collective.staging import Staging
from mlfabric.wire import WireError

# Chunks begin at multiples of this, from where their segment begins: every element type fits.
ALIGNED_BYTES = 64


class Combine(Protocol):
    """Sums (or whatever the operation does) arrays given as bytes, in this order, into `out`.

    The memory of `parts` may be used up, but for the one at index `own`, unless that is `out` itself. `last`
    says that nothing will be added any more.
    """

    def __call__(self, parts: list[memoryview], own: int, out: memoryview, last: bool) -> None: ...


@dataclass(slots=True)
class Chunk:
    block: int
    start: int
    stop: int
    route: Route
    missing: int  # parts that have not come
    parts: dict[int, memoryview] = field(default_factory=dict)  # by rank
    partial: memoryview | None = None  # a sum on its way to its parent
    has_result: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Pending:
    """A chunk to send next."""

    kind: FrameKind
    chunk: Chunk
    payload: memoryview
    to: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """A rank's memory for an operation, by block, as far as the block is ours to read or to hold."""

    sources: Mapping[int, memoryview]  # what we add
    targets: Mapping[int, memoryview]  # where results end up, and what results are sent from


class Exchange:
    def __init__(
        self,
        rank: int,
        segments: Iterable[Segment],
        buffers: Buffers,
        combine: Combine | None,
        chunk_bytes: int,
        window_bytes: int,
        staging: Staging,
        answers: bool = False,
    ) -> None:
        self._rank = rank
        self._buffers = buffers
        self._combine = combine
        self._window = window_bytes
        self._answers = answers  # no result comes back for a part: a frame of its own says it was used
        self._chunks: dict[tuple[int, int], Chunk] = {}
        self._pushes: dict[int, deque[Chunk]] = {}
        self._results: dict[int, deque[Chunk]] = {}
        self._unanswered: dict[int, int] = {}  # bytes of parts sent, by parent
        self._unsent: dict[int, int] = {}  # frames to send, by rank
        self._result_turn: set[int] = set()
        self._staging = staging
        self.to_send = 0  # frames
        self.to_receive = 0
        self.bytes_to_come = 0
        self.woken: set[int] = set()  # ranks that something can be sent to now
        self.credit_to: list[tuple[int, Chunk]] = []
        for segment in segments:
            self._cut(segment, chunk_bytes)

    @property
    def done(self) -> bool:
        return not self.to_send and not self.to_receive

    def needs(self, rank: int) -> bool:
        """Whether anything has still to go to or to come from a rank."""
        return bool(self._unsent.get(rank)) or rank in self.waits_for()

    def waits_for(self) -> dict[int, int]:
        """Bytes still to come, by the rank that owes them."""
        owed: dict[int, int] = {}
        for chunk in self._chunks.values():
            late = [rank for rank in chunk.route.children if rank not in chunk.parts] if chunk.missing else []
            if chunk.route.source >= 0 and not chunk.has_result:
                late.append(chunk.route.source)
            for rank in late:
                owed[rank] = owed.get(rank, 0) + chunk.size
        return owed

    def _cut(self, segment: Segment, chunk_bytes: int) -> None:
        route = segment.route
        incoming = len(route.children) + (route.source >= 0)
        step = _even_step(segment.stop - segment.start, chunk_bytes)
        for start in range(segment.start, segment.stop, step):
            chunk = Chunk(segment.block, start, min(start + step, segment.stop), route, len(route.children))
            self._chunks[segment.block, start] = chunk
            for rank in (route.parent, *route.forward):
                if rank >= 0:
                    self.to_send += 1
                    self._unsent[rank] = self._unsent.get(rank, 0) + 1
            self.to_receive += incoming
            self.bytes_to_come += incoming * chunk.size
            if not route.children:
                self._gathered(chunk)

    # --- sending ----------------------------------------------------------------------------------------

    def next_frame(self, rank: int) -> Pending | None:
        """What to send to a rank now; results and parts take turns."""
        results, pushes = self._results.get(rank), self._pushes.get(rank)
        if pushes:
            chunk = pushes[0]
            unanswered = self._unanswered.get(rank, 0)
            if unanswered and unanswered + chunk.stop - chunk.start > self._window:
                pushes = None
        if results and (rank in self._result_turn or not pushes):
            self._result_turn.discard(rank)
            chunk = results.popleft()
            return Pending(FrameKind.RESULT, chunk, self._held(self._buffers.targets, chunk), rank)
        if not pushes:
            return None
        self._result_turn.add(rank)
        chunk = pushes.popleft()
        size = chunk.stop - chunk.start
        self._unanswered[rank] = self._unanswered.get(rank, 0) + size
        payload = chunk.partial
        if payload is None:
            payload = self._held(self._buffers.sources, chunk)
        return Pending(FrameKind.PART, chunk, payload, rank)

    def frame_sent(self, pending: Pending) -> None:
        self.to_send -= 1
        self._unsent[pending.to] -= 1
        if pending.kind is FrameKind.PART and pending.chunk.partial is not None:
            self._staging.give(pending.chunk.partial)
            pending.chunk.partial = None

    # --- receiving --------------------------------------------------------------------------------------

    def is_at(self, header: FrameHeader, payload: memoryview) -> bool:
        """Whether the bytes of a result are where they belong already."""
        target = self._buffers.targets.get(header.block)
        return target is None or payload.obj is target.obj

    def place(self, header: FrameHeader) -> memoryview:
        """Where the bytes of a frame go."""
        chunk = self._chunk(header)
        if header.kind is FrameKind.RESULT:
            return self._held(self._buffers.targets, chunk)
        return self._staging.take(chunk.stop - chunk.start)

    def received(self, rank: int, header: FrameHeader, payload: memoryview) -> None:
        chunk = self._chunk(header)
        if header.kind is FrameKind.RESULT:
            self._on_result(rank, chunk)
        elif header.kind is FrameKind.PART:
            self._on_part(rank, chunk, payload)
        else:
            self._answered(rank, chunk.size)

    def _on_part(self, rank: int, chunk: Chunk, payload: memoryview) -> None:
        if rank not in chunk.route.children or rank in chunk.parts or not chunk.missing:
            raise WireError(f"rank {rank} sent a part of bytes {chunk.start} that nobody asked it for")
        chunk.parts[rank] = payload
        chunk.missing -= 1
        self.to_receive -= 1
        self.bytes_to_come -= chunk.size
        if not chunk.missing:
            self._sum(chunk)
            self._gathered(chunk)

    def _on_result(self, rank: int, chunk: Chunk) -> None:
        if rank != chunk.route.source or chunk.has_result:
            raise WireError(f"rank {rank} sent a result of bytes {chunk.start} that nobody asked it for")
        self.to_receive -= 1
        self.bytes_to_come -= chunk.size
        if chunk.route.parent >= 0 and not self._answers:
            self._answered(chunk.route.parent, chunk.stop - chunk.start)
        self._spread(chunk)

    def _answered(self, rank: int, size: int) -> None:
        self._unanswered[rank] -= size
        if self._pushes.get(rank):
            self.woken.add(rank)

    def _sum(self, chunk: Chunk) -> None:
        """Add in the order of ranks, so that the bits depend on nothing else."""
        assert self._combine is not None, "a sum needs a way to add"
        route = chunk.route
        ranks = sorted((*route.children, self._rank)) if route.adds else sorted(route.children)
        own = self._held(self._buffers.sources, chunk) if route.adds else None
        parts = [own if rank == self._rank and own is not None else chunk.parts[rank] for rank in ranks]
        ours = ranks.index(self._rank) if own is not None else -1
        staged = list(chunk.parts.values())
        if route.parent >= 0:
            chunk.partial = staged.pop()
            self._combine(parts, ours, chunk.partial, last=False)
        else:
            self._combine(parts, ours, self._held(self._buffers.targets, chunk), last=True)
        for view in staged:
            self._staging.give(view)
        chunk.parts.clear()
        if self._answers:
            self.credit_to += [(rank, chunk) for rank in route.children]

    def _gathered(self, chunk: Chunk) -> None:
        route = chunk.route
        if route.parent >= 0:
            self._pushes.setdefault(route.parent, deque()).append(chunk)
            self.woken.add(route.parent)
        elif route.source < 0:
            self._spread(chunk)

    def _spread(self, chunk: Chunk) -> None:
        chunk.has_result = True
        for rank in chunk.route.forward:
            self._results.setdefault(rank, deque()).append(chunk)
            self.woken.add(rank)

    # --- memory -----------------------------------------------------------------------------------------

    def _chunk(self, header: FrameHeader) -> Chunk:
        chunk = self._chunks.get((header.block, header.offset))
        if chunk is None or (
            header.length != chunk.stop - chunk.start and header.kind is not FrameKind.CREDIT
        ):
            raise WireError(
                f"{header.length} bytes for offset {header.offset} of block {header.block}, where no chunk is"
            )
        return chunk

    def _held(self, blocks: Mapping[int, memoryview], chunk: Chunk) -> memoryview:
        view = blocks.get(chunk.block)
        if view is None:
            raise WireError(f"block {chunk.block} is not here")
        return view[chunk.start : chunk.stop]


def _even_step(length: int, chunk_bytes: int) -> int:
    """Pieces of at most a chunk that are alike: a short last one would cost as much as a whole one."""
    count = max(-(-length // chunk_bytes), 1)
    return max(-(-length // (count * ALIGNED_BYTES)), 1) * ALIGNED_BYTES
