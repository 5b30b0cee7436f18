"""The reducer: every piece is summed once, in rank order, and everybody ends with the same."""

from __future__ import annotations

import pytest

from mlfabric.events import (
    Event,
    ReduceRequested,
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
    UpdatePart,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    FreeBuffer,
    ReduceWaits,
    RefuseTransfer,
    ResolveReduce,
    StartTransfer,
    SumPieces,
    WorkerSettings,
)
from mlfabric.roles.reducer import Reducer
from tests.roles.feeding import Fed, of, one, said

PLAN = ReducePlan(0, ("w0", "w1", "w2"), (0, 4, 7, 10), "equal shares")


def reducer(node: str = "w1") -> Fed:
    return Fed(Reducer(WorkerSettings(node, node, "sched")))


def begun(node: str = "w1", plan: ReducePlan = PLAN) -> tuple[Fed, list[StartTransfer]]:
    role = reducer(node)
    wanted = role(ReduceRequested(0, "reduce/0", 10, "float32", 4))
    assert said(ReduceWanted, wanted, "sched") == ReduceWanted(0, 10, "float32")
    return role, of(StartTransfer, role.tell(plan))


def piece(rank: int) -> TransferArriving:
    return TransferArriving(f"p{rank}", f"w{rank}", 12, ReducePart(0, rank))


def result(rank: int) -> TransferArriving:
    return TransferArriving(f"b{rank}", f"w{rank}", 12, BroadcastPart(0, rank))


def test_each_node_sends_every_piece_to_its_summer_beginning_with_the_next_rank() -> None:
    _, starts = begun()
    assert [(start.node, start.ranges) for start in starts] == [("w2", ((7, 3),)), ("w0", ((0, 4),))]
    assert {start.about for start in starts} == {ReducePart(0, 1)}


def test_a_piece_is_summed_in_rank_order_whoever_came_first() -> None:
    role, _ = begun()
    for event in (piece(2), TransferFinished("p2"), piece(0)):
        assert not of(SumPieces, role(event))
    actions = role(TransferFinished("p0"))
    total = one(SumPieces, actions)
    assert (total.start, total.count) == (4, 3)
    assert total.pieces == ("piece/p0", "", "piece/p2")
    assert {start.node for start in of(StartTransfer, actions)} == {"w0", "w2"}
    assert len(of(FreeBuffer, actions)) == 2


def test_the_sum_is_done_when_all_pieces_are_here_and_ours_has_left() -> None:
    role, _ = begun()
    events: list[Event] = [piece(0), TransferFinished("p0"), piece(2), TransferFinished("p2")]
    out: list[StartTransfer] = []
    for event in events:
        out += of(StartTransfer, role(event))
    for rank in (0, 2):
        accepted = one(AcceptTransfer, role(result(rank)))
        assert (accepted.buffer, accepted.start) == ("reduce/0", PLAN.cuts[rank])
        assert not of(ResolveReduce, role(TransferFinished(f"b{rank}")))
    assert not of(ResolveReduce, role(TransferSent(out[0].transfer)))
    assert one(ResolveReduce, role(TransferSent(out[1].transfer))).error is None
    assert "is over" in one(RefuseTransfer, role(piece(0))).reason


def test_pieces_may_come_before_our_own_call() -> None:
    role = reducer()
    assert of(AcceptTransfer, role(piece(0)))
    role(TransferFinished("p0"))
    role(ReduceRequested(0, "reduce/0", 10, "float32", 4))
    role.tell(PLAN)
    role(piece(2))
    assert of(SumPieces, role(TransferFinished("p2")))


def test_a_lone_worker_is_done_at_once() -> None:
    role = reducer("w0")
    role(ReduceRequested(0, "reduce/0", 10, "float32", 4))
    assert one(ResolveReduce, role.tell(ReducePlan(0, ("w0",), (0, 10), ""))).error is None


def test_nodes_with_an_empty_piece_neither_wait_nor_distribute() -> None:
    plan = ReducePlan(0, ("w0", "w1"), (0, 1, 1), "one element")
    role, starts = begun("w1", plan)
    assert [start.node for start in starts] == ["w0"]
    role(result(0))
    assert of(ResolveReduce, role(TransferFinished("b0")))


@pytest.mark.parametrize(
    "message", [ReduceFailed(0, "w0 gave 3 elements, w1 gave 4"), JobFailed("s0 lost")], ids=["reduce", "job"]
)
def test_a_failure_is_told_once_and_frees_what_came(message: ReduceFailed | JobFailed) -> None:
    role, _ = begun()
    role(piece(0))
    role(TransferFinished("p0"))
    actions = role.tell(message)
    assert one(ResolveReduce, actions).error == message.reason
    assert one(FreeBuffer, actions).buffer == "piece/p0"
    assert not role.tell(message)


def test_a_broken_transfer_fails_the_operation_with_its_reason() -> None:
    role, starts = begun()
    assert "w2 lost" in str(one(ResolveReduce, role(TransferFailed(starts[0].transfer, "w2 lost"))).error)
    role, _ = begun()
    role(piece(0))
    assert "w0 lost" in str(one(ResolveReduce, role(TransferFailed("p0", "w0 lost"))).error)


def test_a_piece_that_arrives_after_the_failure_is_freed_too() -> None:
    role, _ = begun()
    role(piece(0))
    actions = role.tell(ReduceFailed(0, "w2 lost"))
    actions += role(TransferFinished("p0"))
    assert one(FreeBuffer, actions).buffer == "piece/p0"


def test_the_application_hears_whom_it_waits_for() -> None:
    role = reducer()
    assert one(ReduceWaits, role.tell(ReducePending(0, ("w2",)))).missing == ("w2",)


def test_other_transfers_are_refused() -> None:
    assert of(RefuseTransfer, reducer()(TransferArriving("t", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0))))
