"""The clock of a worker's steps: each lasts as long as the scenario says, with the real gradient at its end.

A step begins, sleeps for what its gradient will leave of its time, computes it and sleeps out the rest. So
whatever sends gradients as they are computed finds them when the step's time is nearly over, as it would if
computing had taken all of it. A step overran if its gradient was there later than its time and a twentieth.
The clock is given, so that tests can turn it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

# Beyond the step's time, in parts of it: what the operating system's own jitter may cost.
TOLERANCE: Final = 0.05
# Gradients looked back on to know how long the next one takes.
LOOK_BACK: Final = 8
FIRST_GUESS_S: Final = 0.03


class StepClock:
    def __init__(
        self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._now, self._sleep = now, sleep
        self._took: deque[float] = deque(maxlen=LOOK_BACK)
        self._began = self._gradient_began = 0.0
        self._lasts = 0.0
        self._ended: float | None = None
        self.over = 0.0  # when the step's time was over and its gradient there

    def begin(self, lasts_s: float) -> None:
        """A step of this length begins; returns when it is time to compute its gradient."""
        self._began, self._lasts, self._ended = self._now(), lasts_s, None
        rest = lasts_s - (max(self._took) if self._took else FIRST_GUESS_S)
        if rest > 0:
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
