"""Training by steps among the workers that are fast now: the trainer's side.

A worker offers its gradient and waits for the step that takes it or, overlapped, computes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mlfabric.events import TrainingReported
from mlfabric.numerics import Vector
from mlfabric.torch.calledsteps import Offer, OfferedSteps
from mlfabric.torch.modes import Wishes
from mlfabric.torch.stepped import SteppedTraining, optimizer_settings
from mlfabric.ways import FASTEST


class Fastest(SteppedTraining):
    way = FASTEST
    _steps: OfferedSteps

    def _prepare(self, wishes: Wishes) -> None:
        self._overlapped = wishes.pull == "overlapped"
        self._steps = OfferedSteps(
            self._fabric.name, self._client, self._elements, self._state_elements, self._values, self._state
        )
        self._gradient = np.empty(self._elements, np.float32)
        self._began = 0.0
        self._stepped = False

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
        gradient[self._flat.elements :] = optimizer_settings(self._optimizer)
        offer = self._offer(gradient)
        if offer is None:
            self._settled(None)
        else:
            self._report(waits=not self._overlapped, offer=offer, computed_s=computed_s)
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
        self._base = self._steps.applied
        self._began = time.monotonic()
        if not self._overlapped or self._steps.offer is None:
            self._report()

    def _report(
        self, waits: bool = False, offer: Offer | None = None, computed_s: float | None = None
    ) -> None:
        applied, size_bytes = self._steps.applied, 4 * self._elements
        base, until = (offer.base, offer.until) if offer is not None else (None, -1)
        self._client.tell_stepper(TrainingReported(applied, base, until, waits, size_bytes, computed_s))

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
