"""How long a worker's step takes: one rule for the simulator's clock and for trainers in the lab."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

from mlfabric.scenario import JobSpec, Scenario, uniform

_NORMAL: Final = NormalDist()


def step_factor(scenario: Scenario, job: JobSpec, host: str, step: int) -> float:
    """A step's time in nominal ones: its jitter, and what straggling adds."""
    factor = 1.0
    if job.compute_jitter > 0:
        draw = uniform(scenario.seed, "jitter", job.name, host, step)
        factor = math.exp(job.compute_jitter * _NORMAL.inv_cdf(min(max(draw, 1e-12), 1 - 1e-12)))
    return factor + scenario.straggler_delay(host, step)
