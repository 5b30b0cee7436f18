"""Training by steps that roll on: nobody waits for the network, nor for another worker.

A worker adds each gradient to a sum of its own and computes the next one. Meanwhile all-reduces among all
workers follow each other on a thread of their own. Each takes whatever sums are there, of several gradients
from one worker and of none from one that straggles, and makes one step by the mean of all of them. So a slow
link makes steps rarer and larger, and costs no gradient.

What it does cost is age: a gradient goes into a step one to three steps after the one whose model it is of.
So a worker computes where the model will be by then: the common model, moved on by what its last step made,
as many times as its own gradients were old lately, and once more as Nesterov does. Where gradients are of no
age nothing is moved. `weights()` and checkpoints are of the common model itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

import numpy as np
import torch

from mlfabric.client import Client
from mlfabric.events import StepCarriedOut, TrainingReported
from mlfabric.messages import StepCalled
from mlfabric.numerics import Vector
from mlfabric.torch.calledsteps import CalledSteps, StepResult
from mlfabric.torch.modes import Wishes
from mlfabric.torch.stepped import SteppedTraining, optimizer_settings
from mlfabric.ways import ROLLING

# Gradients of one worker that wait for a step; at one more the worker waits too.
MOST_WAITING: Final = 32
# How old gradients are is the mean of the last so many.
DELAYS_KEPT: Final = 8


@dataclass(slots=True)
class Gathered:
    """Gradients of one worker, summed; how many there are stands behind them."""

    total: Vector
    bases: list[int] = field(default_factory=list)  # of each, the step whose model it is of

    def add(self, gradient: Vector, bases: Sequence[int]) -> None:
        if self.bases:
            self.total += gradient
        else:
            np.copyto(self.total, gradient)
        self.bases += bases


class RolledSteps(CalledSteps):
    """Steps that take what there is. `waiting` is for the next step, `given` is in the one that runs."""

    def __init__(
        self,
        node: str,
        client: Client,
        sizes: tuple[int, int, int],
        values: Callable[[Vector], None],
        state: Callable[[Vector], None],
        max_delay: int,
        codec: str,
        keeps: bool,
    ) -> None:
        """`sizes`: of a gradient, of it with what else is summed, of what a joiner gets. `keeps`: results say
        what this worker gave."""
        gradient, elements, state_elements = sizes
        self.waiting, self.given = (Gathered(np.zeros(elements, np.float32)) for _ in range(2))
        self.next_step = -1
        self._max_delay, self._keeps = max_delay, keeps
        self._too_old = 0  # of those that waited for the step that runs
        # A gradient travels by the codec, what else is summed as it is.
        self._narrow: tuple[Vector, Vector] | None = None
        if codec != "float32":
            rest = client.empty(elements - gradient, np.float32)
            self._narrow = client.empty(gradient, np.dtype(codec)), rest
        super().__init__(node, client, elements, state_elements, values, state)

    def _give(self, vector: Vector, call: StepCalled) -> None:
        bases = self.waiting.bases
        if bases and call.step - min(bases) > self._max_delay:
            # Only after failures: who gives is at most as old when it gives.
            self._too_old += len(bases)
            bases.clear()
        if not bases:
            vector.fill(0)
            return
        self.waiting, self.given = self.given, self.waiting
        np.copyto(vector, self.given.total)

    def _travelling(self, vector: Vector, call: StepCalled) -> Sequence[Vector]:
        if self._narrow is None or call.step < 0:
            return [vector]
        gradient, rest = self._narrow
        np.copyto(gradient, vector[: len(gradient)], casting="same_kind")
        np.copyto(rest, vector[len(gradient) :])
        return self._narrow

    def _take_mean(self, result: StepResult, call: StepCalled) -> None:
        if call.step < 0:
            super()._take_mean(result, call)
            return
        mean = result.mean
        if self._narrow is not None and len(call.nodes) > 1:
            np.concatenate(self._narrow, out=mean)
        result.gradients = round(float(mean[-1]))
        if result.gradients:
            mean /= np.float32(result.gradients)

    def _settle(self, result: StepResult, call: StepCalled) -> None:
        result.delays = (*(call.step - base for base in self.given.bases), *[None] * self._too_old)
        self._too_old = 0
        if self._keeps and self.given.bases:
            result.own = self.given.total.copy()
        self.given.bases.clear()
        self.next_step = call.step + 1

    def _tell_end(self, call: StepCalled, error: str | None) -> None:
        # With the lock, so that what the trainer says of new gradients is not said in between.
        with self.changed:
            if self.given.bases:  # it failed
                self.waiting.add(self.given.total, self.given.bases)
                self.given.bases.clear()
            self._client.tell_stepper(StepCarriedOut(call.step, error, bool(self.waiting.bases)))

    def withdraw(self) -> None:
        self.waiting.bases.clear()


class Rolling(SteppedTraining):
    way = ROLLING
    _steps: RolledSteps

    def _prepare(self, wishes: Wishes) -> None:
        flat = self._flat
        self._elements += 1  # the count
        self._ahead = wishes.ahead
        self._local, self._local_steps = 0, wishes.local_steps or 1
        self._delays: deque[int] = deque(maxlen=DELAYS_KEPT)
        self._common = flat.copy()  # the model that all have
        self._moved = np.zeros(flat.trained, np.float32)  # by its last step
        self._gradient = np.zeros(self._elements, np.float32)
        self._gradient[-1] = 1
        self._steps = RolledSteps(
            self._fabric.name,
            self._client,
            (flat.elements, self._elements, self._state_elements),
            self._values,
            self._state,
            self._max_delay,
            wishes.codec,
            keeps=wishes.local_steps is not None,
        )

    def step(self, take: Callable[[], Vector], scaled: bool) -> None:
        """Add the gradient that `take` gives to those that wait; go on with where the model will be."""
        self._scaled = scaled
        steps, gradient = self._steps, self._gradient
        gradient[: self._flat.elements] = take()
        gradient[self._flat.elements : -1] = optimizer_settings(self._optimizer)
        self._wait(lambda: len(steps.waiting.bases) < MOST_WAITING)
        with steps.changed:
            # The step that runs has taken what it takes.
            old = steps.next_step + 1 - self._base > self._max_delay
            if not old:
                steps.waiting.add(gradient, [self._base])
        if old:
            self._settled(None)
        self._compute()

    def _compute(self) -> None:
        self._apply_all()
        self._move_ahead()
        self._flat.point_gradients()
        self._base = self._steps.applied
        self._report()

    def _move_ahead(self) -> None:
        """Have the model as it is expected to be when the next gradient is applied."""
        if self._ahead and any(self._delays):
            trained = self._flat.trained
            by = np.float32(1 + fmean(self._delays))
            np.multiply(self._moved, by, out=self._flat.values.numpy()[:trained])
            self._flat.values[:trained] += torch.from_numpy(self._common[:trained])

    def _report(self, waits: bool = False) -> None:
        # With the lock: `RolledSteps` tells of what waits, too.
        with self._steps.changed:
            base = self._base if self._steps.waiting.bases and not waits else None
            applied, until = self._steps.applied, self._base + self._max_delay
            size_bytes = 4 * self._elements
            self._client.tell_stepper(TrainingReported(applied, base, until, waits, size_bytes, rolls=True))

    def catch_up(self) -> None:
        """Have the common model as it is, with all that has come."""
        super().catch_up()
        self._flat.load(self._common)

    def finish(self) -> None:
        """Take part no more, once all that was given is in a step, or nobody makes one."""
        until = time.monotonic() + self._timeout
        while self._waits() and time.monotonic() < until:
            self._wait(lambda: self._has_news() or not self._waits(), until - time.monotonic())
            self._apply_all()
        super().finish()

    def _waits(self) -> bool:
        return bool(self._steps.waiting.bases or self._steps.given.bases)

    def _apply(self, result: StepResult) -> None:
        flat = self._flat
        fresh = result.step < 0 or result.state is not None
        if result.gradients:
            flat.load(self._common)  # where it was moved to counts for nothing
        super()._apply(result)
        self._delays.extend(delay for delay in result.delays if delay is not None)
        if result.gradients or fresh:
            values = flat.values.numpy()
            np.subtract(values[: flat.trained], self._common[: flat.trained], out=self._moved)
            np.copyto(self._common, values)
            if fresh:
                self._moved.fill(0)

    def _held(self) -> Vector:
        return self._common
