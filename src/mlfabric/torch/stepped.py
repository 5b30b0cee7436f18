"""Training by steps that the scheduler calls, as far as all ways of it are alike: the trainer's side.

The model and the optimizer live at every worker. Every worker applies the mean of every step it took part in,
in their order, with its own optimizer, so workers that hold the same step hold the same bits. The settings of
the optimizer count as the mean of the contributors' too, since workers' schedules are not at the same place.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from mlfabric.api import Fabric
from mlfabric.errors import FabricError
from mlfabric.events import TrainingEnded
from mlfabric.numerics import Vector
from mlfabric.torch.calledsteps import CalledSteps, StepResult
from mlfabric.torch.flat import FlatModel
from mlfabric.torch.modes import Wishes
from mlfabric.torch.optimizers import read_optimizer
from mlfabric.torch.plainstate import read_state, set_state
from mlfabric.ways import different_mode

# A gradient goes into a step so many steps after the one whose model it is of, at most.
MAX_DELAY: Final = 8
# How often one that waits for the others looks whether they train in another way, or have left.
LOOK_S: Final = 0.2


class SteppedTraining(ABC):
    """`settled` is called with the delay of each own gradient that went into a step, None for a dropped one;
    `skipped` when a step's gradients were infinite."""

    way: str
    _steps: CalledSteps

    def __init__(
        self,
        fabric: Fabric,
        flat: FlatModel,
        optimizer: torch.optim.Optimizer,
        wishes: Wishes,
        timeout: float,
        settled: Callable[[int | None], None],
        skipped: Callable[[], None],
    ) -> None:
        self._fabric, self._flat, self._optimizer = fabric, flat, optimizer
        self._client = fabric._client
        self._max_delay = wishes.max_delay if isinstance(wishes.max_delay, int) else MAX_DELAY
        self._settled, self._skipped = settled, skipped
        self._timeout = timeout
        self._scaled = False  # a gradient scaler is used: steps may be skipped
        self._vectors = read_optimizer(optimizer, flat.parameters).rule(flat.trained, 0, 1).vectors
        self._settings = len(optimizer_settings(optimizer))
        self._elements = flat.elements + self._settings
        self._state_elements = flat.elements + self._vectors * flat.trained + 2
        self._base = -1
        self._prepare(wishes)
        self._join()

    @abstractmethod
    def _prepare(self, wishes: Wishes) -> None:
        """Have `_steps`, and what else there is to have before the first values come."""

    @property
    def version(self) -> int:
        """Steps in the model that this worker has now."""
        return max(self._steps.applied, 0)

    @abstractmethod
    def step(self, take: Callable[[], Vector], scaled: bool) -> None:
        """Give the gradient that `take` gives, and go on with a model."""

    @abstractmethod
    def _report(self, waits: bool = False) -> None:
        """Tell the scheduler where this worker stands; `waits`: it computes nothing."""

    @abstractmethod
    def _compute(self) -> None:
        """The trainer begins to compute with the model as it is."""

    def weights(self) -> Vector:
        """The parameters of the common model that this worker has, in one vector of its own."""
        return self._held()[: self._flat.trained].copy()

    def catch_up(self) -> None:
        """Apply what has come."""
        self._apply_all()
        self._flat.clear_gradients()
        self._base = self._steps.applied

    def finish(self) -> None:
        """Take part no more, with the model as it is here."""
        self.catch_up()
        self._client.tell_stepper(TrainingEnded())

    def look_on(self, until: Callable[[], bool], limit: float | None) -> None:
        """Take the steps of others without giving to any; whoever waits longer than `limit` is told."""
        self.catch_up()
        with self._steps.changed:
            self._steps.withdraw()
        self._report(waits=True)
        over = time.monotonic() + limit if limit is not None else None
        while not until():
            if over is not None and time.monotonic() >= over:
                raise TimeoutError(f"{self._fabric.worker_count - 1} workers still train (after {limit:g} s)")
            with self._steps.changed:
                self._steps.changed.wait_for(lambda: bool(self._steps.results), LOOK_S)
            self.catch_up()

    def _join(self) -> None:
        """Get the first values: with all others at the beginning, or from those who train already."""
        until = time.monotonic() + self._timeout
        self._report(waits=True)
        while self._steps.applied < 0:
            published = self._client.settings
            if published is not None:
                raise FabricError(different_mode(self.way, published.way))
            if time.monotonic() >= until:
                raise TimeoutError(f"the workers of the job are not all here (after {self._timeout:g} s)")
            with self._steps.changed:
                self._steps.changed.wait_for(self._has_news, LOOK_S)
            self._apply_all()
            self._check()
        self._compute()

    # --- waiting and applying ---------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return bool(self._steps.results) or self._steps.failed is not None

    def _wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        with self._steps.changed:
            over = self._steps.changed.wait_for(lambda: done() or self._steps.failed is not None, timeout)
            self._check()
            return over

    def _check(self) -> None:
        if self._steps.failed is not None:
            raise FabricError(self._steps.failed)

    def _apply_all(self) -> None:
        while True:
            with self._steps.changed:
                if not self._steps.results:
                    return
                result = self._steps.results.popleft()
                self._apply(result)
                self._steps.applied = result.step + 1
                self._steps.changed.notify_all()
            self._steps.release(result.mean)
            for delay in result.delays:
                self._settled(delay)

    def _apply(self, result: StepResult) -> None:
        flat, mean = self._flat, result.mean
        if result.state is not None:
            self._load(result.state)
        if result.step < 0:
            flat.load(mean[: flat.elements])
            return
        if not result.gradients:
            return
        flat.values[flat.trained :] = torch.from_numpy(mean[flat.trained : flat.elements])
        if self._scaled and not np.isfinite(mean[: flat.trained]).all():
            self._skipped()
            return
        flat.set_gradients(mean[: flat.elements])
        with self._settings_of(mean[flat.elements : self._elements].tolist()):
            self._optimizer.step()
        flat.clear_gradients()  # the mean's memory is used again

    @contextmanager
    def _settings_of(self, numbers: list[float]) -> Iterator[None]:
        """Have the optimizer step by these settings, the mean of all who give to a step."""
        own = optimizer_settings(self._optimizer)
        _set_settings(self._optimizer, numbers)
        try:
            yield
        finally:
            _set_settings(self._optimizer, own)

    # --- what others get --------------------------------------------------------------------------------

    def _held(self) -> Vector:
        """The common model."""
        values: Vector = self._flat.values.numpy()
        return values

    def _values(self, vector: Vector) -> None:
        vector[: self._flat.elements] = self._held()
        vector[self._flat.elements :] = 0

    def _state(self, vector: Vector) -> None:
        """Values, optimizer vectors, and how many steps the optimizer has counted."""
        flat = self._flat
        held, steps = read_state(self._optimizer, flat.parameters, self._vectors, flat.trained)
        vector[:-2] = np.concatenate([self._held(), *held])
        vector[-2:] = np.array([steps], np.int64).view(np.float32)

    def _load(self, vector: Vector) -> None:
        flat = self._flat
        flat.load(vector[: flat.elements])
        held = vector[flat.elements : -2].reshape(self._vectors, flat.trained)
        steps = int(vector[-2:].copy().view(np.int64)[0])
        set_state(self._optimizer, flat.parameters, list(held), steps)


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[float]:
    """The numbers that a schedule may change, group by group."""
    return [number for group, key in _keys(optimizer) for number in _numbers(group[key])]


def _set_settings(optimizer: torch.optim.Optimizer, numbers: list[float]) -> None:
    rest = iter(numbers)
    for group, key in _keys(optimizer):
        held = group[key]
        group[key] = tuple(next(rest) for _ in held) if isinstance(held, tuple) else next(rest)


def _keys(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], str]]:
    return [
        (group, key)
        for group in optimizer.param_groups
        for key in sorted(optimizer.defaults)
        if key in group and _numbers(group[key])
    ]


def _numbers(held: Any) -> list[float]:
    if isinstance(held, tuple):
        return [float(each) for each in held]
    return [float(held)] if isinstance(held, int | float) and not isinstance(held, bool) else []
