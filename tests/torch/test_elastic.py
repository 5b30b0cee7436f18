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
HOSTS = ("alpha", "beta", "gamma")


def committed(folder: Path, name: str) -> list[float]:
    return sorted(
        record.at_s
        for path in folder.glob(f"{name}.*.log")
        for record in read_log(path)
        if record.type == "ResolveUpdate" and record.record.get("committed")
    )


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
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(HOSTS, free_ports(len(HOSTS)), strict=True)}
    running = {name: start(tmp_path, name, addresses) for name in HOSTS}
    try:
        for name in HOSTS:
            until(lambda name=name: len(committed(tmp_path, name)) > 20, f"{name} does not train")  # type: ignore[misc]
        os.kill(int((tmp_path / f"{victim}.pid").read_text()), signal.SIGKILL)
        died = time.time()
        until(lambda: any(at > died for at in committed(tmp_path, victim)), f"{victim} does not come back")
        running["delta"] = start(tmp_path, "delta", addresses)
        until(lambda: len(committed(tmp_path, "delta")) > 5, "delta does not join")
    finally:
        (tmp_path / "stop").touch()
        codes = {name: process.wait(60) for name, process in running.items()}
    back = min(at for at in committed(tmp_path, victim) if at > died) - died
    pauses = {}
    for name in HOSTS:
        times = committed(tmp_path, name)
        if name != victim:
            pauses[name] = max(b - a for a, b in itertools.pairwise(times) if b > died - 1)
    print(f"{victim} trained again {back:.1f} s after its death; longest pauses of the others {pauses}")
    assert codes == dict.fromkeys(codes, 0)
    assert max(pauses.values()) < 5.0
    assert back < 30.0
