"""A node in no operation probes its peers: one at a time, both ways measured, every breach noticed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from mlfabric.collective.frames import (
    HEADER_BYTES,
    MAX_PROBE_BYTES,
    FrameHeader,
    FrameKind,
    pack_header,
    unpack_header,
)
from mlfabric.collective.probing import (
    ANSWER_S,
    BETWEEN_S,
    GUEST_S,
    LEAST_PROBE_BYTES,
    PROBE_EVERY_S,
    Mark,
    Probed,
    Prober,
    rate_of,
    size_for,
)
from mlfabric.collective.switchboard import Switchboard
from mlfabric.wire import WireError

UP, DOWN = 50_000_000, 60_000_000
PROBE_KINDS = (FrameKind.KNOCK, FrameKind.AWAKE, FrameKind.PROBE, FrameKind.PROBED)


@dataclass
class Pair:
    """A prober and its peers, whose frames a test carries by hand."""

    now: float = 100.0
    peers: tuple[str, ...] = ("b", "c")
    boards: dict[str, Switchboard] = field(init=False)
    prober: Prober = field(init=False)
    kinds: list[FrameKind] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boards = {name: Switchboard(name) for name in ("a", *self.peers)}
        self.prober = Prober(self.boards["a"].probes)

    def turn(self) -> None:
        self.prober.turn(self.now, lambda peer: peer in self.boards, None)

    def carry(self, source: str, target: str) -> None:
        """All that one has for the other."""
        while (frame := self.boards[source].next_frame(target)) is not None:
            header = unpack_header(frame.head)
            place = self.boards[target].place(source, header)
            assert place is not None
            assert len(place) == (0 if frame.payload is None else len(frame.payload)) == header.length
            self.boards[source].sent(frame)
            self.kinds.append(header.kind)
            if header.kind is FrameKind.PROBE:
                self.probed.append(target)
            rate = UP if source == "a" else DOWN
            self.boards[target].received(source, header, place, rate)

    def exchange(self, peer: str) -> None:
        for _ in range(2):
            self.carry("a", peer)
            self.boards[peer].probes.tend(self.now, moving=False)
            self.carry(peer, "a")


def test_a_probe_tells_of_both_directions() -> None:
    pair = Pair()
    pair.prober.probe(("b",))
    pair.turn()
    pair.exchange("b")
    assert pair.kinds == list(PROBE_KINDS)
    assert pair.boards["a"].probes.results == [Probed("b", UP, DOWN)]


def test_peers_are_probed_in_turn_and_never_two_at_a_time() -> None:
    pair = Pair()
    pair.prober.probe(("b", "c"))
    for _ in range(4):
        pair.turn()
        pair.turn()
        assert sum(pair.boards["a"].probes.is_open(peer) for peer in pair.peers) == 1
        for peer in pair.peers:
            pair.exchange(peer)
        pair.turn()
        assert pair.prober.next_s(pair.now) == pytest.approx(pair.now + PROBE_EVERY_S), "not sooner"
        pair.now += PROBE_EVERY_S
    assert pair.probed == ["b", "c", "b", "c"]


def test_a_silent_peer_is_skipped_and_asked_nothing_more_before_it_answers() -> None:
    pair = Pair()
    pair.prober.probe(("b", "c"))
    pair.turn()  # b gets it, and says nothing
    pair.now += ANSWER_S - 0.01
    pair.turn()
    pair.exchange("c")
    assert not pair.kinds
    pair.now += 0.02
    for _ in range(3):
        pair.turn()
        pair.exchange("c")
        pair.now += PROBE_EVERY_S
    assert pair.probed == ["c", "c", "c"]
    pair.exchange("b")  # late, and no breach
    pair.turn()
    pair.exchange("b")
    assert pair.probed[-1] == "b"


def test_no_peers_no_probes() -> None:
    pair = Pair()
    pair.prober.probe(("b",))
    pair.turn()
    pair.prober.probe(())
    assert pair.prober.next_s(pair.now) is None
    pair.exchange("b")  # what is under way comes to its end
    pair.now += 10
    pair.turn()
    pair.exchange("b")
    assert pair.kinds == list(PROBE_KINDS)


def test_both_may_probe_each_other_at_once() -> None:
    pair = Pair()
    other = Prober(pair.boards["b"].probes)
    pair.prober.probe(("b",))
    other.probe(("a",))
    pair.turn()
    other.turn(pair.now, lambda peer: True, None)
    for _ in range(3):
        pair.exchange("b")
        pair.boards["a"].probes.tend(pair.now, moving=False)
    assert pair.boards["a"].probes.results == [Probed("b", UP, DOWN)]
    assert pair.boards["b"].probes.results == [Probed("a", DOWN, UP)]


def test_who_is_probed_rests_not_until_it_has_answered() -> None:
    pair = Pair()
    probes = pair.boards["b"].probes
    pair.prober.probe(("b",))
    pair.turn()
    pair.carry("a", "b")
    awake = [probes.awake]
    probes.tend(pair.now, moving=False)
    awake.append(probes.awake)
    pair.exchange("b")
    awake.append(probes.awake)
    assert awake == [False, True, False]
    pair.now += PROBE_EVERY_S
    pair.turn()
    pair.carry("a", "b")  # it knocks, and nothing follows
    probes.tend(pair.now, moving=False)
    for past_s, rests in ((GUEST_S - 0.01, False), (GUEST_S + 0.01, True)):
        probes.tend(pair.now + past_s, moving=False)
        assert probes.awake is not rests


def test_a_probe_comes_between_operations_or_after_a_while_in_one() -> None:
    pair = Pair()
    probes = pair.boards["b"].probes
    for moving_s, came in ((0.05, 0.05), (10.0, BETWEEN_S)):
        pair.kinds.clear()
        pair.now += PROBE_EVERY_S
        pair.prober.probe(("b",))
        pair.turn()
        pair.carry("a", "b")
        for tick in range(40):
            past_s = tick / 100
            probes.tend(pair.now + past_s, moving=past_s < moving_s)
            pair.carry("b", "a")
            if FrameKind.AWAKE in pair.kinds:
                break
        assert past_s == pytest.approx(came, abs=0.011)
        pair.exchange("b")


def test_a_lost_peer_begins_anew() -> None:
    pair = Pair()
    pair.prober.probe(("b",))
    pair.turn()
    pair.carry("a", "b")
    pair.boards["a"].lost("b", "gone")
    pair.boards["b"].lost("a", "gone")
    pair.now += PROBE_EVERY_S
    pair.turn()
    pair.exchange("b")
    assert pair.boards["a"].probes.results == [Probed("b", UP, DOWN)]


@pytest.mark.parametrize("kind", [FrameKind.AWAKE, FrameKind.PROBE, FrameKind.PROBED])
def test_what_nobody_asked_for_is_a_breach_before_a_byte_is_placed(kind: FrameKind) -> None:
    length = MAX_PROBE_BYTES if kind in (FrameKind.PROBE, FrameKind.PROBED) else 0
    with pytest.raises(WireError, match="nobody asked for"):
        Switchboard("a").place("b", FrameHeader(kind, 0, 0, 0, 0, length))


def test_an_answer_of_another_length_is_a_breach() -> None:
    pair = Pair()
    pair.prober.probe(("b",))
    pair.turn()
    pair.carry("a", "b")
    pair.boards["b"].probes.tend(pair.now, moving=False)
    pair.carry("b", "a")
    with pytest.raises(WireError):
        pair.boards["a"].place("b", FrameHeader(FrameKind.PROBED, 0, 0, 0, 0, 1000))


def test_whoever_knocks_twice_breaks_the_rules() -> None:
    board = Switchboard("a")
    knock = FrameHeader(FrameKind.KNOCK, 0, 0, 0, 0, 0)
    board.received("b", knock, board.place("b", knock))
    with pytest.raises(WireError):
        board.place("b", knock)


def test_no_frame_makes_room_for_more_than_the_longest_probe() -> None:
    for kind, length in ((FrameKind.PROBE, MAX_PROBE_BYTES + 1), (FrameKind.KNOCK, 1)):
        with pytest.raises(WireError, match="allowed are"):
            unpack_header(pack_header(kind, 0, 0, length=length))
    board = Switchboard("a")
    places = []
    for peer in ("b", "c"):
        knock = FrameHeader(FrameKind.KNOCK, 0, 0, 0, 0, 0)
        board.received(peer, knock, board.place(peer, knock))
        board.probes.tend(0.0, moving=False)
        places.append(board.place(peer, FrameHeader(FrameKind.PROBE, 0, 0, 0, 0, MAX_PROBE_BYTES)))
    assert places[0] is not None
    assert places[1] is not None
    assert np.shares_memory(np.asarray(places[0]), np.asarray(places[1]))


# --- rates ------------------------------------------------------------------------------------------------


def arrivals(rate: float, length: int, every: int, idle_s: float = 0.0) -> list[Mark]:
    """Marks of bytes that come at a rate after a slow beginning, as somebody sees who looks now and then."""
    marks = [Mark(0.0, HEADER_BYTES, 0.0)]
    for came in [*range(every, length, every), length]:
        at = idle_s + came / rate
        marks.append(Mark(at, HEADER_BYTES + came, at))
    return marks


@pytest.mark.parametrize("rate", [62.5e6, 7.8e6])
def test_a_slow_beginning_does_not_count(rate: float) -> None:
    length = size_for(rate)
    marks = arrivals(rate, length, length // 8, idle_s=0.25 * length / rate)
    assert rate_of(marks, length) == pytest.approx(rate, rel=0.02)


def test_what_came_all_at_once_has_no_rate() -> None:
    assert rate_of([Mark(0.0, MAX_PROBE_BYTES, 0.0)], MAX_PROBE_BYTES) == 0
    assert rate_of([], MAX_PROBE_BYTES) == 0


def test_being_interrupted_while_looking_makes_a_rate_low_never_high() -> None:
    length = MAX_PROBE_BYTES
    marks = arrivals(62.5e6, length, length // 4)
    for index, mark in enumerate(marks):
        late = [*marks[:index], mark._replace(after_s=mark.after_s + 0.004), *marks[index + 1 :]]
        early = [*marks[:index], mark._replace(before_s=mark.before_s - 0.004), *marks[index + 1 :]]
        assert max(rate_of(late, length), rate_of(early, length)) <= 1.01 * 62.5e6


def test_slow_links_get_short_probes() -> None:
    assert size_for(1e3) == LEAST_PROBE_BYTES
    assert LEAST_PROBE_BYTES < size_for(30e6) < MAX_PROBE_BYTES
    assert size_for(1e9) == MAX_PROBE_BYTES


def test_frames_of_probes_fit_a_header() -> None:
    assert len(pack_header(FrameKind.PROBED, 0, 0, offset=UP, length=MAX_PROBE_BYTES)) == HEADER_BYTES
