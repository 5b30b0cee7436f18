"""Messages between two ranks: order by sender and tag, bounded memory, no wait but for the receive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.collective import mailbox
from mlfabric.collective.mailbox import ANY_SOURCE
from tests.collective.wires import Wires


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "SMALL_BYTES", 64)
    monkeypatch.setattr(mailbox, "UNASKED_BYTES", 600)
    monkeypatch.setattr(mailbox, "CHUNK_BYTES", 50)


def send(wires: Wires, source: int, to: int, tag: int, payload: bytes) -> list[str | None]:
    ended: list[str | None] = []
    board = wires.boards[f"n{source}"]
    board.send(board.groups[1], to, tag, memoryview(payload), ended.append)
    return ended


def receive(
    wires: Wires, rank: int, source: int, tag: int, size: int
) -> tuple[bytearray, list[tuple[str | None, int]]]:
    place, ended = bytearray(size), list[tuple[str | None, int]]()
    board = wires.boards[f"n{rank}"]
    board.receive(
        board.groups[1], source, tag, memoryview(place), lambda error, who: ended.append((error, who))
    )
    return place, ended


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 4), count=st.integers(1, 30))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_messages_of_one_sender_and_tag_come_in_order(seed: int, size: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    wires = Wires(size, seed)
    wires.form()
    # One length for each (sender, receiver, tag), so that a receive from a known sender knows how much comes.
    sent: dict[tuple[int, int, int], list[bytes]] = {}
    calls = []
    for _ in range(count):
        source, to = (int(each) for each in draw.permutation(size)[:2])
        tag = int(draw.integers(2))
        length = [0, 3, 64, 65, 300][(source * 7 + to * 3 + tag) % 5]
        sent.setdefault((source, to, tag), []).append(draw.bytes(length))
        calls.append((source, to, tag, len(sent[source, to, tag]) - 1))
    ended, places = [], {}
    halves = [("send", call) for call in calls] + [("receive", call) for call in calls]
    order = draw.permutation(len(halves))
    numbers: dict[tuple[str, int, int, int], int] = {}
    for index in order:
        what, (source, to, tag, _) = halves[index]
        number = numbers.setdefault((what, source, to, tag), 0)
        numbers[what, source, to, tag] += 1
        payload = sent[source, to, tag][number]
        if what == "send":
            ended.append(send(wires, source, to, tag, payload))
        else:
            places[source, to, tag, number] = receive(wires, to, source, tag, len(payload))
        wires.run(int(draw.integers(0, 6)))
    wires.run()
    assert ended == [[None]] * count, f"seed {seed}"
    for (source, to, tag, number), (place, heard) in places.items():
        assert heard == [(None, source)], f"seed {seed}"
        assert place == sent[source, to, tag][number], f"seed {seed}"
    for board in wires.boards.values():
        box = board.groups[1].mailbox
        assert not any(box._held)
        assert not any(box._unasked)
        assert not box._arrived
        assert not box._incoming


def test_any_source_takes_the_first_that_comes_and_says_whose_it_was() -> None:
    wires = Wires(3, 0)
    wires.form()
    send(wires, 2, 0, 5, b"two")
    wires.run()
    send(wires, 1, 0, 5, b"one")
    wires.run()
    assert receive(wires, 0, ANY_SOURCE, 5, 3) == (bytearray(b"two"), [(None, 2)])
    assert receive(wires, 0, ANY_SOURCE, 5, 3) == (bytearray(b"one"), [(None, 1)])


def test_little_waits_at_a_receiver_that_does_not_receive() -> None:
    wires = Wires(2, 0)
    wires.form()
    ended = [send(wires, 0, 1, 0, bytes([index]) * 60) for index in range(50)]
    wires.run()
    box = wires.boards["n1"].groups[1].mailbox
    assert sum(box._held) <= mailbox.UNASKED_BYTES
    assert not ended[-1]
    for index in range(50):
        place, heard = receive(wires, 1, 0, 0, 60)
        wires.run()
        assert heard == [(None, 0)]
        assert place == bytes([index]) * 60
    assert ended == [[None]] * 50


def test_two_ranks_may_send_large_messages_to_each_other_at_once() -> None:
    wires = Wires(2, 0)
    wires.form()
    sends = [send(wires, rank, 1 - rank, 0, b"x" * 1000) for rank in (0, 1)]
    wires.run()
    heard = [receive(wires, rank, 1 - rank, 0, 1000) for rank in (0, 1)]
    wires.run()
    assert sends == [[None], [None]]
    assert all(place == b"x" * 1000 for place, _ in heard)


@pytest.mark.parametrize("length", [0, 10, 100])
def test_a_message_may_be_shorter_than_its_place(length: int) -> None:
    wires = Wires(2, 0)
    wires.form()
    send(wires, 0, 1, 7, b"x" * length)
    place, heard = receive(wires, 1, 0, 7, 110)
    wires.run()
    assert heard == [(None, 0)]
    assert place == b"x" * length + bytes(110 - length)


@pytest.mark.parametrize("length", [30, 100])
def test_a_message_that_does_not_fit_is_an_error_at_both_ends(length: int) -> None:
    wires = Wires(2, 0)
    wires.form()
    send(wires, 0, 1, 7, b"x" * length)
    _, heard = receive(wires, 1, 0, 7, 20)
    wires.run()
    words = f"rank 0 (n0) sent {length} bytes with tag 7, rank 1 (n1) has room for 20"
    assert heard == [(words, 0)]
    assert send(wires, 0, 1, 7, b"y") == [words]


@pytest.mark.parametrize("length", [10, 100])
def test_calls_that_wait_for_a_lost_rank_end(length: int) -> None:
    wires = Wires(3, 0)
    wires.form()
    _, waiting = receive(wires, 0, 1, 0, length)
    _, any_one = receive(wires, 2, ANY_SOURCE, 0, length)
    offered = send(wires, 0, 1, 3, b"x" * 100)
    wires.run()
    wires.lose("n1")
    wires.run()
    assert "rank 1 (n1) was lost" in str(waiting[0][0])
    assert "rank 1 (n1) was lost" in str(any_one[0][0])
    assert "rank 1 (n1) was lost" in str(offered[0])


def test_a_call_says_whom_it_waits_for() -> None:
    wires = Wires(2, 0)
    wires.form()
    board = wires.boards["n0"]
    group = board.groups[1]
    wanted = board.receive(group, 1, 4, memoryview(bytearray(8)), lambda error, who: None)
    sending = board.send(group, 1, 9, memoryview(bytes(1000)), lambda error: None)
    anybody = board.receive(group, ANY_SOURCE, 4, memoryview(bytearray(8)), lambda error, who: None)
    assert wanted is not None
    assert sending is not None
    assert anybody is not None
    assert group.mailbox.describe(wanted) == "rank 1 (n1) did not send anything with tag 4"
    assert group.mailbox.describe(sending) == "rank 1 (n1) did not receive the message with tag 9"
    assert group.mailbox.describe(anybody) == "nobody sent anything with tag 4"


def test_a_receive_from_anybody_outlives_those_who_leave_in_order() -> None:
    wires = Wires(3, 0)
    wires.form()
    place, heard = receive(wires, 0, ANY_SOURCE, 0, 3)
    wires.boards["n1"].farewell()
    wires.run()
    assert not heard
    send(wires, 2, 0, 0, b"two")
    wires.run()
    assert (bytes(place), heard) == (b"two", [(None, 2)])
    _, from_it = receive(wires, 2, 1, 0, 3)
    assert from_it[0][0] == "group test: rank 1 (n1) has left"


def test_a_second_rank_that_is_lost_is_noticed_too() -> None:
    wires = Wires(3, 0)
    wires.form()
    _, heard = receive(wires, 0, 2, 0, 3)
    wires.boards["n1"].farewell()
    wires.run()
    assert not heard
    wires.lose("n2")
    assert "rank 2 (n2) was lost" in str(heard[0][0])
