"""Host time, wall-clock seconds that never jump, and how far it is from the scheduler's."""

from __future__ import annotations

import time
from collections import deque

OFFSET_SAMPLES = 16


class HostClock:
    def __init__(self) -> None:
        self.anchor_s = time.time() - time.monotonic()
        self._samples: deque[tuple[float, float]] = deque(maxlen=OFFSET_SAMPLES)  # (round trip, offset)

    def now(self) -> float:
        return self.anchor_s + time.monotonic()

    def offset(self) -> tuple[float, float]:
        """(offset to the scheduler's clock, uncertainty), by the quickest round trip of late."""
        if not self._samples:
            return 0.0, 0.0
        round_trip, offset = min(self._samples)
        return offset, round_trip / 2

    def answered(self, sent_s: float, seen_s: float) -> None:
        """What was sent at our `sent_s` was seen at the scheduler's `seen_s`, and is answered now."""
        now = self.now()
        self._samples.append((now - sent_s, seen_s - (sent_s + now) / 2))
