"""Flows over shared links: each gets its max-min fair rate, never more than its own pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlfabric.topology import Link


@dataclass(slots=True)
class Flow:
    """Bytes on their way. `pace` is the rate its sender keeps to. What is passed on stays a chunk behind what
    brings it, `ahead`, until that is complete."""

    name: str
    path: tuple[Link, ...]
    remaining: float
    pace: float = float("inf")
    rate: float = 0.0
    order: int = field(default=0)
    ahead: Flow | None = None
    chunk: float = 0.0

    def room(self) -> float:
        """How far it may catch up; below zero it has to wait. Infinite where nothing is ahead."""
        if self.ahead is None or self.ahead.remaining <= CRUMB_BYTES:
            return float("inf")
        return self.remaining - self.ahead.remaining - self.chunk

    def changes_in_s(self) -> float:
        """When it is through, has caught up, or need not wait any more; infinite where that never comes."""
        room = self.room()
        if room < -CRUMB_BYTES:
            assert self.ahead is not None
            return -room / self.ahead.rate if self.ahead.rate else float("inf")
        times = [self.remaining / self.rate if self.rate else float("inf")]
        if room > CRUMB_BYTES and self.ahead is not None and self.rate > self.ahead.rate:
            times.append(room / (self.rate - self.ahead.rate))
        return min(times)


# What rounding leaves over is no reason to wait.
CRUMB_BYTES = 0.5


def share_rates(flows: Sequence[Flow], capacity: Mapping[Link, float]) -> None:
    """Set every flow's rate: raise all alike, stop those whose pace or link is full, and with them whoever
    can't get ahead of them (progressive filling)."""
    growing: list[Flow] = []
    rising: set[int] = set()
    held: dict[int, int] = {}  # flows that have caught up, and with whom; those come first
    for flow in flows:
        flow.rate = 0.0
        room = flow.room()
        if room <= CRUMB_BYTES:
            held[id(flow)] = id(flow.ahead)
            if room < -CRUMB_BYTES or id(flow.ahead) not in rising:
                continue
        growing.append(flow)
        rising.add(id(flow))
    left = {link: capacity[link] for flow in growing for link in flow.path}
    active: dict[Link, int] = dict.fromkeys(left, 0)
    for flow in growing:
        for link in flow.path:
            active[link] += 1
    level = 0.0
    while growing:
        rise = min(flow.pace - level for flow in growing)
        for link, users in active.items():
            if users:
                rise = min(rise, left[link] / users)
        rise = max(rise, 0.0)
        level += rise
        for link, users in active.items():
            left[link] -= rise * users
        full = {link for link, users in active.items() if users and left[link] <= 1e-9 * capacity[link]}
        still = []
        for flow in growing:
            slowed = held.get(id(flow), id(flow)) not in rising
            if slowed or flow.pace - level <= 1e-9 * level or not full.isdisjoint(flow.path):
                flow.rate = level
                rising.discard(id(flow))
                for link in flow.path:
                    active[link] -= 1
            else:
                still.append(flow)
        if len(still) == len(growing):  # rounding left nobody quite full: stop all at this level
            for flow in growing:
                flow.rate = level
            return
        growing = still
