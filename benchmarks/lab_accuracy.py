"""How true is the lab? Measures its links by real TCP over the whole range and prints one table.

    python benchmarks/lab_accuracy.py            all of it, some three minutes
    python benchmarks/lab_accuracy.py rates      one part: rates, together, change, uplink, queue, size, delay

Needs what `mlfabric lab` needs. Every figure is measured in this run; "asked" is payload that full TCP frames
carry at the asked wire rate.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mlfabric.lab import Lab
from mlfabric.lab.manifest import MachineLoad, versions
from mlfabric.lab.testing import plain_scenario
from mlfabric.scenario import parse
from mlfabric.units import format_rate, goodput, parse_rate

RATES = ("10mbit", "50mbit", "100mbit", "200mbit", "500mbit", "1gbit", "2gbit")
TOGETHER = ("10mbit", "50mbit", "100mbit", "200mbit", "400mbit")
REPEATS = 3


class Meter:
    """One TCP stream between two hosts and the times at which its bytes arrived."""

    def __init__(self, lab: Lab, source: str, target: str) -> None:
        self.arrived: list[tuple[float, int]] = []
        self._server, self._out = lab.host(target).socket(), lab.host(source).socket()
        self._server.bind((lab.host(target).address, 0))
        self._server.listen(1)
        self._out.connect(self._server.getsockname())
        self._inward, _ = self._server.accept()
        self._out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._receive)]
        for thread in self._threads:
            thread.start()

    def rate(self, begin: float, end: float) -> float:
        inside = [entry for entry in self.arrived if begin <= entry[0] <= end]
        if len(inside) < 2:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def close(self) -> None:
        for end in (self._out, self._inward):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._out, self._inward, self._server):
            end.close()

    def _send(self) -> None:
        chunk = bytes(256 * 1024)
        with contextlib.suppress(OSError):
            while True:
                self._out.send(chunk)

    def _receive(self) -> None:
        total, scratch = 0, bytearray(1 << 20)
        with contextlib.suppress(OSError):
            while count := self._inward.recv_into(scratch, 0, socket.MSG_TRUNC):
                total += count
                self.arrived.append((time.monotonic(), total))


@contextlib.contextmanager
def meters(lab: Lab, pairs: list[tuple[str, str]]) -> Iterator[list[Meter]]:
    started = [Meter(lab, source, target) for source, target in pairs]
    try:
        yield started
    finally:
        for meter in started:
            meter.close()


def measured(lab: Lab, pairs: list[tuple[str, str]], warm_s: float, for_s: float) -> list[float]:
    with meters(lab, pairs) as running:
        begin = time.monotonic() + warm_s
        time.sleep(warm_s + for_s)
        return [meter.rate(begin, begin + for_s) for meter in running]


def show(what: str, asked: float, got: list[float], note: str = "") -> None:
    middle = statistics.median(got)
    shares = ", ".join(f"{value / asked:.3f}" for value in got)
    print(
        f"{what:34} {format_rate(8 * asked):>10} {format_rate(8 * middle):>10}  {shares}  {note}", flush=True
    )


def rates() -> None:
    """One stream alone, each way."""
    for rate in RATES:
        with Lab(plain_scenario(2, rate)) as lab:
            asked = goodput(parse_rate(rate))
            for source, target in (("w0", "w1"), ("w1", "w0")):
                got = [measured(lab, [(source, target)], 0.4, 1.0)[0] for _ in range(REPEATS)]
                show(f"alone {rate} {source}->{target}", asked, got)


def together() -> None:
    """Eight hosts at once, each sending and receiving at its full rate."""
    for rate in TOGETHER:
        with Lab(plain_scenario(8, rate)) as lab:
            asked = goodput(parse_rate(rate))
            load = MachineLoad()
            ring = [(f"w{i}", f"w{(i + 1) % 8}") for i in range(8)]
            got = measured(lab, ring, 1.0, 2.0)
            load.update()
            show(f"8 hosts at once {rate}", asked, got, f"processors {load.busy_share():.0%} busy")


def change() -> None:
    """How soon a live change is in force: the first 20 ms window at the new rate, within a tenth."""
    with Lab(plain_scenario(2, "200mbit")) as lab, meters(lab, [("w0", "w1")]) as (meter,):
        time.sleep(0.6)
        for rate in ("50mbit", "200mbit", "20mbit", "150mbit", "50mbit", "180mbit"):
            lab.host("w1").set_rate(rate)
            changed = time.monotonic()
            time.sleep(0.8)
            asked = goodput(parse_rate(rate))
            windows = [
                step * 0.01
                for step in range(60)
                if abs(meter.rate(changed + step * 0.01, changed + step * 0.01 + 0.02) / asked - 1) < 0.1
            ]
            late_ms = 1000 * windows[0] if windows else float("inf")
            show(f"changed to {rate}", asked, [meter.rate(changed + 0.1, changed + 0.8)], f"{late_ms:.0f} ms")


def uplink() -> None:
    """A rack of four behind an uplink of a quarter."""
    scenario = parse("""
        network = { rate = "200mbit" }
        hosts = [{ name = "a", count = 4, rack = "left" }, { name = "b", count = 4, rack = "right" }]
        racks = [{ name = "left", oversubscription = 4 }, { name = "right", oversubscription = 4 }]
    """)
    with Lab(scenario) as lab:
        for _ in range(REPEATS):
            got = measured(lab, [(f"a{i}", f"b{i}") for i in range(4)], 1.0, 2.0)
            each = ", ".join(f"{value / sum(got):.2f}" for value in got)
            show("4:1 uplink, 4 streams", goodput(200e6), [sum(got)], f"shares {each}")


def queue() -> None:
    """How many bytes a queue takes before it drops."""
    for size in ("30kB", "64kB", "256kB"):
        with Lab(plain_scenario(2, "1mbit", queue=size)) as lab:
            # One socket's send buffer is smaller than the largest queue.
            for _ in range(4):
                with lab.host("w0").socket(kind=socket.SOCK_DGRAM) as out:
                    out.setblocking(False)
                    for _ in range(100):
                        with contextlib.suppress(OSError):
                            out.sendto(bytes(1472), (lab.host("w1").address, 9))
            held = lab.counters()["w0.up"]
            print(
                f"queue of {size:25} {held['backlog_bytes']} bytes held, "
                f"{held['dropped_frames']} frames dropped"
            )


def size() -> None:
    """Seconds to build and remove."""
    for hosts in (2, 8, 32, 64, 128):
        began = time.monotonic()
        lab = Lab(plain_scenario(hosts, "100mbit"))
        lab.up()
        up_s = time.monotonic() - began
        lab.down()
        print(f"{hosts:4} hosts {'':24} up in {up_s:.2f} s, down in {time.monotonic() - began - up_s:.2f} s")


def delay() -> None:
    """One stream over long paths through the forwarder."""
    for one_way in ("1ms", "5ms", "10ms", "25ms", "50ms"):
        scenario = parse(f"""
            network = {{ rate = "200mbit" }}
            hosts = [{{ name = "near" }}, {{ name = "far", delay = "{one_way}" }}]
        """)
        with Lab(scenario) as lab:
            load = MachineLoad()
            for source, target in (("near", "far"), ("far", "near")):
                got = [measured(lab, [(source, target)], 1.0, 2.0)[0] for _ in range(REPEATS)]
                load.update()
                note = f"processors {load.busy_share():.0%} busy"
                show(f"one way {one_way} {source}->{target}", goodput(200e6), got, note)


PARTS: dict[str, Callable[[], None]] = {
    "rates": rates, "together": together, "change": change, "uplink": uplink, "queue": queue,
    "size": size, "delay": delay,
}  # fmt: skip


def main(wanted: list[str]) -> None:
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    print(f"{Path(__file__).name}: {json.dumps(versions())}")
    print(f"{'what':34} {'asked':>10} {'got':>10}  share of what was asked, each repeat")
    for name in wanted or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
