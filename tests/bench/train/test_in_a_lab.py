"""One small benchmark from the command line to its plots, over real links with real training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlfabric.bench.cli import app
from tests.bench.train.images import write_easy_images

pytest.importorskip("torch")


@pytest.mark.usefixtures("lab_is_possible")
def test_two_workers_learn_and_the_report_tells_of_it(tmp_path: Path) -> None:
    write_easy_images(tmp_path / "data")
    out = tmp_path / "out"
    arguments = ["train", "--scenario", "dynamic-stragglers", "--contenders", "mlfabric-async"]
    arguments += ["--workers", "2", "--limit", "2s", "--rate", "400mbit", "--target", "0.3", "--json"]
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
