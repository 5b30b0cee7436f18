"""Floats of 16 bits are combined as float32 and rounded once, whoever combines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlfabric.collective import arithmetic
from mlfabric.collective.halves import WAYS
from mlfabric.errors import FabricError


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_registered", {})


def combined(combine: str, dtype: str, *rows: list[float]) -> Any:
    widen, narrow = WAYS[dtype]
    parts = [narrow(np.array(row, np.float32)) for row in rows]
    views = [memoryview(part).cast("B") for part in parts]
    arithmetic.combine_for(combine, dtype, len(rows))(views, 1, views[1], True)
    return widen(parts[1])


def test_float16_loses_no_small_number_on_the_way() -> None:
    # One by one each 1 would be rounded away: neighbours of 2048 are 2 apart.
    assert combined("sum", "float16", [2048.0], [1.0], [1.0], [1.0], [1.0]) == [2052.0]
    assert combined("sum", "bfloat16", [256.0], [1.0], [1.0], [1.0], [1.0]) == [260.0]


@pytest.mark.parametrize("dtype", WAYS)
def test_overflow_on_the_way_that_cancels_is_no_overflow(dtype: str) -> None:
    largest = 65504.0 if dtype == "float16" else 2.0**127
    assert combined("sum", dtype, [largest, 1.0], [largest / 2, 1.0], [-largest, np.inf]).tolist() == [
        largest / 2,
        np.inf,
    ]


def test_every_float16_is_widened_to_itself() -> None:
    widen, narrow = WAYS["float16"]
    every = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(widen(every), every.view(np.float16).astype(np.float32))
    numbers = ~np.isnan(widen(every))
    np.testing.assert_array_equal(narrow(widen(every))[numbers], every[numbers])


def test_whole_number_reductions_are_refused() -> None:
    with pytest.raises(FabricError, match="band works on whole numbers, not on float16"):
        arithmetic.combine_for("band", "float16", 2)
