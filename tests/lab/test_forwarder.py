"""Links with delay, through the user-space forwarder."""

from __future__ import annotations

import socket
import statistics
import time

import pytest

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
        times = []
        for _ in range(12):
            began = time.perf_counter()
            here.sendto(b"ping", there.getsockname())
            _, back = there.recvfrom(16)
            there.sendto(b"pong", back)
            here.recv(16)
            times.append(time.perf_counter() - began)
    assert statistics.median(times[2:]) == pytest.approx(0.020, rel=0.1)


def test_path_of_20_ms_carries_a_stream_at_90_percent_of_200_mbit(make_lab: MakeLab) -> None:
    lab = make_lab(far_away("10ms"), verify=True)
    for source, target in (("near", "far"), ("far", "near")):
        got = max(measured_rate(lab, source, target, warm_s=0.8, for_s=1.0) for _ in range(2))
        assert got >= 0.9 * goodput(200e6)
