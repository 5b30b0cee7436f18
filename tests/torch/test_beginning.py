"""How a job begins: every kind of rendezvous, torchrun, and without an import of ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.torch.worlds import ROOT, Worlds

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("mlfabric")
total = torch.ones(3)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} has {total.tolist()}", flush=True)
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


def test_every_way_to_rendezvous(worlds: Worlds) -> None:
    assert worlds.check("ways", 2, port=free_port()) == [[[2.0, 2.0]] * 4] * 2


def test_the_profiler_shows_a_span_for_every_call(worlds: Worlds) -> None:
    for spans in worlds.check("profiled", 2):
        assert spans == ["mlfabric:all_reduce", "mlfabric:barrier", "mlfabric:broadcast"]


def test_torchrun_runs_a_script_that_names_the_backend_and_imports_nothing(tmp_path: Path) -> None:
    """torch finds the backend by the entry point that an installed package has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.backends"]
    info = tmp_path / "mlfabric_of_test-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlfabric-of-test\nVersion: 0.0\n")
    lines = "".join(f"{name} = {where}\n" for name, where in points.items())
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{lines}")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == [
        "rank 0 has [2.0, 2.0, 2.0]",
        "rank 1 has [2.0, 2.0, 2.0]",
    ]
