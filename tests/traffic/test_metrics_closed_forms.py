"""Traffic whose figures are known on paper: the metrics must give those."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.traffic.analysis import AnalysisOptions, analyze
from mlfabric.traffic.arrivals import fluid
from mlfabric.traffic.backlogs import Backlog, backlog
from mlfabric.traffic.bursts import find_bursts
from mlfabric.traffic.dispersion import spread
from mlfabric.traffic.envelopes import envelope
from mlfabric.traffic.gaps import gap_statistics
from mlfabric.traffic.logscales import logscale
from mlfabric.traffic.rhythm import find_rhythm
from mlfabric.traffic.synth import fractional_noise
from mlfabric.traffic.trace import Trace

FRAME = 1514
WIRE = FRAME + 24


def on_off(period_ns: int, frames: int, line_bps: float, rounds: int) -> Trace:
    """Frames back to back on the wire from the start of every period."""
    within = np.rint(np.arange(1, frames + 1) * WIRE * 8e9 / line_bps).astype(np.int64)
    times = (np.arange(rounds)[:, None] * period_ns + within).ravel()
    return Trace.from_arrays(times, np.full(len(times), FRAME))


LINE = 10e9
PERIOD = 100_000_000
FRAMES = 4000
ROUNDS = 12
BURST = FRAMES * FRAME
RATE = LINE * FRAME / WIRE  # bytes of l2 pass at this rate while the line is busy


@pytest.fixture(scope="module")
def periodic() -> Trace:
    return on_off(PERIOD, FRAMES, LINE, ROUNDS)


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("extra_ns", [100_000, 1_000_000, 4_000_000, 20_000_000])
def test_envelope_of_on_off_traffic(periodic: Trace, rounds: int, extra_ns: int) -> None:
    expected = rounds * BURST + min(RATE / 8e9 * extra_ns, BURST)
    found = envelope(periodic, rounds * PERIOD + extra_ns)
    assert found is not None
    assert found.bytes == pytest.approx(expected, abs=FRAME)
    smooth = envelope(fluid(periodic, LINE), rounds * PERIOD + extra_ns)
    assert smooth is not None
    assert smooth.bytes == pytest.approx(expected, abs=2)


def test_peak_to_mean_of_on_off_traffic(periodic: Trace) -> None:
    result = analyze(periodic, AnalysisOptions(line_rate_bps=LINE))
    mean = BURST * 8e9 / PERIOD
    assert result.mean_rate_bps == pytest.approx(mean, rel=1e-9)
    assert result.rhythm is not None
    assert result.rhythm.period_s == pytest.approx(0.1, rel=1e-9)
    assert result.rhythm.bytes.tolist() == [BURST] * (ROUNDS - 1)
    for scale in result.scales:
        if scale.peak_to_mean is None or scale.tau_ns > PERIOD or scale.tau_ns < 100_000:
            continue
        expected = min(RATE / mean, PERIOD / scale.tau_ns)
        assert scale.peak_to_mean == pytest.approx(expected, abs=1.01 * FRAME * 8e9 / (mean * scale.tau_ns))
        assert scale.most_by_line_rate == pytest.approx(LINE / mean)
        assert scale.peak_to_mean <= (scale.most_by_period or 0) * (1 + 1.01 / FRAMES)


def test_backlog_of_on_off_traffic(periodic: Trace) -> None:
    mean = BURST * 8e9 / PERIOD
    for rate in np.linspace(mean * 1.001, RATE * 0.999, 9):
        assert backlog(periodic, float(rate)).bytes == pytest.approx(BURST * (1 - rate / RATE), abs=FRAME)
        assert backlog(fluid(periodic, LINE), float(rate)).bytes == pytest.approx(
            BURST * (1 - rate / RATE), rel=1e-9, abs=2
        )


def test_one_burst_of_resnet50_gradients_exceeds_sixty_to_one() -> None:
    gradients = 25_557_032 * 4
    frames = gradients // 1448
    period, line = 500_000_000, 100e9
    # Bytes and rate in one layer: payload as the closed form has it.
    within = np.rint(np.arange(1, frames + 1) * 1448 * 8e9 / line).astype(np.int64)
    times = (np.arange(6)[:, None] * period + within).ravel()
    trace = Trace.from_arrays(times, np.full(len(times), 1448))
    result = analyze(trace, AnalysisOptions(scales_ns=(5_000_000,), quick=True))
    assert result.scales[0].peak_to_mean == pytest.approx(61.1, abs=0.1)


def test_poisson_counts_have_dispersion_one(form: str) -> None:
    generator = np.random.default_rng(3)
    times = np.cumsum(generator.exponential(1000, 400_000)).astype(np.int64)
    trace = Trace.from_arrays(times, np.full(len(times), 1000))
    for tau_ns in (10_000, 100_000, 1_000_000):
        found = spread(trace, tau_ns)
        assert found is not None
        assert found.idc == pytest.approx(1, abs=0.08)
        assert found.idc_bytes == pytest.approx(1000, rel=0.08)
    gaps = gap_statistics(trace)
    assert gaps.burstiness == pytest.approx(0, abs=0.01)
    assert gaps.memory == pytest.approx(0, abs=0.01)


def test_a_regular_beat_is_minus_one_and_one_long_gap_is_plus_one() -> None:
    beat = Trace.from_arrays(np.arange(1000) * 1000, np.full(1000, 100))
    assert gap_statistics(beat).burstiness == pytest.approx(-1)
    lonely = Trace.from_arrays(
        np.concatenate([np.zeros(500), np.full(500, 10**9)]).astype(int), np.full(1000, 1)
    )
    assert gap_statistics(lonely).burstiness == pytest.approx(1)


def test_memory_is_the_plain_correlation_of_neighbouring_gaps() -> None:
    generator = np.random.default_rng(4)
    gaps = np.abs(np.cumsum(generator.normal(0, 50, 3000))).astype(np.int64) + 1
    trace = Trace.from_arrays(np.concatenate([[0], np.cumsum(gaps)]), np.full(3001, 1))
    assert gap_statistics(trace).memory == pytest.approx(np.corrcoef(gaps[:-1], gaps[1:])[0, 1], rel=1e-9)


@pytest.mark.parametrize("hurst", [0.6, 0.8])
def test_the_logscale_diagram_recovers_the_hurst_exponent(hurst: float) -> None:
    pytest.importorskip("pywt")
    found = logscale(fractional_noise(1 << 16, hurst, np.random.default_rng(7)), 1e-3)
    assert found.hurst == pytest.approx(hurst, abs=0.05)


def test_no_hurst_exponent_for_periodic_traffic(periodic: Trace) -> None:
    pytest.importorskip("pywt")
    found = analyze(periodic, AnalysisOptions(scales_ns=(5_000_000,))).logscale
    assert found is not None
    assert found.hurst is None
    assert "periodic" in str(found.why_not)


def test_aligned_equal_bursts_queue_all_but_one() -> None:
    hosts, line = 4, 10e9
    within = np.rint(np.arange(1, FRAMES + 1) * WIRE * 8e9 / line).astype(np.int64)
    times = np.repeat(within, hosts)
    found = backlog(Trace.from_arrays(times, np.full(len(times), WIRE)), line)
    assert found.bytes == pytest.approx((hosts - 1) * FRAMES * WIRE, abs=hosts * WIRE)


def test_bursts_of_on_off_traffic_are_its_periods(periodic: Trace) -> None:
    found = find_bursts(periodic)
    assert len(found) == ROUNDS
    assert found.bytes.tolist() == [BURST] * ROUNDS


def test_jitter_does_not_add_up() -> None:
    generator = np.random.default_rng(11)
    starts = np.arange(40) * 50_000_000 + generator.normal(0, 500_000, 40).astype(np.int64)
    times = (starts[:, None] + np.arange(200) * 20_000).ravel()
    found = find_rhythm(Trace.from_arrays(times, np.full(len(times), 1500)))
    assert found is not None
    assert found.period_s == pytest.approx(0.05, rel=0.01)
    assert found.jitter_s == pytest.approx(0.0005 * 2**0.5, rel=0.35)
    assert found.rounds in (38, 39)


def test_sparse_packets_with_jitter_still_show_their_period() -> None:
    # Fewer packets than bins: at the finest bins no two rounds look alike.
    generator = np.random.default_rng(13)
    starts = np.arange(12) * 150_000_000 + generator.normal(0, 100_000, 12).astype(np.int64)
    times = (starts[:, None] + np.arange(60) * 303_000).ravel()
    found = find_rhythm(Trace.from_arrays(times, np.full(len(times), 1514)))
    assert found is not None
    assert found.period_s == pytest.approx(0.15, rel=0.005)
    assert found.rounds == 11


def test_random_traffic_has_no_period() -> None:
    generator = np.random.default_rng(12)
    times = np.cumsum(generator.exponential(50_000, 40_000)).astype(np.int64)
    assert find_rhythm(Trace.from_arrays(times, np.full(len(times), 1500))) is None


pairs = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), min_size=2, max_size=200)


def as_trace(rows: list[tuple[int, int]]) -> Trace:
    return Trace.from_arrays(np.cumsum([gap for gap, _ in rows]), [size for _, size in rows])


def held(trace: Trace, tau_ns: int) -> float:
    """E with windows longer than the trace allowed, as the laws need it."""
    found = envelope(trace, min(tau_ns, trace.span_ns))
    return found.bytes if found else 0


@settings(max_examples=80, deadline=None)
@given(pairs, pairs, st.integers(0, 20_000), st.integers(0, 20_000))
def test_laws_that_always_hold(
    rows: list[tuple[int, int]], others: list[tuple[int, int]], one_ns: int, two_ns: int
) -> None:
    trace, other = as_trace(rows), as_trace(others)
    assert held(trace, trace.span_ns) == trace.total_bytes
    assert held(trace, one_ns) <= held(trace, one_ns + two_ns) <= held(trace, one_ns) + held(trace, two_ns)
    scaled = Trace.from_arrays(trace.time_ns, trace.size.astype(np.int64) * 3)
    assert held(scaled, one_ns) == 3 * held(trace, one_ns)
    backwards = Trace.from_arrays(-trace.time_ns[::-1], trace.size[::-1])
    assert held(backwards, one_ns) == held(trace, one_ns)
    both = Trace.from_arrays(
        np.concatenate([trace.time_ns, other.time_ns]),
        np.concatenate([trace.size, other.size]).astype(np.int64),
    )
    assert max(held(trace, one_ns), held(other, one_ns)) <= held(both, one_ns)
    assert held(both, one_ns) <= held(trace, one_ns) + held(other, one_ns)
    exact, mirrored = Backlog(trace), Backlog(backwards)
    assert exact.at(0).bytes == trace.total_bytes
    rates = [1e8, 1e9, 5e9, 1e10, 1e11]
    values = [exact.at(rate).bytes for rate in rates]
    assert all(a >= b - 1e-6 for a, b in pairwise(values))
    assert exact.at(3e9).bytes <= (values[1] + values[2]) / 2 + 1e-6
    assert [mirrored.at(rate).bytes for rate in rates] == pytest.approx(values, rel=1e-9, abs=1e-6)


def test_the_beat_of_a_full_link_is_no_rhythm() -> None:
    """Three senders at line rate come to one port in turn: that repeats, but is no iteration."""
    starts = np.arange(300) * 1230
    times = np.concatenate([starts, starts + 3, starts + 7])
    assert find_rhythm(Trace.from_arrays(times, np.full(900, 1514))) is None
