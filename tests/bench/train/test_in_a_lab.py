"""One small benchmark from the command line to its plots, over real links with real training."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlfabric.bench.cli import app
from mlfabric.bench.train.campaign import RunFailed
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.bench.train.tuning import Tuned, write_tuned
from tests.bench.train.images import write_easy_images

pytest.importorskip("torch")

from mlfabric.bench.train.running import ApartRun


@pytest.mark.usefixtures("lab_is_possible")
def test_two_workers_learn_and_the_report_tells_of_it(tmp_path: Path) -> None:
    write_easy_images(tmp_path / "data")
    out = tmp_path / "out"
    arguments = ["train", "--scenario", "dynamic-stragglers", "--contenders", "mlfabric-async"]
    arguments += ["--workers", "2", "--limit", "4s", "--rate", "400mbit", "--target", "0.3", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--data", str(tmp_path / "data"), "--out", str(out)])
    assert result.exception is None, result.exception
    found = json.loads(result.stdout)
    (run,) = found["runs"]
    assert run["updates"] > 2
    assert sum(run["delays"].values()) == run["updates"]
    assert len(run["curve"]) >= 1
    assert run["link_bytes"]["w1.up"] > 1e6 * run["steps_by_rank"][1]
    assert 0 < run["gradient_s"] < run["compute_s"]
    ours = out / "dynamic-stragglers" / "mlfabric-async" / "seed1"
    assert (ours / "result.json").exists()
    assert not (ours / "run" / "snapshots").exists()
    for name in ("accuracy", "delays", "links"):
        assert (out / f"dynamic-stragglers-{name}.png").stat().st_size > 5000
    assert "mlfabric-async" in (out / "results.md").read_text()


@pytest.mark.usefixtures("lab_is_possible")
@pytest.mark.parametrize("contender", ["mlfabric-async", pytest.param("gloo", marks=pytest.mark.full)])
def test_contender_that_diverges_is_a_result(contender: str, tmp_path: Path) -> None:
    write_easy_images(tmp_path / "data")
    wild = Tuned(contender, "calm", StepSize(1e30, 0.0), False, [])
    write_tuned(tmp_path / "tuned.json", [wild])
    arguments = ["train", "--scenario", "calm", "--contenders", contender, "--workers", "2"]
    arguments += ["--limit", "100s", "--tuned", str(tmp_path / "tuned.json"), "--json"]
    arguments += ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.exception
    found = json.loads(result.stdout)
    (run,), (row,) = found["runs"], found["report"]["rows"]
    assert 0 < run["diverged_s"] <= run["seconds"] < 100
    assert row["to_target"]["0.85"]["median"] is None
    assert f"{contender}, seed 1: diverged after" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.usefixtures("lab_is_possible")
def test_runs_side_by_side_are_each_in_a_lab_of_their_own(tmp_path: Path) -> None:
    write_easy_images(tmp_path / "data")
    out = tmp_path / "out"
    arguments = ["train", "--scenario", "calm", "--contenders", "alone,fcfs-1", "--workers", "2"]
    arguments += ["--limit", "4s", "--rate", "400mbit", "--target", "0.3", "--abreast", "2", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--data", str(tmp_path / "data"), "--out", str(out)])
    assert result.exception is None, result.exception
    runs = {run["settings"]["contender"]: run for run in json.loads(result.stdout)["runs"]}
    assert runs["alone"]["updates"] > 2
    assert runs["fcfs-1"]["updates"] > 2
    assert runs["alone"]["link_bytes"]["w1.up"] < 1e5  # nothing of the other's traffic
    assert runs["fcfs-1"]["link_bytes"]["w1.up"] > 1e6 * runs["fcfs-1"]["steps_by_rank"][1]


@pytest.mark.usefixtures("lab_is_possible")
def test_failure_of_a_run_apart_is_told_in_its_words(tmp_path: Path) -> None:
    write_easy_images(tmp_path / "data")
    settings = RunSettings("torchft-diloco", "calm", 1, StepSize(0.001, 0.9), workers=2, limit_s=4.0)
    if importlib.util.find_spec("torchft") is not None:
        pytest.skip("torchft is installed, so it does not fail")
    run = ApartRun(settings, tmp_path / "out" / "seed1", tmp_path / "data", 4.0)
    try:
        with pytest.raises(RunFailed, match=r"on w\d"):
            run.result()
    finally:
        run.end()
