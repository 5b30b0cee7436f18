"""What a lab has made, written down before it is made, so that it can be removed after any crash.

One folder per lab: `record.json`, the lab's control socket, its hosts file and its log. A lab is held by one
process, its anchor; with the anchor and all processes inside its namespaces gone, the kernel removes the
rest. Nothing is removed here that the record does not name: a process is ended only if it is the recorded
anchor (number and start time) or sits in a recorded namespace (the kernel's cookie).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mlfabric.errors import FabricError
from mlfabric.lab import kernel
from mlfabric.scenario import Scenario, dump, load

ENTER: Final = str(Path(__file__).with_name("enter.py"))
_STOP_S: Final = 10.0


def labs_folder() -> Path:
    """Where this user's labs are recorded."""
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/mlfabric-labs")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "mlfabric-labs"
    return Path(f"/tmp/mlfabric-labs-{os.geteuid()}")


def lab_name(scenario: Scenario, path: str | Path | None = None) -> str:
    """The name a lab of this scenario goes by."""
    name = scenario.name or (Path(path).stem if path is not None else "lab")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40] or "lab"


class Record:
    """The folder of one lab."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def begin(cls, name: str, scenario: Scenario, *, attached: bool) -> Record:
        """A new record; a lab that outlives its maker goes by its name alone, so there is one of it."""
        parent = labs_folder()
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = parent.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise FabricError(f"{parent} belongs to someone else or is writable by others; remove it")
        folder = parent / (f"{name}+{os.getpid()}-{secrets.token_hex(3)}" if attached else name)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise FabricError(
                f"lab {name} is already up; take it down with: mlfabric lab down {name}"
            ) from None
        record = cls(folder)
        (folder / "scenario.toml").write_text(dump(scenario))
        record.write({"name": name, "attached": attached, "boot": kernel.boot_id(), "state": "building"})
        return record

    @property
    def control_path(self) -> str:
        return str(self.folder / "control")

    @property
    def hosts_path(self) -> str:
        return str(self.folder / "hosts")

    def scenario(self) -> Scenario:
        return load(self.folder / "scenario.toml")

    def read(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / "record.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, content: dict[str, Any]) -> None:
        draft = self.folder / "record.json.new"
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(self.folder / "record.json")

    def anchor(self) -> int | None:
        """The number of the anchor, if it lives."""
        content = self.read()
        pid = content.get("anchor")
        if pid is None or content.get("boot") != kernel.boot_id():
            return None
        return pid if kernel.start_ticks(pid) == content.get("anchor_start") else None

    def entry(self, host: str, argv: list[str]) -> list[str]:
        """The command line that runs `argv` on a host of this lab."""
        content = self.read()
        anchor, namespaces = self.anchor(), content.get("namespaces", {})
        if anchor is None:
            raise FabricError(f"lab {content.get('name', self.folder.name)} is not up")
        if host not in namespaces:
            raise FabricError(f"the lab has no host {host}; it has {', '.join(list(namespaces)[1:9])}")
        order = {
            "user": f"/proc/{anchor}/ns/user" if content["in_user_namespace"] else None,
            "net": f"/proc/{anchor}/fd/{namespaces[host]['fd']}",
            "host": host,
            "hosts": self.hosts_path,
            "argv": argv,
        }
        return [sys.executable, "-I", "-S", ENTER, json.dumps(order)]

    def remove(self) -> None:
        """End everything this record names and forget it; fine to repeat, and after any crash."""
        anchor = self.anchor()
        if anchor is not None:
            _end(anchor)
        self._end_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)
        with_nothing_left = self.folder.parent
        if with_nothing_left.is_dir() and not any(with_nothing_left.iterdir()):
            with_nothing_left.rmdir()

    def _end_leftovers(self) -> None:
        """Processes inside namespaces whose anchor was killed; the cookie tells ours from a later one."""
        content = self.read()
        if content.get("boot") != kernel.boot_id():
            return
        cookies = {entry["inode"]: entry["cookie"] for entry in content.get("namespaces", {}).values()}
        give_up = time.monotonic() + _STOP_S
        while time.monotonic() < give_up:
            ours = [
                pid
                for pid, inode in kernel.processes_in(cookies).items()
                if _cookie_of(pid, content.get("in_user_namespace", False)) == cookies[inode]
            ]
            if not ours:
                return
            for pid in ours:
                kernel.send_signal(pid, signal.SIGKILL)
            time.sleep(0.02)
        raise FabricError(f"processes of lab {content.get('name')} do not end: {ours}")


def records() -> Iterator[Record]:
    """All labs this user has recorded."""
    folder = labs_folder()
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if (path / "record.json").exists() or path.is_dir():
                yield Record(path)


def find(name: str) -> Record | None:
    """The lab of that name that outlives its maker."""
    folder = labs_folder() / name
    return Record(folder) if folder.is_dir() else None


def _end(pid: int) -> None:
    """Ask the anchor to take its lab down; insist after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        kernel.send_signal(pid, number)
        give_up = time.monotonic() + _STOP_S
        while kernel.start_ticks(pid) is not None:
            if time.monotonic() > give_up:
                break
            time.sleep(0.005)
        else:
            return


def _cookie_of(pid: int, in_user_namespace: bool) -> int | None:
    order = {
        "user": f"/proc/{pid}/ns/user" if in_user_namespace else None,
        "net": f"/proc/{pid}/ns/net",
        "cookie": True,
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", ENTER, json.dumps(order)], capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None
