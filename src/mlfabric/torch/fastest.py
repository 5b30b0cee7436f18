"""Training by steps among the workers that are fast now: the trainer's side.

The model and the optimizer live at every worker, as in mode sync. A worker offers its gradient, waits for the
step that takes it (or, overlapped, computes on) and applies the mean of every step it took part in, in their
order, with its own optimizer. So workers that hold the same step hold the same bits. The settings of the
optimizer count as the mean of the contributors' too, since workers' schedules are not at the same place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from mlfabric.api import Fabric
from mlfabric.errors import FabricError
from mlfabric.events import TrainingEnded, TrainingReported
from mlfabric.numerics import Vector
from mlfabric.torch.calledsteps import CalledSteps, Offer, StepResult
from mlfabric.torch.flat import FlatModel
from mlfabric.torch.modes import Wishes
from mlfabric.torch.optimizers import read_optimizer
from mlfabric.torch.plainstate import read_state, set_state
from mlfabric.ways import FASTEST, different_mode

# A gradient goes into a step so many steps after the one whose model it is of, at most.
MAX_DELAY: Final = 8
# How often one that waits for the others looks whether they train in another way, or have left.
LOOK_S: Final = 0.2


class Fastest:
    """`settled` is called with the delay of each own gradient that went into a step, None for a dropped one;
    `skipped` when a step's gradients were infinite."""

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
        self._overlapped = wishes.pull == "overlapped"
        self._max_delay = wishes.max_delay if isinstance(wishes.max_delay, int) else MAX_DELAY
        self._settled, self._skipped = settled, skipped
        self._timeout = timeout
        self._scaled = False  # a gradient scaler is used: steps may be skipped
        self._vectors = read_optimizer(optimizer, flat.parameters).rule(flat.trained, 0, 1).vectors
        self._settings = len(_settings(optimizer))
        self._elements = flat.elements + self._settings
        self._state_elements = flat.elements + self._vectors * flat.trained + 2
        self._steps = CalledSteps(
            fabric.name, self._client, self._elements, self._state_elements, self._values, self._state
        )
        self._gradient = np.empty(self._elements, np.float32)
        self._base = -1
        self._began = 0.0
        self._stepped = False
        self._join()

    @property
    def version(self) -> int:
        """Steps in the model that this worker has now."""
        return max(self._steps.applied, 0)

    # --- steps ------------------------------------------------------------------------------------------

    def step(self, take: Callable[[], Vector], scaled: bool) -> None:
        """Give the gradient that `take` gives to a step, and go on with the model that comes of it."""
        self._scaled = scaled
        # The first time is not like the others: much is done for the first time.
        computed_s = time.monotonic() - self._began if self._stepped else None
        self._stepped = True
        if self._overlapped:
            self._wait(lambda: self._steps.offer is None)
        gradient = self._gradient
        gradient[: self._flat.elements] = take()
        gradient[self._flat.elements :] = _settings(self._optimizer)
        offer = self._offer(gradient)
        if offer is None:
            self._settled(None)
        else:
            self._report(offer, waits=not self._overlapped, computed_s=computed_s)
            if not self._overlapped:
                self._apply_until(lambda: self._steps.offer is None)
        self._compute()

    def _offer(self, gradient: Vector) -> Offer | None:
        """Once all that has come is applied; None: steps have left the gradient behind."""
        while True:
            self._apply_all()
            with self._steps.changed:
                if self._steps.results:
                    continue
                offer = Offer(gradient, self._base, self._base + self._max_delay)
                if self._steps.applied > offer.until:
                    return None
                self._steps.offer = offer
                return offer

    def _compute(self) -> None:
        """The trainer begins to compute with the model as it is."""
        self._flat.point_gradients()
        self._base = self._steps.applied
        self._began = time.monotonic()
        if not self._overlapped or self._steps.offer is None:
            self._report()

    def catch_up(self) -> None:
        """Apply what has come."""
        self._apply_all()
        self._flat.point_gradients()
        self._base = self._steps.applied

    def finish(self) -> None:
        """Take part no more, with the model as it is here."""
        self.catch_up()
        self._client.tell_stepper(TrainingEnded())

    def look_on(self, until: Callable[[], bool], limit: float | None) -> None:
        """Take the steps of others without giving to any; whoever waits longer than `limit` is told."""
        self.catch_up()
        with self._steps.changed:
            self._steps.offer = None
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
                raise FabricError(different_mode(FASTEST, published.way))
            if time.monotonic() >= until:
                raise TimeoutError(f"the workers of the job are not all here (after {self._timeout:g} s)")
            with self._steps.changed:
                self._steps.changed.wait_for(self._has_news, LOOK_S)
            self._apply_all()
            self._check()
        self._compute()

    def _report(
        self, offer: Offer | None = None, waits: bool = False, computed_s: float | None = None
    ) -> None:
        applied, size_bytes = self._steps.applied, 4 * self._elements
        base, until = (offer.base, offer.until) if offer is not None else (None, -1)
        self._client.tell_stepper(TrainingReported(applied, base, until, waits, size_bytes, computed_s))

    # --- waiting and applying ---------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return bool(self._steps.results) or self._steps.failed is not None

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._steps.changed:
            self._steps.changed.wait_for(lambda: done() or self._steps.failed is not None)
            self._check()

    def _check(self) -> None:
        if self._steps.failed is not None:
            raise FabricError(self._steps.failed)

    def _apply_until(self, done: Callable[[], bool]) -> None:
        """A worker that is left out waits here, until it is called as a joiner."""
        while True:
            with self._steps.changed:
                over = done()
                if not over:
                    self._steps.changed.wait_for(self._has_news)
            self._apply_all()
            if over:
                return
            self._check()

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
            if result.delay is not None or result.dropped:
                self._settled(result.delay)

    def _apply(self, result: StepResult) -> None:
        flat, mean = self._flat, result.mean
        if result.state is not None:
            self._load(result.state)
        if result.step < 0:
            flat.load(mean[: flat.elements])
            return
        flat.values[flat.trained :] = torch.from_numpy(mean[flat.trained : flat.elements])
        if self._scaled and not np.isfinite(mean[: flat.trained]).all():
            self._skipped()
            return
        flat.set_gradients(mean[: flat.elements])
        own = _settings(self._optimizer)
        _set_settings(self._optimizer, mean[flat.elements :].tolist())
        self._optimizer.step()
        _set_settings(self._optimizer, own)

    # --- what others get --------------------------------------------------------------------------------

    def _values(self, vector: Vector) -> None:
        vector[: self._flat.elements] = self._flat.values.numpy()
        vector[self._flat.elements :] = 0

    def _state(self, vector: Vector) -> None:
        """Values, optimizer vectors, and how many steps the optimizer has counted."""
        flat = self._flat
        held, steps = read_state(self._optimizer, flat.parameters, self._vectors, flat.trained)
        vector[:-2] = np.concatenate([flat.values.numpy(), *held])
        vector[-2:] = np.array([steps], np.int64).view(np.float32)

    def _load(self, vector: Vector) -> None:
        flat = self._flat
        flat.load(vector[: flat.elements])
        held = vector[flat.elements : -2].reshape(self._vectors, flat.trained)
        steps = int(vector[-2:].copy().view(np.int64)[0])
        set_state(self._optimizer, flat.parameters, list(held), steps)


def _settings(optimizer: torch.optim.Optimizer) -> list[float]:
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
