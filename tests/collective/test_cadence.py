"""Rhythms in virtual time: a job that calls and waits, a sender that keeps to the rate it is told."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from mlfabric.collective.cadence import ALLOWANCE, Cadence, Call

TICK_S = 0.025
LINE = 120e6  # bytes per second


@dataclass
class Job:
    """Calls at these times of each iteration; the next iteration computes on once all has left."""

    offsets: list[float]
    sizes: list[int]
    compute_after_s: float  # from the end of all until the next first call
    ratio: float = 1.5
    cadence: Cadence = field(default_factory=Cadence)
    now: float = 100.0
    sent: float = 0.0
    periods: list[float] = field(default_factory=list)
    fastest: list[float] = field(default_factory=list)  # of each iteration

    def iterate(self, count: int) -> None:
        for _ in range(count):
            begin = self.now
            owed, fastest = 0.0, 0.0
            waiting = list(zip(self.offsets, self.sizes, strict=True))
            open_calls = []
            while waiting or owed > 0:
                if waiting and self.now >= begin + waiting[0][0] - 1e-9:
                    _, size = waiting.pop(0)
                    open_calls.append(self.cadence.posted(self.now, size, int(self.sent)))
                    owed += self.ratio * size
                rate = self.cadence.rate(self.now)
                rate = LINE if rate is None else min(rate, LINE)
                until = min(self.now + TICK_S, begin + waiting[0][0]) if waiting else self.now + TICK_S
                step = min(until - self.now, owed / rate) if owed else until - self.now
                step = max(step, 1e-6)
                gone = min(owed, rate * step)
                self.sent += gone
                owed -= gone
                if owed < 1:
                    owed = 0.0
                if gone > 0:
                    fastest = max(fastest, rate)
                self.now += step
                if owed == 0:
                    for call in open_calls:
                        self.cadence.ended(self.now, call)
                    open_calls = []
            self.now += self.compute_after_s
            self.periods.append(self.now - begin)
            self.fastest.append(fastest)


def backward() -> Job:
    """Like DDP: most bytes come early in the backward pass, some at its very end."""
    return Job(
        [0.0, 6.0, 14.0, 30.0, 50.0], [8 * 10**6, 32 * 10**6, 26 * 10**6, 25 * 10**6, 11 * 10**6], 30.0
    )


def test_first_iterations_go_at_full_speed() -> None:
    job = backward()
    job.iterate(3)
    assert job.fastest == [LINE] * 3


def test_bytes_are_spread_and_cost_no_more_than_the_allowance() -> None:
    job = backward()
    job.iterate(30)
    alone = job.periods[0]
    later = job.periods[5:]
    assert max(job.fastest[5:]) < LINE / 6
    assert sum(later) / len(later) < alone * (1 + 1.1 * ALLOWANCE)


@pytest.mark.parametrize("compute_after_s", [5.0, 20.0, 60.0])
def test_where_the_job_waits_is_found_out_within_the_allowance(compute_after_s: float) -> None:
    job = backward()
    job.compute_after_s = compute_after_s
    job.iterate(12)
    assert [beat.waited_for for beat in job.cadence.beats] == [False, False, False, False, True]
    assert max(job.periods) < job.periods[0] * (1 + 1.5 * ALLOWANCE)


@pytest.mark.parametrize("seed", range(4))
def test_where_the_job_waits_is_found_out_though_computing_is_uneven(seed: int) -> None:
    job, draw = backward(), random.Random(seed)
    even = list(job.offsets)
    for _ in range(12):
        late = [draw.uniform(0.0, 0.3) for _ in even]
        job.offsets = [offset + sum(late[: place + 1]) - late[0] for place, offset in enumerate(even)]
        job.iterate(1)
    assert [beat.waited_for for beat in job.cadence.beats] == [False, False, False, False, True]


def test_one_call_at_the_end_of_each_iteration_is_only_stretched_by_the_allowance() -> None:
    job = Job([0.0], [100 * 10**6], 2.0)
    job.iterate(20)
    assert job.fastest[-1] < LINE
    assert job.periods[-1] < job.periods[0] * (1 + 1.1 * ALLOWANCE)


def test_equal_calls_in_unequal_gaps_are_one_iteration() -> None:
    job = Job([0.0, 0.5, 1.0, 1.5], [10**7] * 4, 2.0)
    job.iterate(8)
    assert job.cadence.beats
    assert len(job.cadence.beats) == 4
    assert job.cadence.period_s == pytest.approx(job.periods[0], rel=0.02)


def test_other_calls_end_the_rhythm_and_full_speed_returns() -> None:
    job = backward()
    job.iterate(6)
    assert job.fastest[-1] < LINE
    job.sizes[2] += 1000
    job.iterate(1)
    assert not job.cadence.beats
    job.iterate(6)
    assert job.fastest[-1] < LINE


def test_no_rhythm_no_pacing() -> None:
    job = Job([0.0], [10**7], 1.0)
    for number in range(20):
        job.sizes = [10**7 + number * 1000]
        job.iterate(1)
    assert job.fastest == [LINE] * 20


def test_late_call_moves_everything_behind_it() -> None:
    job = backward()
    job.iterate(10)
    usual = job.fastest[-1]
    job.offsets[4] += 10.0  # one slow backward pass
    job.iterate(1)
    assert job.fastest[-1] < 1.3 * usual


def test_slower_computing_is_followed() -> None:
    job = backward()
    job.iterate(10)
    job.offsets = [1.5 * each for each in job.offsets]
    job.compute_after_s *= 1.5
    job.iterate(20)
    alone = job.offsets[-1] + job.compute_after_s + job.ratio * job.sizes[-1] / LINE
    assert job.periods[-1] < alone * (1 + 1.1 * ALLOWANCE)


def test_pause_between_iterations_changes_nothing() -> None:
    job = backward()
    job.iterate(10)
    usual = job.fastest[-1]
    job.now += 1000.0  # somebody evaluates
    job.iterate(3)
    assert job.fastest[-1] == pytest.approx(usual, rel=0.2)


def test_bytes_that_are_late_go_faster_and_faster() -> None:
    job = backward()
    job.iterate(6)
    cadence = job.cadence
    for size in job.sizes:
        cadence.posted(job.now, size, int(job.sent))
    rates = [cadence.rate(job.now + late) for late in (55.0, 60.0, 65.0)]
    assert all(rate is not None for rate in rates)
    assert sorted(rates, key=float) == rates  # type: ignore[arg-type]
    assert cadence.rate(job.now + 100.0) > LINE  # type: ignore[operator]


def test_calls_that_never_wait_are_spread_over_the_whole_iteration() -> None:
    """Each call comes while the one before is under way."""
    cadence, sent = Cadence(), 0
    open_calls: list[Call] = []
    rates = []
    for number in range(60):
        call = cadence.posted(float(number), 10**7, sent)
        rates.append(cadence.rate(float(number)))
        sent += 10**7
        if open_calls:
            cadence.ended(number + 0.5, open_calls.pop())
        open_calls.append(call)
    assert rates[0] is None
    assert rates[-1] is not None
    assert 10**7 <= rates[-1] < 5 * 10**7
