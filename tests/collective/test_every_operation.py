"""Every collective against NumPy: any plan, any sizes, any order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.collective import group as groups
from mlfabric.collective import movements, operations
from mlfabric.collective.arithmetic import numpy_combine
from mlfabric.collective.operations import Operation
from mlfabric.collective.routes import Shares
from tests.collective.test_all_reduce import shares_of
from tests.collective.wires import Wires

seeds = st.integers(0, 2**32 - 1)
KIND = "int64"
Arrays = list[Any]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a few bytes, so that small arrays take every way large ones do."""
    monkeypatch.setattr(operations, "WHOLE_BYTES", 32)
    monkeypatch.setattr(operations, "EAGER_BYTES", 128)
    monkeypatch.setattr(operations, "WINDOW_BYTES", 200)
    monkeypatch.setattr(operations, "FLIGHT_BYTES", 0)


def view(array: Any) -> memoryview:
    data: memoryview = array.reshape(-1).view("u1").data
    return data


def add(size: int) -> Any:
    return numpy_combine("sum", KIND, size)


class Case:
    """What every rank brings to one call, and what it has to hold afterwards."""

    def __init__(self, draw: np.random.Generator, size: int, name: str) -> None:
        self.draw, self.size = draw, size
        self.root = int(draw.integers(size))
        self.calls: list[Operation] = []
        self.wanted: list[tuple[Any, Any]] = []  # (where it ends up, what it must be)
        getattr(self, name)()

    def array(self, count: int) -> Any:
        return self.draw.integers(-1000, 1000, count).astype(KIND)

    def count(self) -> int:
        return int(self.draw.choice([0, 1, 3, 17, 60]))

    def broadcast(self) -> None:
        arrays = [self.array(count) for count in [self.count()] * self.size]
        root = arrays[self.root].copy()
        for rank, array in enumerate(arrays):
            self.calls.append(movements.broadcast(rank, self.size, self.root, view(array), 8, KIND))
            self.wanted.append((array, root))

    def reduce(self) -> None:
        arrays = [self.array(count) for count in [self.count()] * self.size]
        before = [array.copy() for array in arrays]
        for rank, array in enumerate(arrays):
            self.calls.append(
                operations.reduce(rank, self.size, self.root, view(array), 8, KIND, "sum", add(self.size))
            )
            self.wanted.append((array, sum(before) if rank == self.root else before[rank]))

    def all_reduce(self) -> None:
        arrays = [self.array(count) for count in [self.count()] * self.size]
        total = np.sum(arrays, axis=0)
        for rank, array in enumerate(arrays):
            self.calls.append(
                operations.all_reduce(rank, self.size, view(array), 8, KIND, "sum", add(self.size))
            )
            self.wanted.append((array, total))

    def reduce_scatter(self) -> None:
        counts = [self.count() for _ in range(self.size)]
        inputs = [[self.array(count) for count in counts] for _ in range(self.size)]
        for rank in range(self.size):
            output = np.zeros(counts[rank], KIND)
            self.calls.append(
                operations.reduce_scatter(
                    rank,
                    self.size,
                    [view(array) for array in inputs[rank]],
                    view(output),
                    8,
                    KIND,
                    "sum",
                    add(self.size),
                )
            )
            self.wanted.append((output, sum(inputs[other][rank] for other in range(self.size))))

    def all_gather(self) -> None:
        mine = [self.array(self.count()) for _ in range(self.size)]
        for rank in range(self.size):
            places = {other: np.zeros(len(mine[other]), KIND) for other in range(self.size) if other != rank}
            views = {other: view(place) for other, place in places.items()}
            self.calls.append(movements.all_gather(rank, self.size, view(mine[rank]), views, 8, KIND))
            self.wanted += [(place, mine[other].copy()) for other, place in places.items()]

    def all_gather_any(self) -> None:
        mine = [self.array(self.count()) for _ in range(self.size)]
        for rank in range(self.size):
            places: dict[int, memoryview] = {}

            def room(other: int, length: int, places: dict[int, memoryview] = places) -> memoryview:
                places[other] = memoryview(bytearray(length))
                return places[other]

            self.calls.append(
                movements.all_gather_any(rank, self.size, view(mine[rank]), room, "gather", KIND)
            )
            for other in range(self.size):
                if other != rank:
                    self.wanted.append((Later(places, other), mine[other].copy()))

    def gather(self) -> None:
        mine = [self.array(count) for count in [self.count()] * self.size]
        for rank in range(self.size):
            places = {
                other: np.zeros_like(mine[0])
                for other in range(self.size)
                if rank == self.root and other != rank
            }
            views = {other: view(place) for other, place in places.items()}
            self.calls.append(movements.gather(rank, self.size, self.root, view(mine[rank]), views, 8, KIND))
            self.wanted += [(place, mine[other].copy()) for other, place in places.items()]

    def scatter(self) -> None:
        count = self.count()
        blocks = [self.array(count) for _ in range(self.size)]
        for rank in range(self.size):
            place = np.zeros(count, KIND)
            views = {
                other: view(blocks[other])
                for other in range(self.size)
                if rank == self.root and other != rank
            }
            self.calls.append(movements.scatter(rank, self.size, self.root, view(place), views, 8, KIND))
            if rank != self.root:
                self.wanted.append((place, blocks[rank].copy()))

    def all_to_all(self) -> None:
        ranks = range(self.size)
        blocks = [[self.array(self.count()) for _ in ranks] for _ in ranks]
        for rank in ranks:
            places = [np.zeros_like(blocks[other][rank]) for other in ranks]
            self.calls.append(
                movements.all_to_all(
                    rank, self.size, [view(b) for b in blocks[rank]], [view(p) for p in places], 8, KIND
                )
            )
            self.wanted += [(places[o], blocks[o][rank].copy()) for o in ranks if o != rank]

    def barrier(self) -> None:
        self.calls = [movements.barrier() for _ in range(self.size)]


class Later:
    """An array that is there only after the call."""

    def __init__(self, places: dict[int, memoryview], key: int) -> None:
        self._places, self._key = places, key

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.frombuffer(self._places[self._key], KIND)


NAMES = (
    "broadcast",
    "reduce",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_gather_any",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)


@given(seed=seeds, size=st.integers(1, 6), count=st.integers(1, 8))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_operations_one_after_the_other_give_what_numpy_gives(seed: int, size: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    wires = Wires(size, seed)
    wires.form()
    cases = [Case(draw, size, NAMES[int(draw.integers(len(NAMES)))]) for _ in range(count)]
    outcomes = []
    for rank in draw.permutation(size):
        # A rank may call everything before another calls anything; plans come in their order.
        held = 0
        for index, case in enumerate(cases):
            while held < index + 1 and draw.random() < 0.5:
                held += 1
                shares = shares_of(np.random.default_rng(seed + held), size, held)
                wires.boards[wires.names[rank]].groups[1].adopt(shares)
            outcomes.append(wires.post(wires.names[rank], case.calls[rank]))
            wires.run(int(draw.integers(0, 40)))
    wires.run()
    assert outcomes == [[None]] * len(outcomes), f"seed {seed}"
    for case in cases:
        for place, wanted in case.wanted:
            np.testing.assert_array_equal(place, wanted, err_msg=f"seed {seed}")
    for board in wires.boards.values():
        assert not board.groups[1].running
        assert not board.groups[1]._ahead


def test_a_large_broadcast_leaves_the_root_once() -> None:
    size, elements = 5, 4000
    wires = Wires(size, 0)
    wires.form()
    arrays = [np.full(elements, rank) for rank in range(size)]
    for rank, array in enumerate(arrays):
        shares = Shares(1, (0.2,) * size, (0.2,) * size, chunk_bytes=800)
        wires.boards[f"n{rank}"].groups[1].adopt(shares)
        wires.post(f"n{rank}", movements.broadcast(rank, size, 2, view(array), 8, KIND))
    wires.run()
    assert all((array == 2).all() for array in arrays)
    chunks = elements * 8 / 800
    assert wires.frames <= chunks * (size - 1) + 2 * size * size
    assert wires.payload_bytes["n2"] <= elements * 8 + 1000 * size


@pytest.mark.parametrize("name", ["broadcast", "all_gather"])
@pytest.mark.parametrize("root", [0, 4])
def test_a_block_enters_each_host_once(name: str, root: int) -> None:
    """Three hosts, of three, two and one ranks: what goes between them is what has to."""
    hosts = ((0, 1, 2), (3, 4), (5,))
    size, elements = 6, 6000
    even = (1 / size,) * size
    shares = Shares(1, even, even, even, hosts, chunk_bytes=800)
    wires = Wires(size, 3)
    wires.form()
    for each in wires.names:
        wires.boards[each].groups[1].adopt(shares)
    home = {f"n{rank}": index for index, host in enumerate(hosts) for rank in host}
    mine = [np.full(elements, rank) for rank in range(size)]
    places = [{o: np.zeros(elements, KIND) for o in range(size) if o != rank} for rank in range(size)]
    for rank in range(size):
        if name == "broadcast":
            call = movements.broadcast(rank, size, root, view(mine[rank]), 8, KIND)
        else:
            views = {other: view(place) for other, place in places[rank].items()}
            call = movements.all_gather(rank, size, view(mine[rank]), views, 8, KIND)
        wires.post(f"n{rank}", call)
    wires.run()
    if name == "broadcast":
        assert all((array == root).all() for array in mine)
    else:
        assert all((place == other).all() for each in places for other, place in each.items())
    between = sum(
        count for (source, target), count in wires.link_bytes.items() if home[source] != home[target]
    )
    blocks = 2 if name == "broadcast" else 2 * size
    assert blocks * elements * 8 <= between <= blocks * elements * 8 + 100 * size * size


def test_a_root_that_is_ahead_waits_for_the_slowest() -> None:
    wires = Wires(2, 0)
    wires.form()
    outcomes = []
    for _ in range(100):
        outcomes.append(wires.post("n0", movements.broadcast(0, 2, 0, memoryview(bytearray(64)), 1, "uint8")))
        wires.run()
    assert sum(bool(outcome) for outcome in outcomes) == groups.EAGER_AHEAD
    for _ in range(100):
        wires.post("n1", movements.broadcast(1, 2, 0, memoryview(bytearray(64)), 1, "uint8"))
        wires.run()
    assert outcomes == [[None]] * 100


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (lambda v: movements.all_to_all(1, 2, [v[:3], v[:0]], [v[:1], v[:0]], 1, "uint8"), "[3, 0] elements"),
        (lambda v: movements.barrier(), "rank 1 (n1) barrier"),
        (lambda v: movements.broadcast(1, 2, 1, v[:2], 1, "uint8"), "with root 1"),
        (lambda v: operations.refused("all_to_all", "quint8", "", -1, (4,), "no such type"), "no such type"),
    ],
)
def test_ranks_that_do_not_fit_together_all_hear_of_it(
    others: Callable[[memoryview], Operation], words: str
) -> None:
    wires = Wires(2, 0)
    wires.form()
    v = memoryview(bytearray(10))
    first = wires.post("n0", movements.all_to_all(0, 2, [v[:0], v[:2]], [v[:0], v[:3]], 1, "uint8"))
    second = wires.post("n1", others(v))
    wires.run()
    assert first[0] is not None
    assert words in first[0]
    # The root of a small broadcast may be past it when it hears of the others.
    assert second == first or (second == [None] and wires.post("n1", movements.barrier()) == first)


def test_the_same_mistake_everywhere_leaves_the_group_in_step() -> None:
    wires = Wires(3, 0)
    wires.form()
    for rank in range(3):
        wires.post(f"n{rank}", operations.refused("all_reduce", "quint8", "sum", -1, (4,), "no such type"))
    outcomes = [wires.post(f"n{rank}", movements.barrier()) for rank in range(3)]
    wires.run()
    assert outcomes == [[None]] * 3


def test_a_rank_may_leave_when_the_others_have_all_they_need_of_it() -> None:
    """Its bytes are here; what two others still owe each other goes on."""
    for seed in range(20):
        wires = Wires(3, seed)
        wires.form()
        draw = np.random.default_rng(seed)
        case = Case(draw, 3, "all_gather")
        ended = [wires.post(f"n{rank}", call) for rank, call in enumerate(case.calls)]
        while not ended[0]:
            wires.run(1)
        wires.deliver("n0")
        wires.lose("n0")
        wires.run()
        assert ended == [[None]] * 3
        for place, wanted in case.wanted:
            np.testing.assert_array_equal(place, wanted)
        assert "rank 0 (n0) was lost" in str(wires.post("n1", movements.barrier())[0])
