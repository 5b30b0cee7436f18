"""Local steps while averages roll on: each worker steps by itself and never waits for what others did.

A worker steps its own copy of the model by its own gradients. Averages follow each other as in mode rolling:
each takes from every worker how far it has come since it last gave, and moves all of them by the mean of
that. What a worker did while an average was under way stays its own until the next one. The common model,
which all have who hold the same step, is the first one moved by all averages so far.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlfabric.numerics import Vector
from mlfabric.torch.calledsteps import StepResult
from mlfabric.torch.rolling import Rolling


class RollingLocal(Rolling):
    def step(self, take: Callable[[], Vector], scaled: bool) -> None:
        """Step by the gradient that `take` gives, and let the next average have what has changed."""
        flat, update = self._flat, take()
        if scaled and not np.isfinite(update[: flat.trained]).all():
            self._skipped()
        else:
            flat.set_gradients(update)
            self._optimizer.step()
        self._local += 1
        self._compute()

    def _compute(self) -> None:
        self._give()
        self._flat.point_gradients()
        self._base = self._steps.applied
        self._report()

    def _give(self) -> None:
        """Have what is not in any average yet wait for the next one."""
        steps, flat = self._steps, self._flat
        while True:
            self._apply_all()
            with steps.changed:
                if steps.results:
                    continue
                if self._local >= self._local_steps or steps.waiting.bases:
                    apart, waiting = self._gradient[: flat.elements], steps.waiting
                    np.subtract(flat.values.numpy(), self._common, out=apart)
                    if steps.given.bases:
                        apart -= steps.given.total[: flat.elements]
                    waiting.bases.clear()
                    waiting.add(self._gradient, [self._base])
                    self._local = 0
                return

    def finish(self) -> None:
        """Take part no more, once all that was done is in an average, or nobody makes one."""
        if self._local:
            self._local = self._local_steps
            self._compute()
        super().finish()

    def _apply(self, result: StepResult) -> None:
        flat = self._flat
        values, common = flat.values.numpy(), self._common
        if result.state is not None:
            self._load(result.state)
            np.copyto(common, values)
        if result.step < 0:
            flat.load(result.mean[: flat.elements])
            np.copyto(common, values)
        elif result.gradients:
            by = result.mean[: flat.elements]
            values += by
            common += by
            if result.own is not None and result.state is None:
                values -= result.own[: flat.elements]
