"""What a run's manifest says about the machine: versions of all that matters, and how busy it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def versions() -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count() or 0,
    }
    for package in ("mlfabric", "numpy", "msgspec", "pyroute2", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    if control.exists():
        found["tcp_congestion_control"] = control.read_text().strip()
    return found


class MachineLoad:
    """The share of all processors' time that was used, over those stretches that count."""

    def __init__(self) -> None:
        self._last = _times()
        self._total = self._busy = self._stolen = self._nice = 0

    def update(self, *, counts: bool = True) -> None:
        """The stretch since the last call is over."""
        before, self._last = self._last, _times()
        if counts:
            self._total += self._last[0] - before[0]
            self._busy += self._last[1] - before[1]
            self._stolen += self._last[2] - before[2]
            self._nice += self._last[3] - before[3]

    def busy_share(self) -> float:
        return self._busy / self._total if self._total > 0 else 0.0

    def stolen_share(self) -> float:
        """Of that time, what a hypervisor gave to other machines: timers are late then, links carry less."""
        return self._stolen / self._total if self._total > 0 else 0.0

    def nice_share(self) -> float:
        """Of that time, what programs of low priority had: they give way, but not at once."""
        return self._nice / self._total if self._total > 0 else 0.0


def _times() -> tuple[int, int, int, int]:
    """Ticks in all, not idle, stolen and of low priority, of all processors together."""
    with open("/proc/stat") as stat:
        values = [int(field) for field in stat.readline().split()[1:9]]
    idle = values[3] + values[4]
    return sum(values), sum(values) - idle, values[7], values[1]
