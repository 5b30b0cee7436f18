"""Several jobs on one link, verdicts on one application, and the small closed loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.errors import FabricError
from mlfabric.traffic.backlogs import backlog
from mlfabric.traffic.control import CONTROLS, Schedule, schedules, simulate
from mlfabric.traffic.cycles import grained, make_cycle, overlaid
from mlfabric.traffic.extrapolation import Link, extrapolate, interleaved, worst_backlog
from mlfabric.traffic.queueing import drop_tail
from mlfabric.traffic.synth import SynthOptions, synthesize
from mlfabric.traffic.trace import Trace
from mlfabric.traffic.verdicts import orchestration

LINE = 10e9
PERIOD_NS = 20_000_000
FRAME = 1538
FRAMES = 800
BURST = FRAME * FRAMES


def one_job(rounds: int = 6, period_ns: int = PERIOD_NS, frames: int = FRAMES) -> Trace:
    """Compact bursts at line rate, counted in wire bytes."""
    within = np.rint(np.arange(1, frames + 1) * FRAME * 8e9 / LINE).astype(np.int64)
    times = (np.arange(rounds)[:, None] * period_ns + within).ravel()
    return Trace.from_arrays(times, np.full(len(times), FRAME))


def link(rate: float = LINE, buffer: float = 1e9, mark: float = 1e9) -> Link:
    return Link(rate, buffer, mark)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 3000)), min_size=1, max_size=200),
    st.floats(1e8, 1e11),
    st.integers(1, 20_000),
)
def test_the_queue_is_the_same_in_both_forms_and_keeps_its_books(
    rows: list[tuple[int, int]], rate: float, room: int
) -> None:
    times = np.cumsum([gap for gap, _ in rows])
    sizes = np.array([size for _, size in rows])
    until = int(times[-1]) + 1000
    results = []
    for switch in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFABRIC_NO_NATIVE", switch)
            results.append(drop_tail(times, sizes, rate, room, room / 2, 0, until))
    assert results[0] == results[1]
    found = results[0]
    assert found.arrived_bytes == sizes.sum()
    assert found.most_bytes <= room
    assert found.lost_bytes <= found.arrived_bytes
    if found.lost_bytes == 0:
        unbounded = backlog(Trace.from_arrays(times, sizes), rate).bytes
        assert found.most_bytes == pytest.approx(unbounded, rel=1e-9, abs=1e-3)


def test_equal_jobs_aligned_queue_all_but_one() -> None:
    for jobs in (2, 4):
        result = extrapolate([one_job()], jobs, link(), draws=3, find_fit=False)
        assert result.law("aligned").draws[0].backlog_bytes == pytest.approx(
            (jobs - 1) * BURST, abs=jobs * FRAME
        )
        assert result.worst.at_most_bytes == pytest.approx((jobs - 1) * BURST, abs=jobs * FRAME)


def test_the_worst_case_is_reached_by_alignment_and_exceeded_by_no_draw() -> None:
    result = extrapolate([one_job()], 4, link(5e9), draws=40, find_fit=False)
    worst = result.worst.at_most_bytes
    assert result.law("aligned").draws[0].backlog_bytes == pytest.approx(worst, abs=8 * FRAME)
    assert result.law("random").values("backlog").max() <= worst + 8 * FRAME
    assert result.law("drift").values("backlog").max() <= worst + 8 * FRAME


def test_interleaving_finds_room_where_there_is_room() -> None:
    cycle = make_cycle(one_job())
    # Four bursts of a twentieth of the period each fit side by side.
    shifts = interleaved([cycle] * 4, LINE)
    times, sizes, measured = overlaid([cycle] * 4, shifts)
    queue = drop_tail(times, sizes, LINE, math.inf, math.inf, measured, 2 * measured)
    assert queue.most_bytes <= 4 * FRAME


def test_overlap_by_chance_follows_the_closed_form() -> None:
    cycle = make_cycle(one_job())
    jobs, duty = 3, BURST * 8 / LINE / (PERIOD_NS / 1e9)
    generator = np.random.default_rng(1)
    apart = 0
    draws = 600
    for _ in range(draws):
        shifts = [int(generator.integers(0, cycle.length_ns)) for _ in range(jobs)]
        times, sizes, measured = overlaid([cycle] * jobs, shifts)
        apart += (
            drop_tail(times, sizes, LINE, math.inf, math.inf, measured, 2 * measured).most_bytes < 3 * FRAME
        )
    assert apart / draws == pytest.approx((1 - jobs * duty) ** (jobs - 1), abs=0.06)


def test_different_jobs_get_a_bracket() -> None:
    kinds = [make_cycle(one_job()), make_cycle(one_job(6, 30_000_000, 1200))]
    worst = worst_backlog(kinds, LINE)
    assert worst.at_least_bytes <= worst.at_most_bytes * (1 + 1e-9)
    aligned = overlaid(kinds, [0, 0], turns=8)
    met = drop_tail(aligned[0], aligned[1], LINE, math.inf, math.inf, 0, int(aligned[0][-1])).most_bytes
    assert worst.at_least_bytes - 4 * FRAME <= max(met, worst.at_least_bytes)
    assert met <= worst.at_most_bytes + 8 * FRAME
    assert math.isinf(worst_backlog(kinds * 40, LINE).at_most_bytes)


def test_how_many_jobs_fit_is_ordered_as_it_must_be() -> None:
    result = extrapolate([one_job()], 2, link(buffer=2.2 * BURST), draws=5)
    fit = result.fit
    assert fit is not None
    assert fit.worst_case == 3
    assert fit.worst_case <= fit.random_95 <= fit.best_case <= fit.by_mean_rate
    assert fit.by_mean_rate == math.floor(LINE / (BURST * 8e9 / PERIOD_NS))
    assert fit.best_case >= 12


def test_the_least_rate_without_loss_loses_nothing() -> None:
    result = extrapolate([one_job()], 3, link(buffer=BURST / 2), draws=4, find_fit=False)
    rate = result.least_rate_bps["aligned"]
    assert rate is not None
    times, sizes, measured = overlaid(result.cycles, [0, 0, 0])
    assert drop_tail(times, sizes, rate * 1.0001, BURST / 2, 0, 0, 2 * measured).lost_bytes <= 1
    assert drop_tail(times, sizes, rate * 0.98, BURST / 2, 0, 0, 2 * measured).lost_bytes > 0


def test_grains_keep_bytes_and_bound_the_error() -> None:
    generator = np.random.default_rng(2)
    times = np.cumsum(generator.integers(0, 2000, 40_000))
    sizes = generator.integers(60, 1515, 40_000)
    few_times, few_sizes = grained(times, sizes, 2000)
    assert len(few_times) <= 2000
    assert few_sizes.sum() == sizes.sum()
    exact = backlog(Trace.from_arrays(times, sizes), 5e9).bytes
    coarse = backlog(Trace.from_arrays(few_times, few_sizes), 5e9).bytes
    assert exact - 1e-6 <= coarse <= exact + 2 * few_sizes.max()


def test_too_many_jobs_are_refused() -> None:
    with pytest.raises(FabricError, match="between 1 and"):
        extrapolate([one_job()], 0, link())


def a_plan(start_s: float = 0.0, bursts: int = 5) -> Schedule:
    return Schedule(np.full(bursts, 1e6), np.full(bursts, LINE), np.full(bursts, 0.01), start_s)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_job_alone_is_not_stretched(control: str) -> None:
    result = simulate([a_plan()], link(), control)  # type: ignore[arg-type]
    assert result.finished
    assert result.stretch_max == pytest.approx(1, abs=0.1)
    assert result.lost_bytes == 0
    assert result.pause_s == 0


def test_two_jobs_at_once_take_twice_as_long() -> None:
    for control in CONTROLS:
        result = simulate([a_plan(), a_plan()], link(buffer=4e6, mark=1e5), control)
        assert result.finished
        # Control may leave the link idle while senders recover; nothing is quicker than sharing it fully.
        assert 1.7 <= result.stretch_mean <= 3


def test_control_keeps_the_queue_low_and_pauses_instead_of_losing() -> None:
    small = link(buffer=1e6, mark=1e5)
    plans = [a_plan() for _ in range(4)]
    open_loop = simulate(plans, small, "none")
    assert open_loop.lost_bytes > 0
    marked = simulate(plans, small, "dctcp")
    assert marked.marked_share > 0
    assert marked.lost_bytes < open_loop.lost_bytes / 10
    assert marked.most_queue_bytes <= open_loop.most_queue_bytes <= 1e6
    paused = simulate(plans, small, "pfc")
    assert paused.lost_bytes == 0
    assert paused.pause_s > 0


def test_schedules_follow_the_cycle() -> None:
    cycle = make_cycle(one_job())
    plan = schedules([cycle], [3_000_000])[0]
    assert len(plan.bytes) == cycle.rounds
    assert plan.bytes.tolist() == [BURST] * cycle.rounds
    assert plan.start_s == pytest.approx(0.003)


def made(pattern: str, **fields: object) -> Trace:
    options = SynthOptions(
        pattern=pattern,  # type: ignore[arg-type]
        size_bytes=1_000_000,
        period_s=0.01,
        iterations=12,
        **fields,  # type: ignore[arg-type]
    )
    return synthesize(options).trace()


def test_naive_servers_collide_and_staggered_ones_take_turns() -> None:
    naive = {each.host: each for each in orchestration(made("ps-naive", hosts=6), 10e9, "sender")}
    assert naive["10.77.0.1"].verdict == "collides"
    assert naive["10.77.0.1"].overlap_share == pytest.approx(1, abs=0.01)
    assert naive["10.77.0.1"].backlog_bytes == pytest.approx(4 * 1_000_000, rel=0.1)
    assert naive["10.77.0.2"].verdict == "not applicable"
    staggered = {each.host: each for each in orchestration(made("ps-staggered", hosts=6), 10e9, "sender")}
    assert staggered["10.77.0.1"].verdict == "orchestrated"
    assert staggered["10.77.0.1"].p_value is not None
    assert staggered["10.77.0.1"].p_value <= 0.05
    assert staggered["10.77.0.1"].overlap_share == pytest.approx(0, abs=0.01)


def test_behind_the_bottleneck_nothing_can_be_told() -> None:
    trace = made("ps-staggered", hosts=6)
    verdicts = {each.host: each for each in orchestration(trace, 10e9, "receiver")}
    assert verdicts["10.77.0.1"].verdict == "cannot tell"
    unknown = {each.host: each for each in orchestration(trace, 10e9, "unknown")}
    assert "side is not stated" in unknown["10.77.0.1"].reason


def test_a_ring_has_fan_in_one() -> None:
    assert {each.verdict for each in orchestration(made("ring"), 10e9, "sender")} == {"not applicable"}


def test_ring_hosts_send_their_share_of_the_gradient() -> None:
    trace = synthesize(SynthOptions(pattern="ring", hosts=5, size_bytes=5_792_000, iterations=3)).trace()
    payload = 5_792_000 * 2 * 4 / 5 * 3
    for _, part in trace.by("host", "out"):
        assert part.total_bytes / 1514 * 1448 == pytest.approx(payload, rel=1e-3)


def test_made_traffic_is_the_same_for_equal_seeds() -> None:
    for pattern in ("periodic", "poisson", "fgn"):
        first = made(pattern, seed=4, jitter_s=0.001)
        second = made(pattern, seed=4, jitter_s=0.001)
        assert first.time_ns.tolist() == second.time_ns.tolist()
    with pytest.raises(FabricError, match="at least 2 hosts"):
        made("ring", hosts=1)


def test_trickle_between_bursts_does_not_hide_them() -> None:
    """Heartbeats fill every pause: the jobs fare as without them."""
    # 100 Mb/s for 240 ms of each second
    bursts = [(k * 1_000_000_000 + i * 120_000, 1500) for k in range(6) for i in range(2000)]
    trickle = [(i * 3_000_000 + 7, 60) for i in range(2000)]
    shared = link(100e6, 256_000, 12_800)
    stretches = []
    for arrivals in (bursts, sorted(bursts + trickle)):
        times, sizes = zip(*arrivals, strict=True)
        cycle = make_cycle(Trace.from_arrays(times, sizes))
        assert cycle.period_ns == pytest.approx(1e9, rel=1e-3)
        for shift in (0, cycle.period_ns // 2):
            plans = schedules([cycle] * 2, [0, shift])
            assert plans[0].bytes.sum() == pytest.approx(cycle.total_bytes)
            stretches.append(simulate(plans, shared, "none", 1e-3).round_stretch)
    together, apart, together_trickling, apart_trickling = stretches
    assert together > 1.2
    assert together_trickling == pytest.approx(together, abs=0.03)
    assert apart_trickling == pytest.approx(apart, abs=0.03)
