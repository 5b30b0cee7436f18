"""`mlfabric demo`: trains a classifier over TCP on loopback, kills the server halfway, goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from mlfabric.api import Fabric, join
from mlfabric.commands.output import console, print_json
from mlfabric.data import mirror_path
from mlfabric.demo.classifier import Digits, accuracy, load_digits
from mlfabric.demo.member import Part, Report
from mlfabric.errors import FabricError
from mlfabric.eventlog import read_log
from mlfabric.events import LogRecord
from mlfabric.units import format_size, parse_rate

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# Who takes part, what for, and its link's rates up and down. The server's downlink is the bottleneck.
MEMBERS = {
    "w0": (("worker", "aggregator"), "60mbit", "60mbit"),
    "w1": (("worker", "aggregator"), "40mbit", "40mbit"),
    "w2": (("worker", "aggregator"), "30mbit", "30mbit"),
    "w3": (("worker", "aggregator"), "20mbit", "20mbit"),
    "a0": (("aggregator",), "80mbit", "80mbit"),
    "a1": (("aggregator",), "80mbit", "80mbit"),
    "s0": (("server", "replica"), "100mbit", "20mbit"),
    "r0": (("replica",), "100mbit", "20mbit"),
}
# How often progress is printed where it can't be redrawn.
QUIET_REFRESH_S = 3.0
SERVER, REPLICA, OBSERVER = "s0", "r0", "observer"


class DemoResult(msgspec.Struct, frozen=True):
    """What the demo shows at the end."""

    seconds: float
    accuracy: float
    committed: int
    dropped: int
    aggregated: int
    lost: int
    delay_mean: float
    delay_max: int
    divergence_at_fail_over: float | None
    divergence_bound: float
    recovery_s: float | None
    bytes_per_link: dict[str, dict[str, int]]
    event_log: str


@dataclass(slots=True)
class _Progress:
    began: float
    killed_at: float | None = None
    killed: str = SERVER

    @property
    def leader(self) -> str:
        """Two can lead, and every epoch is the other's: a lead may move before anybody is killed."""
        return (SERVER, REPLICA)[self.epoch % 2]

    recovered_at: float | None = None
    version: int = 0
    epoch: int = 0
    accuracy: float = 0.0


@app.command()
def demo(
    updates: Annotated[int, typer.Option("--updates", min=40, help="updates to commit")] = 160,
    folder: Annotated[Path | None, typer.Option("--folder", help="where the run is kept")] = None,
    divergence: Annotated[float, typer.Option("--divergence", min=0.0, help="bound of the replica")] = 0.02,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, no live progress")] = False,
) -> None:
    """Train on four workers with aggregators, a server and a replica; the server is killed halfway."""
    place = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FabricError(f"can't make the folder {place}: {error.strerror}") from None
    (place / "events.jsonl").unlink(missing_ok=True)
    digits = Digits(load_digits(place))
    with (
        _members(place, divergence) as (processes, address),
        join(address, job="demo", name=OBSERVER, host=OBSERVER, roles=(), timeout=30) as fabric,
    ):
        progress = _watch(fabric, digits, processes, updates, quiet=as_json)
        _say_stop(processes)
        reports = _reports(processes)
        model = fabric.pull(timeout=30)
        final = accuracy(model.arrays, digits.test_images, digits.test_labels)
    result = _result(place, progress, reports, final, divergence)
    if as_json:
        print_json(result)
    else:
        _print_result(result, reports)


# --- processes ----------------------------------------------------------------------------------------------


@contextmanager
def _members(folder: Path, divergence: float) -> Iterator[tuple[dict[str, subprocess.Popen[bytes]], str]]:
    """The eight processes, ended with the block however it ends."""
    address = f"127.0.0.1:{_free_port()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, (roles, up, down) in MEMBERS.items():
            part = Part(
                name=name,
                address=address,
                roles=roles,
                up=up,
                down=down,
                folder=str(folder),
                members=len(MEMBERS),
                embed_scheduler=name == "w0",
                divergence=divergence,
            )
            with (folder / f"{name}.log").open("wb") as errors:
                processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "mlfabric.demo.member", msgspec.json.encode(part).decode()],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                )
        yield processes, address
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 5
        for process in processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _say_stop(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    for name, process in processes.items():
        if "worker" in MEMBERS[name][0] and process.poll() is None:
            process.send_signal(signal.SIGUSR1)


def _reports(processes: dict[str, subprocess.Popen[bytes]]) -> list[Report]:
    """Each worker's line. They stay members until the demo ends them: the model may live with them."""
    reports = []
    for name, process in processes.items():
        if "worker" not in MEMBERS[name][0]:
            continue
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise FabricError(f"worker {name} of the demo ended without a report; see {name}.log of the run")
        reports.append(msgspec.json.decode(line, type=Report))
    return reports


# --- watching -----------------------------------------------------------------------------------------------


def _watch(
    fabric: Fabric,
    digits: Digits,
    processes: dict[str, subprocess.Popen[bytes]],
    updates: int,
    quiet: bool,
) -> _Progress:
    """Pull and evaluate while the workers train; kill the server halfway; return at the end."""
    progress = _Progress(time.monotonic())
    begun = 0
    screen = Console(quiet=True) if quiet else console()
    with _live(screen) as show:
        while begun + progress.version < updates:
            _check_processes(processes, progress)
            model = fabric.pull(timeout=60)
            epoch = model.versions[0].epoch
            if epoch > progress.epoch and progress.killed_at is not None and progress.recovered_at is None:
                progress.recovered_at = time.monotonic()
                begun += max(progress.version - model.version, 0)
            progress.version, progress.epoch = model.version, epoch
            progress.accuracy = accuracy(model.arrays, digits.test_images, digits.test_labels)
            show(_progress_line(progress, updates))
            if progress.killed_at is None and progress.version >= updates // 2:
                progress.killed_at, progress.killed = time.monotonic(), progress.leader
                processes[progress.killed].kill()
                continue  # the next pull is answered by whoever leads then
            time.sleep(0.3)
    return progress


@contextmanager
def _live(screen: Console) -> Iterator[Callable[[str], None]]:
    """Shows a line that changes; where there is no terminal, a line every few seconds."""
    if screen.is_terminal:
        with Live("", console=screen, auto_refresh=False) as live:
            yield lambda line: live.update(line, refresh=True)
        return
    shown = [0.0]

    def show(line: str) -> None:
        if time.monotonic() - shown[0] >= QUIET_REFRESH_S:
            shown[0] = time.monotonic()
            screen.print(line)

    yield show


def _check_processes(processes: dict[str, subprocess.Popen[bytes]], progress: _Progress) -> None:
    for name, process in processes.items():
        ended = process.poll()
        if ended is not None and not (name == progress.killed and progress.killed_at is not None):
            raise FabricError(f"process {name} of the demo ended with {ended}; see {name}.log of the run")


def _progress_line(progress: _Progress, updates: int) -> str:
    done = round(min(progress.version / updates, 1.0) * 20)
    leader = progress.leader if progress.epoch == 0 else f"{progress.leader} (was replica)"
    if progress.killed_at is not None and progress.recovered_at is None:
        leader = f"{progress.killed} killed!"
    return (
        f"{time.monotonic() - progress.began:5.1f} s {'█' * done}{'░' * (20 - done)} "
        f"{progress.version}/{updates}  accuracy {progress.accuracy:.3f}  server {leader}"
    )


# --- what came out ------------------------------------------------------------------------------------------


def _result(
    folder: Path, progress: _Progress, reports: list[Report], final: float, divergence: float
) -> DemoResult:
    records = read_log(folder / "events.jsonl")
    delays = [delay for report in reports for delay in report.delays]
    recovery = None
    if progress.killed_at is not None and progress.recovered_at is not None:
        recovery = progress.recovered_at - progress.killed_at
    return DemoResult(
        seconds=time.monotonic() - progress.began,
        accuracy=final,
        committed=sum(report.committed for report in reports),
        dropped=sum(report.dropped for report in reports),
        aggregated=_aggregated(records),
        lost=sum(report.lost for report in reports),
        delay_mean=float(np.mean(delays)) if delays else 0.0,
        delay_max=max(delays, default=0),
        divergence_at_fail_over=_divergence(folder, progress.killed),
        divergence_bound=divergence,
        recovery_s=recovery,
        bytes_per_link=_bytes_per_link(records),
        event_log=str(folder / "events.jsonl"),
    )


def _aggregated(records: list[LogRecord]) -> int:
    """Committed updates that reached the server inside a sum."""
    summed: set[str] = set()
    committed: set[str] = set()
    for record in records:
        if record.type == "Note" and record.record["what"] == "forwarded":
            summed.update(record.record["updates"])
        elif record.type == "ResolveUpdate" and record.record["committed"]:
            committed.add(record.record["update"])
    return len(summed & committed)


def _divergence(folder: Path, killed: str) -> float | None:
    """||server - replica|| / ||server||, from the weights both left in files at the fail-over."""
    server = mirror_path(folder / killed, 0)
    replica = mirror_path(folder / (REPLICA if killed == SERVER else SERVER), 0, "promoted")
    if not server.exists() or not replica.exists():
        return None
    last, taken = np.fromfile(server, np.float32), np.fromfile(replica, np.float32)
    return float(np.linalg.norm(last - taken) / np.linalg.norm(last))


def _bytes_per_link(records: list[LogRecord]) -> dict[str, dict[str, int]]:
    """Payload bytes out of and into every host, from the transfers that arrived whole."""
    sizes: dict[tuple[str, str], tuple[str, int]] = {}
    totals: dict[str, dict[str, int]] = {}
    for record in records:
        if record.type == "TransferArriving":
            about = record.record
            sizes[record.node, about["transfer"]] = (about["sender"], about["size_bytes"])
        elif record.type == "TransferFinished":
            sender, size = sizes.pop((record.node, record.record["transfer"]), (record.node, 0))
            if sender == record.node:
                continue
            for host, way in ((sender, "up"), (record.node, "down")):
                link = totals.setdefault(host, {"up": 0, "down": 0})
                link[way] += size
    return {host: totals[host] for host in sorted(totals)}


def _print_result(result: DemoResult, reports: list[Report]) -> None:
    out = console()
    table = Table(title="What happened", title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("accuracy on unseen digits", f"{result.accuracy:.3f}")
    table.add_row(
        "updates",
        f"{result.committed} committed ({result.aggregated} of them aggregated), {result.dropped} dropped, "
        f"{result.lost} lost at the fail-over",
    )
    each = ", ".join(f"{report.name} {report.committed}" for report in reports)
    table.add_row("committed by worker", each)
    table.add_row("delay", f"mean {result.delay_mean:.2f}, max {result.delay_max} updates")
    if result.divergence_at_fail_over is not None:
        told = f"{result.divergence_at_fail_over:.4f} of the model's norm (bound {result.divergence_bound:g})"
        table.add_row("divergence at fail-over", told)
    if result.recovery_s is not None:
        table.add_row("first model after the kill", f"{result.recovery_s:.2f} s")
    out.print(table)
    links = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("link", "rate up / down", "bytes up", "bytes down"):
        links.add_column(column, justify="left" if column == "link" else "right")
    for host, carried in result.bytes_per_link.items():
        rates = [f"{parse_rate(rate) / 1e6:.0f}" for rate in MEMBERS[host][1:]] if host in MEMBERS else []
        shown = f"{' / '.join(rates)} Mb/s" if rates else "not limited"
        links.add_row(host, shown, format_size(carried["up"]), format_size(carried["down"]))
    out.print(links)
    command = os.path.relpath(sys.argv[0]) if os.sep in sys.argv[0] else "mlfabric"
    out.print(f"event log: {result.event_log}", soft_wrap=True)
    out.print(
        f"one update's story: {command} story w0#5 --log {result.event_log}", style="dim", soft_wrap=True
    )
