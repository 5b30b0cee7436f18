"""The ledger: exact, releasable, undoable, and the same as the plainest one that can be written."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.plan.reservation import Booking, Ledger, open_ledger
from mlfabric.plan.staircase import snap_rate
from mlfabric.plan.values import Reserved
from mlfabric.topology import Host, Link, Network, Rack
from tests.plan.plain_ledger import PlainLedger

RATES = st.one_of(st.integers(1, 16).map(float), st.floats(0.5, 2e9, allow_nan=False))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    racks = [Rack(f"r{k}", draw(RATES), draw(RATES)) for k in range(draw(st.integers(0, 2)))]
    names = [None, *(rack.name for rack in racks)]
    count = draw(st.integers(2, 5))
    hosts = [Host(f"h{i}", draw(RATES), draw(RATES), draw(st.sampled_from(names))) for i in range(count)]
    return Network.of(hosts, racks)


Transfer = tuple[int, int, float, float, float]
transfers = st.tuples(
    st.integers(0, 4),
    st.integers(0, 4),
    st.one_of(st.integers(0, 50).map(float), st.floats(0, 1e9)),
    st.one_of(st.integers(0, 5).map(float), st.floats(0, 10)),
    st.one_of(st.just(math.inf), RATES),
)


def ends(network: Network, transfer: Transfer) -> tuple[str, str]:
    names = list(network.hosts)
    return names[transfer[0] % len(names)], names[transfer[1] % len(names)]


def staircases(ledger: Ledger) -> dict[Link, tuple[list[float], list[float]]]:
    return {stairs.link: (list(stairs.starts), list(stairs.residuals)) for stairs in ledger.links()}


@settings(max_examples=150, deadline=None)
@given(networks(), st.lists(transfers, max_size=12))
def test_ledger_reserves_what_the_plain_one_does_and_never_exceeds_a_link(
    network: Network, asked: list[Transfer]
) -> None:
    ledger, plain = Ledger(network), PlainLedger(network)
    for transfer in asked:
        source, target = ends(network, transfer)
        _, _, size, start, limit = transfer
        path = ledger.path(source, target)
        assert tuple(stairs.link for stairs in path) == network.path(source, target)
        predicted = ledger.finish(path, size, start, limit)
        booking = ledger.reserve(path, size, start, limit)
        taken = plain.reserve(network.path(source, target), size, start, snap_rate(limit))
        assert booking.finish_s == predicted
        assert booking.finish_s == pytest.approx(taken[-1][2] if taken else start, rel=1e-9)
    for stairs in ledger.links():
        for at_s, residual in zip(stairs.starts[:-1], stairs.residuals, strict=False):
            assert 0 <= residual <= stairs.capacity <= network.capacity(stairs.link)
            assert (residual * 1024).is_integer()
            del at_s


@settings(max_examples=150, deadline=None)
@given(networks(), st.lists(transfers, max_size=12))
def test_no_instant_is_ever_booked_above_capacity(network: Network, asked: list[Transfer]) -> None:
    ledger = Ledger(network)
    bookings: list[Booking] = []
    for transfer in asked:
        source, target = ends(network, transfer)
        bookings.append(ledger.reserve(ledger.path(source, target), *transfer[2:]))
    edges = {edge for booking in bookings for piece in booking.pieces for edge in piece[:2]}
    for at_s in edges:
        for stairs in ledger.links():
            used = sum(
                Fraction(rate)
                for booking in bookings
                if stairs in booking.path
                for begin, end, rate in booking.pieces
                if begin <= at_s < end
            )
            assert used <= Fraction(network.capacity(stairs.link))
            assert stairs.residual(at_s) == float(Fraction(stairs.capacity) - used)


@settings(max_examples=150, deadline=None)
@given(networks(), st.lists(transfers, max_size=6), st.lists(transfers, min_size=1, max_size=8))
def test_undo_and_release_leave_no_trace(
    network: Network, before: list[Transfer], after: list[Transfer]
) -> None:
    ledger = Ledger(network)
    for host in network.hosts:
        for other in network.hosts:
            ledger.path(host, other)
    for transfer in before:
        ledger.reserve(ledger.path(*ends(network, transfer)), *transfer[2:])
    untouched = staircases(ledger)
    mark = ledger.mark()
    bookings = [ledger.reserve(ledger.path(*ends(network, t)), *t[2:]) for t in after]
    reserved = staircases(ledger)
    ledger.release(bookings[0], from_s=3.0)
    ledger.undo(mark)
    assert staircases(ledger) == untouched
    bookings = [ledger.reserve(ledger.path(*ends(network, t)), *t[2:]) for t in after]
    assert staircases(ledger) == reserved
    for booking in bookings[::2] + bookings[1::2]:
        ledger.release(booking)
    assert staircases(ledger) == untouched


def test_two_link_shortcut_leaves_the_same_ledger_as_walking_and_adding() -> None:
    for seed in range(400):
        draw = random.Random(seed)
        rates = (1e8, 5e7, 2.5e7, 1.25e7)
        network = Network.of([Host(f"h{i}", draw.choice(rates), draw.choice(rates)) for i in range(4)])
        quick, slow = Ledger(network), Ledger(network)
        for _ in range(25):
            source, target = draw.sample(list(network.hosts), 2)
            size, start = (
                draw.choice((1e6, 2e6, draw.uniform(1, 1e7))),
                draw.choice((0.0, draw.uniform(0, 1))),
            )
            limit = draw.choice((math.inf, math.inf, 3e7))
            booking = quick.reserve(quick.path(source, target), size, start, limit)
            path = slow.path(source, target)
            pieces, finish_s = slow.walk(path, size, start, limit)
            for begin, end, rate in pieces:
                for stairs in path:
                    stairs.add(begin, end, -rate)
            assert (booking.pieces, booking.finish_s) == (pieces, finish_s), seed
            assert staircases(quick) == staircases(slow), seed


def test_release_gives_back_the_remainder_only() -> None:
    ledger = Ledger(Network.of([Host("a", 100, 100), Host("b", 100, 100)]))
    path = ledger.path("a", "b")
    booking = ledger.reserve(path, 1000, 0.0)
    ledger.release(booking, from_s=4.0)
    assert ledger.finish(path, 100, 0.0) == 5.0
    assert ledger.stairs(Link("b", "down")).residual(3.0) == 0


def test_transfer_takes_what_slower_ones_leave() -> None:
    ledger = Ledger(Network.of([Host("slow", 25, 100), Host("fast", 100, 100), Host("server", 100, 100)]))
    ledger.reserve(ledger.path("slow", "server"), 100, 0.0)
    booking = ledger.reserve(ledger.path("fast", "server"), 325, 0.0)
    assert booking.pieces == [(0.0, 4.0, 75.0), (4.0, 4.25, 100.0)]


def test_rack_uplink_is_shared_by_its_hosts() -> None:
    hosts = [Host("a", 100, 100, "r"), Host("b", 100, 100, "r"), Host("c", 100, 100), Host("d", 100, 100)]
    ledger = Ledger(Network.of(hosts, [Rack("r", 100, 100)]))
    assert ledger.reserve(ledger.path("a", "c"), 100, 0.0).finish_s == 1.0
    assert ledger.reserve(ledger.path("b", "d"), 100, 0.0).finish_s == 2.0
    assert ledger.reserve(ledger.path("a", "b"), 100, 0.0).finish_s == 2.0


def test_fit_finds_the_first_gap_wide_and_long_enough() -> None:
    ledger = Ledger(Network.of([Host("a", 100, 100), Host("b", 100, 100), Host("c", 100, 100)]))
    path = ledger.path("a", "b")
    ledger.hold(path, 60, 1.0, 2.0)
    ledger.hold(ledger.path("c", "b"), 100, 3.0, 4.0)
    assert ledger.fit(path, [100, 100], 1.0, 0.0) == 0.0
    assert ledger.fit(path, [100, 100], 1.5, 0.0) == 4.0
    assert ledger.fit(path, [40, 40], 2.5, 0.0) == 0.0
    assert ledger.fit(path, [101, 101], 1.0, 0.0) == math.inf


def test_lowered_capacity_shows_as_overbooked() -> None:
    ledger = Ledger(Network.of([Host("a", 100, 100), Host("b", 100, 100)]))
    ledger.reserve(ledger.path("a", "b"), 1000, 0.0)
    ledger.set_capacity(Link("b", "down"), 50)
    assert ledger.overbooked() == [Link("b", "down")]
    assert ledger.finish(ledger.path("a", "b"), 50, 0.0) == 11.0


def test_transfers_under_way_hold_their_rate_and_no_more_than_there_is() -> None:
    network = Network.of([Host("a", 100, 100), Host("b", 100, 100), Host("c", 100, 100)])
    moving = [Reserved("a", "c", 200, 80), Reserved("b", "c", 100, 80), Reserved("gone", "c", 1, 1)]
    ledger = open_ledger(network, moving, 10.0)
    assert ledger.overbooked() == []
    assert ledger.stairs(Link("c", "down")).residual(10.0) == 0
    assert staircases(ledger) == staircases(open_ledger(network, moving[::-1], 10.0))


def test_past_is_forgotten_when_time_advances() -> None:
    ledger = Ledger(Network.of([Host("a", 100, 100), Host("b", 100, 100)]))
    path = ledger.path("a", "b")
    for step in range(200):
        ledger.hold(path, 50, step, step + 0.5)
    ledger.advance(150.0)
    assert ledger.finish(path, 100, 0.0) == pytest.approx(151.5)
    assert len(path[0].starts) < 150


def test_transfer_without_a_rate_never_ends_and_holds_nothing() -> None:
    network = Network.of([Host("a", 100, 100), Host("b", 100, 100)])
    ledger = open_ledger(network, [Reserved("a", "b", 100, 0.0)], 0.0)
    assert ledger.finish(ledger.path("a", "b"), 1, 0.0, 0.0) == math.inf
    assert ledger.finish(ledger.path("a", "b"), 100, 0.0) == 1.0


def test_transfer_over_a_dead_link_is_refused() -> None:
    ledger = Ledger(Network.of([Host("a", 0, 100), Host("b", 100, 100)]))
    assert ledger.finish(ledger.path("a", "b"), 1, 0.0) == math.inf
    with pytest.raises(ValueError, match=r"a\.up"):
        ledger.reserve(ledger.path("a", "b"), 1, 0.0)
