"""All sockets together send no more than they may, and whoever had to stop goes on in time."""

from __future__ import annotations

import pytest

from mlfabric.runtime.allowance import PIECE_BYTES, Allowance

LIMIT = 2_000_000.0


def send_for(allowance: Allowance, seconds: float, now: float, senders: int = 3) -> int:
    """Senders that always have bytes, asked in turn whenever somebody may send; bytes sent."""
    total, until = 0, now + seconds
    payload = memoryview(bytes(300_000))
    while now < until:
        while allowance.may_send(now):
            for _ in range(senders):
                if allowance.may_send(now):
                    count = sum(len(each) for each in allowance.cut([payload]))
                    allowance.took(count)
                    total += count
        wake_s = allowance.next_s(now)
        assert wake_s is not None
        assert wake_s > now
        now = wake_s
    return total


@pytest.mark.parametrize("limit", [50_000.0, LIMIT, 100e6])
def test_the_sum_of_all_stays_at_the_limit(limit: float) -> None:
    allowance = Allowance()
    allowance.set_limit(limit, 10.0)
    assert send_for(allowance, 2.0, 10.0) == pytest.approx(2 * limit, rel=0.05, abs=2 * PIECE_BYTES)


def test_without_a_limit_nothing_is_held_back_or_cut() -> None:
    allowance = Allowance()
    payload = [memoryview(bytes(10_000_000))]
    assert allowance.may_send(1.0)
    assert allowance.cut(payload) is payload
    assert allowance.next_s(1.0) is None


def test_a_pause_is_not_saved_up_for_a_burst() -> None:
    allowance = Allowance()
    allowance.set_limit(LIMIT, 0.0)
    send_for(allowance, 1.0, 0.0)
    assert send_for(allowance, 0.5, 100.0) == pytest.approx(0.5 * LIMIT, rel=0.1)


def test_a_new_limit_is_in_force_at_once() -> None:
    allowance = Allowance()
    allowance.set_limit(LIMIT, 0.0)
    send_for(allowance, 1.0, 0.0)
    allowance.set_limit(LIMIT / 10, 1.0)
    assert send_for(allowance, 1.0, 1.0) == pytest.approx(LIMIT / 10, rel=0.1, abs=2 * PIECE_BYTES)
    allowance.took(100_000)
    assert not allowance.may_send(2.0)
    allowance.set_limit(None, 2.0)
    assert allowance.may_send(2.0)
    assert allowance.next_s(2.0) == 2.0  # those who had stopped go on now


def test_more_than_there_was_is_paid_back() -> None:
    allowance = Allowance()
    allowance.set_limit(LIMIT, 0.0)
    assert allowance.may_send(1.0)
    allowance.took(int(LIMIT))  # TLS takes a buffer as a whole
    assert not allowance.may_send(1.5)
    assert allowance.may_send(2.1)
