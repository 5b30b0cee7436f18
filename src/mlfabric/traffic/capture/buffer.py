"""A window that slides over the input, so that a capture of any size is read in bounded memory."""

from __future__ import annotations

from typing import Final

import numpy as np

from mlfabric.traffic import native
from mlfabric.traffic.capture.frames import PADDING_BYTES
from mlfabric.traffic.capture.source import ByteSource

# Large enough that NumPy's cost per call does not show, small beside the columns that are kept.
WINDOW_BYTES: Final = 1 << 24
# The compiled form has no such cost, and gains where the window stays in the processor's cache.
COMPILED_WINDOW_BYTES: Final = 1 << 22


class SlidingBuffer:
    """Bytes [start, end) of `data` are unread input; `refill` keeps them and appends more."""

    def __init__(self, source: ByteSource, window_bytes: int | None = None) -> None:
        if window_bytes is None:
            window_bytes = WINDOW_BYTES if native.library() is None else COMPILED_WINDOW_BYTES
        self._source = source
        self._window = window_bytes
        self.data = np.zeros(window_bytes + PADDING_BYTES, np.uint8)
        self.start = 0
        self.end = 0
        self._before = 0  # input bytes that no longer are in the window
        self.refill()

    def position(self) -> int:
        """Where `start` lies in the input, in bytes from its beginning."""
        return self._before + self.start

    def left(self) -> int:
        return self.end - self.start

    def refill(self) -> bool:
        """Slides and reads on; False where the input has ended. Grows if one record fills the window."""
        left = self.left()
        if left > self._window // 2:
            self._window *= 2
            grown = np.zeros(self._window + PADDING_BYTES, np.uint8)
            grown[:left] = self.data[self.start : self.end]
            self.data = grown
        else:
            self.data[:left] = self.data[self.start : self.end].copy()
        self._before += self.start
        self.start, self.end = 0, left
        count = self._source.read_into(self.data.data[left : self._window])
        self.end += count
        self.data[self.end : self.end + PADDING_BYTES] = 0
        return count > 0
