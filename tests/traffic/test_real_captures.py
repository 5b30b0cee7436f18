"""Packets of a real kernel: two namespaces, a veth pair, tcpdump; totals as capinfos and tshark see them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from mlfabric.traffic.analysis import AnalysisOptions, analyze
from mlfabric.traffic.envelopes import byte_series, envelope_by_bins
from mlfabric.traffic.reading import read
from mlfabric.traffic.trace import Trace

_NEEDED = ("ip", "tcpdump", "capinfos", "tshark")
_missing = [name for name in _NEEDED if shutil.which(name) is None]

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(bool(_missing), reason=f"needs {', '.join(_missing)}"),
]

_SERVER = """
import socket, sys
s = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
for _ in range(int(sys.argv[1])):
    c, _a = s.accept()
    while c.recv(1 << 16):
        pass
    c.close()
"""
_CLIENT = """
import socket, sys
for _ in range(int(sys.argv[1])):
    c = socket.create_connection(("10.213.7.2", 5001))
    c.sendall(bytes(400_000))
    c.shutdown(socket.SHUT_WR)
    c.recv(1)
    c.close()
last = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
last.sendto(b"mlft-last-packet", ("10.213.7.2", 9))
"""
_MARKER = b"mlft-last-packet"


def sh(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ten transfers of 400 kB over a veth, captured by tcpdump at the sender."""
    here = f"mlft-{os.getpid()}"
    one, two = f"{here}-a", f"{here}-b"
    path = tmp_path_factory.mktemp("veth") / "real.pcap"
    try:
        for name in (one, two):
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
    try:
        sh("ip", "-n", one, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", two)
        for name, address in ((one, "10.213.7.1/24"), (two, "10.213.7.2/24")):
            sh("ip", "-n", name, "addr", "add", address, "dev", "veth0")
            sh("ip", "-n", name, "link", "set", "veth0", "up")
        _run_transfers(one, two, path)
        yield path
    finally:
        for name in (one, two):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run_transfers(one: str, two: str, path: Path) -> None:
    inside = ("ip", "netns", "exec")
    dump = subprocess.Popen(
        [*inside, one, "tcpdump", "-i", "veth0", "-s", "96", "-U", "--immediate-mode", "-B", "16384",
         "-w", "-", "tcp or udp port 9"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    server = subprocess.Popen([*inside, two, sys.executable, "-c", _SERVER, "10"], stdout=subprocess.PIPE)
    assert dump.stdout is not None
    assert dump.stderr is not None
    assert server.stdout is not None
    try:
        while b"listening" not in dump.stderr.readline():
            assert dump.poll() is None
        server.stdout.readline()
        reader = threading.Thread(target=_copy_until_marker, args=(dump.stdout, path))
        reader.start()
        subprocess.run([*inside, one, sys.executable, "-c", _CLIENT, "10"], check=True, timeout=60)
        reader.join(timeout=30)
        assert not reader.is_alive()
        server.wait(timeout=20)
    finally:
        for process in (dump, server):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)


def _copy_until_marker(source: IO[bytes], path: Path) -> None:
    """What tcpdump writes, up to the packet the client sends last."""
    content = b""
    while _MARKER not in content[-4096:]:
        more = os.read(source.fileno(), 1 << 16)
        if not more:
            break
        content += more
    path.write_bytes(content)


@pytest.fixture
def trace(capture: Path, form: str) -> Trace:
    return read(capture)


def test_totals_equal_capinfos(capture: Path, trace: Trace) -> None:
    shown = sh("capinfos", "-T", "-M", "-c", "-d", "-r", str(capture)).split("\t")
    packets, size = (int(field) for field in shown[-2:])
    assert (len(trace), trace.total_bytes) == (packets, size)
    assert trace.total_bytes > 4_000_000


def tshark_bins(capture: Path, interval: str) -> list[int]:
    shown = sh("tshark", "-n", "-q", "-r", str(capture), "-z", f"io,stat,{interval}")
    rows = [line.split("|") for line in shown.splitlines() if "<>" in line and line.count("|") == 4]
    return [int(row[3]) for row in rows]


def test_five_millisecond_bins_equal_tshark(capture: Path, trace: Trace) -> None:
    bins = tshark_bins(capture, "0.005")
    assert max(bins) == envelope_by_bins(trace, 5_000_000)
    ours = byte_series(trace, 5_000_000).tolist()
    # tshark closes the last, partial bin at the last packet and may leave that one out of a new bin.
    assert bins[: len(ours) - 1] == ours[:-1]


def test_pcapng_of_the_same_packets_is_the_same_trace(capture: Path, trace: Trace, tmp_path: Path) -> None:
    if shutil.which("editcap") is None:
        pytest.skip("needs editcap")
    converted = tmp_path / "real.pcapng"
    sh("editcap", "-F", "pcapng", str(capture), str(converted))
    again = read(converted)
    assert again.time_ns.tolist() == trace.time_ns.tolist()
    assert again.size.tolist() == trace.size.tolist()


def test_flows_and_bursts_of_real_transfers(trace: Trace) -> None:
    assert trace.flows is not None
    assert len(trace.flows) == 21  # ten connections, both directions, and the last packet
    result = analyze(trace, AnalysisOptions(quick=True, scales_ns=(1_000_000,)))
    assert result.bursts.bytes.sum() == trace.total_bytes


def test_the_live_meter_sees_what_passes(tmp_path: Path) -> None:
    written = tmp_path / "live.pcap"
    command = [
        sys.executable,
        "-c",
        "from mlfabric.cli import main; main()",
        "traffic",
        "capture",
        "-i",
        "lo",
    ]
    process = subprocess.Popen(
        [*command, "--interval", "200ms", "--duration", "1s", "--json", "--write", str(written)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()  # it listens now
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    threading.Thread(
        target=lambda: [sender.sendto(bytes(1000), receiver.getsockname()) for _ in range(200)]
    ).run()
    readings = [json.loads(line) for line in [first, *process.stdout]]
    process.stdout.close()
    assert process.wait() == 0
    sender.close()
    receiver.close()
    assert sum(reading["bytes"] for reading in readings) >= 200 * 1042
    assert read(written).total_bytes == sum(reading["bytes"] for reading in readings)
