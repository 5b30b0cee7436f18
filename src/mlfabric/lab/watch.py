"""What can be seen of a run while it lasts: link counters, how busy the machine is, lines of the logs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlfabric.lab.manifest import MachineLoad
from mlfabric.lab.session import Lab

_TRAFFIC_BPS = 1e6  # below, a run is starting up, computing or over


@dataclass(frozen=True, slots=True)
class LinkSample:
    """What all links did since the last sample."""

    wire_bps: float  # into all hosts together
    dropped_frames: int  # since the lab was made


class LinkSampler:
    """Reads the link counters now and then and appends them to a CSV file."""

    def __init__(self, lab: Lab, file: Path, every_s: float) -> None:
        self._load = MachineLoad()
        self._lab, self._file, self._every_s = lab, file, every_s
        self._downlinks = {f"{name}.down" for name in lab.scenario.host_names()}
        self._next = 0.0
        self._last: tuple[float, int] | None = None

    def busy_share(self) -> float:
        """How busy the processors were while there was traffic."""
        return self._load.busy_share()

    def sample_if_due(self, seconds: float) -> LinkSample | None:
        """`seconds` is the time of the run to write down."""
        return self.sample(seconds) if time.monotonic() >= self._next else None

    def sample(self, seconds: float) -> LinkSample:
        counters = self._lab.counters()
        new = not self._file.exists()
        with self._file.open("a") as out:
            if new:
                out.write("time_s,link,sent_bytes,sent_frames,dropped_frames,backlog_bytes\n")
            for link, count in counters.items():
                out.write(f"{seconds:.3f},{link},{','.join(str(value) for value in count.values())}\n")
        self._next = time.monotonic() + self._every_s
        arrived = sum(counters[link]["sent_bytes"] for link in self._downlinks)
        before_s, before = self._last or (seconds, arrived)
        self._last = (seconds, arrived)
        wire_bps = 8 * (arrived - before) / (seconds - before_s) if seconds > before_s else 0.0
        self._load.update(counts=wire_bps > _TRAFFIC_BPS)
        return LinkSample(wire_bps, sum(count["dropped_frames"] for count in counters.values()))


class LogTail:
    """Follows a growing file and passes whole lines on."""

    def __init__(self, file: str, on_line: Callable[[str], None]) -> None:
        self._file, self._on_line = file, on_line
        self._at = 0
        self._rest = b""

    def read(self, *, final: bool = False) -> None:
        if os.path.getsize(self._file) == self._at and not final:
            return
        with open(self._file, "rb") as log:
            log.seek(self._at)
            text = self._rest + log.read()
            self._at = log.tell()
        *lines, self._rest = text.split(b"\n")
        if final and self._rest:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))
