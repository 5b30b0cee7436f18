"""Flows over shared links: each gets its max-min fair rate, never more than its own pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlfabric.topology import Link


@dataclass(slots=True)
class Flow:
    """Bytes on their way. `pace` is the rate its sender keeps to."""

    name: str
    path: tuple[Link, ...]
    remaining: float
    pace: float = float("inf")
    rate: float = 0.0
    order: int = field(default=0)


def share_rates(flows: Sequence[Flow], capacity: Mapping[Link, float]) -> None:
    """Set every flow's rate: raise all alike, stop those whose pace or link is full (progressive filling)."""
    left = {link: capacity[link] for flow in flows for link in flow.path}
    active: dict[Link, int] = dict.fromkeys(left, 0)
    for flow in flows:
        for link in flow.path:
            active[link] += 1
    growing = list(flows)
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
            if flow.pace - level <= 1e-9 * level or not full.isdisjoint(flow.path):
                flow.rate = level
                for link in flow.path:
                    active[link] -= 1
            else:
                still.append(flow)
        if len(still) == len(growing):  # rounding left nobody quite full: stop all at this level
            for flow in growing:
                flow.rate = level
            return
        growing = still
