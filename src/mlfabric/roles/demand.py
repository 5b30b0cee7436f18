"""What a job's workers would send if nothing held them up, from what the scheduler sees of their rounds."""

from __future__ import annotations

from statistics import fmean

from mlfabric.plan.serving import own_traffic

# Weight of the newest round in what is believed of a worker's steps.
NEWEST = 0.3


class Demand:
    def __init__(self) -> None:
        self.alongside = False  # workers pull while their update is on its way
        self._since: dict[str, float] = {}  # node -> when the last thing it waited for was over
        self._step_s: dict[str, float] = {}

    def waits_no_more(self, node: str, now: float) -> None:
        self._since[node] = now

    def offered(self, node: str, now: float) -> None:
        """A worker is done with a step: it began when nothing was left to wait for."""
        since = self._since.pop(node, None)
        if since is not None:
            known = self._step_s.get(node, now - since)
            self._step_s[node] = known + NEWEST * (now - since - known)

    def forget(self, node: str) -> None:
        self._since.pop(node, None)
        self._step_s.pop(node, None)

    def own_traffic(self, rate: float, size_bytes: float) -> float:
        """Bytes per second of a worker with such a link; its step is like everybody's."""
        step_s = fmean(self._step_s.values()) if self._step_s else 0.0
        return own_traffic(rate, size_bytes, step_s, 1 if self.alongside else 2)
