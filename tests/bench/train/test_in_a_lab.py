"""One small benchmark from the command line to its plots, over real links with real training."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlfabric.bench.cli import app

pytest.importorskip("torch")


def write_easy_images(folder: Path) -> None:
    """Ten classes that differ by where a bright square is, in the form of Fashion-MNIST's files."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("train", 640), ("t10k", 200)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[row * 8 : row * 8 + 7, column * 7 : column * 7 + 6] = 250
        with gzip.open(folder / f"{name}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack("!4I", 0x803, count, 28, 28) + images.tobytes())
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack("!2I", 0x801, count) + labels.tobytes())


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
