"""Local steps while averages roll on: each worker steps by itself and never waits for what others did.

A worker steps its own copy of the model by its own gradients. Averages follow each other part by part as in
mode rolling: each takes from every worker how far that part has come since it last gave, and moves all of
them by the mean of that. What a worker did while an average was under way stays its own until the next one.
The common model, which all have who hold the same step, is the first one moved by all averages so far.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlfabric.numerics import Vector
from mlfabric.torch.calledsteps import StepResult
from mlfabric.torch.modes import Wishes
from mlfabric.torch.rolledsteps import Gradient
from mlfabric.torch.rolling import Rolling
from mlfabric.torch.stepped import SteppedTraining


class RollingLocal(Rolling):
    def _prepare(self, wishes: Wishes) -> None:
        super()._prepare(wishes)
        self._made = 0  # steps of our own
        self._gave = [0] * len(self._parts)  # of them, those in what was given last
        self._apart = self._common.copy()

    def step(self, take: Callable[[], Vector], scaled: bool) -> None:
        """Step by the gradient that `take` gives, and let the next averages have what has changed."""
        flat, update = self._flat, take()
        if scaled and not np.isfinite(update[: flat.trained]).all():
            self._skipped()
        else:
            flat.set_gradients(update)
            self._optimizer.step()
        self._made += 1
        self._compute()

    def _compute(self) -> None:
        self._give(self._local_steps)
        self._flat.clear_gradients()
        self._base = self._steps.applied
        self._report()

    def _give(self, least: int) -> None:
        """Have what is not in any average yet wait for the next ones, of parts that are so many steps on."""
        steps = self._steps
        while True:
            self._apply_all()
            with steps.changed:
                if steps.results:
                    continue
                if not steps.joining:
                    self._put_forward(least)
                return

    def _put_forward(self, least: int) -> None:
        steps, apart = self._steps, self._apart
        np.subtract(self._flat.values.numpy(), self._common, out=apart)
        for number, part in enumerate(self._parts):
            if not steps.waiting.gradients[number] and self._made - self._gave[number] < least:
                continue
            if steps.given.gradients[number]:
                apart[part] -= steps.given.sum_of(number)
            # What became of one part is told, not of all of them.
            steps.waiting.replace(number, apart[part], Gradient(self._base, left=1 if number == 0 else 0))
            self._gave[number] = self._made

    def finish(self) -> None:
        """Take part no more, once all that was done is in an average, or nobody makes one."""
        self._give(1)
        self._report()
        super().finish()

    def _step_part(self, result: StepResult) -> None:
        part = self._parts[result.step % len(self._parts)]
        values, by = self._flat.values.numpy(), result.mean[: part.stop - part.start]
        values[part] += by
        self._common[part] += by
        if result.own is not None:
            values[part] -= result.own

    # The optimizer steps the whole model here, and holds its own state.
    _state = SteppedTraining._state
    _load = SteppedTraining._load

    def _hand_over(self) -> None:
        pass
