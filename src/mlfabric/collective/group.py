"""A group of members: its operations in the order they were called, in step on all ranks.

Every rank announces an operation to all others when it comes to it. From the announcements each rank knows
who is missing, whether all mean the same, and the newest plan that everybody has (`collective.standing`):
that one is used. So plans may change between any two operations without a word to the scheduler, and a rank
that disagrees is an error everywhere, not a hang.

Of operations that follow each other each goes by the announcements of the one `BEHIND` before it, which have
come by then, and begins as soon as it is called. Its own are still compared as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from mlfabric.collective.exchange import Exchange, Pending
from mlfabric.collective.frames import (
    Announcement,
    FrameHeader,
    FrameKind,
    Sizes,
    encode_announcement,
    pack_header,
)
from mlfabric.collective.lanes import Lanes
from mlfabric.collective.mailbox import ANY_SOURCE, Mailbox
from mlfabric.collective.operations import EAGER_BYTES, Operation, window_for
from mlfabric.collective.routes import Shares, equal_shares
from mlfabric.collective.staging import Staging
from mlfabric.collective.standing import StandingPlans
from mlfabric.wire import WireError

# Eager operations that may begin before the slowest rank has come to the first of them.
EAGER_AHEAD = 16
# An operation that follows others goes by what was announced of the one so many before it. Nobody is further
# ahead of the slowest rank than that, so little comes for operations that have not been called.
BEHIND = 2
# They overlap, so links are busy without chunks, and each frame costs: chunks are no smaller than this.
FOLLOWING_CHUNK_BYTES = 256 * 1024

Done = Callable[[str | None], None]


@dataclass(slots=True)
class Ahead:
    """What came for an operation that this rank has not begun."""

    announced: dict[int, Announcement] = field(default_factory=dict)
    frames: list[tuple[int, FrameHeader, memoryview]] = field(default_factory=list)


@dataclass(slots=True)
class Running:
    """An operation that this rank has announced."""

    sequence: int
    operation: Operation
    done: Done
    announced: dict[int, Announcement]  # ours included
    mine: Announcement  # as the others got it
    early: list[tuple[int, FrameHeader, memoryview]] = field(default_factory=list)
    exchange: Exchange | None = None
    age: int = 0  # among all operations of the node, once it has its place


class Group:
    """Frames for a rank are put out by `urgent(rank, buffers)`; chunks are asked for by `next_chunk`."""

    def __init__(
        self,
        number: int,
        name: str,
        nodes: tuple[str, ...],
        rank: int,
        urgent: Callable[[int, bytes], None],
        staging: Staging,
    ) -> None:
        self.number = number
        self.name = name
        self.nodes = nodes
        self.rank = rank
        self.broken: str | None = None
        self.ranks = {node: number for number, node in enumerate(nodes)}
        self.running: dict[int, Running] = {}
        self.changed = False  # an operation began or ended since somebody looked
        self.woken: set[int] = set()
        self._urgent = urgent
        self._staging = staging
        self._next = 0
        self._waiting: Lanes[Done] = Lanes()
        self._ahead: dict[int, Ahead] = {}
        self._ahead_bytes = 0
        self._plans = StandingPlans(len(nodes), rank)
        # What all announced, ours included, of the last operations and those that have not begun.
        self._said: dict[int, dict[int, Announcement]] = {}
        self._came = [0] * len(nodes)  # the first operation that each has not come to
        self._gone: dict[int, str] = {}  # who is gone, and how
        self._left: set[int] = set()  # those of them who left in order
        self.mailbox = Mailbox(number, rank, len(nodes), urgent, self.fail, self._names)

    def __repr__(self) -> str:
        return f"<Group {self.name} of {len(self.nodes)}, {len(self.running)} running, next {self._next}>"

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def title(self) -> str:
        return f"group {self.name}" if self.name else "the group of all workers"

    def adopt(self, shares: Shares) -> None:
        """Have a new plan; it is used from the first operation on that is announced when all have it."""
        if self._plans.adopt(shares):
            self._tell(pack_header(FrameKind.ADOPTED, self.number, 0, offset=shares.number))

    def adopted(self, rank: int, plan: int) -> None:
        self._plans.heard(rank, plan)

    # --- calls ------------------------------------------------------------------------------------------

    def post(self, operation: Operation, done: Done) -> int:
        """Begin an operation, or queue it behind those that run; `done` hears of its end."""
        if operation.rounds:
            done = _after(len(operation.rounds), done)
            return [self.post(each, done) for each in operation.rounds][-1]
        sequence = self._next
        self._next += 1
        if self.ended():
            done(self.broken)
            return sequence
        self._waiting.put(sequence, operation, done)
        self._start_waiting()
        return sequence

    def ended(self, peer: int | None = None) -> bool:
        """Whether nothing can begin any more; `broken` says why.

        Messages to a `peer` can, as long as it is here and those who are not left in order.
        """
        for rank, reason in self._gone.items():
            alone = peer == ANY_SOURCE and len(self._gone) == self.size - 1
            if peer is None or rank not in self._left or peer == rank or alone:
                self.fail(reason)
        return self.broken is not None

    def _start_waiting(self) -> None:
        while self.broken is None and (entry := self._waiting.next()) is not None:
            self._start(*entry)

    def _start(self, sequence: int, operation: Operation, done: Done) -> None:
        ahead = self._ahead.pop(sequence, None) or Ahead()
        self._ahead_bytes -= sum(len(payload) for _, _, payload in ahead.frames)
        mine = operation.announcement
        if self._plans.newest:
            mine = msgspec.structs.replace(mine, plan=self._plans.newest, common=self._plans.common)
        said = {**ahead.announced, self.rank: mine}
        running = Running(sequence, operation, done, said, mine, ahead.frames)
        self.running[sequence], self._said[sequence] = running, said
        self._forget_words()
        self.changed = True
        body = encode_announcement(mine)
        self._tell(pack_header(FrameKind.ANNOUNCE, self.number, sequence, length=len(body)) + body)
        for rank, theirs in ahead.announced.items():
            self._compare(running, rank, theirs)
        eager = operation.eager and sequence - self._slowest() < EAGER_AHEAD
        if self.broken is None and (eager or self._may_begin(running)):
            self._begin(running)
        self._begin_follower(sequence)

    def _tell(self, frame: bytes, without: Collection[int] = ()) -> None:
        for rank in range(self.size):
            if rank != self.rank and rank not in without:
                self._urgent(rank, frame)

    def _slowest(self) -> int:
        """The first operation that somebody else has not come to."""
        return min((came for rank, came in enumerate(self._came) if rank != self.rank), default=self._next)

    def _forget_words(self) -> None:
        """Of operations so old that none still to begin goes by them."""
        waiting = (each.sequence for each in self.running.values() if each.exchange is None)
        first = min([self._next, *self._waiting.sequences, *waiting])
        for old in [sequence for sequence in self._said if sequence < first - BEHIND]:
            del self._said[old]

    def _goes_by(self, running: Running) -> int:
        """The operation by whose announcements the plan of this one is chosen, the same one at all ranks."""
        follows = running.operation.follows and running.sequence >= BEHIND
        return running.sequence - BEHIND if follows else running.sequence

    def _may_begin(self, running: Running) -> bool:
        return len(self._said.get(self._goes_by(running), ())) == self.size

    def _begin_follower(self, sequence: int) -> None:
        """Somebody came to an operation: one that goes by its announcements may have waited for them."""
        follower = self.running.get(sequence + BEHIND)
        if follower is None or follower.exchange is not None or self.broken is not None:
            return
        if follower.operation.follows and self._may_begin(follower):
            self._begin(follower)

    def _all_came(self, running: Running) -> bool:
        return len(running.announced) == self.size

    def _begin(self, running: Running) -> None:
        """Everybody is here, or need not be: let the chunks flow."""
        operation = running.operation
        shares = equal_shares(self.size) if operation.eager else self._plan_for(running)
        buffers = operation.buffers
        if operation.prepare is not None:
            buffers, segments = operation.prepare(running.announced)
        else:
            segments = operation.segments(shares)
        chunk_bytes = shares.chunk_bytes
        if operation.follows:
            chunk_bytes = max(chunk_bytes, FOLLOWING_CHUNK_BYTES)
        running.exchange = Exchange(
            self.rank,
            segments,
            buffers,
            operation.combine,
            chunk_bytes,
            window_for(self.size, chunk_bytes),
            self._staging,
            operation.answers,
        )
        early, running.early = running.early, []
        for rank, header, payload in early:
            self._take(running, running.exchange, rank, header, payload)
        for gone, reason in self._gone.items():
            if running.exchange.needs(gone):
                self.fail(reason)
                return
        self._look(running)

    def _plan_for(self, running: Running) -> Shares:
        others = (each for each in self.running.values() if each.exchange is None and each is not running)
        announced = self._said[self._goes_by(running)].values()
        still = [each.mine.plan for each in others]
        still += [said[self.rank].common for said in self._said.values()]
        return self._plans.choose(announced, still)

    def _take(
        self, running: Running, exchange: Exchange, rank: int, header: FrameHeader, payload: memoryview
    ) -> None:
        """A chunk is there. It may have come to a place of its own, before we knew where it belongs."""
        if header.kind is FrameKind.RESULT and not exchange.is_at(header, payload):
            exchange.place(header)[:] = payload
        exchange.received(rank, header, payload)

    # --- frames -----------------------------------------------------------------------------------------

    def chunk_sent(self, sequence: int, pending: Pending) -> None:
        running = self.running.get(sequence)
        if running is None or running.exchange is None:
            return  # it failed in the meantime
        running.exchange.frame_sent(pending)
        self._look(running)

    def place(self, header: FrameHeader) -> memoryview | None:
        """Where the bytes of a chunk go; None: the operation is over, they go nowhere."""
        running = self.running.get(header.sequence)
        if running is not None and running.exchange is not None:
            return running.exchange.place(header)
        if self.broken is not None or (running is None and not self._is_ahead(header.sequence)):
            return None
        limit = self.size * EAGER_AHEAD * EAGER_BYTES
        if self._ahead_bytes + header.length > limit:
            raise WireError(f"over {limit} bytes for operations that have not been called here")
        return memoryview(bytearray(header.length))

    def _is_ahead(self, sequence: int) -> bool:
        """Whether an operation that does not run is still to begin here."""
        return sequence >= self._next or sequence in self._waiting

    def chunk_received(self, rank: int, header: FrameHeader, payload: memoryview) -> None:
        running = self.running.get(header.sequence)
        if running is None:
            if self.broken is None and self._is_ahead(header.sequence):
                self._ahead_bytes += len(payload)
                self._ahead.setdefault(header.sequence, Ahead()).frames.append((rank, header, payload))
        elif running.exchange is None:
            running.early.append((rank, header, payload))
        else:
            self._take(running, running.exchange, rank, header, payload)
            self._look(running)

    def announced(self, rank: int, sequence: int, theirs: Announcement) -> None:
        running = self.running.get(sequence)
        self._came[rank] = max(self._came[rank], sequence + 1)
        self._plans.heard(rank, theirs.plan, theirs.common)
        said = self._said.get(sequence) if running is None else running.announced
        if said is not None:
            said[rank] = theirs
        if running is None:
            self._begin_follower(sequence)
            if self.broken is None and self._is_ahead(sequence):
                self._ahead.setdefault(sequence, Ahead()).announced[rank] = theirs
            return
        self._compare(running, rank, theirs)
        if running.exchange is None and self.broken is None and self._may_begin(running):
            self._begin(running)
        self._begin_follower(sequence)

    def _compare(self, running: Running, rank: int, theirs: Announcement) -> None:
        mine = running.operation.announcement
        if _same(mine, theirs, self.rank, rank) or self.broken is not None:
            return
        first, second = sorted([(self.rank, mine), (rank, theirs)], key=lambda pair: pair[0])
        self.fail(
            f"operation {running.sequence} of {self.title}: {self._names([first[0]])} called "
            f"{first[1].describe()}, {self._names([second[0]])} {second[1].describe()}"
        )

    def _look(self, running: Running) -> None:
        """Pass on whom something can be sent to; end the operation when nothing is left."""
        exchange = running.exchange
        assert exchange is not None
        for rank, chunk in exchange.credit_to:
            header = pack_header(FrameKind.CREDIT, self.number, running.sequence, chunk.block, chunk.start)
            self._urgent(rank, header)
        exchange.credit_to.clear()
        if exchange.woken:
            self.woken |= exchange.woken
            exchange.woken.clear()
        if exchange.done and self.running.pop(running.sequence, None) is not None:
            self._waiting.ended(running.operation)
            self.changed = True
            running.done(None)
            self._start_waiting()

    # --- trouble ----------------------------------------------------------------------------------------

    def lost(self, rank: int, reason: str, orderly: bool = False) -> None:
        """A rank is gone. What needs nothing of it any more goes on to its end; nothing new begins."""
        if self.broken is not None or rank in self._gone:
            return
        how = "has left" if orderly else f"was lost: {reason}"
        if orderly:
            self._left.add(rank)
        self._gone[rank] = f"{self.title}: {self._names([rank])} {how}"
        needed = any(
            rank not in running.announced if running.exchange is None else running.exchange.needs(rank)
            for running in self.running.values()
        )
        # A receive from anybody may still be served by those who are here, if nothing went wrong.
        alone = not orderly or len(self._gone) == self.size - 1
        if needed or self._waiting or self.mailbox.needs(rank, alone):
            self.fail(self._gone[rank])

    def farewell(self) -> None:
        """Tell all others that we leave."""
        self._tell(pack_header(FrameKind.LEFT, self.number, 0), without=self._gone)

    def fail(self, reason: str, tell: bool = True) -> None:
        """No operation of this group can be trusted any more: end all with the reason."""
        if self.broken is not None:
            return
        self.broken = reason
        if tell:
            said = reason.encode()[:4096]
            self._tell(pack_header(FrameKind.FAILED, self.number, 0, length=len(said)) + said)
        ended = [running.done for running in self.running.values()]
        ended += self._waiting.clear()
        self.running.clear()
        self.changed = True
        self._ahead.clear()
        for done in ended:
            done(reason)
        self.mailbox.end(reason)

    def describe(self, sequence: int) -> str:
        """Whom or what an operation waits for, in words."""
        running = self.running.get(sequence)
        if running is None:
            return "it waits for earlier operations" if self._is_ahead(sequence) else "it is over"
        if running.exchange is None or not self._all_came(running):
            missing = [rank for rank in range(self.size) if rank not in running.announced]
            if missing:
                return f"{self._names(missing)} did not come"
        assert running.exchange is not None
        owed = running.exchange.waits_for()
        if owed:
            parts = [f"{count} bytes from {self._names([rank])}" for rank, count in sorted(owed.items())]
            return "waiting for " + ", ".join(parts)
        return "its last bytes are on their way out"

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {rank} ({self.nodes[rank]})" for rank in ranks)


def _after(count: int, done: Done) -> Done:
    """Tell `done` once, after so many ends or the first that is a failure."""
    left = count

    def one(error: str | None) -> None:
        nonlocal left
        left -= 1
        if error is not None and left >= 0:
            left = 0
        if left == 0:
            left = -1
            done(error)

    return one


def _same(mine: Announcement, theirs: Announcement, rank: int, other: int) -> bool:
    """Whether two ranks mean the same call. Where each pair has its own sizes, the pair's must agree."""
    if (mine.operation, mine.dtype, mine.combine, mine.root) != (
        theirs.operation,
        theirs.dtype,
        theirs.combine,
        theirs.root,
    ):
        return False
    if mine.sizes is not theirs.sizes or mine.mistake != theirs.mistake:
        return False
    match mine.sizes:
        case Sizes.OWN:
            return len(mine.elements) == len(theirs.elements) == 1
        case Sizes.PAIRS:
            half = len(mine.elements) // 2
            return (
                len(theirs.elements) == len(mine.elements)
                and mine.elements[other] == theirs.elements[half + rank]
                and mine.elements[half + other] == theirs.elements[rank]
            )
    return mine.elements == theirs.elements
