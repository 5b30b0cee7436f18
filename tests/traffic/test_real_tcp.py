"""The closed loop against real TCP: 2 and 4 jobs that send, wait for the last acknowledgement, pause, go on.

What can be compared here is `none`: a drop-tail queue and senders that repeat what was lost. The laws that
need marks would need a kernel with DCTCP and a queue that marks (RED, CoDel) to be compared with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlfabric.traffic.capture.reader import ReadOptions
from mlfabric.traffic.control import schedules, simulate
from mlfabric.traffic.cycles import Cycle, make_cycle
from mlfabric.traffic.extrapolation import Link
from mlfabric.traffic.reading import read
from tests.traffic.test_real_jobs import BOTTLENECK_MBIT, BUFFER_BYTES, Lab, built, sh

_missing = [name for name in ("ip", "tc", "tcpdump") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(bool(_missing), reason=f"needs {', '.join(_missing)}"),
]

SIZE_BYTES, PAUSE_S, ROUNDS = 400_000, 0.1, 12
# What starting, waiting for the last acknowledgement and a busy machine may add.
TOLERANCE = 0.1

_SINK = """
import socket, threading
server = socket.create_server(("", 5900), backlog=16)
print("ready", flush=True)
def drain(peer):
    while peer.recv(1 << 20):
        pass
while True:
    threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
_JOB = """
import fcntl, socket, struct, sys, time
start, pause = map(float, sys.argv[1:3])
rounds, size = map(int, sys.argv[3:5])
s = socket.create_connection(("10.214.9.100", 5900))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, sys.argv[5].encode())
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
SIOCOUTQ = 0x5411
time.sleep(max(0.0, start - time.monotonic()))
begin = time.monotonic()
for k in range(rounds):
    s.sendall(bytes(size))
    while struct.unpack("i", fcntl.ioctl(s, SIOCOUTQ, bytes(4)))[0]:
        time.sleep(0.0005)
    time.sleep(pause)
print(time.monotonic() - begin)
"""


class TcpLab(Lab):
    """The same lab with jobs that speak TCP to one sink."""

    def build(self) -> None:
        super().build()
        inside = ["ip", "netns", "exec", f"{self.name}-r", sys.executable, "-c", _SINK]
        self.sink = subprocess.Popen(inside, stdout=subprocess.PIPE, text=True)
        assert self.sink.stdout is not None
        assert self.sink.stdout.readline() == "ready\n"

    def remove(self) -> None:
        if hasattr(self, "sink"):
            self.sink.kill()
            self.sink.communicate()
        super().remove()

    def took_s(self, jobs: int, law: str) -> float:
        """Mean time of all iterations of that many jobs which start together."""
        start = time.monotonic() + 0.7
        words = [str(start), str(PAUSE_S), str(ROUNDS), str(SIZE_BYTES), law]
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{self.name}-s{number}", sys.executable, "-c", _JOB, *words],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(jobs)
        ]
        said = [job.communicate(timeout=120)[0] for job in running]
        assert all(job.returncode == 0 for job in running)
        return sum(map(float, said)) / jobs

    def captured_alone(self, path: Path, law: str) -> float:
        """One job, captured where it enters the bridge, and how long it took."""
        dump = subprocess.Popen(
            ["ip", "netns", "exec", f"{self.name}-m", "tcpdump", "-i", "p0", "-s", "96", "-U",
             "--immediate-mode", "-w", str(path), "dst port 5900"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert dump.stderr is not None
        while "listening" not in dump.stderr.readline():
            assert dump.poll() is None
        took = self.took_s(1, law)
        dump.terminate()
        dump.communicate(timeout=30)
        return took


@pytest.fixture(scope="module")
def lab() -> Iterator[TcpLab]:
    yield from built(TcpLab())


@pytest.fixture(scope="module", params=["reno", "cubic"])
def alone(
    request: pytest.FixtureRequest, lab: TcpLab, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Cycle, float]:
    """A law, its job's cycle and the time it took alone."""
    law = str(request.param)
    if law not in sh("sysctl", "-n", "net.ipv4.tcp_available_congestion_control").split():
        pytest.skip(f"this kernel has no {law}")
    path = tmp_path_factory.mktemp(law) / "alone.pcap"
    took = lab.captured_alone(path, law)
    return law, make_cycle(read(path, ReadOptions(layer="wire"))), took


@pytest.mark.parametrize("jobs", [2, 4])
def test_real_tcp_lies_between_a_full_link_and_lock_step(
    lab: TcpLab, alone: tuple[str, Cycle, float], jobs: int
) -> None:
    """Jobs that start together stay together in the model, where all share equally. Real shares are unequal,
    so real jobs drift towards taking turns; no faster than the link carries what they send."""
    law, cycle, alone_s = alone
    link = Link(BOTTLENECK_MBIT * 1e6, BUFFER_BYTES, BUFFER_BYTES / 20)
    together = simulate(schedules([cycle] * jobs, [0] * jobs), link, "none", 1e-3).round_stretch
    least = max(1.0, jobs * cycle.mean_rate_bps / link.rate_bps)
    measured = lab.took_s(jobs, law) / alone_s
    print(json.dumps({"law": law, "jobs": jobs, "least": least, "together": together, "measured": measured}))
    assert least * (1 - TOLERANCE) <= measured <= together * (1 + TOLERANCE)
    assert together > 1.2
