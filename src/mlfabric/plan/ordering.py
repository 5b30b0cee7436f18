"""Which waiting updates are kept, and in which order they are applied.

With V updates placed already, an update computed from version v and placed at position p is V + p - v
updates old when it is applied. So the delay bound is a deadline on *positions*: p <= D = bound - (V - v).

1. Walk the updates by deadline and keep a heap; whenever more are kept than the deadline has places, the
   longest is dropped. The kept set is the largest possible, and of those the one with the least link time.
2. Fill the positions from the back, each with the longest kept update whose deadline allows it. For the
   kept set no order has a smaller sum of completion times.

Both hold for one link and fixed durations; with several links a duration is an estimate, size over the
narrowest of the links, and only the head of the order is looked at again with the reservations in hand
(`planner.py`). Ties never depend on who arrived first: equal durations keep the worker that was dropped more
often, then the smaller worker name. A worker dropped three times in a row goes first once.

The other policies are what we compare with; they are here so that everything else stays equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from mlfabric.errors import FabricError
from mlfabric.plan.values import JobState, Offer, PlannedDrop, Shard
from mlfabric.topology import Network

# Dropped this often in a row, a worker's next update goes first.
DROPS_BEFORE_FIRST: Final = 3
UNBOUNDED: Final = 1 << 60
WITHOUT_BOUND: Final = frozenset({"shortest", "fair-share"})  # policies that know no delay bound


@dataclass(frozen=True, slots=True)
class Ordered:
    """Kept updates in the order of application, and the others with the reason why not."""

    kept: tuple[Offer, ...]
    drops: tuple[PlannedDrop, ...]


class _Entry(NamedTuple):
    """An offer with what the rules look at. Sorted as they are, entries stand by deadline, then by rank."""

    deadline: int  # the last position it may have
    rank: int  # unique, so that every order is total: by drops in a row, then by names
    duration_s: float
    offer: Offer


def order_updates(offers: Sequence[Offer], job: JobState, durations_s: Mapping[str, float]) -> Ordered:
    """Keep and order a job's offers by the policy it names. `durations_s` is by update."""
    try:
        policy = POLICIES[job.policy]
    except KeyError:
        raise FabricError(f"unknown policy {job.policy!r}; known are {', '.join(sorted(POLICIES))}") from None
    ranked = sorted(offers, key=lambda o: (-o.drops_in_row, o.worker, o.update))
    entries = [
        _Entry(position_deadline(offer, job), rank, durations_s[offer.update], offer)
        for rank, offer in enumerate(ranked)
    ]
    return policy(entries, job)


def position_deadline(offer: Offer, job: JobState) -> int:
    """The last position, counted from 0, at which the offer is still within the job's delay bound."""
    if job.max_delay is None or job.policy in WITHOUT_BOUND:
        return UNBOUNDED
    return job.max_delay - (job.placed_version - offer.base_version)


def estimate_duration(network: Network, shards: Sequence[Shard], offer: Offer) -> float:
    """Seconds an update takes over idle links: the narrowest link decides; parts share the uplink."""
    whole = sum(shard.share for shard in shards) or 1.0
    remote = [shard for shard in shards if shard.server != offer.host]
    if not remote:
        return 0.0
    up = network.hosts[offer.host].up_bytes_per_s
    rates = [(shard.share / whole, network.rate(offer.host, shard.server)) for shard in remote]
    if up <= 0 or any(rate <= 0 for _, rate in rates):
        return math.inf
    out = sum(share for share, _ in rates) / up
    return offer.size_bytes * max(out, *(share / rate for share, rate in rates))


def estimate_durations(
    network: Network, shards: Sequence[Shard], offers: Iterable[Offer]
) -> dict[str, float]:
    """`estimate_duration` of many offers. What lies beyond the uplink is the same for a whole rack."""
    hosts = network.hosts
    servers = {shard.server for shard in shards}
    beyond: dict[str | None, float] = {}  # by the sender's rack
    durations = {}
    for offer in offers:
        host = hosts[offer.host]
        if offer.host in servers:
            durations[offer.update] = estimate_duration(network, shards, offer)
            continue
        rack, up = host.rack, host.up_bytes_per_s
        if rack not in beyond:
            beyond[rack] = _beyond_uplink(network, rack, shards)
        slowest = max(beyond[rack], 1 / up if up > 0 else math.inf)
        durations[offer.update] = offer.size_bytes * slowest if slowest < math.inf else math.inf
    return durations


def _beyond_uplink(network: Network, rack: str | None, shards: Sequence[Shard]) -> float:
    """Seconds per byte of an update that the slowest way from a rack's core link to a server takes."""
    whole = sum(shard.share for shard in shards) or 1.0
    slowest = 0.0
    for shard in shards:
        server = network.hosts[shard.server]
        rate = server.down_bytes_per_s
        if rack != server.rack:
            if rack is not None and rack in network.racks:
                rate = min(rate, network.racks[rack].up_bytes_per_s)
            if server.rack is not None and server.rack in network.racks:
                rate = min(rate, network.racks[server.rack].down_bytes_per_s)
        slowest = max(slowest, shard.share / whole / rate if rate > 0 else math.inf)
    return slowest


# -- our own rule


def _order_by_deadline(entries: Sequence[_Entry], job: JobState) -> Ordered:
    urgent = [e for e in entries if e.offer.drops_in_row >= DROPS_BEFORE_FIRST and e.deadline >= 0]
    first, squeezed = _keep(urgent, 0)
    rest = [e for e in entries if e.offer.drops_in_row < DROPS_BEFORE_FIRST or e.deadline < 0]
    later, dropped = _keep(rest + squeezed, len(first))
    kept = _fill_backward(first, 0) + _fill_backward(later, len(first))
    return Ordered(
        tuple(e.offer for e in kept),
        tuple(_explain_drop(e, len(kept), job) for e in sorted(dropped, key=lambda e: e.rank)),
    )


def _keep(entries: Sequence[_Entry], taken: int) -> tuple[list[_Entry], list[_Entry]]:
    """The largest, then cheapest, set whose deadlines can all be met after `taken` positions; the others."""
    heap: list[tuple[float, int, _Entry]] = []
    dropped = []
    for entry in sorted(entries):
        heappush(heap, (-entry.duration_s, -entry.rank, entry))
        if len(heap) > entry.deadline + 1 - taken:
            dropped.append(heappop(heap)[2])
    return [entry for _, _, entry in heap], dropped


def _fill_backward(kept: Sequence[_Entry], taken: int) -> list[_Entry]:
    """Positions from the last to the first, each to the longest update whose deadline allows it."""
    by_deadline = sorted(kept)
    eligible: list[tuple[float, int, int, _Entry]] = []
    reverse: list[_Entry] = []
    for position in range(taken + len(kept) - 1, taken - 1, -1):
        while by_deadline and by_deadline[-1].deadline >= position:
            entry = by_deadline.pop()
            heappush(eligible, (-entry.duration_s, -entry.deadline, -entry.rank, entry))
        reverse.append(heappop(eligible)[3])
    return reverse[::-1]


def _explain_drop(entry: _Entry, kept: int, job: JobState) -> PlannedDrop:
    """Even next in line it would be too late, or so many shorter ones are before it that it would be."""
    now = job.placed_version - entry.offer.base_version
    if entry.deadline < 0:
        return PlannedDrop(
            entry.offer.update, f"delay would be {now} even if sent next, bound {job.max_delay}"
        )
    return PlannedDrop(
        entry.offer.update,
        f"delay would be {now + kept}, bound {job.max_delay}, behind {kept} updates that are kept",
    )


# -- what we compare with


def _in_line(key: Callable[[_Entry, JobState], tuple[object, ...]]) -> Policy:
    """A policy that fixes the order by a key and drops whoever's place in it comes too late."""

    def order(entries: Sequence[_Entry], job: JobState) -> Ordered:
        kept: list[Offer] = []
        drops = []
        for entry in sorted(entries, key=lambda e: key(e, job)):
            if entry.deadline >= len(kept):
                kept.append(entry.offer)
            else:
                delay = job.placed_version + len(kept) - entry.offer.base_version
                drops.append(
                    PlannedDrop(
                        entry.offer.update,
                        f"delay would be {delay}, bound {job.max_delay}: "
                        f"{len(kept)} go before it by policy {job.policy}",
                    )
                )
        return Ordered(tuple(kept), tuple(drops))

    return order


def _unbounded(key: Callable[[_Entry], tuple[object, ...]]) -> Policy:
    """A policy that fixes the order by a key and never drops."""

    def order(entries: Sequence[_Entry], job: JobState) -> Ordered:
        return Ordered(tuple(e.offer for e in sorted(entries, key=key)), ())

    return order


def _turn(entries: Sequence[_Entry], job: JobState) -> Ordered:
    """Round robin: one update of each worker a round, workers by name, from the one after the last served."""
    rounds: dict[str, int] = {}
    turns: dict[str, tuple[int, bool, str]] = {}
    for entry in sorted(entries, key=lambda e: (e.offer.arrival, e.offer.update)):
        worker = entry.offer.worker
        lap = rounds.get(worker, 0)
        rounds[worker] = lap + 1
        turns[entry.offer.update] = (lap, worker <= job.last_served, worker)
    return _in_line(lambda e, _: turns[e.offer.update])(entries, job)


Policy = Callable[[Sequence[_Entry], JobState], Ordered]
POLICIES: Final[dict[str, Policy]] = {
    "mlfabric": _order_by_deadline,
    "arrival": _in_line(lambda e, _: (e.offer.arrival, e.offer.update)),
    "oldest": _in_line(lambda e, _: (e.offer.base_version, e.rank)),
    "shortest": _unbounded(lambda e: (e.duration_s, e.rank)),
    "round-robin": _turn,
    # No order at all: everything moves at once, and positions follow from who is through first.
    "fair-share": _unbounded(lambda e: (e.duration_s, e.rank)),
}
