"""The collectives agree with Gloo, and with the plain sum of all inputs, on random calls."""

from __future__ import annotations

import pytest

from tests.torch.worlds import Worlds

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")


@pytest.mark.parametrize(("size", "count"), [(1, 60), (2, 120), (3, 120), (5, 70), (8, 40)])
def test_random_calls_agree_with_gloo(worlds: Worlds, size: int, count: int) -> None:
    assert worlds.check("agree_with_gloo", size, seed=size, count=count) == ["done"] * size


@pytest.mark.parametrize(("size", "count"), [(1, 40), (3, 120)])
def test_an_engine_in_a_process_of_its_own_gives_the_same(worlds: Worlds, size: int, count: int) -> None:
    said = worlds.check("agree_with_gloo", size, seed=20 + size, count=count, engine="process")
    assert said == ["done"] * size


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_many_random_calls_agree_with_gloo(worlds: Worlds, size: int, seed: int) -> None:
    said = worlds.check("agree_with_gloo", size, timeout=800.0, seed=1000 + seed, count=600)
    assert said == ["done"] * size


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "names",
    [
        ["all_reduce", "broadcast"],
        ["reduce", "all_gather", "all_gather_single"],
        ["gather", "scatter"],
        ["reduce_scatter", "reduce_scatter_single"],
        ["all_to_all_single", "all_to_all_even", "messages"],
    ],
    ids=lambda names: names[0],
)
def test_every_type_shape_and_root_agrees_with_gloo(worlds: Worlds, size: int, names: list[str]) -> None:
    counts = worlds.check("every_combination", size, timeout=800.0, seed=7, names=names)
    assert min(counts) >= 100
