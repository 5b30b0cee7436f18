"""Workers are known by name: one that dies comes back, new ones join, and nobody stalls."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlfabric.eventlog import read_log

ROOT = Path(__file__).parents[2]
LIMIT_S = 40.0


def free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


class Hosts:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listens = {
            name: f"127.0.0.1:{port}"
            for name, port in zip(("alpha", "beta", "gamma"), free_ports(3), strict=True)
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = {}

    def start(self, name: str) -> None:
        count = self._starts.get(name, 0)
        self._starts[name] = count + 1
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "TORCHELASTIC_RESTART_COUNT": str(count),  # what torchrun says
        }
        listen = self._listens.get(name, "127.0.0.1")
        addresses = ",".join(self._listens.values())
        member = [sys.executable, "-m", "tests.runtime.elastic_member"]
        self._running[name] = subprocess.Popen(
            [*member, str(self.folder), name, listen, addresses],
            env=environment,
            cwd=ROOT,
        )

    def kill(self, name: str) -> float:
        self._running[name].send_signal(signal.SIGKILL)
        self._running[name].wait(10)
        return time.time()

    def outcomes(self, name: str) -> list[float]:
        """When this worker's updates were committed, in all its lives."""
        return sorted(
            record.at_s
            for path in self.folder.glob(f"{name}.*.log")
            for record in read_log(path)
            if record.type == "ResolveUpdate" and record.record.get("committed")
        )

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < end, what
            time.sleep(0.3)

    def commits_after(self, name: str, at: float) -> None:
        self.until(lambda: any(t > at for t in self.outcomes(name)), f"{name} commits nothing")

    def stop(self) -> None:
        (self.folder / "stop").touch()
        for process in self._running.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.stop()


def longest_pause(times: list[float], since: float, until: float) -> float:
    marks = [since, *(t for t in times if since < t < until), until]
    return max(after - before for before, after in itertools.pairwise(marks))


def test_who_dies_comes_back_and_who_is_new_is_welcome(hosts: Hosts) -> None:
    for name in ("alpha", "beta", "gamma"):
        hosts.start(name)
    for name in ("alpha", "beta", "gamma"):
        hosts.commits_after(name, 0.0)
    died = hosts.kill("beta")
    hosts.start("beta")
    hosts.commits_after("beta", died)
    # Alpha schedules, serves and works: the others go on without it, and it finds who schedules now.
    killed = hosts.kill("alpha")
    hosts.start("alpha")
    hosts.commits_after("alpha", killed)
    came = time.time()
    hosts.start("delta")
    hosts.commits_after("delta", came)
    end = time.time()
    for name in ("beta", "gamma"):
        assert any(t > killed for t in hosts.outcomes(name))
    assert longest_pause(hosts.outcomes("gamma"), died, end) < 15.0
