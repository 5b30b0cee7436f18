"""All-reduce over any plan, in any order of events: every rank ends with the same, right bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.collective import operations
from mlfabric.collective.arithmetic import numpy_combine
from mlfabric.collective.group import BEHIND
from mlfabric.collective.lanes import IN_FLIGHT
from mlfabric.collective.operations import Operation, all_reduce
from mlfabric.collective.routes import Shares
from mlfabric.plan.groups import plan_group
from mlfabric.topology import Host, Network, Rack
from tests.collective.wires import Wires

seeds = st.integers(0, 2**32 - 1)


def reduce_of(array: Any, rank: int, size: int, combine: str = "sum", follows: bool = False) -> Operation:
    kind = str(array.dtype)
    view = array.reshape(-1).view("u1").data
    add = numpy_combine(combine, kind, size)
    return all_reduce(rank, size, view, array.itemsize, kind, combine, add, follows=follows)


def shares_of(draw: np.random.Generator, size: int, number: int) -> Shares:
    """A plan for hosts of random speed, some of them in racks or sharing a host."""
    form = draw.choice(["flat", "racks", "shared"])
    racks = [f"r{draw.integers(0, 3)}" if form == "racks" else None for _ in range(size)]
    hosts = [f"h{draw.integers(0, 3)}" if form == "shared" else f"h{index}" for index in range(size)]
    network = Network.of(
        (
            Host(h, float(draw.integers(1, 9)), float(draw.integers(1, 9)), r)
            for h, r in zip(hosts, racks, strict=True)
        ),
        (Rack(name, 3.0, 3.0) for name in ("r0", "r1", "r2")) if form == "racks" else (),
    )
    plan = plan_group(network, hosts)
    chunk = int(draw.choice([64, 100, 1000])) // 8 * 8
    return Shares(number, plan.reduces, plan.broadcasts, plan.gathers, plan.domains, chunk)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a few bytes, so that small arrays take every way large ones do."""
    monkeypatch.setattr(operations, "WHOLE_BYTES", 32)
    monkeypatch.setattr(operations, "EAGER_BYTES", 128)
    monkeypatch.setattr(operations, "ROUND_BYTES", 256)
    monkeypatch.setattr(operations, "ROUND_BYTES_PER_RANK", 8)
    monkeypatch.setattr(operations, "WINDOW_BYTES", 200)
    monkeypatch.setattr(operations, "FLIGHT_BYTES", 0)


@given(seed=seeds, size=st.integers(1, 7), elements=st.integers(0, 120), operations_count=st.integers(1, 6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_all_ranks_end_with_the_same_right_bits(
    seed: int, size: int, elements: int, operations_count: int
) -> None:
    draw = np.random.default_rng(seed)
    wires = Wires(size, seed)
    wires.form()
    arrays = draw.normal(size=(operations_count, size, elements)).astype(np.float64)
    mine = arrays.copy()
    outcomes = []
    held = [0] * size  # the newest plan of each rank
    follow = draw.random() < 0.7
    for index in range(operations_count):
        follows = bool(follow and draw.random() < 0.8)
        for rank in draw.permutation(size):
            # Plans come in their order, between any two calls, not everywhere at once.
            while held[rank] < index + 1 and draw.random() < 0.5:
                held[rank] += 1
                shares = shares_of(np.random.default_rng(seed + held[rank]), size, held[rank])
                wires.boards[wires.names[rank]].groups[1].adopt(shares)
            operation = reduce_of(mine[index, rank], int(rank), size, follows=follows)
            outcomes.append(wires.post(wires.names[rank], operation))
            wires.run(int(draw.integers(0, 30)))
    wires.run()
    assert outcomes == [[None]] * len(outcomes), f"seed {seed}"
    for index in range(operations_count):
        np.testing.assert_allclose(mine[index, 0], arrays[index].sum(axis=0), rtol=1e-12, atol=1e-12)
        for rank in range(size):
            assert mine[index, rank].tobytes() == mine[index, 0].tobytes(), f"seed {seed}"
    for board in wires.boards.values():
        assert not board.groups[1].running
        assert not board.groups[1]._ahead
        assert len(board.groups[1]._said) <= BEHIND + IN_FLIGHT


def test_an_operation_that_follows_begins_before_the_others_have_come_by_the_plan_of_then() -> None:
    wires = Wires(3, 1)
    wires.form()
    arrays = np.ones((4, 3, 30))  # one round each, not eager
    group = wires.boards[wires.names[0]].groups[1]
    for board in wires.boards.values():
        board.groups[1].adopt(Shares(1, (0.5, 0.5, 0.0), (0.5, 0.5, 0.0), chunk_bytes=64))
    for index in range(2):
        for rank in range(3):
            wires.post(wires.names[rank], reduce_of(arrays[index, rank], rank, 3))
        wires.run()
    for board in wires.boards.values():
        board.groups[1].adopt(Shares(2, (0.0, 0.0, 1.0), (0.0, 0.0, 1.0), chunk_bytes=64))
    wires.run()
    wires.post(wires.names[0], reduce_of(arrays[2, 0], 0, 3, follows=True))
    (running,) = group.running.values()
    assert running.exchange is not None
    assert running.exchange.waits_for().keys() == {1, 2}, "by the plan of two operations before"
    wires.post(wires.names[0], reduce_of(arrays[3, 0], 0, 3))
    assert group.running[max(group.running)].exchange is None, "it does not follow"
    for index in (2, 3):
        for rank in (1, 2):
            wires.post(wires.names[rank], reduce_of(arrays[index, rank], rank, 3, follows=index == 2))
    wires.run()
    assert (arrays == 3).all()


@pytest.mark.parametrize("combine", ["sum", "avg", "product", "min", "max"])
def test_every_reduction_agrees_with_numpy(combine: str) -> None:
    draw = np.random.default_rng(7)
    for size, elements in ((3, 2), (3, 10), (5, 200)):
        wires = Wires(size, 1)
        wires.form()
        arrays = draw.normal(size=(size, elements))
        mine = arrays.copy()
        for rank in range(size):
            wires.post(wires.names[rank], reduce_of(mine[rank], rank, size, combine))
        wires.run()
        names = {"avg": "mean", "product": "prod"}
        wanted = getattr(np, names.get(combine, combine))(arrays, axis=0)
        np.testing.assert_allclose(mine[size - 1], wanted, rtol=1e-12)


def test_flat_plans_sum_in_rank_order_so_bits_do_not_depend_on_the_plan() -> None:
    draw = np.random.default_rng(3)
    arrays = draw.normal(size=(5, 100)).astype(np.float32) * 10.0 ** draw.integers(-3, 4, (5, 100))
    wanted = arrays[0].copy()
    for array in arrays[1:]:
        wanted += array
    for number, share in enumerate(((0.2,) * 5, (0.5, 0.1, 0.1, 0.3, 0.0)), start=1):
        wires = Wires(5, number)
        wires.form()
        mine = arrays.copy()
        for rank in range(5):
            wires.boards[wires.names[rank]].groups[1].adopt(Shares(1, share, share[::-1], chunk_bytes=64))
            wires.post(wires.names[rank], reduce_of(mine[rank], rank, 5))
        wires.run()
        assert all(row.tobytes() == wanted.tobytes() for row in mine)


def test_a_plan_that_comes_while_some_wait_for_a_late_rank_is_used() -> None:
    size, elements = 3, 1000
    wires = Wires(size, 1)
    wires.form()
    mine = np.ones((size, elements))
    for rank in (0, 1):
        wires.post(wires.names[rank], reduce_of(mine[rank], rank, size))
    wires.run()
    for name in wires.names:
        wires.boards[name].groups[1].adopt(Shares(1, (0.0, 0.0, 1.0), (0.0, 0.0, 1.0)))
    wires.run()
    wires.post("n2", reduce_of(mine[2], 2, size))
    wires.run()
    assert (mine == 3).all()
    assert wires.link_bytes["n0", "n2"] > mine[0].nbytes
    assert wires.link_bytes["n0", "n1"] < mine[0].nbytes / 2, "announcements, and the first rounds' nothing"


@given(seed=seeds, steps=st.integers(0, 400))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_lost_rank_is_an_error_everywhere_and_never_a_wrong_sum(seed: int, steps: int) -> None:
    size, elements = 4, 100
    wires = Wires(size, seed)
    wires.form()
    arrays = np.random.default_rng(seed).normal(size=(size, elements))
    mine = arrays.copy()
    outcomes = [wires.post(name, reduce_of(mine[rank], rank, size)) for rank, name in enumerate(wires.names)]
    wires.run(steps)
    wires.lose("n1")
    wires.run()
    for rank in (0, 2, 3):
        assert len(outcomes[rank]) == 1, f"seed {seed}: rank {rank} waits for ever"
        said = outcomes[rank][0]
        if said is None:
            np.testing.assert_allclose(mine[rank], arrays.sum(axis=0), rtol=1e-12)
        else:
            assert "rank 1 (n1) was lost: gone" in said
    again = wires.post("n0", reduce_of(mine[0], 0, size))
    assert again[0] is not None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (np.zeros(11, np.float32), "11 elements of float32"),
        (np.zeros(10, np.float64), "10 elements of float64"),
    ],
)
@pytest.mark.parametrize("factor", [1, 50])
def test_ranks_that_disagree_all_hear_what_each_called(other: Any, words: str, factor: int) -> None:
    wires = Wires(3, 0)
    wires.form()
    arrays = [np.zeros(10 * factor, np.float32), np.zeros(10 * factor, np.float32), other]
    outcomes = [wires.post(f"n{rank}", reduce_of(array, rank, 3)) for rank, array in enumerate(arrays)]
    wires.run()
    for outcome in outcomes:
        assert outcome[0] is not None
        assert f"{10 * factor} elements of float32" in outcome[0]
        assert words in outcome[0]


def test_a_rank_that_did_not_come_is_named() -> None:
    wires = Wires(3, 0)
    wires.form()
    for rank in (0, 1):
        wires.post(f"n{rank}", reduce_of(np.zeros(500), rank, 3))
    wires.run()
    assert wires.boards["n0"].groups[1].describe(0) == "rank 2 (n2) did not come"


def test_few_bytes_wait_at_one_place() -> None:
    """Parts are sent only as fast as results come back."""
    size = 3
    wires = Wires(size, 0)
    wires.form()
    arrays = [np.ones(2_000) for _ in range(size)]
    for rank in range(size):
        wires.boards[f"n{rank}"].groups[1].adopt(Shares(1, (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), chunk_bytes=80))
        wires.post(f"n{rank}", reduce_of(arrays[rank], rank, size))
    root = wires.boards["n0"].groups[1]
    worst = 0
    for _ in range(30_000):
        wires.run(1)
        exchanges = [running.exchange for running in root.running.values() if running.exchange]
        staged = [v for each in exchanges for chunk in each._chunks.values() for v in chunk.parts.values()]
        worst = max(worst, sum(len(view) for view in staged))
    assert 0 < worst <= IN_FLIGHT * 2 * 200
    assert not root.running
