"""Packet captures of a run, one file per host, taken at the host's port of the switch.

tcpdump where we are root, dumpcap else or instead: both with nanosecond stamps and 96 bytes of each frame.
The port sees every frame of the host's link, after its shaping, and goes on when the host is killed.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlfabric.errors import FabricError
from mlfabric.lab.blueprint import SWITCH
from mlfabric.lab.record import Record

SNAP_BYTES: Final = 96
_BUFFER_MIB: Final = 16
_START_S: Final = 15.0
# The kernel hands frames over in blocks, each at the latest a second after its first frame (tcpdump's
# timeout); a capture ended before that lacks the last block.
_SETTLE_S: Final = 1.1
_TCPDUMP_DROPS: Final = re.compile(r"(\d+) packets? dropped by (?:kernel|interface)")
_TCPDUMP_FRAMES: Final = re.compile(r"(\d+) packets? captured")
_DUMPCAP_FRAMES: Final = re.compile(r"received/dropped on interface .*: (\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Captured:
    host: str
    file: str
    frames: int
    dropped: int


class Captures:
    """All captures of one run, from `start` to `stop`."""

    def __init__(self, record: Record, ports: dict[str, str], folder: Path, *, as_user: bool) -> None:
        self._record = record
        self._ports = ports  # host to device of the switch
        self._folder = folder
        self._program = _choose_program(as_user)
        self._running: list[tuple[str, Path, Path, subprocess.Popen[bytes]]] = []

    def start(self) -> None:
        """Returns when every capture is taking frames."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for host, device in self._ports.items():
            file = self._folder / f"{host}.{'pcap' if self._program == 'tcpdump' else 'pcapng'}"
            story = self._folder / f"{host}.{self._program}.log"
            with story.open("wb") as log:
                process = subprocess.Popen(
                    self._record.entry(SWITCH, self._command(device, file)),
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
                )  # fmt: skip
            self._running.append((host, file, story, process))
        sign = "listening on" if self._program == "tcpdump" else "File:"
        give_up = time.monotonic() + _START_S
        for host, _, story, process in self._running:
            while sign not in story.read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > give_up:
                    said = story.read_text(errors="replace").strip().splitlines() or ["nothing"]
                    raise FabricError(f"{self._program} does not start on {host}: it said {said[-1]!r}")
                time.sleep(0.005)

    def stop(self) -> list[Captured]:
        """End the captures and say what each holds and what the kernel dropped of it."""
        if self._running:
            time.sleep(_SETTLE_S)
        for _, _, _, process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        results = []
        for host, file, story, process in self._running:
            try:
                process.wait(_START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            said = story.read_text(errors="replace")
            results.append(Captured(host, str(file), *self._counts(said)))
            story.unlink()
        self._running = []
        return results

    def _command(self, device: str, file: Path) -> list[str]:
        if self._program == "tcpdump":
            return [
                "tcpdump", "-i", device, "-s", str(SNAP_BYTES), "-B", str(_BUFFER_MIB * 1024), "-n",
                "--time-stamp-precision=nano", "-Z", "root", "-w", str(file),
            ]  # fmt: skip
        return ["dumpcap", "-q", "-i", device, "-s", str(SNAP_BYTES), "-B", str(_BUFFER_MIB), "-w", str(file)]

    def _counts(self, said: str) -> tuple[int, int]:
        if self._program == "tcpdump":
            frames = _TCPDUMP_FRAMES.search(said)
            return (int(frames.group(1)) if frames else 0), sum(map(int, _TCPDUMP_DROPS.findall(said)))
        both = _DUMPCAP_FRAMES.search(said)
        return (int(both.group(1)), int(both.group(2))) if both else (0, 0)


def _choose_program(as_user: bool) -> str:
    # In a user namespace tcpdump fails at changing to a user the namespace does not know.
    for program in ("dumpcap",) if as_user else ("tcpdump", "dumpcap"):
        if shutil.which(program):
            return program
    if as_user:
        raise FabricError(
            "captures without root need dumpcap; install it (Debian: wireshark-common), or use root"
        )
    raise FabricError(
        "captures need tcpdump or dumpcap; install one, on Debian with: apt-get install tcpdump"
    )
