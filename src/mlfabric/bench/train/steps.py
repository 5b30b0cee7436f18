"""The clock of a worker's steps: each lasts as long as the scenario says, with the real gradient inside.

A step begins, computes its gradient and sleeps out the rest. Where gradients are sent while they are computed
it sleeps first, as long as its gradient will leave, and computes then: they are found when the step's time is
nearly over, as they would be if computing had taken all of it. It begins a fifth of the step sooner than the
slowest of its last gradients would need: had computing taken all of the step, the large layer's gradient,
nearly all there is to send, would have been there a fifth of it before the end. A step overran if its
gradient was there later than its time and a twentieth. The clock is given, so that tests can turn it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

# Beyond the step's time, in parts of it: what the operating system's own jitter may cost.
TOLERANCE: Final = 0.05
# Gradients looked back on to know how long the next one takes.
LOOK_BACK: Final = 32
FIRST_GUESS_S: Final = 0.04
# Sooner than these say, in parts of the step.
RESERVE: Final = 0.2


class StepClock:
    def __init__(
        self,
        at_the_end: bool,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._at_the_end, self._now, self._sleep = at_the_end, now, sleep
        self._took: deque[float] = deque(maxlen=LOOK_BACK)
        self._began = self._gradient_began = 0.0
        self._lasts = 0.0
        self._ended: float | None = None
        self.over = 0.0  # when the step's time was over and its gradient there

    def begin(self, lasts_s: float) -> None:
        """A step of this length begins; returns when it is time to compute its gradient."""
        self._began, self._lasts, self._ended = self._now(), lasts_s, None
        rest = (1 - RESERVE) * lasts_s - max(self._took, default=FIRST_GUESS_S)
        if self._at_the_end and rest > 0:
            self._sleep(rest)
        self._gradient_began = self._now()

    def computed(self) -> None:
        """The gradient is there: wait until the step's time is over. Only the first call of a step counts."""
        if self._ended is not None:
            return
        self._ended = self._now()
        self._took.append(self._ended - self._gradient_began)
        rest = self._began + self._lasts - self._ended
        self.over = self._ended + max(rest, 0.0)
        if rest > 0:
            self._sleep(rest)

    @property
    def overran(self) -> bool:
        return self.late_s > TOLERANCE * self._lasts

    @property
    def late_s(self) -> float:
        """How long after the step's time its gradient was there."""
        return (self._ended if self._ended is not None else self._now()) - self._began - self._lasts

    @property
    def gradient_s(self) -> float:
        return self._took[-1] if self._took else 0.0
