"""The reducer: a node's part in an all-reduce. Sends pieces to who sums them, sums its own, distributes it.

Each piece is summed at one node only, in rank order, and copied to the others: the result is bit-identical
on all ranks. Who sums what is the scheduler's plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mlfabric.events import (
    Event,
    MessageReceived,
    PeerLost,
    ReduceRequested,
    SchedulerChanged,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    TransferSent,
)
from mlfabric.messages import (
    BroadcastPart,
    JobFailed,
    ReduceFailed,
    ReducePart,
    ReducePending,
    ReducePlan,
    ReduceWanted,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    FreeBuffer,
    ReduceWaits,
    RefuseTransfer,
    ResolveReduce,
    Send,
    StartTransfer,
    SumPieces,
    WorkerSettings,
)


@dataclass(slots=True)
class _Operation:
    wanted: ReduceRequested | None = None
    plan: ReducePlan | None = None
    pieces: dict[int, str] = field(default_factory=dict)  # rank -> buffer with its part of our piece
    arriving: dict[str, tuple[int, bool]] = field(default_factory=dict)  # transfer -> (rank, broadcast?)
    distributed: set[int] = field(default_factory=set)  # ranks whose piece we hold
    sending: set[str] = field(default_factory=set)  # our piece on its way; the array is not free before
    summed: bool = False


class ReducerStatistics(msgspec.Struct, frozen=True):
    done: int
    failed: int
    open: int


class Reducer:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._operations: dict[int, _Operation] = {}
        self._done = 0
        self._failed = 0
        self._last_ended = -1

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case ReduceRequested(operation=number):
                self._operations.setdefault(number, _Operation()).wanted = event
                return [self._want(event)]
            case SchedulerChanged():
                # Some may have a plan and others none: all ask again, and an equal plan changes nothing.
                return [self._want(o.wanted) for o in self._operations.values() if o.wanted is not None]
            case MessageReceived(message=ReducePlan() as plan) if plan.operation in self._operations:
                return self._planned(plan)
            case MessageReceived(message=ReducePending(operation=number, missing=missing)):
                return [ReduceWaits(number, missing)]
            case MessageReceived(message=ReduceFailed(operation=number, reason=reason)):
                return self._fail(number, reason)
            case MessageReceived(message=JobFailed(reason=reason)):
                return [action for number in list(self._operations) for action in self._fail(number, reason)]
            case PeerLost(node=node, reason=reason):
                return self._lost(node, reason)
            case TransferArriving(about=ReducePart() | BroadcastPart()):
                return self._arrive(event)
            case TransferArriving():
                return [RefuseTransfer(event.transfer, "a reducer takes pieces of all-reduces only")]
            case TransferFinished(transfer=transfer):
                return self._arrived(transfer)
            case TransferSent(transfer=transfer):
                return self._sent(transfer)
            case TransferFailed(transfer=transfer, reason=reason):
                return self._broken(transfer, reason)
        return []

    def _want(self, wanted: ReduceRequested) -> Send:
        want = ReduceWanted(wanted.operation, wanted.elements, wanted.dtype)
        return Send(self._settings.scheduler, "scheduler", want)

    def _planned(self, plan: ReducePlan) -> list[Action]:
        held = self._operations[plan.operation].plan
        if held is None:
            return self._begin(plan)
        if (held.nodes, held.cuts) == (plan.nodes, plan.cuts):
            return []
        return self._fail(plan.operation, f"all-reduce {plan.operation}: its members changed under way")

    def _begin(self, plan: ReducePlan) -> list[Action]:
        operation = self._operations[plan.operation]
        operation.plan = plan
        wanted = operation.wanted
        assert wanted is not None
        me = plan.nodes.index(self._settings.node)
        actions: list[Action] = []
        for offset in range(1, len(plan.nodes)):
            rank = (me + offset) % len(plan.nodes)  # rotated, so that not all begin with the same receiver
            start, count = _piece(plan, rank)
            if count:
                actions.append(
                    StartTransfer(
                        transfer=f"{self._settings.node}/reduce/{plan.operation}/{rank}",
                        node=plan.nodes[rank],
                        role="reducer",
                        buffer=wanted.buffer,
                        about=ReducePart(plan.operation, me),
                        ranges=((start, count),),
                    )
                )
        return actions + self._check(plan.operation)

    def _arrive(self, event: TransferArriving) -> list[Action]:
        about = event.about
        assert isinstance(about, ReducePart | BroadcastPart)
        operation = self._operations.get(about.operation)
        if operation is None:
            if about.operation <= self._last_ended:
                return [RefuseTransfer(event.transfer, f"all-reduce {about.operation} is over")]
            operation = self._operations.setdefault(about.operation, _Operation())
        broadcast = isinstance(about, BroadcastPart)
        operation.arriving[event.transfer] = (about.rank, broadcast)
        if broadcast:
            # In place is safe: who distributes a piece has had our part of it before it could sum.
            assert operation.plan is not None, "a distributed piece needs our part, which needs the plan"
            assert operation.wanted is not None
            start, _ = _piece(operation.plan, about.rank)
            return [AcceptTransfer(event.transfer, operation.wanted.buffer, start=start)]
        return [AcceptTransfer(event.transfer, f"piece/{event.transfer}")]

    def _arrived(self, transfer: str) -> list[Action]:
        for number, operation in self._operations.items():
            if transfer in operation.arriving:
                rank, broadcast = operation.arriving.pop(transfer)
                if broadcast:
                    operation.distributed.add(rank)
                else:
                    operation.pieces[rank] = f"piece/{transfer}"
                return self._check(number)
        return []

    def _check(self, number: int) -> list[Action]:
        operation = self._operations[number]
        plan, wanted = operation.plan, operation.wanted
        if plan is None or wanted is None:
            return []
        me = plan.nodes.index(self._settings.node)
        others = [rank for rank in range(len(plan.nodes)) if rank != me]
        start, count = _piece(plan, me)
        actions: list[Action] = []
        if not operation.summed and (count == 0 or len(operation.pieces) == len(others)):
            operation.summed = True
            if count:
                names = tuple(operation.pieces.get(rank, "") for rank in range(len(plan.nodes)))
                actions.append(SumPieces(wanted.buffer, start, count, names))
                actions += [FreeBuffer(name) for name in operation.pieces.values()]
                for rank in others:
                    start_one = self._distribute(plan, wanted, me, rank)
                    operation.sending.add(start_one.transfer)
                    actions.append(start_one)
        sources = {rank for rank in others if _piece(plan, rank)[1] > 0}
        if operation.summed and operation.distributed >= sources and not operation.sending:
            self._end(number)
            self._done += 1
            actions.append(ResolveReduce(number))
        return actions

    def _distribute(self, plan: ReducePlan, wanted: ReduceRequested, me: int, rank: int) -> StartTransfer:
        return StartTransfer(
            transfer=f"{self._settings.node}/broadcast/{plan.operation}/{rank}",
            node=plan.nodes[rank],
            role="reducer",
            buffer=wanted.buffer,
            about=BroadcastPart(plan.operation, me),
            ranges=(_piece(plan, me),),
        )

    def _lost(self, node: str, reason: str) -> list[Action]:
        """What needed somebody who is gone can't be finished."""
        needed = [number for number, o in self._operations.items() if o.plan and node in o.plan.nodes]
        return [
            a
            for number in needed
            for a in self._fail(number, f"all-reduce {number}: {node} was lost ({reason})")
        ]

    def _sent(self, transfer: str) -> list[Action]:
        for number, operation in self._operations.items():
            if transfer in operation.sending:
                operation.sending.remove(transfer)
                return self._check(number)
        return []

    def _broken(self, transfer: str, reason: str) -> list[Action]:
        for number, operation in self._operations.items():
            if transfer in operation.arriving or f"/{number}/" in transfer:
                return self._fail(number, f"a transfer of it broke off: {reason}")
        return []

    def _fail(self, number: int, reason: str) -> list[Action]:
        if number not in self._operations:
            return []
        operation = self._operations[number]
        self._end(number)
        self._failed += 1
        frees: list[Action] = [FreeBuffer(name) for name in operation.pieces.values()]
        coming = [transfer for transfer, (_, broadcast) in operation.arriving.items() if not broadcast]
        frees += [FreeBuffer(f"piece/{transfer}") for transfer in coming]
        return [*frees, ResolveReduce(number, reason)] if operation.wanted else frees

    def _end(self, number: int) -> None:
        del self._operations[number]
        self._last_ended = max(self._last_ended, number)

    def next_deadline(self) -> float | None:
        return None

    def statistics(self) -> ReducerStatistics:
        return ReducerStatistics(self._done, self._failed, len(self._operations))

    def validate(self) -> None:
        for operation in self._operations.values():
            assert not operation.summed or operation.plan, "nothing can be summed without a plan"


def _piece(plan: ReducePlan, rank: int) -> tuple[int, int]:
    return plan.cuts[rank], plan.cuts[rank + 1] - plan.cuts[rank]
