"""The same benchmark under the virtual clock: real gradients, and times that are the simulator's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mlfabric.bench.cli import app
from tests.bench.train.images import write_easy_images
from tests.bench.train.results import some_settings

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("virtual")
    write_easy_images(folder / "data")
    arguments = ["train", "--simulate", "--scenario", "calm", "--contenders", "gloo,fcfs-1,alone"]
    arguments += [
        "--workers",
        "2",
        "--limit",
        "12s",
        "--target",
        "0.9",
        "--json",
        "--out",
        str(folder / "out"),
    ]
    result = CliRunner().invoke(app, [*arguments, "--data", str(folder / "data")])
    assert result.exception is None, result.exception
    runs = json.loads(result.stdout)["runs"]
    return {run["settings"]["contender"]: run for run in runs}


def test_every_way_learns_what_is_easy(found: dict[str, Any]) -> None:
    for name, run in found.items():
        assert run["simulated"]
        assert max(accuracy for _, accuracy in run["curve"]) > 0.9, name


def test_only_the_asynchronous_ones_have_delays(found: dict[str, Any]) -> None:
    assert set(found["gloo"]["delays"]) == set(found["alone"]["delays"]) == {"0"}
    assert max(map(int, found["fcfs-1"]["delays"])) >= 1


def test_steps_take_what_the_scenario_says(found: dict[str, Any]) -> None:
    """Alone, a step is its computing: 1.75 transfers of 5.08 MB at 500 Mb/s, with a jitter of a tenth."""
    alone = found["alone"]
    assert alone["updates"] == pytest.approx(12 / 0.1485, rel=0.1)


def test_models_ahead_go_on_as_the_last_step_went(tmp_path: Path) -> None:
    from mlfabric.bench.train.task import Fashion
    from mlfabric.bench.train.virtual import TaskLearner

    write_easy_images(tmp_path / "data")
    learner = TaskLearner(some_settings(), Fashion(tmp_path / "data"))
    first = learner.read()
    assert first is not None
    np.testing.assert_array_equal(learner.read(ahead=2.0), first)  # nothing has moved
    learner.apply([learner.compute(first)], [0.5], 0.1)
    second, ahead = learner.read(), learner.read(ahead=2.0)
    assert second is not None
    assert ahead is not None
    np.testing.assert_allclose(ahead, second + 2 * (second - first), atol=1e-6)
