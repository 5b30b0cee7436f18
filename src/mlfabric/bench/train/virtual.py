"""The same run under the virtual clock: the simulator's network and servers, real gradients of the same task.

What a lab needs minutes and an idle machine for takes less here, and tells how soon a target would be reached
if hosts and links did what the simulator says. Every update is computed from the model its worker held.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from mlfabric import scenario as scenarios
from mlfabric.bench.train.adam import ArrayAdam
from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.running import RESULT, write_record
from mlfabric.bench.train.settings import REACHED_IN_A_ROW, RunSettings, fit
from mlfabric.bench.train.task import (
    Batches,
    Fashion,
    accuracy,
    flat_weights,
    load_weights,
    loss_of,
    make_model,
)
from mlfabric.numerics import Vector
from mlfabric.scenario import Seconds
from mlfabric.sim.results import simulate_jobs


class TaskLearner:
    """The model and its optimizer; steps as torch's Adam makes them, one per message.

    Gradients that arrive together and weigh the same are a synchronous step, by their mean as in DDP.
    """

    def __init__(self, settings: RunSettings, data: Fashion) -> None:
        self._settings, self._data = settings, data
        self._module = make_model(settings.seed)
        self._weights = flat_weights(self._module).copy()
        self._adam = ArrayAdam(settings.step_size, len(self._weights))
        self._moved = np.zeros_like(self._weights)  # by the last step
        self._batches = Batches(settings.seed, 0, len(data.labels), settings.batch)
        self._drawn = 0
        self._next_s = settings.snapshot_s
        self._in_a_row = 0
        self.curve: list[tuple[float, float]] = []
        self.done = False
        self.diverged_s: float | None = None

    def read(self, ahead: float = 0.0) -> Vector | None:
        """The model; or where it should be so many steps later, if each moves it as the last one did."""
        if self.done:
            return None
        # Steps make new arrays, so that the old ones may be kept as they are.
        return self._weights + np.float32(ahead) * self._moved if ahead else self._weights

    def compute(self, model: Any, steps: int = 1) -> Vector | None:
        """The gradient of a fresh batch; of several local steps their sum, each from where the last led."""
        if self.done or model is None:
            return None
        total: Vector | None = None
        local = copy.deepcopy(self._adam) if steps > 1 else None
        for number in range(steps):
            gradient = self._gradient(model)
            total = gradient if total is None else total + gradient
            if local is not None and number + 1 < steps:
                model = model + local.step(gradient)
        return total

    def _gradient(self, weights: Vector) -> Vector:
        load_weights(self._module, weights)
        self._module.zero_grad()
        indices = self._batches.indices(self._drawn)
        self._drawn += 1
        loss_of(self._module, self._data, indices).backward()
        gradient: Vector = torch.cat([p.grad.reshape(-1) for p in self._module.parameters()]).numpy()
        return gradient

    def apply(self, gradients: list[Any], weights: list[float], now: float) -> None:
        known = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
        if self.done or not known:
            return
        whole = sum(weight for _, weight in known)
        mean = sum(gradient * np.float32(weight / whole) for gradient, weight in known)
        together = len(known) > 1
        self._moved = self._adam.step(mean, 1.0 if together else whole)
        self._weights = self._weights + self._moved
        if now >= self._next_s:
            self._look(now)

    def _look(self, now: float) -> None:
        self._next_s = now + self._settings.snapshot_s
        if not np.isfinite(self._weights).all():
            self.done, self.diverged_s = True, now
            return
        load_weights(self._module, self._weights)
        found = accuracy(self._module, self._data)
        self.curve.append((now, found))
        self._in_a_row = self._in_a_row + 1 if found >= max(self._settings.targets) else 0
        self.done = self._in_a_row >= REACHED_IN_A_ROW


def simulate_run(
    settings: RunSettings,
    folder: Path,
    data_folder: Path,
    stop_s: float = math.inf,
    told: Callable[[float], None] = lambda seconds: None,
) -> RunResult:
    """One run in virtual time, written down as one in a lab would be."""
    entry = find_entry(settings.contender)
    torch.set_num_threads(1)
    seconds = min(settings.limit_s, stop_s)
    scenario = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
    scenario = msgspec.structs.replace(scenario, duration=Seconds(seconds))
    learner = TaskLearner(settings, Fashion(data_folder))
    (run,) = simulate_jobs(scenario, entry.policy, told, lambda: learner)
    tally = run.tally
    links = zip(run.world.links, run.world.carried, strict=True)
    result = RunResult(
        settings=settings,
        seconds=seconds,
        diverged_s=learner.diverged_s,
        ended_early=False,
        curve=learner.curve,
        steps=tally.committed,
        updates=tally.committed,
        dropped=tally.dropped + tally.dropped_late,
        delays=dict(Counter(tally.delays)),
        overran_share=0.0,
        gradient_s=0.0,
        compute_s=run.mean_compute_s,
        exchange_s=max(len(run) * seconds / max(tally.committed, 1) - run.mean_compute_s, 0.0),
        cpu_share=0.0,
        link_bytes={f"{link.owner}.{link.direction}": int(carried) for link, carried in links},
        steps_by_rank=[tally.by_worker.get(worker, 0) for worker in range(len(run))],
        simulated=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / RESULT, result)
    return result
