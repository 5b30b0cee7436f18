"""Units: what people write, what it means, and the sentence they get when it means nothing."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlfabric.units import (
    FRAME_L2_BYTES,
    FRAME_PAYLOAD_BYTES,
    format_rate,
    format_size,
    format_time,
    goodput,
    parse_rate,
    parse_size,
    parse_time,
    parse_time_ns,
    wire_rate,
)

SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20}
RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit/s": 10**9, "mbps": 10**6, "Mbit": 10**6}
TIMES_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "µs": 10**3, "ns": 1, "min": 60 * 10**9, "h": 3600 * 10**9}
blanks = st.sampled_from(["", " ", "  "])


@given(st.integers(0, 10**9), st.sampled_from(sorted(SIZES)), blanks, blanks)
def test_a_whole_size_is_its_number_times_its_unit(number: int, unit: str, before: str, between: str) -> None:
    assert parse_size(f"{before}{number}{between}{unit}") == number * SIZES[unit]


@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(SIZES)))
def test_a_fraction_of_a_byte_is_rounded_up(number: Decimal, unit: str) -> None:
    exact = number * SIZES[unit]
    assert 0 <= parse_size(f"{number}{unit}") - exact < 1


@given(st.integers(0, 10**6), st.sampled_from(sorted(RATES)))
def test_a_rate_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_rate(f"{number}{unit}") == number * RATES[unit]


@given(st.integers(0, 10**18))
def test_nanoseconds_pass_exactly(time_ns: int) -> None:
    assert parse_time_ns(f"{time_ns}ns") == time_ns
    assert parse_time_ns(str(Decimal(time_ns) / 10**9)) == time_ns


@given(st.integers(0, 10**9), st.sampled_from(sorted(TIMES_NS)))
def test_both_readings_of_a_time_agree(number: int, unit: str) -> None:
    written = f"{number}{unit}"
    assert parse_time_ns(written) == number * TIMES_NS[unit]
    assert parse_time(written) == pytest.approx(parse_time_ns(written) / 1e9, rel=1e-12)


def test_bare_numbers_are_bytes_bits_per_second_and_seconds() -> None:
    assert parse_size(16) == 16
    assert parse_rate(1e6) == 1e6
    assert parse_time(1.5) == 1.5
    assert parse_time_ns(0.1) == 100_000_000


@pytest.mark.parametrize("parse", [parse_size, parse_rate, parse_time, parse_time_ns])
@pytest.mark.parametrize(
    "written",
    ["", "fast", "-1", "1 2", "1..2", "3parsec", "1e999999999", "MB", True, float("inf"), float("nan"), None],
)
def test_what_is_no_quantity_gets_one_sentence_that_repeats_it(parse: object, written: object) -> None:
    with pytest.raises(ValueError) as caught:
        parse(written)  # type: ignore[operator]
    sentence = str(caught.value)
    assert repr(written) in sentence
    assert "\n" not in sentence


def test_units_of_one_kind_are_not_taken_for_another() -> None:
    for parse, written in (
        (parse_size, "1mbit"),
        (parse_rate, "1MB"),
        (parse_time, "1MB"),
        (parse_size, "1mb"),
    ):
        with pytest.raises(ValueError, match="unknown unit"):
            parse(written)


@given(st.floats(0, 1e15))
def test_goodput_and_wire_rate_undo_each_other(rate: float) -> None:
    assert wire_rate(goodput(rate)) == pytest.approx(rate)
    assert goodput(rate) * 8 <= rate


def test_goodput_is_the_payload_share_of_full_frames() -> None:
    assert goodput(8 * FRAME_L2_BYTES) == pytest.approx(FRAME_PAYLOAD_BYTES)


@given(st.floats(1, 1e15))
def test_a_formatted_size_reads_back_to_three_digits(size: float) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=6e-3, abs=1)


@given(st.floats(1, 1e15))
def test_a_formatted_rate_reads_back_to_three_digits(rate: float) -> None:
    written = format_rate(rate).replace("b/s", "bit/s")
    assert parse_rate(written.lower()) == pytest.approx(rate, rel=6e-3)


@given(st.floats(1e-9, 1e6))
def test_a_formatted_time_reads_back_to_three_digits(time_s: float) -> None:
    assert parse_time(format_time(time_s)) == pytest.approx(time_s, rel=6e-3)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (999_700, "1 MB"), (16e6, "16 MB"), (1.234e9, "1.23 GB")]
)
def test_sizes_look_as_people_write_them(value: float, text: str) -> None:
    assert format_size(value) == text
