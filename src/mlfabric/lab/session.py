"""The lab from Python: `with Lab(scenario) as lab: lab.host("w3").set_rate("50mbit")`.

A Lab is a handle on an anchor process that holds the namespaces; leaving the `with` takes all of it down,
and so does the end of this process, however it ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mlfabric.errors import FabricError
from mlfabric.lab.record import Record, find, lab_name
from mlfabric.scenario import Scenario, load_named
from mlfabric.units import parse_rate, parse_size

if TYPE_CHECKING:
    from mlfabric.lab.run import RunOptions, RunResult


class Lab:
    """A cluster in a box. `scenario` is one, or the path or shipped name of one."""

    def __init__(
        self, scenario: Scenario | str | Path, *, name: str | None = None, verify: bool = True
    ) -> None:
        path = None if isinstance(scenario, Scenario) else scenario
        self.scenario = scenario if isinstance(scenario, Scenario) else load_named(scenario)
        self.name = name or lab_name(self.scenario, path)
        self._verify = verify
        self._mine = True
        self._record: Record | None = None
        self._anchor: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._replies = b""
        self._turn = threading.Lock()

    @classmethod
    def attach(cls, name: str) -> Lab:
        """A handle on a lab that `lab up` made."""
        record = find(name)
        if record is None or record.anchor() is None:
            raise FabricError(f"lab {name} is not up; make it with: mlfabric lab up SCENARIO")
        lab = cls(record.scenario(), name=name)
        lab._record = record
        lab._mine = False
        lab._connect()
        return lab

    def __enter__(self) -> Self:
        if self._record is None:
            self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._mine:
            self.down()
        else:
            self.leave()

    def up(self, *, attached: bool = True) -> None:
        """Build it. An attached lab goes when this process goes; another stays until `down`."""
        if not sys.platform.startswith("linux"):
            raise FabricError("a lab is made of Linux network namespaces; this system has none")
        if importlib.util.find_spec("pyroute2") is None:
            raise FabricError("the lab needs pyroute2; install it with: pip install 'mlfabric[lab]'")
        if self._record is not None:
            raise FabricError(f"lab {self.name} is up already")
        self._record = Record.begin(self.name, self.scenario, attached=attached)
        try:
            self._start_anchor(attached)
            self._connect()
        except BaseException:
            self.down()
            raise

    def leave(self) -> None:
        """Let go of a lab that stays up."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def down(self) -> None:
        """Remove all of it; fine to repeat."""
        self.leave()
        if self._record is not None:
            self._record.remove()
            self._record = None
        if self._anchor is not None:
            if self._anchor.stdin is not None:
                self._anchor.stdin.close()
            self._anchor.wait()
            self._anchor = None

    @property
    def hosts(self) -> list[LabHost]:
        return [LabHost(self, name) for name in self.scenario.host_names()]

    def host(self, name: str) -> LabHost:
        if name not in self.scenario.host_names():
            raise FabricError(
                f"the lab has no host {name}; it has {', '.join(self.scenario.host_names()[:8])}"
            )
        return LabHost(self, name)

    def cut(self, first: str, second: str | None = None, *, direction: str = "both") -> None:
        """Cut a host off, or the path between two; "out" and "in" are seen from the first."""
        self.ask("cut", first=first, second=second, direction=_checked_direction(direction))

    def heal(self, first: str, second: str | None = None, *, direction: str = "both") -> None:
        self.ask("heal", first=first, second=second, direction=_checked_direction(direction))

    def play(self) -> float:
        """Begin the scenario's trace, faults and background traffic; the wall time of its beginning."""
        return float(self.ask("play"))

    def done(self, since: int = 0) -> list[dict[str, Any]]:
        """What has been done to the lab so far, from number `since` on."""
        return list(self.ask("done", since=since))

    def counters(self) -> dict[str, dict[str, int]]:
        """For each direction of each link ("w3.up"), what it carried, dropped and holds."""
        return dict(self.ask("counters"))

    def describe(self) -> dict[str, Any]:
        return dict(self.ask("describe"))

    def use_plain_frames(self) -> None:
        """Have every link carry frames of at most 1,514 bytes, one by one, whatever that costs."""
        self.ask("plain_frames")

    def measure(self, owner: str, direction: str) -> float:
        """Wire bits per second that this direction of the link carries, by trying."""
        return float(self.ask("measure", owner=owner, direction=direction)["measured_bps"])

    def run(self, command: Sequence[str], options: RunOptions | None = None) -> RunResult:
        """Run one rank of the command on each host while the scenario plays; see `mlfabric lab run`."""
        from mlfabric.lab.run import RunOptions, run_ranks

        return run_ranks(self, list(command), options or RunOptions())

    @property
    def record(self) -> Record:
        if self._record is None:
            raise FabricError(f"lab {self.name} is not up")
        return self._record

    def ask(self, do: str, **request: Any) -> Any:
        """A request to the anchor; its complaint becomes a FabricError."""
        result, fds = self._exchange({"do": do, **request})
        for fd in fds:
            os.close(fd)
        return result

    def open_socket(self, host: str, family: int, kind: int, protocol: int) -> socket.socket:
        _, fds = self._exchange(
            {"do": "socket", "host": host, "family": int(family), "kind": int(kind), "protocol": protocol}
        )
        return socket.socket(family, kind, protocol, fileno=fds[0])

    def _exchange(self, request: dict[str, Any]) -> tuple[Any, list[int]]:
        with self._turn:
            if self._control is None:
                raise FabricError(f"lab {self.name} is not up")
            fds: list[int] = []
            try:
                self._control.sendall(json.dumps(request).encode() + b"\n")
                while b"\n" not in self._replies:
                    more, new_fds, _, _ = socket.recv_fds(self._control, 1 << 20, 4)
                    fds += new_fds
                    if not more:
                        raise FabricError(f"lab {self.name} has gone down")
                    self._replies += more
            except OSError as error:
                raise FabricError(f"lab {self.name} does not answer: {error.strerror}") from None
            line, _, self._replies = self._replies.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise FabricError(reply["error"])
        return reply["result"], fds

    def _start_anchor(self, attached: bool) -> None:
        log = open(self.record.folder / "anchor.log", "wb")  # noqa: SIM115 - handed to the child
        with log:
            self._anchor = subprocess.Popen(
                [sys.executable, "-m", "mlfabric.lab.anchor", str(self.record.folder),
                 "attached" if attached else "detached", "verify" if self._verify else "trust"],
                stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._anchor.stdout is not None
        with self._anchor.stdout as said:
            line = said.readline()
        if not attached:
            self._anchor.wait()
            self._anchor = None
        if not line:
            story = (self.record.folder / "anchor.log").read_text(errors="replace").strip().splitlines()
            raise FabricError(f"the lab's anchor failed: {story[-1] if story else 'it said nothing'}")
        answer = json.loads(line)
        if "error" in answer:
            raise FabricError(answer["error"])

    def _connect(self) -> None:
        # By way of /proc/self/fd, because the path of a Unix socket has room for 107 bytes.
        folder = os.open(self.record.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                control.connect(f"/proc/self/fd/{folder}/control")
            except OSError as error:
                control.close()
                raise FabricError(f"lab {self.name} does not answer: {error.strerror}") from None
            self._control = control
        finally:
            os.close(folder)


class LabHost:
    """One host of a lab."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self.name = name

    @property
    def address(self) -> str:
        return str(self._lab.describe()["hosts"][self.name])

    def set_rate(
        self,
        rate: str | float | None = None,
        *,
        up: str | float | None = None,
        down: str | float | None = None,
    ) -> None:
        """New wire rates, in force when this returns; numbers are bits per second."""
        change = {
            way: parse_rate(value)
            for way, value in (
                ("up", up if up is not None else rate),
                ("down", down if down is not None else rate),
            )
            if value is not None
        }
        for way, value in change.items():
            if value < 8_000:
                raise FabricError(
                    f"{self.name}.{way} can't be set to {value:g} bit/s; cut it, or use 8 kbit or more"
                )
        self._lab.ask("set_rate", host=self.name, **change)

    def set_queue(self, size: str | int) -> None:
        """Bytes that the queues of both directions hold before they drop."""
        self._lab.ask("set_rate", host=self.name, queue=parse_size(size))

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; takes what `subprocess.Popen` takes."""
        return subprocess.Popen(self._lab.record.entry(self.name, list(argv)), **options)

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on this host to its end; takes what `subprocess.run` takes."""
        return subprocess.run(self._lab.record.entry(self.name, list(argv)), **options)

    def socket(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
    ) -> socket.socket:
        """A socket of this process that lives on the host's network."""
        return self._lab.open_socket(self.name, family, kind, protocol)

    def cut(self, direction: str = "both") -> None:
        self._lab.cut(self.name, direction=direction)

    def heal(self, direction: str = "both") -> None:
        self._lab.heal(self.name, direction=direction)

    def kill(self) -> list[int]:
        """End all that runs on the host, at once; which processes that were."""
        return list(self._lab.ask("signal", host=self.name, fault="kill"))

    def pause(self) -> list[int]:
        return list(self._lab.ask("signal", host=self.name, fault="pause"))

    def resume(self) -> list[int]:
        return list(self._lab.ask("signal", host=self.name, fault="resume"))

    def __repr__(self) -> str:
        return f"<LabHost {self.name} of {self._lab.name}>"


def _checked_direction(direction: str) -> str:
    if direction not in ("both", "in", "out"):
        raise FabricError(f"a cut goes both ways, 'in' or 'out', not {direction!r}")
    return direction


def take_down(name: str) -> bool:
    """Remove a lab by its name, whatever state it is in; whether there was one."""
    record = find(name)
    if record is None:
        return False
    with contextlib.suppress(FileNotFoundError):
        record.remove()
    return True
