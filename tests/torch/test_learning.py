"""Fashion-MNIST without a barrier is learned as well as with one, though a server dies halfway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mlfabric.eventlog import read_log
from tests.runtime.test_torchrun import free_port
from tests.torch.worlds import Worlds, failed

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")

DATA = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
WORKERS = 4


def delays(folder: Path) -> list[int]:
    """Of all updates that servers applied, as their logs tell."""
    return [
        record.record["message"]["delay_updates"]
        for path in folder.glob("*.log")
        for record in read_log(path)
        if record.type == "Send" and record.record["message"]["type"] == "UpdateApplied"
    ]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(not DATA.is_dir(), reason="no Fashion-MNIST: apt install dataset-fashion-mnist")
def test_asynchronous_training_with_a_dead_server_is_within_a_point_of_synchronous(
    worlds: Worlds, tmp_path: Path
) -> None:
    steps = 400
    common: dict[str, Any] = {"data": str(DATA), "steps": steps, "logs": str(tmp_path), "timeout": 400.0}
    together = worlds.check(
        "learn_fashion", WORKERS, port=free_port(), mode="sync", lr=2e-3, dies_at=-1, **common
    )
    answers = worlds.run(
        "learn_fashion", WORKERS, port=free_port(), mode="async", lr=1e-3, dies_at=steps // 2, **common
    )
    assert failed(answers[-1]), "it was to die"
    survivors = answers[:-1]
    assert not any(failed(answer) for answer in survivors), survivors
    applied = delays(tmp_path)
    print(
        f"synchronous {together[0]['accuracy']:.4f}, asynchronous {survivors[0]['accuracy']:.4f} with a "
        f"server killed halfway; {len(applied)} parts applied, largest delay {max(applied)}"
    )
    assert max(applied) <= 2 * WORKERS  # "auto"
    assert survivors[0]["accuracy"] > together[0]["accuracy"] - 0.01
