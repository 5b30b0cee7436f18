"""Who counts as alive, and for how long after its last sign of life. The lengths are learned from arrivals.

A lease is three times the largest gap seen between a member's heartbeats of late, within limits: the floor
keeps a moment's load on a host from looking like its death, the ceiling keeps one long stall from making the
next one last as long. Heartbeats come four times per lease, so a large fabric with a longer floor also has
fewer of them.

A heartbeat counts from when it was sent: after a cable cut, TCP delivers those that it kept, and they say
nothing of the present. The sender's clock is its own, so a heartbeat's age is how much later it came than the
promptest one. Nothing else counts as a sign of life, because it does not say when it was sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

# Losing the scheduler's host takes two leases to repair, and three seconds are promised for it.
FLOOR_S = 1.0
CEILING_S = 3.0
# A scheduler answers some thousand heartbeats a second beside its other work; this many members at four
# heartbeats per second reach it, and beyond that leases grow with their number.
MEMBERS_AT_FLOOR = 250
GAPS_PER_LEASE = 3.0
# The promptest heartbeat is forgotten so fast: clocks drift apart by less, and changed paths are learned.
DRIFT = 0.001
# How much of the largest gap remains after each heartbeat that came sooner: half in about nine seconds.
FADING = 0.98


@dataclass(slots=True)
class _Lease:
    heard_s: float
    beat_s: float | None = None  # when its last heartbeat came
    lag_s: float = 0.0  # the least time from the sender's clock to ours, of late
    gap_s: float = 0.0


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease as it is shown."""

    node: str
    lease_s: float
    silent_s: float
    largest_gap_s: float


class Leases:
    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._leases: dict[str, _Lease] = {}

    def begin(self, node: str, now: float) -> None:
        self._leases[node] = _Lease(now)

    def end(self, node: str) -> None:
        self._leases.pop(node, None)

    def heard(self, node: str, sent_s: float, now: float) -> None:
        """A heartbeat: its sender lived when it was sent; and how regularly they come."""
        lease = self._leases.get(node)
        if lease is None:
            return
        lag = now - sent_s
        if lease.beat_s is None:
            lease.lag_s = lag
        else:
            lease.lag_s = min(lag, lease.lag_s + DRIFT * (now - lease.beat_s))
            lease.gap_s = max(now - lease.beat_s, lease.gap_s * FADING)
        lease.heard_s = max(lease.heard_s, sent_s + lease.lag_s)
        lease.beat_s = now

    def length_s(self, node: str) -> float:
        floor = max(self._least_s, FLOOR_S * max(1.0, len(self._leases) / MEMBERS_AT_FLOOR))
        lease = self._leases.get(node)
        gap = lease.gap_s if lease is not None else 0.0
        return min(max(GAPS_PER_LEASE * gap, floor), max(CEILING_S, floor))

    def until_s(self, node: str) -> float:
        return self._leases[node].heard_s + self.length_s(node)

    def silent_s(self, node: str, now: float) -> float:
        return now - self._leases[node].heard_s

    def alive(self, node: str, now: float) -> bool:
        return node in self._leases and now < self.until_s(node)

    def fresh(self, node: str, now: float) -> bool:
        """Heard within half a lease, so that two heartbeats are not missing yet."""
        return node in self._leases and now < self._leases[node].heard_s + self.length_s(node) / 2

    def nodes(self) -> set[str]:
        return set(self._leases)

    def records(self, now: float) -> tuple[LeaseRecord, ...]:
        return tuple(
            LeaseRecord(node, self.length_s(node), now - lease.heard_s, lease.gap_s)
            for node, lease in sorted(self._leases.items())
        )
