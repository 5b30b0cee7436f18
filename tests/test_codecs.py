"""Codecs: sizes known beforehand, losses bounded, nothing lost that is not kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlfabric.codecs import CODECS, INT8_BLOCK, Codec, ErrorFeedback, Vector, find_codec
from mlfabric.errors import FabricError

vectors = hnp.arrays(
    np.float32, st.integers(0, 700), elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
)
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@codecs
@given(vector=vectors)
def test_the_size_follows_from_the_number_of_elements(codec: Codec, vector: Vector) -> None:
    encoded = codec.encode(vector)
    assert encoded.dtype == np.uint8
    assert len(encoded) == codec.size_bytes(len(vector))
    decoded = codec.decode(encoded, len(vector))
    assert decoded.dtype == np.float32
    assert decoded.shape == vector.shape
    assert np.isfinite(decoded).all()


@codecs
@given(vector=vectors)
def test_what_was_coded_once_is_not_changed_by_coding_it_again(codec: Codec, vector: Vector) -> None:
    once = codec.decode(codec.encode(vector), len(vector))
    twice = codec.decode(codec.encode(once), len(once))
    np.testing.assert_allclose(twice, once, rtol=1e-6)


@given(vector=vectors)
def test_float32_changes_nothing(vector: Vector) -> None:
    codec = find_codec("float32")
    assert codec.decode(codec.encode(vector), len(vector)).tobytes() == vector.tobytes()


@given(vector=vectors)
def test_bfloat16_rounds_to_the_nearest(vector: Vector) -> None:
    codec = find_codec("bfloat16")
    decoded = codec.decode(codec.encode(vector), len(vector))
    np.testing.assert_allclose(decoded, vector, rtol=2.0**-8)


def test_bfloat16_breaks_ties_to_even_and_keeps_the_largest_finite() -> None:
    codec = find_codec("bfloat16")
    tie_down, tie_up = np.float32(1 + 2**-8), np.float32(1 + 3 * 2**-8)
    largest = np.finfo(np.float32).max
    decoded = codec.decode(codec.encode(np.array([tie_down, tie_up, largest], np.float32)), 3)
    assert decoded[0] == 1.0
    assert decoded[1] == np.float32(1 + 2**-6)
    assert np.isfinite(decoded[2])


@given(vector=vectors)
def test_int8_is_off_by_at_most_half_a_step_of_its_block(vector: Vector) -> None:
    codec = find_codec("int8")
    decoded = codec.decode(codec.encode(vector), len(vector))
    for start in range(0, len(vector), INT8_BLOCK):
        block = vector[start : start + INT8_BLOCK].astype(np.float64)
        step = np.abs(block).max() / 127
        assert np.abs(decoded[start : start + INT8_BLOCK] - block).max() <= 0.5001 * step + 1e-38


@given(st.integers(0, 2**32 - 1), st.integers(1, 9000))
def test_topk_keeps_the_largest_in_their_places(seed: int, elements: int) -> None:
    codec = find_codec("topk")
    vector = np.random.default_rng(seed).normal(size=elements).astype(np.float32)
    decoded = codec.decode(codec.encode(vector), elements)
    kept = np.flatnonzero(decoded)
    np.testing.assert_array_equal(decoded[kept], vector[kept])
    dropped = np.delete(np.abs(vector), kept)
    assert not len(dropped) or dropped.max() <= np.abs(vector[kept]).min()


@codecs
@given(seed=st.integers(0, 2**32 - 1), drops=st.lists(st.booleans(), min_size=1, max_size=12))
def test_nothing_is_lost_that_is_not_kept(codec: Codec, seed: int, drops: list[bool]) -> None:
    """Applied updates and the residual together are all that was ever pushed."""
    draw = np.random.default_rng(seed)
    feedback = ErrorFeedback(codec, [(0, 300), (300, 211)])
    pushed, applied = np.zeros(511), np.zeros(511)
    for number, dropped in enumerate(drops):
        vector = draw.normal(size=511).astype(np.float32)
        pushed += vector
        seen = feedback.code(f"u{number}", vector)
        feedback.settle(f"u{number}", applied=not dropped)
        if not dropped:
            applied += seen
    residual = feedback._residual if feedback._residual is not None else 0
    np.testing.assert_allclose(applied + residual, pushed, atol=1e-4)


def test_an_unknown_codec_gets_one_sentence() -> None:
    with pytest.raises(FabricError, match="unknown codec 'zip'; known are float32, bfloat16"):
        find_codec("zip")
