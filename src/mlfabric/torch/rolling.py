"""Training by steps that roll on: nobody waits for the network, nor for another worker.

A worker adds each gradient to a sum of its own and computes the next one. Meanwhile all-reduces among all
workers follow each other on a thread of their own (`torch.rolledsteps`). Each takes whatever sums are there,
of several gradients from one worker and of none from one that straggles, and makes one step by the mean of
all of them. So a slow link makes steps rarer and larger, and costs no gradient.

What it does cost is age: the model has moved on by the time a gradient is applied. So a step is of one part
of the model only, and the parts take turns: a gradient's part waits for its turn and its own all-reduce, not
for one of the whole model, and mostly no other step of that part comes in between. And a worker computes
where the model will be by then: the common model, each part moved on by what its last step made, as many
times as its own gradients were old lately, and once more as Nesterov does. Where gradients are of no age
nothing is moved. `weights()` and checkpoints are of the common model itself.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Final

import numpy as np
import torch

from mlfabric.events import TrainingReported
from mlfabric.numerics import Vector
from mlfabric.torch.calledsteps import StepResult
from mlfabric.torch.modes import Wishes
from mlfabric.torch.pieces import PieceOptimizer
from mlfabric.torch.rolledsteps import Gradient, RolledSteps, cut_parts
from mlfabric.torch.stepped import SteppedTraining, optimizer_settings
from mlfabric.ways import ROLLING

# Gradients of one worker that wait for a step; at one more the worker waits too.
MOST_WAITING: Final = 32
# How old gradients are is the mean of the last so many.
DELAYS_KEPT: Final = 8


class Rolling(SteppedTraining):
    way = ROLLING
    _steps: RolledSteps

    def _prepare(self, wishes: Wishes) -> None:
        flat = self._flat
        cuts = cut_parts(flat.elements)
        self._parts = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
        self._ahead = wishes.ahead
        self._local_steps = wishes.local_steps or 1
        self._ages: deque[int] = deque(maxlen=DELAYS_KEPT * len(self._parts))
        self._common = flat.copy()  # the model that all have
        self._moved = np.zeros(flat.trained, np.float32)  # each part by its last step
        if wishes.local_steps is None:
            self._pieces = PieceOptimizer(self._optimizer, flat, self._vectors, cuts)
            # How often each part was stepped, where a whole model has one number.
            self._state_elements += 2 * (len(self._parts) - 1)
        self._steps = RolledSteps(
            self._fabric.name,
            self._client,
            self._parts,
            optimizer_settings(self._optimizer) if wishes.local_steps is None else (),
            self._state_elements,
            self._values,
            self._state,
            self._max_delay,
            wishes.codec,
            keeps=wishes.local_steps is not None,
        )

    def step(self, take: Callable[[], Vector], scaled: bool) -> None:
        """Add the gradient that `take` gives to those that wait; go on with where the model will be."""
        steps, gradient = self._steps, take()
        if scaled and not np.isfinite(gradient[: self._flat.trained]).all():
            self._skipped()
        else:
            self._wait(lambda: steps.waiting.most < MOST_WAITING)
            with steps.changed:
                old = steps.joining or steps.delay_of(self._base) > self._max_delay
                if not old:
                    given = Gradient(self._base, len(self._parts))
                    steps.settings = optimizer_settings(self._optimizer)
                    steps.waiting.add(gradient, steps.settings, given)
            if old:
                self._settled(None)
        self._compute()

    def _compute(self) -> None:
        self._apply_all()
        self._move_ahead()
        self._base = self._steps.applied
        self._report()

    def _move_ahead(self) -> None:
        """Have the model as it is expected to be when the next gradient is applied."""
        if self._ahead and any(self._ages):
            trained = self._flat.trained
            common, moved = (torch.from_numpy(v[:trained]) for v in (self._common, self._moved))
            torch.add(common, moved, alpha=1 + fmean(self._ages), out=self._flat.values[:trained])

    def _report(self, waits: bool = False) -> None:
        # With the lock: `RolledSteps` tells of what waits, too.
        with self._steps.changed:
            base = self._base if self._steps.waiting.most and not waits else None
            parts = len(self._parts)
            applied, until = self._steps.applied, self._base + parts * self._max_delay
            size_bytes = 4 * self._flat.elements
            self._client.tell_stepper(TrainingReported(applied, base, until, waits, size_bytes, parts=parts))

    def catch_up(self) -> None:
        """Have the common model as it is, with all that has come."""
        super().catch_up()
        self._flat.load(self._common)
        self._hand_over()

    def _hand_over(self) -> None:
        """Have the user's optimizer hold the state of the common model."""
        self._pieces.hand_over()

    def finish(self) -> None:
        """Take part no more, once all that was given is in a step, or nobody makes one."""
        until = time.monotonic() + self._timeout
        while self._waits() and time.monotonic() < until:
            self._wait(lambda: self._has_news() or not self._waits(), until - time.monotonic())
            self._apply_all()
        super().finish()
        # The others would have to make the rest of the call again without this one.
        self._wait(lambda: self._steps.idle, until - time.monotonic())

    def _waits(self) -> bool:
        return bool(self._steps.waiting.most or self._steps.given.most)

    def _apply(self, result: StepResult) -> None:
        values, common = self._flat.values.numpy(), self._common
        self._ages.extend(result.ages)
        if result.state is not None:
            self._load(result.state)
        if result.step < 0:
            self._flat.load(result.mean[: self._flat.elements])
        if result.step < 0 or result.state is not None:
            np.copyto(common, values)
            self._moved.fill(0)
            self._steps.joining = False
        if result.step >= 0 and result.gradients:
            self._step_part(result)

    def _step_part(self, result: StepResult) -> None:
        number, flat = result.step % len(self._parts), self._flat
        part, mean = self._parts[number], result.mean
        values, common = flat.values.numpy(), self._common
        trained = slice(part.start, min(part.stop, flat.trained))
        values[trained] = common[trained]  # where it was moved to counts for nothing
        length = max(trained.stop - trained.start, 0)
        if length:
            elements = part.stop - part.start
            with self._settings_of(mean[elements : elements + self._settings].tolist()):
                self._pieces.step(number, mean[:length])
            np.subtract(values[trained], common[trained], out=self._moved[trained])
        values[part.start + length : part.stop] = mean[length : part.stop - part.start]  # running statistics
        common[part] = values[part]

    # --- what others get --------------------------------------------------------------------------------

    def _held(self) -> Vector:
        return self._common

    def _state(self, vector: Vector) -> None:
        vectors, counts = self._pieces.read()
        vector[: -2 * len(counts)] = np.concatenate([self._common, *vectors])
        vector[-2 * len(counts) :] = np.array(counts, np.int64).view(np.float32)

    def _load(self, vector: Vector) -> None:
        flat, counts = self._flat, 2 * len(self._parts)
        flat.load(vector[: flat.elements])
        held = vector[flat.elements : -counts].reshape(self._vectors, flat.trained)
        self._pieces.take_over(list(held), vector[-counts:].copy().view(np.int64).tolist())
