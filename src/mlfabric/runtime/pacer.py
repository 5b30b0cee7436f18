"""Has the kernel pace collective links: each iteration's bytes take the time until they are needed.

What is pure is in `collective.cadence`: the rhythm, and the rate of this node as a whole. Here it is shared
out among the links, by what each carried lately, and told to the kernel whenever it has changed by enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mlfabric.collective.cadence import Cadence
from mlfabric.collective.group import Done
from mlfabric.runtime.link import Link
from mlfabric.runtime.pacing import set_pace

# A rate is told to the kernel when it differs from the last one by this share.
WORTH_SETTING = 0.03
# No link gets less than this part of an equal share: it may have to carry more than it did.
LEAST_SHARE = 0.25
# What a link carried counts half after so long an iteration.
FORGET = 0.5
# Above this share of what the uplink carries, the uplink is the limit and not we.
HOLDS_BACK = 0.9


class Pacer:
    """`links` are the node's links by peer, as they are now."""

    def __init__(
        self,
        links: Mapping[str, Link],
        clock: Callable[[], float] = time.monotonic,
        cadence: Cadence | None = None,
    ) -> None:
        self.cadence = cadence or Cadence()
        self.rate: float | None = None  # bytes per second of all links together; None: no limit
        self._links = links
        self._clock = clock
        self._carried: dict[str, float] = {}  # by peer, lately
        self._counted: dict[str, int] = {}
        self._set: dict[Link, float | None] = {}

    def holds_back(self, uplink: float | None) -> bool:
        """Whether bytes wait for us rather than for a link."""
        return self.rate is not None and (uplink is None or self.rate < HOLDS_BACK * uplink)

    def posted(self, size_bytes: int, done: Done) -> Done:
        """A large operation was called; the same `done`, listened to."""
        now = self._clock()
        self._count()
        call = self.cadence.posted(now, size_bytes, self._sent())
        self.look(now)

        def ended(error: str | None) -> None:
            self.cadence.ended(self._clock(), call)
            done(error)

        return ended

    def look(self, now: float) -> None:
        """Set every link's rate to what is needed from now on."""
        self.rate = self.cadence.rate(now)
        shares = self._shares() if self.rate is not None else {}
        for peer, link in self._links.items():
            wanted = None if self.rate is None else self.rate * shares[peer]
            if _differs(wanted, self._set.get(link)):
                set_pace(link.sock, wanted)
                self._set[link] = wanted
        for link in [link for link in self._set if self._links.get(link.peer) is not link]:
            del self._set[link]

    def _sent(self) -> int:
        """Bytes that peers have acknowledged, of all that was ever sent."""
        return sum(link.sent_bytes - link.unsent() for link in self._links.values())

    def _count(self) -> None:
        for peer, link in self._links.items():
            before = self._counted.get(peer, 0)
            self._counted[peer] = link.sent_bytes
            self._carried[peer] = FORGET * self._carried.get(peer, 0.0) + max(link.sent_bytes - before, 0)

    def _shares(self) -> dict[str, float]:
        equal = 1 / max(len(self._links), 1)
        total = sum(self._carried.get(peer, 0.0) for peer in self._links)
        if total <= 0:
            return dict.fromkeys(self._links, equal)
        return {peer: max(self._carried.get(peer, 0.0) / total, LEAST_SHARE * equal) for peer in self._links}


def _differs(new: float | None, old: float | None) -> bool:
    if new is None or old is None:
        return new is not old
    return abs(new - old) > WORTH_SETTING * old
