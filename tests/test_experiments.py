"""The burstiness experiment in its short form: real training in a lab, with a small model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")
pytestmark = pytest.mark.skipif(shutil.which("tcpdump") is None, reason="captures need tcpdump")

SHORT = Path(__file__).parent.parent / "experiments" / "burstiness" / "short.toml"
HOSTS = 3
FRAME = 1514 / 1448  # bytes on the wire for each byte of payload


@pytest.mark.parametrize(
    "name",
    [
        "short-mlfabric",
        pytest.param("short-gloo", marks=pytest.mark.full),
        pytest.param("short-server", marks=pytest.mark.full),
    ],
)
def test_training_is_captured_and_measured(tmp_path: Path, name: str) -> None:
    from experiments.burstiness.run import main

    from mlfabric.lab.testing import reason_for_no_lab

    if (reason := reason_for_no_lab()) is not None:
        pytest.skip(reason)
    main(["--settings", str(SHORT), "--only", name, "--out", str(tmp_path)])
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["steps"] == 4
    assert len(found["hosts"]) == len(found["orchestration"]) == HOSTS
    gradient = 4 * found["parameters"]
    all_sent = sum(host["out"]["bytes_per_step"] for host in found["hosts"].values())
    # An all-reduce moves 2(N-1) times the gradient in all; a push and a pull by servers on the hosts as much.
    assert 0.9 < all_sent / (2 * (HOSTS - 1) * gradient * FRAME) < 1.2
    for host in found["hosts"].values():
        for way in ("out", "in"):
            ratio = host[way]["peak_to_mean_5ms"]
            assert 1 < ratio < 2 * host[way]["most_by_line_rate"]
    assert set(found["extrapolation"]) == {"2", "4", "8"}
