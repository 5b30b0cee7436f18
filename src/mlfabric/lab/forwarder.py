"""A link with delay: carries frames between the two TAP ends of a link, each a fixed time after it came.

A program of its own, one for each delayed host: `python -m mlfabric.lab.forwarder NEAR_FD FAR_FD DELAY_NS`.
The kernel shapes both directions before the frames get here; this adds time, nothing else. It never drops:
frames it can't take in time wait in the TAP device's queue, which the lab makes long. A piece of several
frames is read and written whole, with the header that says how to cut it.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque

from mlfabric.lab.kernel import die_with_parent, sharpen_timers

_MAX_PIECE_BYTES = 65_536 + 64
_FRAMES_AT_ONCE = 64
_IDLE_S = 1.0


class Way:
    """One direction: frames with the time each is due."""

    def __init__(self, source: int, target: int, delay_ns: int) -> None:
        self.source = source
        self._target = target
        self._delay_ns = delay_ns
        self._waiting: deque[tuple[int, bytes]] = deque()

    def take(self) -> None:
        waiting, source, delay_ns = self._waiting, self.source, self._delay_ns
        with contextlib.suppress(BlockingIOError):
            for _ in range(_FRAMES_AT_ONCE):
                frame = os.read(source, _MAX_PIECE_BYTES)
                waiting.append((time.monotonic_ns() + delay_ns, frame))

    def give(self) -> None:
        waiting, target = self._waiting, self._target
        now = time.monotonic_ns()
        while waiting and waiting[0][0] <= now:
            # The other end may be down for a moment; a frame sent into it is lost, as on any cable.
            with contextlib.suppress(OSError):
                os.write(target, waiting.popleft()[1])

    def wait_s(self) -> float:
        if not self._waiting:
            return _IDLE_S
        return max(0.0, (self._waiting[0][0] - time.monotonic_ns()) / 1e9)


def forward(near: int, far: int, delay_ns: int) -> None:
    ways = (Way(near, far, delay_ns), Way(far, near, delay_ns))
    sources = [way.source for way in ways]
    while True:
        readable, _, _ = select.select(sources, [], [], min(way.wait_s() for way in ways))
        for way in ways:
            if way.source in readable:
                way.take()
            way.give()


if __name__ == "__main__":
    die_with_parent()
    sharpen_timers()
    # It stands for a cable: nothing that runs on the hosts should make it wait, where that can be had.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    forward(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
