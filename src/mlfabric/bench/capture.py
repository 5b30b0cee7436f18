"""How fast captures are read and measured: whole processes, ours and those of the tools people use today.

Makes one capture, runs every tool that is present on it, in rounds, takes medians, and compares answers as
well as times. Every tool reads the whole capture; nothing is extrapolated, and what did not run has no
figure.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mlfabric.errors import FabricError

_OURS: Final = (sys.executable, "-c", "from mlfabric.cli import main; main()", "traffic")
_ALL_TASK: Final = ("--quick", "--scales", "10us:10s", "--rates", "100mbit:100gbit:50", "--json")
_BYTES_PER_PACKET: Final = 112
_DPKT: Final = """
import sys, dpkt
bins, n, total, first = {}, 0, 0, None
with open(sys.argv[1], 'rb') as f:
    for ts, data in dpkt.pcap.Reader(f):
        first = ts if first is None else first
        k = int((ts - first) / 0.005)
        bins[k] = bins.get(k, 0) + len(data); n += 1; total += len(data)
print(n, total, max(bins.values()))
"""
_SCAPY: Final = """
import sys
from scapy.utils import RawPcapReader
bins, n, total, first = {}, 0, 0, None
for data, meta in RawPcapReader(sys.argv[1]):
    ts = meta.sec * 1000000 + meta.usec
    first = ts if first is None else first
    k = (ts - first) // 5000
    bins[k] = bins.get(k, 0) + meta.wirelen; n += 1; total += meta.wirelen
print(n, total, max(bins.values()))
"""


@dataclass(frozen=True)
class Tool:
    """One way to do one task."""

    name: str
    task: str
    command: tuple[str, ...]
    answer: Callable[[str], dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    slow: bool = False  # run in one of the rounds only

    def with_bytecode(self, directory: Path) -> Tool:
        """The same with compiled Python kept there, as an installed package has it: a run must not compile
        what the one before it did."""
        kept = {"PYTHONPYCACHEPREFIX": str(directory), "PYTHONDONTWRITEBYTECODE": ""}
        return replace(self, environment={**kept, **self.environment})


@dataclass(frozen=True)
class Run:
    tool: str
    task: str
    wall_s: float  # median
    walls_s: tuple[float, ...]
    cpu_s: float  # median, user and system
    rss_mb: float  # largest
    answer: dict[str, Any]


def make_capture(path: Path, packets: int, seed: int = 1) -> None:
    """Rounds of 70,000 packets on eight connections every two seconds, cut at 96 bytes, microsecond stamps,
    with the ties, backward steps and odd lengths of a plain tcpdump on a veth."""
    import numpy as np

    from mlfabric.traffic.capture.writer import Endpoints, write_pcap

    generator = np.random.default_rng(seed)
    per_round = 70_000
    there = [Endpoints("10.0.0.1", "10.0.1.1", 40_000 + k, 5001) for k in range(4)]
    flows = [*there, *(each.reversed() for each in there)]
    gaps = generator.exponential(1100, packets)
    gaps[::per_round] += 1_900_000_000
    times = 1_700_000_000_000_000_000 + np.cumsum(gaps).astype(np.int64)
    late = generator.integers(1, packets, packets // 4200 + 1)
    times[late] -= generator.integers(0, 200_000, len(late))
    lengths = np.where(generator.random(packets) < 0.985, 1514, generator.choice([66, 78, 86], packets))
    write_pcap(path, times, lengths, generator.integers(0, 8, packets), flows, 96, nanoseconds=False)


def _make_apart(path: Path, packets: int) -> None:
    """Makes the capture in a process of its own: a child's peak memory counts from its parent's."""
    script = "import sys; from pathlib import Path; from mlfabric.bench.capture import make_capture; "
    script += "make_capture(Path(sys.argv[1]), int(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", script, str(path), str(packets)], check=True)


def _from_series(output: str) -> dict[str, Any]:
    found = json.loads(output)
    return {"packets": found["packets"], "bytes": found["bytes"], "peak_5ms": max(found["bytes_per_bin"])}


def _from_analysis(output: str) -> dict[str, Any]:
    found = json.loads(output)
    peak = next((s["envelope_bytes"] for s in found["scales"] if s["tau_s"] == 0.005), None)
    return {
        "packets": found["packets"], "bytes": found["bytes"], "sliding_5ms": peak,
        "scales": len(found["scales"]), "rates": len(found["backlog"]), "flows": len(found["flows"]),
        "bursts": found["bursts"]["count"],
    }  # fmt: skip


def _from_tcpstat(output: str) -> dict[str, Any]:
    rows = [line.split() for line in output.splitlines() if line]
    return {
        "packets": sum(int(row[0]) for row in rows),
        "bytes": sum(int(row[1]) for row in rows),
        "peak_5ms": max(int(row[1]) for row in rows),
    }


def _from_tshark(output: str) -> dict[str, Any]:
    rows = [line.split("|") for line in output.splitlines() if "<>" in line and line.count("|") == 4]
    counts = [(int(row[2]), int(row[3])) for row in rows]
    return {
        "packets": sum(frames for frames, _ in counts),
        "bytes": sum(size for _, size in counts),
        "peak_5ms": max(size for _, size in counts),
    }


def _from_three_numbers(output: str) -> dict[str, Any]:
    packets, size, peak = output.split()[-3:]
    return {"packets": int(packets), "bytes": int(size), "peak_5ms": int(peak)}


def _tools(file: str, peer_python: str) -> list[Tool]:
    plain = {"MLFABRIC_NO_NATIVE": "1"}
    series = (*_OURS, "series", file, "--bin", "5ms", "--json")
    everything = (*_OURS, "analyze", file, *_ALL_TASK)
    full = (*_OURS, "analyze", file, *_ALL_TASK[1:])
    tools = [
        Tool("mlfabric numpy", "5 ms series", series, _from_series, plain),
        Tool("mlfabric helper", "5 ms series", series, _from_series),
        Tool("mlfabric numpy", "scales, rates, flows, bursts", everything, _from_analysis, plain),
        Tool("mlfabric helper", "scales, rates, flows, bursts", everything, _from_analysis),
        Tool("mlfabric helper", "and percentiles, dispersion, logscale", full, _from_analysis),
        Tool(
            "mlfabric numpy", "and percentiles, dispersion, logscale", full, _from_analysis, plain, slow=True
        ),
    ]
    if shutil.which("tcpstat"):
        command = ("tcpstat", "-l", "-r", file, "-o", r"%n %N\n", "0.005")
        tools.append(Tool("tcpstat", "5 ms series", command, _from_tcpstat))
    if shutil.which("tshark"):
        fast = ("tshark", "-n", "-q", "-r", file, "--disable-protocol", "ip", "-z", "io,stat,0.005")
        tools.append(Tool("tshark, IP dissection off", "5 ms series", fast, _from_tshark, slow=True))
        usual = ("tshark", "-n", "-q", "-r", file, "-z", "io,stat,0.005")
        tools.append(Tool("tshark", "5 ms series", usual, _from_tshark, slow=True))
    for name, script in (("dpkt", _DPKT), ("scapy", _SCAPY)):
        if (
            subprocess.run([peer_python, "-c", f"import {name}"], capture_output=True, check=False).returncode
            == 0
        ):
            tools.append(
                Tool(name, "5 ms series", (peer_python, "-c", script, file), _from_three_numbers, slow=True)
            )
    return tools


def run_once(command: tuple[str, ...], environment: dict[str, str]) -> tuple[float, float, float, str]:
    """Wall and processor seconds, peak memory in MB, and the output of one whole process."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env={**os.environ, **environment}
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise FabricError(f"{command[0]} ended with {process.returncode}: {said[-300:]}")
        output.seek(0)
        text = output.read().decode(errors="replace")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, text


def measure(tools: list[Tool], repeat: int) -> list[Run]:
    """Every tool so many times, in rounds: what else the machine does hits all of them alike. Slow ones run
    once, spread over the rounds."""
    taken: list[list[tuple[float, float, float, str]]] = [[] for _ in tools]
    slow = [tool for tool in tools if tool.slow]
    for number in range(repeat):
        for tool, runs in zip(tools, taken, strict=True):
            if not tool.slow or slow.index(tool) % repeat == number:
                sys.stderr.write(f"{tool.name}: {tool.task}, run {number + 1} ...\n")
                runs.append(run_once(tool.command, tool.environment))
    return [
        Run(
            tool.name,
            tool.task,
            statistics.median(run[0] for run in runs),
            tuple(run[0] for run in runs),
            statistics.median(run[1] for run in runs),
            max(run[2] for run in runs),
            tool.answer(runs[-1][3]),
        )
        for tool, runs in zip(tools, taken, strict=True)
    ]


def figures(runs: list[Run], long_run: Run | None) -> list[dict[str, Any]]:
    """What was promised, what was measured."""
    by = {(run.tool, run.task): run for run in runs}
    series, everything = "5 ms series", "scales, rates, flows, bursts"
    result = []

    def add(name: str, measured: float | None, limit: float) -> None:
        met = None if measured is None else measured <= limit
        result.append({"figure": name, "measured": measured, "limit": limit, "met": met})

    tcpstat = by.get(("tcpstat", series))
    for form, most, most_s in (("numpy", 3.0, 2.5), ("helper", 1.5, 0.8)):
        ours = by.get((f"mlfabric {form}", series))
        ratio = ours.wall_s / tcpstat.wall_s if ours and tcpstat else None
        add(f"5 ms series, {form}, times tcpstat", ratio, most)
        all_of_it = by.get((f"mlfabric {form}", everything))
        add(f"19 scales, 50 rates, flows, bursts, {form}, s", all_of_it.wall_s if all_of_it else None, most_s)
    if long_run is not None:
        add(f"peak memory on {long_run.answer['packets']:,} packets, MB", long_run.rss_mb, 600.0)
    return result


def bench_capture(
    packets: Annotated[int, typer.Option(help="packets of the capture that is made")] = 3_000_000,
    file: Annotated[Path | None, typer.Option(help="measure this capture instead of making one")] = None,
    repeat: Annotated[int, typer.Option(help="runs of each quick tool; the median counts")] = 5,
    long: Annotated[
        int | None,
        typer.Option(help="packets of a second capture, for memory; otherwise ten times --packets"),
    ] = None,
    slow: Annotated[bool, typer.Option(help="also the tools that take a minute")] = True,
    peer_python: Annotated[str, typer.Option(help="interpreter that has dpkt and scapy")] = sys.executable,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Read and measure a capture, against tshark, tcpstat, dpkt and scapy where present."""
    if packets < 1000 or repeat < 1:
        raise FabricError("the benchmark needs at least 1,000 packets and one run")
    from mlfabric.traffic import native

    helper = native.library() is not None
    long = 10 * packets if long is None else long
    with tempfile.TemporaryDirectory(prefix="mlfabric-bench-") as scratch:
        path = file or Path(scratch) / "made.pcap"
        if file is None:
            _make_apart(path, packets)
        elif not path.is_file():
            raise FabricError(f"{path} does not exist")
        tools = [tool for tool in _tools(str(path), peer_python) if slow or not tool.slow]
        tools = [tool for tool in tools if helper or tool.name != "mlfabric helper"]
        tools = [tool.with_bytecode(Path(scratch) / "bytecode") for tool in tools]
        for tool in tools[:4]:
            run_once(tool.command, tool.environment)  # fills the page cache and the bytecode cache
        runs = measure(tools, repeat)
        long_run = _long_run(Path(scratch), long) if long else None
        size = path.stat().st_size
    result = {
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "file_bytes": size,
        "runs": [_run_json(run) for run in ([*runs, long_run] if long_run else runs)],
        "figures": figures(runs, long_run),
    }
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _print(result)


def _long_run(scratch: Path, packets: int) -> Run | None:
    """One analysis of a capture so long that memory shows; None where the disk has no room for it."""
    needed = packets * _BYTES_PER_PACKET
    if shutil.disk_usage(scratch).free < 2 * needed:
        sys.stderr.write(f"no room for a capture of {packets:,} packets ({needed / 1e9:.1f} GB): left out\n")
        return None
    path = scratch / "long.pcap"
    sys.stderr.write(f"making a capture of {packets:,} packets ...\n")
    _make_apart(path, packets)
    task = Tool("mlfabric", "long capture", (*_OURS, "analyze", str(path), *_ALL_TASK), _from_analysis)
    return measure([task], 1)[0]


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "tool": run.tool, "task": run.task, "wall_s": run.wall_s, "walls_s": list(run.walls_s),
        "cpu_s": run.cpu_s, "rss_mb": run.rss_mb, "packets_per_s": run.answer["packets"] / run.wall_s,
        "answer": run.answer,
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _print(result: dict[str, Any]) -> None:
    from mlfabric.traffic.tables import console, table

    out = console()
    machine = result["machine"]
    out.print(
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}; whole processes"
    )
    shown = table("", ["tool", "task", "wall s", "cpu s", "Mpkt/s", "RSS MB", "packets", "peak 5 ms"], left=2)
    for run in result["runs"]:
        answer = run["answer"]
        peak = answer.get("peak_5ms", answer.get("sliding_5ms"))
        shown.add_row(
            run["tool"],
            run["task"],
            f"{run['wall_s']:.2f}",
            f"{run['cpu_s']:.2f}",
            f"{run['packets_per_s'] / 1e6:.2f}",
            f"{run['rss_mb']:.0f}",
            f"{answer['packets']:,}",
            f"{peak:,}",
        )
    out.print(shown)
    verdict = table("", ["figure", "measured", "at most", "met"])
    for each in result["figures"]:
        measured = "-" if each["measured"] is None else f"{each['measured']:.2f}"
        word = {True: "yes", False: "no", None: "not measured"}[each["met"]]
        verdict.add_row(each["figure"], measured, f"{each['limit']:g}", word)
    out.print(verdict)
