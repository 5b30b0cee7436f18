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

from mlfabric.errors import FabricError
from mlfabric.scenario import Scenario, load


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a lab, or nowhere."""

    scenario: Scenario | None
    host: str | None

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


def inside(environment: Mapping[str, str] | None = None) -> Place:
    """Where this process is, by the variables that the lab sets."""
    values = os.environ if environment is None else environment
    path, host = values.get("MLFABRIC_SCENARIO"), values.get("MLFABRIC_HOST")
    if not path or not host:
        return Place(None, None)
    return Place(load(path), host)
