"""What an engine's thread and the rest of a process cost each other. Where it runs is decided in `placement`.

A thread that has slept gets the interpreter late by the timer's slack, by what the kernel kept it waiting for
a processor, and by what other threads held the interpreter. The kernel counts the second; the first is small;
the rest is the third. What the engine's thread takes is bounded by its processor time.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

logger = logging.getLogger("mlfabric")

# A thread that gets the interpreter so late, on average, is starved: chunks follow each other faster.
STARVED_S = 0.002
# So much of a processor is more than the engine may take from a step.
SHARE = 0.05
NAP_S = 0.005
NAPS = 20
WATCH_NAP_S = 0.05
WATCH_S = 5.0


def mean_lag(naps: int, nap_s: float) -> float:
    """Seconds by which this thread gets the interpreter late after a nap, on average."""
    total = 0.0
    own = Path("/proc/thread-self/schedstat")
    for _ in range(naps):
        waited, began = _times(own)[1], time.monotonic()
        time.sleep(nap_s)
        late = time.monotonic() - began - nap_s
        total += max(late - (_times(own)[1] - waited), 0.0)
    return total / naps


def _times(path: Path) -> tuple[float, float]:
    """Seconds that a thread has run, and waited for a processor; zeros where the kernel does not say."""
    try:
        ran, waited, _ = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


class EngineWatch:
    """Looks at an engine's thread while training runs, and says once where a process would be better."""

    def __init__(self, thread: threading.Thread) -> None:
        self._engine = thread
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlfabric-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        path = Path(f"/proc/self/task/{self._engine.native_id}/schedstat")
        while not self._ended.is_set() and self._engine.is_alive():
            ran, began = _times(path)[0], time.monotonic()
            lag = 0.0
            naps = int(WATCH_S / WATCH_NAP_S)
            for _ in range(naps):
                if self._ended.is_set():
                    return
                lag += mean_lag(1, WATCH_NAP_S) / naps
            share = (_times(path)[0] - ran) / (time.monotonic() - began)
            said = verdict(lag, share)
            if said:
                logger.warning("%s", said)
                return


def verdict(lag_s: float, share: float) -> str:
    """What to tell the user; empty: nothing."""
    if lag_s > STARVED_S:
        what = f"gets the interpreter {lag_s * 1e3:.1f} ms late on average"
    elif share > SHARE:
        what = f"takes {share:.0%} of a processor, some of it from the training thread"
    else:
        return ""
    return f"the engine's thread {what}; engine='process' (MLFABRIC_ENGINE) gives it a process of its own"
