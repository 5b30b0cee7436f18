"""Which way every piece of a collective operation goes, as seen by one rank.

An operation moves blocks of bytes. Each piece of a block is *gathered* along a tree (children send parts,
which are summed on the way to the one rank that holds the whole sum) and its result is *spread* along
another. A `Route` is one rank's place in both trees; `Segment` says for which bytes. All collectives are made
of these: a sum at one place and copies to all, a block that is only spread, parts that are only gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Route:
    """A rank's place in the trees of one piece; -1 stands for nobody."""

    children: tuple[int, ...] = ()  # whose parts are added here
    parent: int = -1  # who gets the sum of ours and theirs
    source: int = -1  # who sends the result
    forward: tuple[int, ...] = ()  # who gets the result from us
    adds: bool = True  # our own array is part of the sum


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes [start, stop) of a block and the way they go."""

    block: int
    start: int
    stop: int
    route: Route


@dataclass(frozen=True, slots=True)
class Shares:
    """Who sums and who distributes which share, agreed on by all ranks from some operation on.

    `domains` are the ranks that share a rack or a host: parts are summed inside first, by `gathers`.
    """

    number: int
    reduces: tuple[float, ...]  # by rank, sums to one
    broadcasts: tuple[float, ...]
    gathers: tuple[float, ...] = ()  # by rank, sums to one inside each domain
    domains: tuple[tuple[int, ...], ...] = ()
    chunk_bytes: int = 256 * 1024


def equal_shares(size: int) -> Shares:
    even = (1.0 / size,) * size
    return Shares(0, even, even)


def cut(elements: int, shares: Sequence[float]) -> list[int]:
    """Bounds of consecutive pieces of so many elements in proportion to the shares."""
    whole = sum(shares)
    bounds, sofar = [0], 0.0
    for share in shares:
        sofar += share
        bounds.append(min(elements, max(bounds[-1], round(elements * sofar / whole))))
    bounds[-1] = elements
    return bounds


def all_reduce_segments(elements: int, itemsize: int, shares: Shares, rank: int) -> list[Segment]:
    """Every rank's array is block 0; the sum ends up in all of them."""
    if shares.domains:
        return _in_domains(elements, itemsize, shares, rank)
    size = len(shares.reduces)
    sums, spreads = cut(elements, shares.reduces), cut(elements, shares.broadcasts)
    segments = []
    at, summing, spreading = 0, 0, 0
    while at < elements:
        while sums[summing + 1] <= at:
            summing += 1
        while spreads[spreading + 1] <= at:
            spreading += 1
        until = min(sums[summing + 1], spreads[spreading + 1])
        route = _flat(size, rank, summing, spreading)
        segments.append(Segment(0, at * itemsize, until * itemsize, route))
        at = until
    return segments


def _flat(size: int, rank: int, summing: int, spreading: int) -> Route:
    """All send to `summing`; `spreading` distributes the sum."""
    others = tuple((rank + step) % size for step in range(1, size))
    rest = tuple(other for other in others if other not in (summing, spreading))
    if rank == summing:
        return Route(children=others, forward=others if summing == spreading else (spreading,))
    if rank == spreading:
        return Route(parent=summing, source=summing, forward=rest)
    return Route(parent=summing, source=spreading)


def _in_domains(elements: int, itemsize: int, shares: Shares, rank: int) -> list[Segment]:
    """Sum inside each domain, then between domains, and back the same way.

    The gatherers of each domain cut the elements by `gathers`; a root is one of its domain's gatherers. Cuts
    of all domains together make pieces in each of which every domain has one gatherer and all have one root.
    """
    mine = next(domain for domain in shares.domains if rank in domain)
    roots = [_weight(shares.reduces, domain) for domain in shares.domains]
    # The root's domain owns a run of elements, and inside it, the gatherers their part of that run.
    runs = cut(elements, roots)
    segments: list[Segment] = []
    for home, (first, last) in enumerate(pairwise(runs)):
        if last <= first:
            continue
        cuts = [
            [first + bound for bound in cut(last - first, [shares.gathers[r] for r in domain])]
            for domain in shares.domains
        ]
        bounds = sorted({bound for each in cuts for bound in each})
        for start, stop in pairwise(bounds):
            leads = [_who(domain, each, start) for domain, each in zip(shares.domains, cuts, strict=True)]
            route = _two_levels(rank, mine, leads, leads[home], shares.domains)
            segments.append(Segment(0, start * itemsize, stop * itemsize, route))
    return segments


def _weight(values: Sequence[float], domain: Sequence[int]) -> float:
    return sum(values[rank] for rank in domain)


def _who(domain: Sequence[int], bounds: Sequence[int], at: int) -> int:
    for rank, (start, stop) in zip(domain, pairwise(bounds), strict=True):
        if start <= at < stop:
            return rank
    raise AssertionError("every element has a gatherer in every domain")


def _two_levels(
    rank: int, mine: Sequence[int], leads: Sequence[int], root: int, domains: Sequence[Sequence[int]]
) -> Route:
    lead = leads[[rank in domain for domain in domains].index(True)]
    if rank != lead:
        return Route(parent=lead, source=lead)
    inside = tuple(other for other in mine if other != rank)
    others = tuple(other for other in leads if other != rank)
    if rank == root:
        return Route(children=(*inside, *others), forward=(*others, *inside))
    return Route(children=inside, parent=root, source=root, forward=inside)


def sum_at_routes(size: int, place: int, rank: int) -> Route:
    """Everybody's part is summed at one place and stays there."""
    if rank == place:
        return Route(children=tuple((rank + step) % size for step in range(1, size)))
    return Route(parent=place)


def reduce_to_segments(lengths: Sequence[int], root: int, rank: int) -> list[Segment]:
    """Block b is summed by rank b, which sends the sum to the root."""
    size = len(lengths)
    segments = []
    for block in [(rank + step) % size for step in range(size)]:
        at = sum_at_routes(size, block, rank)
        if block != root and rank == block:
            at = Route(children=at.children, forward=(root,))
        elif block != root and rank == root:
            at = Route(parent=block, source=block)
        segments.append(Segment(block, 0, lengths[block], at))
    return segments


def spread_route(rank: int, origin: int, size: int, shares: Shares, without: Sequence[int] = ()) -> Route:
    """A block of one rank goes to all others, but for some, once into each domain that is not its own."""
    others = [each for each in range(size) if each != origin and each not in without]
    if rank != origin and rank not in others:
        return Route()
    homes = {each: index for index, domain in enumerate(shares.domains) for each in domain}
    if not homes:
        return Route(forward=_after(origin, others)) if rank == origin else Route(source=origin)
    inside: dict[int, list[int]] = {}
    for each in others:
        inside.setdefault(homes[each], []).append(each)
    # Different origins lead through different ranks of a domain, so that all of them carry their part.
    leads = {home: held[origin % len(held)] for home, held in inside.items() if home != homes[origin]}
    near = inside.get(homes[origin], [])
    if rank == origin:
        return Route(forward=(*_after(origin, list(leads.values())), *near))
    if homes[rank] == homes[origin]:
        return Route(source=origin)
    lead = leads[homes[rank]]
    if rank != lead:
        return Route(source=lead)
    return Route(source=origin, forward=tuple(each for each in inside[homes[rank]] if each != lead))


def _after(rank: int, others: Sequence[int]) -> tuple[int, ...]:
    """In the order of ranks, the next one first: not everybody begins with the same."""
    return (*(each for each in others if each > rank), *(each for each in others if each < rank))


def broadcast_segments(elements: int, itemsize: int, shares: Shares, root: int, rank: int) -> list[Segment]:
    """The root sends each share once, to the rank that hands it to all others; its own domain it serves."""
    size = len(shares.broadcasts)
    weights = [0.0 if other == root else share for other, share in enumerate(shares.broadcasts)]
    if not any(weights):
        weights = [float(other != root) for other in range(size)]
    near = next((domain for domain in shares.domains if root in domain), (root,))
    segments = []
    for relay, (start, stop) in enumerate(pairwise(cut(elements, weights))):
        if relay == root:
            continue
        served = (root,) if relay in near else near
        if rank == root:
            route = Route(forward=(relay, *(each for each in served if each != root)))
        elif rank in served:
            route = Route(source=root)
        else:
            route = spread_route(rank, relay, size, shares, served)
            if rank == relay:
                route = Route(source=root, forward=route.forward)
        segments.append(Segment(0, start * itemsize, stop * itemsize, route))
    return segments
