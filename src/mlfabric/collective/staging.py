"""Memory for parts on their way into a sum, kept for the next ones: fresh pages cost more than the adding."""

from __future__ import annotations

import numpy as np

# Kept at most, over all sizes.
KEPT_BYTES = 64 * 2**20


class Staging:
    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self._kept = 0

    def take(self, size: int) -> memoryview:
        free = self._free.get(size)
        if free:
            self._kept -= size
            return free.pop()
        return np.empty(size, np.uint8).data

    def give(self, view: memoryview) -> None:
        size = len(view)
        if self._kept + size <= KEPT_BYTES:
            self._kept += size
            self._free.setdefault(size, []).append(view)
