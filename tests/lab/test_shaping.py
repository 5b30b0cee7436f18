"""Links carry what was asked, by real TCP; queues hold what was asked; changes are in force at once."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from mlfabric.errors import FabricError
from mlfabric.lab.manifest import MachineLoad
from mlfabric.lab.testing import MakeLab
from mlfabric.scenario import parse
from mlfabric.units import goodput, parse_rate
from tests.lab.streams import FILLING, MUCH_STOLEN, steady_rate, streaming

# 2 Gb/s takes most of a core: on a busy machine that measures the machine.
RATES = ["10mbit", "200mbit", "1gbit", pytest.param("2gbit", marks=pytest.mark.full)]


@pytest.mark.parametrize("rate", RATES)
def test_tcp_gets_the_asked_rate_both_ways(make_lab: MakeLab, rate: str) -> None:
    lab = make_lab(hosts=2, rate=rate)
    asked = goodput(parse_rate(rate))
    for source, target in (("w0", "w1"), ("w1", "w0")):
        assert steady_rate(lab, source, target, asked) == pytest.approx(asked, rel=0.05)


def test_up_and_down_of_one_host_are_shaped_apart(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2, rate="400mbit")
    lab.host("w0").set_rate(up="30mbit", down="90mbit")
    for source, target, asked in (("w0", "w1", 30e6), ("w1", "w0", 90e6)):
        asked_payload = goodput(asked)
        assert steady_rate(lab, source, target, asked_payload) == pytest.approx(asked_payload, rel=0.05)


def test_a_lower_rate_is_in_force_within_100_ms(make_lab: MakeLab) -> None:
    """Counted on the link itself: a receiver that gets no processor time reads late what came before."""
    lab = make_lab(hosts=2, rate="200mbit")

    def carried() -> tuple[float, int]:
        before = time.monotonic()
        count = lab.counters()["w1.down"]["sent_bytes"]
        return (before + time.monotonic()) / 2, count

    with streaming(lab, "w0", "w1"):
        time.sleep(0.5)
        for rate in ("100mbit", "50mbit", "20mbit"):
            lab.host("w1").set_rate(rate)
            time.sleep(0.1)
            began, first = carried()
            time.sleep(0.4)
            ended, last = carried()
            # A stream may back off from the full queue; faster than the link it can't be.
            assert 0.7 < 8 * (last - first) / (ended - began) / parse_rate(rate) < 1.08, rate


def test_a_higher_rate_is_in_force_at_once(make_lab: MakeLab) -> None:
    """Measured on the link itself: how soon a stream dares to use it is its congestion control's affair."""
    lab = make_lab(hosts=2, rate="20mbit")
    for rate in ("50mbit", "160mbit", "400mbit"):
        lab.host("w1").set_rate(rate)
        assert lab.measure("w1", "down") == pytest.approx(parse_rate(rate), rel=0.05), rate
        assert lab.measure("w1", "up") == pytest.approx(parse_rate(rate), rel=0.05), rate


def test_rack_uplink_shares_as_asked(make_lab: MakeLab) -> None:
    scenario = parse("""
        network = { rate = "80mbit" }
        hosts = [{ name = "a", count = 4, rack = "left" }, { name = "b", count = 4, rack = "right" }]
        racks = [{ name = "left", oversubscription = 4 }, { name = "right", oversubscription = 4 }]
    """)
    lab = make_lab(scenario)
    lab.use_plain_frames()
    with contextlib.ExitStack() as stack:
        # Whether streams share a queue evenly is their congestion control's affair; Reno's do.
        streams = [stack.enter_context(streaming(lab, f"a{i}", f"b{i}", FILLING)) for i in range(4)]
        time.sleep(1.0)
        load = MachineLoad()
        best: list[float] = []
        for _ in range(4):  # a busy machine holds streams back, but makes none faster
            begin = time.monotonic()
            time.sleep(2.2)
            best = max(best, [stream.rate(begin, begin + 2.2) for stream in streams], key=sum)
            if sum(best) > 0.97 * goodput(80e6):
                break
        load.update()
    if sum(best) < 0.95 * goodput(80e6) and load.stolen_share() > MUCH_STOLEN:
        pytest.skip(f"{load.stolen_share():.0%} of the processors' time went to other machines")
    assert sum(best) == pytest.approx(goodput(80e6), rel=0.05)
    assert all(rate > sum(best) / 8 for rate in best), best
    inside = steady_rate(lab, "a0", "a1", goodput(80e6))
    assert inside == pytest.approx(goodput(80e6), rel=0.05)


def test_queue_of_q_bytes_drops_after_q_bytes(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2, rate="1mbit", queue="60kB")
    with (
        lab.host("w0").socket(kind=socket.SOCK_DGRAM) as out,
        lab.host("w1").socket(kind=socket.SOCK_DGRAM) as inward,
    ):
        inward.bind((lab.host("w1").address, 0))
        out.sendto(b"first, so that addresses are known", inward.getsockname())
        inward.recv(100)
        before = lab.counters()["w0.up"]
        for _ in range(100):
            # Full is reported to the sender; what is in the queue counts here.
            with contextlib.suppress(OSError):
                out.sendto(bytes(1472), inward.getsockname())
        after = lab.counters()["w0.up"]
    frame = 1514
    passed = after["sent_bytes"] - before["sent_bytes"]
    assert 60_000 - frame < after["backlog_bytes"] + passed <= 60_000 + 3 * frame
    assert after["backlog_bytes"] <= 60_000
    assert (
        after["dropped_frames"] - before["dropped_frames"] == 100 - (after["backlog_bytes"] + passed) / frame
    )


def test_queue_on_the_way_into_a_host_is_limited_too(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2, rate="100mbit", queue="200kB")
    lab.host("w1").set_rate(down="10kbit")
    lab.host("w1").set_queue("30kB")
    with lab.host("w0").socket(kind=socket.SOCK_DGRAM) as out:
        for _ in range(60):
            out.sendto(bytes(1472), (lab.host("w1").address, 9))
        time.sleep(0.02)
    inward = lab.counters()["w1.down"]
    assert 30_000 - 1514 < inward["backlog_bytes"] <= 30_000
    assert inward["dropped_frames"] > 0


def test_lab_measures_its_own_links(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=3, rate="150mbit", verify=True)
    measured = lab.describe()["measured"]
    assert len(measured) == 6
    assert all(entry["measured_bps"] == pytest.approx(150e6, rel=0.05) for entry in measured)


def test_rate_beyond_the_machine_fails_loudly(make_lab: MakeLab) -> None:
    with pytest.raises(FabricError, match=r"can't be built as asked: w0\.up should carry 90 Gb/s"):
        make_lab(hosts=1, rate="90gbit", verify=True)


def test_probe_leaves_nothing_in_the_queues(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2, rate="10mbit", verify=True)
    assert all(
        count["backlog_bytes"] == 0 and count["dropped_frames"] == 0 for count in lab.counters().values()
    )
