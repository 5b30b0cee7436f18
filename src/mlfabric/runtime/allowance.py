"""What a process may send: all its sockets together stay at or below a limit. Pure; callers know the time.

A bucket of bytes that fills at the limit's rate. Whoever sends takes what it sent; while the bucket is empty
nobody sends. Control messages are not counted: they are few, and must not wait behind bulk bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

# The bucket holds what comes in this time, at least a piece; so long may sending go on at once.
BURST_S = 0.01
PIECE_BYTES = 16 * 1024


class Allowance:
    def __init__(self) -> None:
        self.limit_bytes_per_s: float | None = None
        self.waits = False  # somebody had to stop
        self._bytes = 0.0  # negative: more was sent than there was
        self._at = 0.0

    def set_limit(self, bytes_per_s: float | None, now: float) -> None:
        self._fill(now)
        self.limit_bytes_per_s = bytes_per_s

    def may_send(self, now: float) -> bool:
        """Whether anything may be sent now; if not, whoever asks comes again at `next_s`."""
        self._fill(now)
        if self.limit_bytes_per_s is None or self._bytes > 0:
            return True
        self.waits = True
        return False

    def cut(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """As much of these as may be sent in one go."""
        if self.limit_bytes_per_s is None:
            return buffers
        left = max(int(self._bytes), PIECE_BYTES)
        some = []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
            if left <= 0:
                break
        return some

    def took(self, count: int) -> None:
        if self.limit_bytes_per_s is not None:
            self._bytes -= count

    def next_s(self, now: float) -> float | None:
        """When those who had to stop may send again; None: nobody had to."""
        if not self.waits:
            return None
        if self.limit_bytes_per_s is None or self._bytes > 0:
            return now
        return self._at + (PIECE_BYTES - self._bytes) / self.limit_bytes_per_s

    def _fill(self, now: float) -> None:
        if self.limit_bytes_per_s is not None:
            most = max(BURST_S * self.limit_bytes_per_s, PIECE_BYTES)
            self._bytes = min(self._bytes + (now - self._at) * self.limit_bytes_per_s, most)
        else:
            self._bytes = 0.0
        self._at = now
