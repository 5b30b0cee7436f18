"""How parts of models that are wanted together travel: from hosts of a plan to the nodes that pass them on.

`plan.distribution` says which host gets a shard from which. Here that becomes one copy per node: the first on
a host gets it from elsewhere, and has to pass it on to the others there and to the next host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlfabric.messages import Hop, MemberInfo, ServePull
from mlfabric.plan.distribution import Relay, Wanted, relay_or_not
from mlfabric.plan.values import Reserved
from mlfabric.roles.release import MAX_RATE
from mlfabric.topology import Network


@dataclass(frozen=True, slots=True)
class PartWanted:
    """A shard that a node wants from whoever holds it."""

    pull: str
    node: str
    shard: int
    holder: str  # node
    size_bytes: int
    version: int = 0
    may_relay: bool = True
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """One of them with its way: from the holder, or passed on from another pull."""

    part: PartWanted
    source: str  # node
    through: str  # pull; none: from the holder itself
    rate_bytes_per_s: float
    depth: int  # 0: from the holder
    finish_s: float  # from now on
    chunk_bytes: int


def relay_copies(
    parts: Sequence[PartWanted],
    members: Mapping[str, MemberInfo],
    network: Network,
    reserved: Sequence[Reserved],
) -> list[Copy]:
    """Copies of all parts that had better be passed on, each after the one it is made from; the rest comes
    straight from its holder."""
    asked: dict[tuple[int, str], dict[str, list[PartWanted]]] = {}  # (shard, holder) -> host -> its parts
    taken = set()
    for part in parts:
        key = (part.shard, part.holder)
        host = members[part.node].host
        # Nobody passes something on to itself.
        if part.may_relay and host != members[part.holder].host and (*key, part.node) not in taken:
            taken.add((*key, part.node))
            asked.setdefault(key, {}).setdefault(host, []).append(part)
    wanted = {
        (shard, holder): Wanted(
            shard,
            max(part.version for there in hosts.values() for part in there),
            members[holder].host,
            next(iter(hosts.values()))[0].size_bytes,
            {host: tuple(part.node for part in there) for host, there in hosts.items()},
        )
        for (shard, holder), hosts in asked.items()
    }
    plans = relay_or_not(network, reserved, list(wanted.values()))
    return [
        copy
        for (key, each), relays in zip(wanted.items(), plans, strict=False)
        for copy in _along(relays, each, key[1], asked[key])
    ]


def _along(
    relays: Sequence[Relay], wanted: Wanted, holder: str, asked: Mapping[str, list[PartWanted]]
) -> list[Copy]:
    onward: dict[str, list[Relay]] = {}
    for relay in reversed(relays):
        onward.setdefault(relay.source, []).append(relay)
    copies: list[Copy] = []
    to_do = [(relay, holder, "", 0) for relay in onward.get(wanted.server, [])]
    while to_do:
        relay, source, through, depth = to_do.pop()
        first, *others = asked[relay.target]
        rate, finish_s, chunk = relay.rate_bytes_per_s, relay.finish_s, wanted.chunk_bytes
        copies.append(Copy(first, source, through, rate, depth, finish_s, chunk))
        copies += [
            Copy(part, first.node, first.pull, MAX_RATE, depth + 1, finish_s, chunk) for part in others
        ]
        to_do += [(below, first.node, first.pull, depth + 1) for below in onward.get(relay.target, [])]
    return copies


def serve_orders(copies: Sequence[Copy]) -> list[tuple[PartWanted, ServePull]]:
    """What the holders are told: each order with all who get the bytes from there."""
    orders: list[tuple[PartWanted, ServePull]] = []
    at = 0
    while at < len(copies):
        head = copies[at]
        end = at + 1
        while end < len(copies) and copies[end].depth > 0:
            end += 1
        hops = tuple(
            Hop(copy.part.pull, copy.part.node, copy.rate_bytes_per_s, copy.depth - 1, copy.part.attempt)
            for copy in copies[at + 1 : end]
        )
        order = ServePull(
            head.part.pull,
            head.part.node,
            head.part.shard,
            head.rate_bytes_per_s,
            False,
            onward=hops,
            chunk_bytes=head.chunk_bytes if hops else 0,
            attempt=head.part.attempt,
        )
        orders.append((head.part, order))
        at = end
    return orders
