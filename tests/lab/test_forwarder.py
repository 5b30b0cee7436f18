"""Links with delay, through the user-space forwarder."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from mlfabric.lab import RunOptions, kernel
from mlfabric.lab.testing import MakeLab
from mlfabric.scenario import Scenario, parse
from mlfabric.units import goodput
from tests.lab.streams import measured_rate


def far_away(delay: str) -> Scenario:
    return parse(f"""
        network = {{ rate = "200mbit" }}
        hosts = [{{ name = "near" }}, {{ name = "far", delay = "{delay}" }}]
    """)


def test_round_trip_takes_the_delay_twice(make_lab: MakeLab) -> None:
    lab = make_lab(far_away("10ms"))
    with (
        lab.host("near").socket(kind=socket.SOCK_DGRAM) as here,
        lab.host("far").socket(kind=socket.SOCK_DGRAM) as there,
    ):
        there.bind((lab.host("far").address, 0))
        times, late = [], []
        for _ in range(12):
            began = time.perf_counter()
            time.sleep(0.01)
            late.append(time.perf_counter() - began - 0.01)
            began = time.perf_counter()
            here.sendto(b"ping", there.getsockname())
            _, back = there.recvfrom(16)
            there.sendto(b"pong", back)
            here.recv(16)
            times.append(time.perf_counter() - began)
    # Never sooner; later by what this machine makes the forwarder wait, as it does us.
    assert 0.020 <= min(times) < 0.0215 + 2 * min(late)


def test_path_of_20_ms_carries_a_stream_at_90_percent_of_200_mbit(make_lab: MakeLab) -> None:
    lab = make_lab(far_away("10ms"), verify=True)
    for source, target in (("near", "far"), ("far", "near")):
        asked = 0.9 * goodput(200e6)
        got = 0.0
        for _ in range(4):
            got = max(got, measured_rate(lab, source, target, warm_s=0.7, for_s=0.8))
            if got >= asked:
                break
        assert got >= asked


def test_broken_forwarder_fails_the_run(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(far_away("1ms"))
    forwarder = [
        pid
        for pid in kernel.process_ids()
        if command_line(pid)[2:3] == ["mlfabric.lab.forwarder"] and parent(pid) == lab.record.anchor()
    ]
    assert len(forwarder) == 1
    os.kill(forwarder[0], signal.SIGKILL)
    result = lab.run(["sleep", "0.3"], RunOptions(folder=tmp_path / "run"))
    assert result.complaints == ["the lab's forwarder of far broke down during the run"]


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
