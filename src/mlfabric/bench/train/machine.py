"""Is this machine quick enough for runs to count? Asked before hours are spent on them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from mlfabric import scenario as scenarios
from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.settings import MOST_CPU, RunSettings, ceilings, fit
from mlfabric.bench.train.task import Batches, Fashion, loss_of, make_model

PASSES: Final = 12
WARM_UP: Final = 3
# Of the processors, workers that never wait use as much in all for each second spent on gradients: 2.7 to 3.2
# times where a gradient took 15 and 8 ms of two processors, 4 times on a machine whose kernel is slow, too.
# So a share is told of before it is the largest that counts.
ALL_BY_GRADIENTS: Final = 3.0
TOLD_FROM: Final = 0.5


def measure_gradient(data: Fashion, batch: int) -> float:
    """Seconds that a worker's gradient takes here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module, batches = make_model(0), Batches(0, 0, len(data.images), batch)
        took = []
        for step in range(WARM_UP + PASSES):
            began = time.perf_counter()
            module.zero_grad()
            loss_of(module, data, batches.indices(step)).backward()
            took.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return statistics.median(took[WARM_UP:])


def strain(settings: RunSettings, gradient_s: float, processors: int) -> str | None:
    """What is to be said where workers that never wait would keep this machine too busy; None: nothing."""
    found = ceilings(fit(scenarios.load(scenarios.find(settings.scenario)), settings), settings.limit_s)
    share = found.compute_per_s * gradient_s / processors
    if ALL_BY_GRADIENTS * share <= TOLD_FROM:
        return None
    return (
        f"{settings.scenario}: a gradient takes {1000 * gradient_s:.0f} ms here, and workers that never wait "
        f"make {found.compute_per_s:.0f} a second; that keeps {processors} processors {share:.0%} busy with "
        f"gradients alone and some {ALL_BY_GRADIENTS:g} times as busy in all. Runs above {MOST_CPU:.0%} do "
        "not count: if they are, take a slower --rate, a longer --compute or fewer --workers"
    )


def strains(runs: Iterable[RunSettings], data: Path) -> list[str]:
    """What is to be said before these runs are made, once for each scenario."""
    heavy = {run.scenario: run for run in runs if find_entry(run.contender).heavy}
    if not heavy:
        return []
    images = Fashion(data)
    took = {batch: measure_gradient(images, batch) for batch in {run.batch for run in heavy.values()}}
    processors = os.cpu_count() or 1
    said = (strain(run, took[run.batch], processors) for run in heavy.values())
    return [each for each in said if each is not None]
