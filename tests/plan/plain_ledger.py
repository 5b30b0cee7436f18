"""The ledger in its simplest form: a list of bookings, every question answered by looking at all of them.

Times are floats as in the real ledger, so both can be compared bit for bit; rates are checked in exact
fractions against the capacity at every breakpoint.
"""

from __future__ import annotations

import math
from fractions import Fraction

from mlfabric.plan.staircase import NOTHING_BYTES, snap_rate
from mlfabric.topology import Link, Network

Held = tuple[tuple[Link, ...], float, float, float]  # links, from, to, rate


class PlainLedger:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.held: list[Held] = []

    def residual(self, link: Link, at_s: float) -> float:
        taken = sum(
            Fraction(rate) for links, begin, end, rate in self.held if link in links and begin <= at_s < end
        )
        return float(Fraction(snap_rate(self.network.capacity(link))) - taken)

    def walk(self, links: tuple[Link, ...], size_bytes: float, start_s: float, limit: float) -> list[Held]:
        """The stretches a transfer takes: from breakpoint to breakpoint, what the narrowest link has left."""
        taken: list[Held] = []
        if not links or size_bytes <= 0:
            return taken
        ends = {edge for _, begin, end, _ in self.held for edge in (begin, end)}
        edges = sorted(edge for edge in ends if edge > start_s)
        at_s, left = start_s, size_bytes
        for until in (*edges, math.inf):
            rate = min(limit, *(self.residual(link, at_s) for link in links))
            if rate > 0:
                done_s = at_s + left / rate
                taken.append((links, at_s, min(done_s, until), rate))
                if done_s <= until:
                    return taken
                left -= rate * (until - at_s)
                if left <= NOTHING_BYTES:
                    return taken
            at_s = until
        return taken

    def reserve(self, links: tuple[Link, ...], size_bytes: float, start_s: float, limit: float) -> list[Held]:
        taken = self.walk(links, size_bytes, start_s, limit)
        self.held.extend(taken)
        return taken

    def release(self, taken: list[Held]) -> None:
        for held in taken:
            self.held.remove(held)
