"""Who is told, before runs are made, that this machine is too slow for them to count."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlfabric.bench.train import machine
from mlfabric.bench.train.machine import measure_gradient, strain, strains
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.bench.train.task import Fashion
from tests.bench.train.images import write_easy_images


def rolling(scenario: str = "calm", contender: str = "mlfabric-rolling") -> RunSettings:
    return RunSettings(contender, scenario, 1, StepSize(0.001, 0.9))


def test_slower_machines_and_faster_links_are_told_of() -> None:
    # Steps of 0.15 s: eight workers make 53 gradients a second.
    assert strain(rolling(), 0.005, processors=2) is None
    said = strain(rolling(), 0.018, processors=2)
    assert said is not None
    assert "calm: a gradient takes 18 ms here" in said
    assert "2 processors 48% busy" in said
    assert strain(rolling(), 0.018, processors=8) is None


def test_each_scenario_is_told_of_once_and_only_who_never_waits_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [rolling(contender=name) for name in ("gloo", "mlfabric-rolling-fp16")]
    runs = [rolling(), rolling("skewed"), *other]
    write_easy_images(tmp_path / "images")
    monkeypatch.setattr(machine, "measure_gradient", lambda data, batch: 1.0)
    assert [each.partition(":")[0] for each in strains(runs, tmp_path / "images")] == ["calm", "skewed"]
    assert strains([rolling(contender="gloo")], tmp_path / "nothing is read") == []


def test_gradients_are_measured(tmp_path: Path) -> None:
    write_easy_images(tmp_path / "images")
    assert 1e-4 < measure_gradient(Fashion(tmp_path / "images"), batch=4) < 10
