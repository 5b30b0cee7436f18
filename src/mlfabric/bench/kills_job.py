"""A training job on the hosts of a lab whose processes are struck, one at a time, and come back.

Processes are started, watched by what they say, killed, stopped or cut off, and released again. What became
of every update is judged in `bench.kills_ledger`; how fast the others went on, by the times of their commits.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from mlfabric.bench.kills_member import KillsPart
from mlfabric.errors import FabricError
from mlfabric.lab import Lab, kernel
from mlfabric.messages import MEMBER_ROLES

PORT = 7400
COORDINATES = 1500  # updates that one life of a worker may make
BEGIN_S = 90.0  # processes start slowly where many share a processor
COMMITS_BEFORE = 3
POLL_S = 0.01
LEAVE_S = 20.0


@dataclass(frozen=True, slots=True)
class Seat:
    """A place of the job: a host, and what its process may be used for."""

    name: str
    roles: tuple[str, ...]
    rate: str = "100mbit"
    schedules: bool = False

    @property
    def works(self) -> bool:
        return "worker" in self.roles


SERVES = ("server", "replica")
# Every role on a host of its own; servers have the slower links, so that sums are worth making.
APART = (
    Seat("c0", (), schedules=True),
    Seat("s0", SERVES, rate="40mbit"),
    Seat("r0", SERVES, rate="40mbit"),
    Seat("a0", ("aggregator",), rate="200mbit"),
    Seat("w0", ("worker",), rate="200mbit"),
    Seat("w1", ("worker",), rate="200mbit"),
    Seat("w2", ("worker",), rate="200mbit"),
)
# As under torchrun: the first rank schedules, leads and works.
TOGETHER = (
    Seat("w0", MEMBER_ROLES, rate="200mbit", schedules=True),
    Seat("w1", MEMBER_ROLES),
    Seat("w2", MEMBER_ROLES),
    Seat("w3", MEMBER_ROLES),
)


@dataclass(slots=True)
class UpdateStory:
    """What a worker has said of one of its updates."""

    coordinate: int
    committed: bool | None = None  # None: it has not heard
    reason: str = ""
    at_s: float = 0.0


@dataclass
class Life:
    """One process of a seat, from its start to its end, and all it has said."""

    seat: Seat
    number: int
    process: subprocess.Popen[str]
    log: Path  # events
    said: Path  # warnings
    address: str = ""
    roles: dict[str, int] = field(default_factory=dict)  # name -> epoch, if it is a server's
    followed: list[str] = field(default_factory=list)  # of those: a replica could take over
    updates: dict[str, UpdateStory] = field(default_factory=dict)
    failures: list[tuple[float, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of training, by step
    stopped: bool = False
    lost: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    left: bool = False
    silent: bool = False  # it has ended, and all it said is heard

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def listen(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed when the job ends
            for line in self.process.stdout:
                if line.startswith("{"):
                    self._hear(json.loads(line))
        self.silent = True

    def _hear(self, said: dict[str, Any]) -> None:
        match said:
            case {"address": address}:
                self.address = address
            case {"roles": roles, "followed": followed}:
                self.roles, self.followed = roles, followed
            case {"offered": update, "coordinate": coordinate}:
                self.updates[update] = UpdateStory(coordinate)
            case {"outcome": update, "committed": committed, "at_s": at, "reason": reason, "loss": loss}:
                story = self.updates[update]
                story.committed, story.at_s, story.reason = committed, at, reason
                self.losses.append(loss)
            case {"failed": reason, "at_s": at}:
                self.failures.append((at, reason))
            case {"stopped": stopped, "lost": lost}:
                self.lost, self.stopped = lost, stopped
            case {"model": _}:
                self.model = said
            case {"left": _}:
                self.left = True

    def commits(self) -> list[float]:
        """When it heard of its commits."""
        return [story.at_s for story in list(self.updates.values()) if story.committed]

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(words + "\n")
            self.process.stdin.flush()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class KillsJob:
    """The processes of one job. Use it as a context manager: all of them end with it."""

    def __init__(
        self, lab: Lab, seats: tuple[Seat, ...], folder: Path, divergence: float | None, sync: bool = False
    ) -> None:
        self.lab = lab
        self.seats = {seat.name: seat for seat in seats}
        self.folder = folder
        self.lives: list[Life] = []
        self._divergence = divergence
        self._sync = sync
        self._secret = secrets.token_hex(16)
        self._addresses: dict[str, str] = lab.describe()["hosts"]
        self._first = next(seat for seat in seats if seat.schedules)
        self._files: list[IO[str]] = []
        self._shards: set[str] = set()  # the roles of all leaders there were

    def __enter__(self) -> KillsJob:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for life in self.lives:
            life.end()
        for file in self._files:
            file.close()

    # --- processes --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everybody, and wait until everybody trains."""
        self.start(self._first.name, f"{self._addresses[self._first.name]}:{PORT}", first=True)
        self.wait(lambda: bool(self.now(self._first.name).address), BEGIN_S, "the scheduler does not begin")
        for name in self.seats:
            if name != self._first.name:
                self.start(name, self.now(self._first.name).address, first=True)
        self.wait(
            lambda: (
                self.is_followed() and all(len(life.commits()) >= COMMITS_BEFORE for life in self.workers())
            ),
            BEGIN_S,
            "training does not begin",
        )

    def start(self, name: str, address: str, first: bool = False) -> Life:
        seat = self.seats[name]
        number = sum(1 for life in self.lives if life.seat is seat)
        workers = [each.name for each in self.seats.values() if each.works]
        lives_in_all = 8 * len(workers)
        at = -1
        if seat.works:
            at = (number * len(workers) + workers.index(name)) * COORDINATES
        if number >= 8:
            raise FabricError(f"{name} has been started {number} times; a job has room for 8")
        log = self.folder / f"{name}.{number}.jsonl"
        part = KillsPart(
            name=name,
            address=address,
            roles=seat.roles,
            rate=seat.rate,
            log=str(log),
            members=len(self.seats) if first else 0,
            embed_scheduler=seat.schedules and first,
            first_coordinate=at,
            coordinates=lives_in_all * COORDINATES,
            divergence=self._divergence,
            sync=self._sync,
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFABRIC_")}
        environment |= {
            "MLFABRIC_SECRET": self._secret,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        said = self.folder / f"{name}.{number}.txt"
        errors = open(said, "w", encoding="utf-8")  # noqa: SIM115 - the process writes there
        self._files.append(errors)
        process = self.lab.host(name).popen(
            [sys.executable, "-m", "mlfabric.bench.kills_member", msgspec.json.encode(part).decode()],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        life = Life(seat, number, process, log, said)
        self.lives.append(life)
        threading.Thread(target=life.listen, daemon=True).start()
        return life

    def now(self, name: str) -> Life:
        """The present life of a seat."""
        return next(life for life in reversed(self.lives) if life.seat.name == name)

    def present(self) -> list[Life]:
        last = {life.seat.name: life for life in self.lives}
        return [last[name] for name in self.seats if name in last]

    def workers(self) -> list[Life]:
        return [life for life in self.present() if life.seat.works]

    def wait(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        while not holds():
            ended = [life for life in self.present() if life.silent and not life.running and not life.left]
            if time.monotonic() >= until:
                raise FabricError(f"{what} (after {limit_s:g} s)")
            if ended and ended[0].process.returncode not in (-signal.SIGKILL,):
                last = ended[0].said.read_text(errors="replace").strip().splitlines()
                raise FabricError(f"{what}: {ended[0].seat.name} ended: {last[-1] if last else 'silently'}")
            time.sleep(POLL_S)

    # --- strikes ----------------------------------------------------------------------------------------

    def holder(self, role: str, choose: Callable[[list[str]], str]) -> str:
        """Who holds a role now, as processes say themselves; where several could be struck, one is chosen."""
        living = [life for life in self.present() if life.running]
        if role == "rank0":
            return self._first.name
        if role == "worker":
            free = [life for life in living if life.seat.works and not _leads(life)]
            return choose([life.seat.name for life in free or living if life.seat.works])
        if role == "server":
            leads = [(max(_epochs(life)), life.seat.name) for life in living if _epochs(life)]
            if not leads:
                raise FabricError("nobody leads")
            return max(leads)[1]
        if role == "aggregator":
            return choose([life.seat.name for life in living if "aggregator" in life.seat.roles])
        named = {"replica": "replica.", "scheduler": "scheduler"}[role]
        holders = [life.seat.name for life in living if any(each.startswith(named) for each in life.roles)]
        if not holders:
            raise FabricError(f"nobody is {role} now")
        return choose(holders)

    def is_followed(self) -> bool:
        """Whether every shard has a leader and a filled replica: who strikes before that strikes a second
        time at once, and a leader lost without a replica ends the job."""
        leaders = leaders_of(life for life in self.present() if life.running)
        self._shards |= leaders.keys()
        all_led = bool(leaders) and leaders.keys() == self._shards
        return all_led and all(role in life.followed for role, life in leaders.items())

    def strike(self, name: str, how: str) -> float:
        """Strike; when that was."""
        life = self.now(name)
        inode = self.lab.record.read()["namespaces"][name]["inode"]
        if kernel.network_of(life.process.pid) != inode:
            raise FabricError(f"the process of {name} is not on its host")
        if how == "cut":
            self.lab.host(name).cut()
        else:
            life.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return time.monotonic()

    def release(self, name: str, how: str) -> float:
        """Let the struck one come back: plugged in, continued, or started anew."""
        life = self.now(name)
        if how == "cut":
            self.lab.host(name).heal()
        elif how == "stop":
            life.signal(signal.SIGCONT)
        else:
            life.process.wait()
            other = next(
                each for each in self.present() if each.running and each.address and each.seat.name != name
            )
            self.start(name, other.address)
        return time.monotonic()

    def finish(self) -> Life:
        """Have the workers end their work; one that lives tells what the model is in the end."""
        living = [life for life in self.workers() if life.running]
        for life in living:
            life.tell("stop")
        self.wait(lambda: all(life.stopped for life in living), LEAVE_S, "a worker does not end its work")
        for life in living:
            life.tell(f"model {self.folder / 'model.npz'}")
            with contextlib.suppress(FabricError):
                self.wait(lambda life=life: bool(life.model), LEAVE_S, "the model can't be read")  # type: ignore[misc]
                return life
        raise FabricError("no worker can read the model in the end")

    def leave(self) -> None:
        """All at once, as when a job ends."""
        for life in self.present():
            if life.running:
                life.tell("leave")
        self.wait(lambda: all(life.left for life in self.present()), LEAVE_S, "not all processes leave")


def leaders_of(lives: Iterable[Life]) -> dict[str, Life]:
    """Who leads each shard, by the server's role; one that has not heard of its successor does not."""
    leaders: dict[str, tuple[int, Life]] = {}
    for life in lives:
        for role, epoch in list(life.roles.items()):
            if role.startswith("server.") and (role not in leaders or epoch > leaders[role][0]):
                leaders[role] = (epoch, life)
    return {role: life for role, (_, life) in leaders.items()}


def _epochs(life: Life) -> list[int]:
    return [epoch for role, epoch in list(life.roles.items()) if role.startswith("server.")]


def _leads(life: Life) -> bool:
    return bool(_epochs(life)) or "scheduler" in life.roles
