"""For programs that run inside a lab: which host am I, and how long does this step straggle?

`lab run` sets MLFABRIC_SCENARIO (a file) and MLFABRIC_HOST; a training script that wants the scenario's
compute stragglers calls `inside().straggle(step)` once per step. Outside a lab both do nothing, so the call
may stay in the script.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlfabric.errors import FabricError
from mlfabric.scenario import Scenario, load

BEGAN: Final = "began"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a lab, or nowhere."""

    scenario: Scenario | None
    host: str | None
    folder: Path | None = None  # of the run
    rank: int = 0

    def straggler_delay_s(self, step: int) -> float:
        """Seconds that this host's step is delayed by, drawn from the scenario's seed."""
        if self.scenario is None or self.host is None or not self.scenario.stragglers:
            return 0.0
        compute_s = self.scenario.compute_s(self.scenario.job()) if self.scenario.jobs else 0.0
        if compute_s == 0.0:
            raise FabricError(
                "the scenario's stragglers delay steps by multiples of a job's 'compute', and it states none"
            )
        return self.scenario.straggler_delay(self.host, step) * compute_s

    def straggle(self, step: int) -> float:
        """Wait as long as this step straggles; the seconds waited."""
        delay_s = self.straggler_delay_s(step)
        time.sleep(delay_s)
        return delay_s

    def begin_together(self, timeout_s: float = 600.0) -> float:
        """Wait until all ranks are here; when the scenario began, by this machine's monotonic clock.

        For runs whose options say `together`. Outside a lab: now.
        """
        if self.folder is None:
            return time.monotonic()
        (self.folder / f"ready-{self.rank}").touch()
        told, give_up = self.folder / BEGAN, time.monotonic() + timeout_s
        while not told.exists():
            if time.monotonic() > give_up:
                raise FabricError(f"the scenario has not begun after {timeout_s:g} s")
            time.sleep(0.005)
        return float(told.read_text())


def is_ready(folder: Path, rank: int) -> bool:
    return (folder / f"ready-{rank}").exists()


def tell_beginning(folder: Path, at: float) -> None:
    """Let the ranks of a run go."""
    draft = folder / f"{BEGAN}.new"
    draft.write_text(repr(at))
    draft.replace(folder / BEGAN)


def inside(environment: Mapping[str, str] | None = None) -> Place:
    """Where this process is, by the variables that the lab sets."""
    values = os.environ if environment is None else environment
    path, host = values.get("MLFABRIC_SCENARIO"), values.get("MLFABRIC_HOST")
    if not path or not host:
        return Place(None, None)
    folder = values.get("MLFABRIC_RUN_FOLDER")
    return Place(load(path), host, Path(folder) if folder else None, int(values.get("RANK", "0")))
