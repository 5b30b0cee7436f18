"""The extrapolation against 2 and 4 real jobs through one bottleneck: namespaces, shaped links, UDP bursts.

One job is captured alone; the prediction for several is compared with what the kernel's queue drops when
several really run. UDP does not slow down, so the open loop is what should happen.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from mlfabric.traffic.capture.reader import ReadOptions
from mlfabric.traffic.cycles import make_cycle, overlaid
from mlfabric.traffic.queueing import drop_tail
from mlfabric.traffic.reading import read
from mlfabric.traffic.trace import Trace

_missing = [name for name in ("ip", "tc", "tcpdump") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(bool(_missing), reason=f"needs {', '.join(_missing)}"),
]

# Slow enough that four Python senders on a busy machine keep to their times.
LINE_MBIT, BOTTLENECK_MBIT = 40, 50
BUFFER_BYTES = 40_000
PERIOD_S, FRAMES, ROUNDS = 0.15, 60, 12
FRAME = 1514

_SENDER = """
import socket, sys, time
start, phase, period = map(float, sys.argv[1:4])
rounds, frames, port = map(int, sys.argv[4:7])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
to = ("10.214.9.100", port)
s.sendto(b"", ("10.214.9.100", 10))  # resolves the address before it matters
late = 0.0
for k in range(rounds):
    due = start + phase + k * period
    time.sleep(max(0.0, due - time.monotonic()))
    late = max(late, time.monotonic() - due)
    for _ in range(frames):
        s.sendto(bytes(1472), to)
print(late)
"""


def sh(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Lab:
    """Four senders and a receiver around one bridge; the bridge's port to the receiver is the bottleneck."""

    def __init__(self) -> None:
        self.name = f"mlft-{os.getpid()}"
        self.spaces: list[str] = []

    def build(self) -> None:
        middle = self._space("m")
        sh("ip", "-n", middle, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", middle, "link", "set", "br0", "up")
        for number in range(4):
            self._host(f"s{number}", f"10.214.9.{number + 1}", number)
        self._host("r", "10.214.9.100", 9)
        inside = ("ip", "netns", "exec", middle, "tc", "qdisc", "add", "dev", "p9", "root", "tbf")
        sh(*inside, "rate", f"{BOTTLENECK_MBIT}mbit", "burst", "4000", "limit", str(BUFFER_BYTES))

    def _space(self, suffix: str) -> str:
        space = f"{self.name}-{suffix}"
        sh("ip", "netns", "add", space)
        self.spaces.append(space)
        sh("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def _host(self, suffix: str, address: str, port: int) -> None:
        middle, space = f"{self.name}-m", self._space(suffix)
        sh(
            "ip",
            "-n",
            middle,
            "link",
            "add",
            f"p{port}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            space,
        )
        sh("ip", "-n", middle, "link", "set", f"p{port}", "master", "br0")
        sh("ip", "-n", middle, "link", "set", f"p{port}", "up")
        sh("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        sh("ip", "-n", space, "link", "set", "eth0", "up")
        if suffix != "r":
            shape = ("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf")
            sh(*shape, "rate", f"{LINE_MBIT}mbit", "burst", "4000", "limit", "4000000")

    def remove(self) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def run(self, phases_s: list[float]) -> float:
        """Every sender one job, on a common clock; how late the latest burst began, in seconds."""
        start = time.monotonic() + 0.7
        senders = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{self.name}-s{number}", sys.executable, "-c", _SENDER, str(start),
                 str(phase), str(PERIOD_S), str(ROUNDS), str(FRAMES), "9"],
                stdout=subprocess.PIPE, text=True,
            )
            for number, phase in enumerate(phases_s)
        ]  # fmt: skip
        said = [sender.communicate(timeout=60)[0] for sender in senders]
        assert all(sender.returncode == 0 for sender in senders)
        return max(float(words) for words in said)

    def dropped(self) -> int:
        shown = sh("ip", "netns", "exec", f"{self.name}-m", "tc", "-s", "qdisc", "show", "dev", "p9")
        found = re.search(r"dropped (\d+)", shown)
        assert found
        return int(found.group(1))

    def alone(self, path: Path) -> None:
        """One job, captured where it enters the bridge: behind its own line, before the bottleneck."""
        command = [
            "ip",
            "netns",
            "exec",
            f"{self.name}-m",
            "tcpdump",
            "-i",
            "p0",
            "-s",
            "96",
            "-U",
            "--immediate-mode",
        ]
        count = str(FRAMES * ROUNDS)
        dump = subprocess.Popen(
            [*command, "-c", count, "-w", str(path), "udp and dst port 9"], stderr=subprocess.PIPE, text=True
        )
        assert dump.stderr is not None
        while "listening" not in dump.stderr.readline():
            assert dump.poll() is None
        self.run([0.0])
        dump.communicate(timeout=30)


SomeLab = TypeVar("SomeLab", bound=Lab)


def built(made: SomeLab) -> Iterator[SomeLab]:
    """The lab, standing, until the tests are through."""
    try:
        made.build()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"this lab can't be built here: {error.stderr.strip()}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    yield from built(Lab())


@pytest.fixture(scope="module")
def job(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("job") / "alone.pcap"
    lab.alone(path)
    trace = read(path, ReadOptions())
    assert len(trace) == FRAMES * ROUNDS
    return trace


# At the same time, half over each other, and one after the other.
_TOGETHER, _PARTLY, _APART = 0.0, 0.009, 0.03
# Phases are compared, so a run counts only if every burst of every job began when it should.
_PUNCTUAL_S = 0.002


@pytest.mark.parametrize("jobs", [2, 4])
@pytest.mark.parametrize("spacing_s", [_TOGETHER, _PARTLY, _APART])
def test_loss_of_real_jobs_is_as_predicted(lab: Lab, job: Trace, jobs: int, spacing_s: float) -> None:
    phases = [number * spacing_s for number in range(jobs)]
    cycle = make_cycle(job)
    assert cycle.period_ns == pytest.approx(PERIOD_S * 1e9, rel=0.01)
    times, sizes, measured = overlaid([cycle] * jobs, [int(phase * 1e9) for phase in phases])
    # The bucket lets one burst of tokens through before the queue fills.
    predicted = drop_tail(times, sizes, BOTTLENECK_MBIT * 1e6, BUFFER_BYTES + 4000, 0, measured, 2 * measured)
    sent = jobs * FRAMES * ROUNDS
    for _ in range(6):
        before = lab.dropped()
        late_s = lab.run(phases)
        measured_ratio = (lab.dropped() - before) / sent
        if late_s < _PUNCTUAL_S:
            break
    else:
        pytest.skip(f"the machine is too busy: bursts begin {late_s * 1000:.1f} ms late")
    shown = {
        "jobs": jobs,
        "spacing_s": spacing_s,
        "predicted": predicted.loss_ratio,
        "measured": measured_ratio,
    }
    print(json.dumps(shown))
    assert measured_ratio == pytest.approx(predicted.loss_ratio, abs=0.05)
