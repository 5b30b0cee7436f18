"""Each host runs a torchrun of its own: a worker that dies is restarted and comes back while others go on."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlfabric.eventlog import read_log
from tests.runtime.test_elastic import free_ports

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")

ROOT = Path(__file__).parents[2]
HOSTS = ("alpha", "beta", "gamma", "delta")
LISTED = HOSTS[:3]  # whose addresses all know


def committed(folder: Path, name: str) -> list[float]:
    return sorted(
        record.at_s
        for path in folder.glob(f"{name}.*.log")
        for record in read_log(path)
        if record.type == "ResolveUpdate" and record.record.get("committed")
    )


def life(folder: Path, name: str) -> tuple[int, float, float]:
    """A worker's process id, when that process began, and when it began to join."""
    process, began, joins = (folder / f"{name}.life").read_text().split()
    return int(process), float(began), float(joins)


def until(holds: Callable[[], bool], what: str, limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def start(folder: Path, name: str, addresses: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "MLFABRIC_SCHEDULER": ",".join(addresses.values()),
        "MLFABRIC_NAME": name,
    }
    if name in addresses:
        environment["MLFABRIC_LISTEN"] = addresses[name]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    script = ROOT / "tests" / "torch" / "elastic_worker.py"
    return subprocess.Popen(
        [*launcher, "--max-restarts=3", str(script), str(folder)], env=environment, cwd=folder
    )


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["beta", "alpha"], ids=["a worker", "who schedules"])
def test_a_killed_worker_is_restarted_and_rejoins_while_others_go_on(tmp_path: Path, victim: str) -> None:
    ports = free_ports(len(LISTED))
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(LISTED, ports, strict=True)}
    running = {name: start(tmp_path, name, addresses) for name in HOSTS}
    try:
        for name in HOSTS:
            until(lambda name=name: len(committed(tmp_path, name)) > 20, f"{name} does not train")  # type: ignore[misc]
        os.kill(life(tmp_path, victim)[0], signal.SIGKILL)
        died = time.time()
        until(lambda: any(at > died for at in committed(tmp_path, victim)), f"{victim} does not come back")
        running["epsilon"] = start(tmp_path, "epsilon", addresses)
        until(lambda: len(committed(tmp_path, "epsilon")) > 5, "epsilon does not join")
    finally:
        (tmp_path / "stop").touch()
        codes = {name: process.wait(60) for name, process in running.items()}
    back = min(at for at in committed(tmp_path, victim) if at > died)
    _, began, joins = life(tmp_path, victim)
    pauses = {}
    for name in HOSTS:
        times = committed(tmp_path, name)
        if name != victim:
            pauses[name] = max(b - a for a, b in itertools.pairwise(times) if b > died - 1)
    print(
        f"{victim} trained again {back - died:.1f} s after its death: {began - died:.1f} s until its next "
        f"life, {joins - began:.1f} s to load torch, {back - joins:.1f} s to join and to make a step; "
        f"longest pauses of the others {pauses}"
    )
    assert codes == dict.fromkeys(codes, 0)
    assert max(pauses.values()) < 3.0
    # How fast torch is loaded is the machine's matter.
    assert back - died - (joins - began) < 5.0
