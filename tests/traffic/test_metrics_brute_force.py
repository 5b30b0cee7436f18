"""Every metric equals its definition, evaluated in quadratic time, on random traces."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlfabric.traffic import backlogs as backlog_module
from mlfabric.traffic import dispersion, envelopes, native, trace
from mlfabric.traffic.arrivals import fluid
from mlfabric.traffic.backlogs import Backlog, backlog_curve, least_rate
from mlfabric.traffic.bursts import find_bursts, widest_plateau
from mlfabric.traffic.dispersion import spread
from mlfabric.traffic.envelopes import byte_series, envelope, envelope_by_bins, envelopes_by_bins
from mlfabric.traffic.trace import RunningBytes, Trace, sort_in_pieces
from tests.traffic import brute

# Short and long gaps mixed, ties included, so that blocks, bursts and windows all get something to do.
gaps = st.one_of(st.integers(0, 3), st.integers(0, 2000), st.sampled_from([0, 0, 50_000]))
packet_lists = st.lists(st.tuples(gaps, st.integers(1, 9000)), min_size=1, max_size=300)
window = st.one_of(st.integers(0, 50), st.integers(0, 20_000), st.integers(0, 400_000))
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def made(rows: list[tuple[int, int]]) -> tuple[brute.Packets, Trace]:
    times = np.cumsum([gap for gap, _ in rows])
    times -= times[0]
    packets = [(int(at), size) for at, (_, size) in zip(times, rows, strict=True)]
    return packets, Trace.from_arrays(times, [size for _, size in rows])


def bins_of(packets: brute.Packets, tau_ns: int) -> Counter[int]:
    bins: Counter[int] = Counter()
    for at, size in packets:
        bins[at // tau_ns] += size
    return bins


@relaxed
@given(packet_lists, window)
def test_envelope_equals_its_definition(form: str, rows: list[tuple[int, int]], tau_ns: int) -> None:
    packets, made_trace = made(rows)
    peak = envelope(made_trace, tau_ns)
    if tau_ns > packets[-1][0]:
        assert peak is None
        return
    assert peak is not None
    assert peak.bytes == brute.envelope(packets, tau_ns)
    start = peak.start_ns
    assert sum(size for at, size in packets if start <= at <= start + tau_ns) == peak.bytes
    earlier = [at for at, _ in packets if at < start]
    assert all(sum(s for t, s in packets if at <= t <= at + tau_ns) < peak.bytes for at in earlier)
    binned = envelope_by_bins(made_trace, tau_ns) if tau_ns else None
    if binned is not None:
        assert binned <= peak.bytes <= 2 * binned
        assert binned == byte_series(made_trace, tau_ns).max()


@relaxed
@given(packet_lists, st.floats(1e6, 1e12))
def test_backlog_equals_its_definition(rows: list[tuple[int, int]], rate_bps: float) -> None:
    packets, made_trace = made(rows)
    exact = brute.backlog(packets, Fraction(rate_bps) / 8_000_000_000)
    with patch.object(backlog_module, "_FEW", 0):
        found = Backlog(made_trace).at(rate_bps)
    assert found.bytes == pytest.approx(float(exact), rel=1e-9, abs=1e-6)
    inside = [s for t, s in packets if found.start_ns <= t <= found.start_ns + found.duration_ns]
    assert sum(inside) >= found.arrived_bytes


@relaxed
@given(packet_lists, st.lists(st.floats(1e6, 1e13), min_size=1, max_size=8))
def test_many_rates_at_once_equal_one_at_a_time(rows: list[tuple[int, int]], rates: list[float]) -> None:
    _, made_trace = made(rows)
    with patch.object(backlog_module, "_FEW", 0), patch.object(backlog_module, "_BLOCK", 8):
        exact = Backlog(made_trace)
        together = exact.at_many(rates)
        assert [each.rate_bps for each in together] == rates
        for rate, found in zip(rates, together, strict=True):
            assert found.bytes == pytest.approx(exact.at(rate).bytes, rel=1e-12, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_narrowing_keeps_what_only_matters_at_higher_rates(seed: int) -> None:
    # A long, loose burst rules the lower rates; short, dense ones elsewhere rule the higher.
    generator = np.random.default_rng(seed)
    loose = np.cumsum(generator.exponential(1000, 40_000)).astype(np.int64)
    dense = (loose[-1] + np.arange(1, 40)[:, None] * 3_000_000 + np.arange(60) * 60).ravel()
    times = np.concatenate([loose, dense])
    crowded = Trace.from_arrays(times, generator.integers(60, 1515, len(times)))
    exact = Backlog(crowded)
    for found in exact.at_many([float(rate) for rate in np.geomspace(1e9, 1e13, 30)]):
        assert found.bytes == pytest.approx(exact.at(found.rate_bps).bytes, rel=1e-12)


@relaxed
@given(packet_lists)
def test_the_backlog_curve_is_exact_everywhere(rows: list[tuple[int, int]]) -> None:
    _, made_trace = made(rows)
    corners = backlog_curve(made_trace, 1e6, 1e12)
    exact = Backlog(made_trace)
    rates = [corner.rate_bps for corner in corners]
    for rate in np.geomspace(1e6, 1e12, 37):
        between = np.interp(rate, rates, [corner.bytes for corner in corners])
        assert between == pytest.approx(exact.at(float(rate)).bytes, rel=1e-6, abs=1e-3)


@relaxed
@given(packet_lists, st.integers(1, 100_000))
def test_the_least_rate_fits_the_buffer_and_less_does_not(rows: list[tuple[int, int]], buffer: int) -> None:
    packets, made_trace = made(rows)
    rate = least_rate(made_trace, buffer)
    if rate is None:
        ties: dict[int, int] = {}
        for at, size in packets:
            ties[at] = ties.get(at, 0) + size
        assert max(ties.values()) > buffer
        return
    assert Backlog(made_trace).at(rate).bytes <= buffer + 1e-3
    if rate > 0:
        assert Backlog(made_trace).at(rate * 0.999).bytes > buffer - 1e-3


@relaxed
@given(packet_lists, window)
def test_spread_equals_its_definition(form: str, rows: list[tuple[int, int]], tau_ns: int) -> None:
    packets, made_trace = made(rows)
    found = spread(made_trace, tau_ns, (0.01, 0.5, 0.9, 0.99, 1.0))
    if tau_ns >= packets[-1][0]:
        assert (found is None) == (tau_ns > packets[-1][0])
        return
    assert found is not None
    pieces = brute.contents(packets, tau_ns)
    expected = tuple(brute.quantile(pieces, share) for share in (0.01, 0.5, 0.9, 0.99, 1.0))
    assert found.quantile_bytes == expected
    mean, variance = brute.moments(pieces, 1)
    assert found.mean_bytes == pytest.approx(float(mean), rel=1e-9)
    if mean:
        assert found.idc_bytes == pytest.approx(float(variance / mean), rel=1e-7, abs=1e-6)
    count_mean, count_variance = brute.moments(pieces, 2)
    if count_mean:
        assert found.idc == pytest.approx(float(count_variance / count_mean), rel=1e-7, abs=1e-9)


def test_spread_in_pieces_equals_spread_at_once() -> None:
    generator = np.random.default_rng(5)
    times = np.cumsum(generator.integers(0, 1000, 5000))
    whole = Trace.from_arrays(times, generator.integers(60, 1515, 5000))
    at_once = spread(whole, 40_000)
    with patch.object(dispersion, "_PIECE", 64), patch.dict("os.environ", {"MLFABRIC_NO_NATIVE": "1"}):
        assert native.library() is None
        in_pieces = spread(whole, 40_000)
    assert at_once is not None
    assert in_pieces is not None
    assert at_once.quantile_bytes == in_pieces.quantile_bytes
    assert at_once.idc_bytes == pytest.approx(in_pieces.idc_bytes, rel=1e-9)


@relaxed
@given(packet_lists, st.integers(0, 60_000))
def test_bursts_partition_the_trace(rows: list[tuple[int, int]], theta_ns: int) -> None:
    packets, made_trace = made(rows)
    found = find_bursts(made_trace, theta_ns)
    assert len(found) == brute.burst_count(packets, theta_ns)
    assert found.bytes.sum() == made_trace.total_bytes
    assert found.packets.sum() == len(packets)


@pytest.mark.usefixtures("form")
@relaxed
@given(packet_lists)
def test_the_widest_plateau_is_the_largest_ratio_of_neighbouring_gaps(rows: list[tuple[int, int]]) -> None:
    packets, made_trace = made(rows)
    gaps = [b[0] - a[0] for a, b in pairwise(packets)]
    plateaus = [
        (high / low, low, high)
        for low, high in pairwise(sorted(set(gaps) - {0}))
        if high >= 2 * low and 2 * (1 + sum(gap >= high for gap in gaps)) <= len(packets)
    ]
    found = widest_plateau(made_trace)
    bursts = find_bursts(made_trace)
    if not plateaus:
        assert found is None
        assert (bursts.theta_from, len(bursts)) == ("no plateau", 1)
        assert "one burst" in bursts.notes[0]
        return
    assert found is not None
    assert found[1] / found[0] == pytest.approx(max(plateaus)[0])
    assert bursts.theta_from == "widest plateau"
    assert found[0] < bursts.theta_ns < found[1]
    assert len(bursts) * 2 <= len(packets)


@relaxed
@given(packet_lists, st.lists(st.sampled_from([10, 20, 50, 100, 300, 7, 1000]), min_size=1, max_size=5))
def test_bins_of_several_lengths_equal_each_counted_alone(
    form: str, rows: list[tuple[int, int]], taus: list[int]
) -> None:
    packets, made_trace = made(rows)
    with patch.object(envelopes, "pieces", partial(trace.pieces, length=16)):
        found = envelopes_by_bins(made_trace, taus)
    expected = [None if tau > made_trace.span_ns else max(bins_of(packets, tau).values()) for tau in taus]
    assert found == expected


@pytest.mark.parametrize("seed", range(4))
def test_both_forms_agree_where_windows_hold_many_packets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough that every way to rule out windows and blocks is taken."""
    generator = np.random.default_rng(seed)
    gaps = np.where(generator.random(20_000) < 0.01, 50_000, generator.integers(0, 200, 20_000))
    made_trace = Trace.from_arrays(np.cumsum(gaps), generator.integers(40, 1500, 20_000))
    taus = [100, 3_000, 20_000, 100_000, 1_000_000, 5_000_000]
    rates = [10.0**power for power in np.arange(9, 12, 0.15)]
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("MLFABRIC_NO_NATIVE", switch)
        peaks = [envelope(made_trace, tau) for tau in taus]
        bins = envelopes_by_bins(made_trace, taus)
        found.append((peaks, bins, Backlog(made_trace).at_many(rates), widest_plateau(made_trace)))
    assert found[0] == found[1], f"seed {seed}"


def test_traffic_without_pauses_is_one_burst() -> None:
    gaps = np.random.default_rng(5).exponential(1000, 20_000).astype(np.int64)
    found = find_bursts(Trace.from_arrays(np.cumsum(gaps), np.full(20_000, 1500)))
    assert (len(found), found.theta_from) == (1, "no plateau")


@relaxed
@given(packet_lists, st.integers(1, 100_000), st.sampled_from([1e9, 1e10, 1e11]))
def test_fluid_envelope_obeys_the_line_and_beats_every_sampled_window(
    rows: list[tuple[int, int]], tau_ns: int, line_bps: float
) -> None:
    _, made_trace = made(rows)
    arrivals = fluid(made_trace, line_bps)
    peak = envelope(arrivals, tau_ns)
    if peak is None:
        return
    assert peak.bytes <= line_bps / 8e9 * tau_ns * (1 + 1e-9) + 1e-6
    corners = np.concatenate([arrivals.start, arrivals.end])
    starts = np.concatenate([corners, corners - tau_ns])
    held = arrivals.passed(starts + tau_ns) - arrivals.passed(starts)
    assert peak.bytes == pytest.approx(float(held.max()), rel=1e-9, abs=1e-6)


@relaxed
@given(st.lists(st.integers(0, 2**26 - 1), min_size=1, max_size=700))
def test_short_running_sums_equal_long_ones(sizes: list[int]) -> None:
    column = np.array(sizes, np.uint32)
    with patch.object(trace, "_MOST_FULL_SUMS", 0), patch.object(trace, "PIECE", 128):
        short = RunningBytes(column)
    expected = np.concatenate([[0], np.cumsum(column, dtype=np.int64)])
    assert short(np.arange(len(sizes) + 1)).tolist() == expected.tolist()
    assert short(np.arange(len(sizes) + 1)[::-7]).tolist() == expected[::-7].tolist()
    middle = len(sizes) // 2
    assert short.between(middle, len(sizes)).tolist() == expected[middle:].tolist()


@relaxed
@given(packet_lists, window)
def test_long_traces_give_the_same_envelope(form: str, rows: list[tuple[int, int]], tau_ns: int) -> None:
    packets, short = made(rows)
    with patch.object(trace, "_MOST_FULL_SUMS", 0):
        peak = envelope(short, tau_ns)
        queue = Backlog(short).at_many([1e9, 1e10])
    if peak is not None:
        assert peak.bytes == brute.envelope(packets, tau_ns)
    assert [each.bytes for each in queue] == pytest.approx(
        [float(brute.backlog(packets, Fraction(rate) / 8_000_000_000)) for rate in (10**9, 10**10)]
    )


@relaxed
@given(st.lists(st.integers(0, 1000), max_size=400), st.integers(0, 30))
def test_sorting_in_pieces_is_a_stable_sort(drawn: list[int], disorder: int) -> None:
    times = np.sort(np.array(drawn, np.int64)) - np.arange(len(drawn)) * 37 % (disorder + 1)
    order = np.arange(len(drawn))
    expected = np.argsort(times, kind="stable")
    ordered_times, ordered = times.copy(), order.copy()
    with patch.object(trace, "PIECE", 32):
        sort_in_pieces(ordered_times, [ordered])
    assert ordered.tolist() == expected.tolist()
    assert ordered_times.tolist() == times[expected].tolist()
