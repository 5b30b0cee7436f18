"""Fair sharing, the order that is no order: everything moves at once, every link is split max-min.

This is what a network does when nobody plans, and the baseline `fair-share`. Rates are those of the first
moment, held to the end of each transfer; they are feasible, so the ledger can hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from mlfabric.plan.forest import Cargo, Layout, Sent, empty_layout
from mlfabric.plan.reservation import Booking, Ledger
from mlfabric.plan.staircase import INF, Path, Staircase, snap_rate


def share_rates(paths: Sequence[Path], residual: dict[int, float]) -> list[float]:
    """Max-min fair rates: fill all equally, freeze those over the link that is full first, go on.

    `residual` is what each staircase (by id) has to give. A path without links gets an infinite rate.
    """
    rates = [INF if not path else 0.0 for path in paths]
    left = dict(residual)
    users: dict[int, set[int]] = {}
    for index, path in enumerate(paths):
        for stairs in path:
            users.setdefault(id(stairs), set()).add(index)
    order = {key: number for number, key in enumerate(users)}  # ties: the link met first
    heap = [(left[key] / len(waiting), order[key], key) for key, waiting in users.items()]
    heapify(heap)
    while heap:
        share, _, key = heappop(heap)
        if not users[key]:
            continue
        now = left[key] / len(users[key])
        if share < now:  # others have left it since: it is full later
            heappush(heap, (now, order[key], key))
            continue
        level = snap_rate(min(share, now))
        for index in list(users[key]):
            rates[index] = level
            for stairs in paths[index]:
                left[id(stairs)] -= level
                users[id(stairs)].discard(index)
    return rates


def lay_out_fairly(ledger: Ledger, cargo: Cargo, now_s: float) -> Layout:
    """Every part starts now at its fair rate."""
    count, shards = len(cargo.hosts), range(len(cargo.servers))
    paths = [ledger.path(cargo.hosts[i], cargo.servers[s]) for i in range(count) for s in shards]
    touched: dict[int, Staircase] = {id(stairs): stairs for path in paths for stairs in path}
    # A link's fair split may rely only on what it has left for good: until the last transfer under way ends.
    residual = {key: max(0.0, min(stairs.residuals[:-1])) for key, stairs in touched.items()}
    rates = share_rates(paths, residual)
    sizes = [size for parts in cargo.parts for size in parts]
    bookings: dict[int, Booking] = {}
    for k, (path, rate, size) in enumerate(zip(paths, rates, sizes, strict=True)):
        if rate > 0:
            bookings[k] = ledger.hold(path, rate, now_s, now_s + size / rate)
    for k, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        if k not in bookings:  # a link is taken for now: queue behind those that hold it
            bookings[k] = ledger.reserve(path, size, now_s)
    layout = empty_layout(range(count))
    for i in range(count):
        row = [bookings[i * len(shards) + s] for s in shards]
        layout.sent[i] = Sent(cargo.servers, row, None)
        layout.finishes[i] = max(booking.finish_s for booking in row)
    return layout
