"""What a job's workers would send if nothing held them up, from what the scheduler sees of their rounds."""

from __future__ import annotations

from collections import deque
from statistics import median

from mlfabric.plan.serving import own_traffic

# So many steps of each worker are looked at.
STEPS_KEPT = 5


class Demand:
    def __init__(self) -> None:
        self.alongside = False  # workers pull while their update is on its way
        self._since: dict[str, float] = {}  # node -> when the last thing it waited for was over
        self._steps_s: dict[str, deque[float]] = {}

    def waits_no_more(self, node: str, now: float) -> None:
        self._since[node] = now

    def offered(self, node: str, now: float) -> None:
        """A worker is done with a step: it began when nothing was left to wait for. Its first one may have
        waited until others were set up, and tells nothing."""
        since = self._since.pop(node, None)
        if since is None:
            return
        if node not in self._steps_s:
            self._steps_s[node] = deque(maxlen=STEPS_KEPT)
        else:
            self._steps_s[node].append(now - since)

    def forget(self, node: str) -> None:
        self._since.pop(node, None)
        self._steps_s.pop(node, None)

    def own_traffic(self, rate: float, size_bytes: float) -> float:
        """Bytes per second of a worker with such a link; its step is like everybody's, stragglers apart."""
        seen = [seconds for steps in self._steps_s.values() for seconds in steps]
        return own_traffic(rate, size_bytes, median(seen) if seen else 0.0, 1 if self.alongside else 2)
