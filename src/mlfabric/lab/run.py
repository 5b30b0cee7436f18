"""One run of a command in a lab: a rank on each host, the scenario playing, everything of note in a folder.

The folder holds `manifest.json` (what ran, with which seed, versions and outcome), `scenario.toml`,
`logs/rank0-w0.log`, `events.jsonl` (what was done to the lab and when), `links.csv` (what each link carried
and dropped) and, on request, captures. Whatever ends the run, no process of it stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from mlfabric.errors import FabricError
from mlfabric.lab import kernel
from mlfabric.lab.capture import Captured, Captures
from mlfabric.lab.manifest import versions
from mlfabric.lab.place import is_ready, tell_beginning
from mlfabric.lab.session import Lab
from mlfabric.lab.watch import LinkSampler, LogTail
from mlfabric.scenario import Scenario, dump

_POLL_S: Final = 0.02
_ENTER_S: Final = 60.0
_READY_S: Final = 300.0
BUSY: Final = 0.95  # of the processors' time; above it, figures tell more of the machine than of the network


@dataclass(frozen=True, slots=True)
class Progress:
    seconds: float
    running: int
    ranks: int
    wire_bps: float  # into all hosts together
    dropped_frames: int


@dataclass(frozen=True, slots=True)
class RunOptions:
    hosts: Sequence[str] | None = None  # names or patterns; default: the first job's workers, else all
    ranks_per_host: int = 1
    folder: Path | None = None  # default: runs/NAME-TIME
    capture: Path | None = None
    capture_pieces: bool = False  # let TCP's pieces travel whole through captures: cheaper, coarser
    timeout_s: float | None = None
    grace_s: float = 5.0  # for ranks to end by themselves when one has failed, or when asked to
    sample_s: float = 1.0  # between readings of the link counters
    master_port: int = 29500
    # The scenario begins when every rank has called inside().begin_together(), not when they are started.
    together: bool = False
    # Asked with the seconds since the beginning; once it says so the ranks are ended, which is no failure.
    until: Callable[[float], bool] | None = None
    environment: Mapping[str, str] | None = None  # default: this process's
    on_line: Callable[[int, str, str], None] | None = None  # rank, host, line of its log
    on_progress: Callable[[Progress], None] | None = None


@dataclass
class Rank:
    """One process of the run and how it fared."""

    rank: int
    host: str
    local_rank: int
    log: str
    exit_code: int | None = None
    ended_by_fault: bool = False
    restarts: int = 0
    user_s: float = 0.0
    system_s: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.process is not None

    def reap(self) -> bool:
        """Whether it has ended just now; its processor time is counted."""
        if self.process is None:
            return False
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.exit_code = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.user_s += usage.ru_utime
        self.system_s += usage.ru_stime
        self.process = None
        return True

    def signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def summary(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "process"}


@dataclass(frozen=True, slots=True)
class RunResult:
    folder: Path
    seconds: float
    ranks: list[Rank]
    captures: list[Captured]
    complaints: list[str]  # what makes the run a failure
    warnings: list[str]
    first_failed: int | None = None  # the rank whose end made the others'

    @property
    def ok(self) -> bool:
        return not self.complaints


def run_ranks(lab: Lab, command: list[str], options: RunOptions) -> RunResult:
    """Run the command to its end; when interrupted too, nothing stays running and the folder is written."""
    run = _Run(lab, command, options)
    try:
        run.start()
        run.go_on()
    except BaseException as error:
        run.complaints.append(f"interrupted: {error!r}")
        run.finish()
        raise
    return run.finish()


def place_ranks(scenario: Scenario, options: RunOptions) -> list[tuple[str, int]]:
    """Host and local rank of every rank; a FabricError says what is wrong with the wishes."""
    if options.ranks_per_host < 1:
        raise FabricError("there must be at least one rank on each host")
    if options.hosts is not None:
        hosts = scenario.matching(options.hosts)
    elif scenario.jobs:
        hosts = list(scenario.places(scenario.jobs[0]).workers)
    else:
        hosts = scenario.host_names()
    if not hosts:
        raise FabricError(f"no host matches {', '.join(options.hosts or ())}")
    return [(host, local) for host in hosts for local in range(options.ranks_per_host)]


def rank_environment(
    lab: Lab, rank: Rank, ranks: Sequence[Rank], folder: Path, secret: str, port: int, master: str
) -> dict[str, str]:
    """torchrun's variables, ours, and the interface that Gloo should use."""
    hosts = list(dict.fromkeys(each.host for each in ranks))
    local = sum(each.host == rank.host for each in ranks)
    rack = next(link.rack for link in lab.scenario.host_links() if link.name == rank.host)
    limit = next((job.max_rate for job in lab.scenario.jobs[:1]), None)
    return {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(hosts.index(rank.host)),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(len(ranks)),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": folder.name,
        "TORCHELASTIC_RESTART_COUNT": str(rank.restarts),
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "MLFABRIC_SECRET": secret,
        "MLFABRIC_SCENARIO": str(folder / "scenario.toml"),
        "MLFABRIC_HOST": rank.host,
        **({"MLFABRIC_RACK": rack} if rack is not None else {}),
        **({"MLFABRIC_JOB_MAX_RATE": f"{float(limit):.0f}"} if limit is not None else {}),
        "MLFABRIC_RUN_FOLDER": str(folder),
        "PYTHONUNBUFFERED": "1",
    }


class _Run:
    def __init__(self, lab: Lab, command: list[str], options: RunOptions) -> None:
        if not command:
            raise FabricError("there is no command to run; write it after --")
        self.lab, self.command, self.options = lab, command, options
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.folder = (options.folder or Path("runs") / f"{lab.name}-{stamp}").absolute()
        self.ranks = [
            Rank(number, host, local, str(self.folder / "logs" / f"rank{number}-{host}.log"))
            for number, (host, local) in enumerate(place_ranks(lab.scenario, options))
        ]
        self.complaints: list[str] = []
        self.warnings: list[str] = []
        self.captured: list[Captured] = []
        self.addresses: dict[str, str] = {}
        self._measured: list[dict[str, Any]] = []
        self._captures: Captures | None = None
        self._secret = secrets.token_hex(32)
        self.began = time.monotonic()
        self._began_wall = time.time()
        self._seen = 0  # of what was done to the lab
        self._down: dict[str, str] = {}  # host to the fault that ended it
        self._failed_at: float | None = None
        self._first_failed: int | None = None
        self._sampler = LinkSampler(lab, self.folder / "links.csv", options.sample_s)
        self._tails: dict[int, LogTail] = {}

    def start(self) -> None:
        try:
            (self.folder / "logs").mkdir(parents=True)
        except FileExistsError:
            raise FabricError(f"the run folder {self.folder} holds a run already; name another") from None
        except OSError as error:
            raise FabricError(f"can't make the run folder {self.folder}: {error.strerror}") from None
        (self.folder / "scenario.toml").write_text(dump(self.lab.scenario))
        described = self.lab.describe()
        self.addresses, self._measured = described["hosts"], described["measured"]
        self._write_manifest("running")
        if self.options.capture is not None:
            if not self.options.capture_pieces:
                self.lab.use_plain_frames()
            self._captures = Captures(
                self.lab.record, described["ports"], self.options.capture.absolute(),
                as_user=described["in_user_namespace"],
            )  # fmt: skip
            self._captures.start()
        for rank in self.ranks:
            self._start_rank(rank)
        self._wait_until_on_hosts(self.ranks)
        if self.options.together:
            self._wait_until_ready()
        self.began, self._began_wall = time.monotonic(), time.time()
        self.lab.play()
        tell_beginning(self.folder, time.monotonic())

    def go_on(self) -> None:
        while self._unfinished():
            for rank in self.ranks:
                if rank.reap():
                    self._learn_what_was_done()
                    self._judge(rank)
            self._learn_what_was_done()
            self._report_progress()
            for tail in self._tails.values():
                tail.read()
            self._stop_if_late()
            if self.options.until is not None and self.options.until(time.monotonic() - self.began):
                self._end_ranks()
                return
            time.sleep(_POLL_S)

    def finish(self) -> RunResult:
        """End what still runs, close the books."""
        seconds = time.monotonic() - self.began
        self._end_ranks()
        with contextlib.suppress(FabricError, OSError):
            self._learn_what_was_done()
            self._sampler.sample(seconds)
        if self._captures is not None:
            self.captured = self._captures.stop()
            self.complaints += [
                f"the kernel dropped {each.dropped} packets of the capture on {each.host}"
                for each in self.captured
                if each.dropped
            ]
        for tail in self._tails.values():
            tail.read(final=True)
        busy = self._sampler.busy_share()
        if busy > BUSY:
            self.warnings.append(
                f"the machine's processors were {busy:.0%} busy: this run measures them, not the network"
            )
        if (self.folder / "scenario.toml").exists():
            self._write_manifest("failed" if self.complaints else "done", seconds=seconds, busy_share=busy)
        return RunResult(
            self.folder,
            seconds,
            self.ranks,
            self.captured,
            self.complaints,
            self.warnings,
            self._first_failed,
        )

    def _start_rank(self, rank: Rank) -> None:
        environment = dict(os.environ if self.options.environment is None else self.options.environment)
        # As torchrun does: many ranks share the processors.
        environment.setdefault("OMP_NUM_THREADS", "1")
        # What a rank sees are the processors of the machine; all hosts of the lab share them.
        part = len(os.sched_getaffinity(0)) / len(self.ranks)
        environment.setdefault("MLFABRIC_PROCESSORS", f"{part:.3g}")
        environment |= rank_environment(
            self.lab, rank, self.ranks, self.folder, self._secret, self.options.master_port,
            self.addresses[self.ranks[0].host],
        )  # fmt: skip
        with open(rank.log, "ab") as log:
            rank.process = self.lab.host(rank.host).popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        rank.exit_code = None
        if rank.rank not in self._tails and self.options.on_line is not None:
            self._tails[rank.rank] = LogTail(rank.log, partial(self.options.on_line, rank.rank, rank.host))

    def _wait_until_on_hosts(self, ranks: Sequence[Rank]) -> None:
        """A fault must find the ranks it is meant for: on their hosts, not on the way there."""
        inodes = {name: entry["inode"] for name, entry in self.lab.record.read()["namespaces"].items()}
        give_up = time.monotonic() + _ENTER_S
        for rank in ranks:
            while rank.process is not None and kernel.network_of(rank.process.pid) != inodes[rank.host]:
                if kernel.start_ticks(rank.process.pid) is None:
                    break  # it has ended; judged when it is reaped
                if time.monotonic() > give_up:
                    raise FabricError(
                        f"rank {rank.rank} does not get onto {rank.host}; its log is {rank.log}"
                    )
                time.sleep(0.002)

    def _wait_until_ready(self) -> None:
        """All ranks have set up what they need, or one has failed at it."""
        give_up = time.monotonic() + (self.options.timeout_s or _READY_S)
        while not all(is_ready(self.folder, rank.rank) for rank in self.ranks):
            for rank in self.ranks:
                if rank.reap():
                    raise FabricError(
                        f"rank {rank.rank} on {rank.host} ended with {_ending(rank.exit_code or 0)} "
                        f"before it was ready; its log is {rank.log}"
                    )
            if time.monotonic() > give_up:
                late = [str(rank.rank) for rank in self.ranks if not is_ready(self.folder, rank.rank)]
                raise FabricError(f"these ranks do not get ready: {', '.join(late)}")
            time.sleep(_POLL_S)

    def _unfinished(self) -> bool:
        if any(rank.running for rank in self.ranks):
            return True
        if self._failed_at is not None or not self._down:
            return False
        # All that ran was ended by faults; some of it may come back.
        now = time.monotonic() - self.began
        return any(
            event.do == "restart" and event.host in self._down and event.at_s > now - 1.0
            for event in self.lab.scenario.fault_events()
        )

    def _report_progress(self) -> None:
        seconds = time.monotonic() - self.began
        seen = self._sampler.sample_if_due(seconds)
        if seen is not None and self.options.on_progress is not None:
            running = sum(rank.running for rank in self.ranks)
            self.options.on_progress(
                Progress(seconds, running, len(self.ranks), seen.wire_bps, seen.dropped_frames)
            )

    def _judge(self, rank: Rank) -> None:
        if rank.exit_code == 0:
            return
        if rank.host in self._down:
            rank.ended_by_fault = True
            return
        self.complaints.append(
            f"rank {rank.rank} on {rank.host} ended with "
            f"{_ending(rank.exit_code or 0)}; its log is {rank.log}"
        )
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._first_failed = rank.rank

    def _learn_what_was_done(self) -> None:
        news = self.lab.done(self._seen)
        if not news:
            return
        self._seen += len(news)
        with (self.folder / "events.jsonl").open("a") as out:
            for event in news:
                out.write(json.dumps(event) + "\n")
        for event in news:
            host = event["detail"].get("host")
            if event["do"] in ("kill", "drain"):
                self._down[host] = event["do"]
            elif event["do"] == "restart":
                self._restart(host)
            elif event["do"] == "broken":
                self.complaints.append(f"the lab's {event['detail']['program']} broke down during the run")

    def _restart(self, host: str) -> None:
        self._down.pop(host, None)
        for rank in self.ranks:
            if rank.host == host:
                if rank.running:
                    rank.signal(signal.SIGKILL)
                    while not rank.reap():
                        time.sleep(0.001)
                rank.ended_by_fault = False
                rank.restarts += 1
                self._start_rank(rank)
        self._wait_until_on_hosts([rank for rank in self.ranks if rank.host == host])

    def _stop_if_late(self) -> None:
        now = time.monotonic()
        if self._failed_at is not None and now - self._failed_at > self.options.grace_s:
            self._end_ranks()
        limit = self.options.timeout_s
        if limit is not None and now - self.began > limit:
            late = [str(rank.rank) for rank in self.ranks if rank.running]
            self.complaints.append(f"after {limit:g} s these ranks still ran: {', '.join(late)}")
            self._failed_at = now
            self._end_ranks()

    def _end_ranks(self) -> None:
        """Ask, wait a little, insist. Ranks that stand still are woken to hear it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self.ranks:
                rank.signal(number)
                rank.signal(signal.SIGCONT)
            give_up = time.monotonic() + self.options.grace_s
            while any(rank.running for rank in self.ranks) and time.monotonic() < give_up:
                for rank in self.ranks:
                    rank.reap()
                time.sleep(_POLL_S)

    def _write_manifest(self, state: str, **more: Any) -> None:
        manifest = {
            "state": state,
            "scenario": self.lab.scenario.name or self.lab.name,
            "seed": self.lab.scenario.seed,
            "command": self.command,
            "began": datetime.fromtimestamp(self._began_wall, UTC).isoformat(),
            "ranks": [rank.summary() for rank in self.ranks],
            "captures": [asdict(each) for each in self.captured],
            "complaints": self.complaints,
            "warnings": self.warnings,
            "measured_links": self._measured,
            "versions": versions(),
            **more,
        }
        (self.folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
