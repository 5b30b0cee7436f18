"""Who of a job's workers may take the model for its next step, where steps are bound to each other.

With bounded staleness no worker is more than so many steps ahead of the slowest; where a step takes the first
few gradients, the next one begins when it is complete. A worker that asks too early waits for its model. It
is counted from its first wish on, beginning where the slowest is, so newcomers hold nobody back; one that is
gone, or takes no part any more, is not waited for. A new scheduler begins to count anew.
"""

from __future__ import annotations

from mlfabric.messages import JobSettings, PullWanted


class Pace:
    def __init__(self, settings: JobSettings) -> None:
        self._staleness = settings.staleness
        self._every = settings.wait_for
        self._ahead: dict[str, int] = {}  # by worker: its clock less this is its step
        self._clocks: dict[str, int] = {}
        self._held: dict[str, tuple[str, PullWanted]] = {}  # by pull: who asks

    @property
    def binds(self) -> bool:
        return self._staleness is not None or self._every > 0

    def ask(self, node: str, wanted: PullWanted) -> None:
        """A worker's wish for the model; `due` tells when it may have it."""
        if wanted.clock < 0:
            if not wanted.with_state:
                self._stop_counting(node)
        elif node in self._clocks:
            self._clocks[node] = max(self._clocks[node], wanted.clock)
        else:
            self._ahead[node] = wanted.clock - min(self._steps().values(), default=0)
            self._clocks[node] = wanted.clock
        self._held[wanted.pull] = (node, wanted)

    def holds(self, pull: str) -> bool:
        return pull in self._held

    def lost(self, node: str) -> None:
        self._stop_counting(node)
        self._held = {pull: held for pull, held in self._held.items() if held[0] != node}

    def due(self, version: int) -> list[tuple[str, PullWanted]]:
        """Wishes that can be granted now, with the model at this version."""
        steps = self._steps()
        slowest = min(steps.values(), default=0)
        # Where all wait for each other, gradients were lost with their workers: all give another one.
        stuck = self._every > 0 and set(steps) == {node for node, _ in self._held.values()} & set(steps)
        granted = []
        for pull, (node, wanted) in list(self._held.items()):
            waits = self._staleness is not None and steps.get(node, 0) > slowest + self._staleness
            waits = waits or (version < wanted.after and not stuck)
            if wanted.clock < 0 or not waits:
                del self._held[pull]
                granted.append((node, wanted))
        return granted

    def _steps(self) -> dict[str, int]:
        return {node: clock - self._ahead[node] for node, clock in self._clocks.items()}

    def _stop_counting(self, node: str) -> None:
        self._clocks.pop(node, None)
        self._ahead.pop(node, None)
