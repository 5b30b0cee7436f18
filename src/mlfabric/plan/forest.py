"""The shape of a plan's transfers, and its layout on the ledger.

What reaches the servers is a list of nodes, in order. A node is

- a number: that update, sent straight from its worker;
- a `Gather`: nodes sent to one host per shard, which forwards their sum once all are there; its children may
  be gathers themselves, so levels are just depth;
- a `Chain`: updates handed from host to host, each adding its own chunk by chunk as it passes, so that j
  hosts of like speed take the time of one transfer and j - 1 chunks.

`lay_out` turns a list of nodes into bookings. It decides nothing; the search (`grouping.py`, `chains.py`)
compares lists of nodes by laying them out and undoing it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Union

from mlfabric.plan.reservation import Booking, Doors, Ledger
from mlfabric.plan.staircase import INF, Path, Staircase, snap_rate

# Fewer streams than this are sent one after the other: the first are there early and times stay round.
PACED_FROM_STREAMS: Final = 16


class Cargo(NamedTuple):
    """What is to be moved, by place in the order, and to whom."""

    hosts: Sequence[str]
    parts: Sequence[Sequence[int]]  # bytes, by update and shard
    servers: Sequence[str]  # host, by shard
    aggregators: frozenset[str] = frozenset()  # hosts that may sum
    last_counts: bool = False  # cost: the last completion instead of the mean
    deadlines: Sequence[int] = ()  # last position of each update; empty: no bound
    chunk_bytes: int | None = None  # chains may forward chunks of this size
    levels: int = 1  # of gathers
    search_transfers: int = 300  # that a search by local moves may lay out on trial

    def may_be_late(self) -> bool:
        """Can a deadline want an update earlier than it arrives? Not if all may be last."""
        return bool(self.deadlines) and not self.last_counts and min(self.deadlines) < len(self.hosts) - 1

    def meets_deadlines(self, nodes: Iterable[Node]) -> bool:
        """Is there an order of the nodes in which every member is in time? The most urgent first tells."""
        if not self.deadlines:
            return True
        limits = sorted(
            (last_position(members, self.deadlines), len(members)) for members in map(members_of, nodes)
        )
        position = -1
        for last, count in limits:
            position += count
            if position > last:
                return False
        return True


class Gather(NamedTuple):
    """Nodes summed at one host per shard."""

    children: tuple[Node, ...]
    at: tuple[str, ...]


class Chain(NamedTuple):
    """Updates summed on the way from host to host; for each shard the order in which they pass."""

    orders: tuple[tuple[int, ...], ...]


Node = Union[int, Gather, Chain]  # noqa: UP007 - Gather and Chain refer to it before they exist


def members_of(node: Node) -> tuple[int, ...]:
    """The updates in a node, in order."""
    if isinstance(node, int):
        return (node,)
    if isinstance(node, Chain):
        return tuple(sorted(node.orders[0]))
    if set(map(type, node.children)) == {int}:  # as in most gathers
        return node.children  # type: ignore[return-value]
    return tuple(index for child in node.children for index in members_of(child))


def last_position(members: Sequence[int], deadlines: Sequence[int]) -> int:
    """The last position a message's last member may have, its members applied by deadline."""
    if len(members) == 1:
        return deadlines[members[0]]
    return min(
        deadline + len(members) - 1 - k for k, deadline in enumerate(sorted(deadlines[i] for i in members))
    )


class Sum(NamedTuple):
    """One shard's sum on its way to the server or to the gather above."""

    tag: str
    parent: str | None
    shard: int
    aggregator: str
    target: str
    members: tuple[int, ...]
    ready_s: float
    booking: Booking
    size_bytes: int
    chain: tuple[str, ...] = ()


class Sent(NamedTuple):
    """One update's first transfers: by shard where to and what is booked; the group it goes into."""

    targets: Sequence[str]
    bookings: Sequence[Booking]
    tag: str | None


class Layout(NamedTuple):
    """A plan of transfers on the ledger."""

    nodes: Sequence[Node]
    sent: dict[int, Sent]
    sums: list[Sum]
    finishes: dict[int, float]  # by update: when the last shard's server has it


def empty_layout(nodes: Sequence[Node] = ()) -> Layout:
    return Layout(nodes, {}, [], {})


def lay_out(ledger: Ledger, cargo: Cargo, nodes: Sequence[Node], now_s: float) -> Layout:
    """Reserve the transfers of the nodes, in order."""
    layout = empty_layout(nodes)
    for number, node in enumerate(nodes):
        deliver(ledger, cargo, layout, node, number, now_s)
    return layout


def node_tag(number: int) -> str:
    """The name of the group that a node of the layout makes, if it makes one."""
    return f"g{number}"


def deliver(ledger: Ledger, cargo: Cargo, layout: Layout, node: Node, number: int, now_s: float) -> None:
    """Reserve everything that brings one node to the servers."""
    bookings = send(ledger, cargo, layout, node, cargo.servers, node_tag(number), None, now_s)
    finish_s = max(booking.finish_s for booking in bookings)
    for index in members_of(node):
        layout.finishes[index] = finish_s


def send(
    ledger: Ledger,
    cargo: Cargo,
    layout: Layout,
    node: Node,
    targets: Sequence[str],
    tag: str,
    parent: str | None,
    now_s: float,
) -> Sequence[Booking]:
    """Reserve what brings a node to `targets`, one host per shard; the last transfer of each shard."""
    if isinstance(node, int):
        sent = send_update(ledger, cargo, node, targets, parent, now_s)
        layout.sent[node] = sent
        return sent.bookings
    if isinstance(node, Chain):
        return _send_chain(ledger, cargo, layout, node, targets, tag, parent, now_s)
    arrivals: Sequence[Sequence[Booking]] | None = _gather_paced(ledger, cargo, layout, node, tag, now_s)
    if arrivals is None:
        arrivals = [
            send(ledger, cargo, layout, child, node.at, f"{tag}-{k}", tag, now_s)
            for k, child in enumerate(node.children)
        ]
    return forward(ledger, cargo, layout, node, arrivals, targets, tag, parent)


def send_update(
    ledger: Ledger, cargo: Cargo, index: int, targets: Sequence[str], tag: str | None, now_s: float
) -> Sent:
    """Reserve an update's parts from its worker to the targets."""
    sizes = cargo.parts[index]
    order = rotation(len(sizes), index)
    bookings = ledger.reserve_parts(cargo.hosts[index], targets, sizes, order, now_s)
    return Sent(targets, bookings, tag)


def _gather_paced(
    ledger: Ledger, cargo: Cargo, layout: Layout, node: Gather, tag: str, now_s: float
) -> list[list[Booking]] | None:
    """Reserve a gather's parts so that all arrive together, as soon as its fullest link allows.

    The sum waits for the last part anyway, so nothing is lost by sending the others no faster; each link then
    carries one even stream instead of bursts, and is booked once. Only for updates of one size in one rack
    whose links have that much left; None otherwise, and the parts are sent one by one.

    The bookings are shared by all members that are not at an aggregator themselves, so they name no links.
    """
    at, children = node.at, node.children
    if len(children) * len(at) < PACED_FROM_STREAMS or set(map(type, children)) != {int}:
        return None
    if ledger.host_limit < INF:
        return None
    homes = [cargo.hosts[child] for child in children]  # type: ignore[index]
    sizes = cargo.parts[children[0]]  # type: ignore[index]
    if any(cargo.parts[child] != sizes for child in children):  # type: ignore[index]
        return None
    copies = Counter(homes)
    ups, downs = {home: ledger.doors(home) for home in copies}, [ledger.doors(host) for host in at]
    if len({doors.rack for doors in (*ups.values(), *downs)}) > 1:
        return None
    # Bytes first, then rates that let the fullest link take just as long.
    loads = _stream_loads(copies, ups, at, downs, sizes)
    lasts_s = max([load / stairs.capacity if stairs.capacity > 0 else INF for stairs, load in loads.items()])
    rates = [snap_rate(size / lasts_s) if 0 < lasts_s < INF else 0.0 for size in sizes]
    if min(rates) <= 0:
        return None
    finish_s = now_s + max([size / rate for size, rate in zip(sizes, rates, strict=True)])
    if not ledger.hold_totals(_stream_loads(copies, ups, at, downs, rates), now_s, finish_s):
        return None
    streams = [Booking((), [(now_s, finish_s, rate)], now_s, finish_s) for rate in rates]
    here = Booking((), [], now_s, now_s)
    away = Sent(at, streams, tag)
    for child, home in zip(children, homes, strict=True):
        if home in at:
            own = [here if host == home else stream for host, stream in zip(at, streams, strict=True)]
            layout.sent[child] = Sent(at, own, tag)  # type: ignore[index]
        else:
            layout.sent[child] = away  # type: ignore[index]
    return [streams]


def _stream_loads(
    copies: Mapping[str, int],
    ups: Mapping[str, Doors],
    at: Sequence[str],
    downs: Sequence[Doors],
    amounts: Sequence[float],
) -> dict[Staircase, float]:
    """What each link carries if every update sends these amounts, by shard, to the shards' hosts."""
    whole, count = sum(amounts), sum(copies.values())
    loads: dict[Staircase, float] = {ups[home].up: times * whole for home, times in copies.items()}
    for host, doors, amount in zip(at, downs, amounts, strict=True):
        local = copies.get(host, 0)
        if local:
            loads[doors.up] -= local * amount
        loads[doors.down] = loads.get(doors.down, 0.0) + (count - local) * amount
    return loads


def forward(
    ledger: Ledger,
    cargo: Cargo,
    layout: Layout,
    node: Gather,
    arrivals: Sequence[Sequence[Booking]],
    targets: Sequence[str],
    tag: str,
    parent: str | None,
) -> list[Booking]:
    """Reserve a gather's sums from their hosts to the targets, each once its last child is there."""
    members = members_of(node)
    sizes = cargo.parts[members[0]]
    if any(cargo.parts[index] is not sizes for index in members):
        sizes = list(map(max, zip(*(cargo.parts[index] for index in members), strict=True)))
    bookings: list[Booking] = [None] * len(targets)  # type: ignore[list-item]
    for shard in rotation(len(targets), members[0]):
        at, target = node.at[shard], targets[shard]
        ready_s = max([arrival[shard].finish_s for arrival in arrivals])
        booking = ledger.reserve(ledger.path(at, target), sizes[shard], ready_s)
        layout.sums.append(Sum(tag, parent, shard, at, target, members, ready_s, booking, sizes[shard]))
        bookings[shard] = booking
    return bookings


_ROTATIONS: dict[int, list[tuple[int, ...]]] = {
    count: [(*range(turn, count), *range(turn)) for turn in range(count)] for count in range(1, 17)
}


def rotation(count: int, index: int) -> tuple[int, ...]:
    """Shards in the order an update's parts are sent: rotated, or all would queue at the same server."""
    known = _ROTATIONS.get(count)
    if known is not None:
        return known[index % count]
    turn = index % count
    return (*range(turn, count), *range(turn))


# -- chains


def _send_chain(
    ledger: Ledger,
    cargo: Cargo,
    layout: Layout,
    node: Chain,
    targets: Sequence[str],
    tag: str,
    parent: str | None,
    now_s: float,
) -> list[Booking]:
    assert cargo.chunk_bytes is not None
    members = members_of(node)
    steps: dict[int, list[tuple[str, Booking]]] = {index: [] for index in members}
    bookings = []
    for shard, order in enumerate(node.orders):
        hosts = tuple(cargo.hosts[index] for index in order)
        size = max(cargo.parts[index][shard] for index in order)
        stops = (*hosts, targets[shard])
        paths = [ledger.path(here, there) for here, there in pairwise(stops)]
        hops = _reserve_hops(ledger, paths, size, min(cargo.chunk_bytes, size), now_s)
        for index, there, hop in zip(order, stops[1:], hops, strict=True):
            steps[index].append((there, hop))
        ready_s = max(hops[-1].start_s, hops[-2].start_s) if len(hops) > 1 else hops[-1].start_s
        layout.sums.append(
            Sum(tag, parent, shard, hosts[-1], targets[shard], order, ready_s, hops[-1], size, hosts)
        )
        bookings.append(hops[-1])
    for index, hopped in steps.items():
        layout.sent[index] = Sent([there for there, _ in hopped], [hop for _, hop in hopped], tag)
    return bookings


def _reserve_hops(
    ledger: Ledger, paths: Sequence[Path], size_bytes: int, chunk_bytes: int, now_s: float
) -> list[Booking]:
    """Every hop at the same rate, each a chunk behind the one before, as early as all of them fit."""
    crossed = Counter(
        stairs for path in paths for stairs in path
    )  # a rack's link may be crossed several times
    widest = snap_rate(min([stairs.capacity / times for stairs, times in crossed.items()], default=INF))
    if widest == INF:
        return [ledger.hold((), INF, now_s, now_s) for _ in paths]
    best: tuple[float, float, float] | None = None
    for rate in (widest, snap_rate(widest * 0.5)):
        if rate <= 0:
            continue
        needs = [[rate * crossed[stairs] for stairs in path] for path in paths]
        start_s = _fit_hops(ledger, paths, needs, size_bytes / rate, chunk_bytes / rate, now_s)
        finish_s = start_s + (size_bytes + (len(paths) - 1) * chunk_bytes) / rate
        if best is None or finish_s < best[0]:
            best = (finish_s, start_s, rate)
    if best is None or best[0] == INF:
        raise ValueError("no chain ends over a dead link")
    _, start_s, rate = best
    hops = []
    for k, path in enumerate(paths):
        begin_s = start_s + k * (chunk_bytes / rate)
        hops.append(ledger.hold(path, rate, begin_s, begin_s + size_bytes / rate))
    return hops


def _fit_hops(
    ledger: Ledger,
    paths: Sequence[Path],
    needs: Sequence[Sequence[float]],
    lasts_s: float,
    lag_s: float,
    now_s: float,
) -> float:
    """The earliest start at which every hop, each `lag_s` after the one before, finds its rate free."""
    start_s = now_s
    moved = True
    while moved:
        moved = False
        for k, path in enumerate(paths):
            begin_s = start_s + k * lag_s
            free_s = ledger.fit(path, needs[k], lasts_s, begin_s)
            if free_s == INF:
                return INF
            if free_s > begin_s:
                moved = True
                start_s = free_s - k * lag_s
                while start_s + k * lag_s < free_s:
                    start_s += math.ulp(free_s)
    return start_s
