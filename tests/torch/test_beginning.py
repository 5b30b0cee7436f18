"""How a job begins: every kind of rendezvous, torchrun, and without an import of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.test_torchrun import free_port
from tests.torch.worlds import ROOT, Worlds, torchrun

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")


def test_every_way_to_rendezvous(worlds: Worlds) -> None:
    assert worlds.check("ways", 2, port=free_port()) == [[[2.0, 2.0]] * 5] * 2


def test_the_profiler_shows_a_span_for_every_call(worlds: Worlds) -> None:
    for spans in worlds.check("profiled", 2):
        assert spans == ["mlfabric:all_reduce", "mlfabric:barrier", "mlfabric:broadcast"]


def test_the_resnet_example_learns_under_torchrun(tmp_path: Path) -> None:
    """It imports nothing of ours: torch finds the backend by the entry point of the package."""
    pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install 'mlfabric[demo]'")
    done = torchrun(tmp_path, 2, str(ROOT / "examples" / "ddp_resnet.py"), "--epochs", "2")
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("accuracy ")[1])
    assert accuracy > 0.8
    assert len((ROOT / "examples" / "ddp_resnet.py").read_text().splitlines()) < 100
