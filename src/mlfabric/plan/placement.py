"""Which hosts lead the shards of a model, which follow, and when a lead moves.

Shards are spread over the fastest hosts in proportion to what their links carry, and over racks, as leads in
one rack share its link; a replica sits on another host, in another rack if there is one. When a server's link
degrades its lead moves to the replica, where the state already is; only if another host is so much better
that the bytes of the move pay does the shard itself move. Moving costs are counted, so links that flap don't
make leads flap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlfabric.errors import FabricError
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import Shard
from mlfabric.topology import Link, Network
from mlfabric.units import format_rate, format_size, format_time

# A lead moves only if it saves this many times what moving costs.
WORTH_MOVING: Final = 1.5
# Seconds a hand-over takes beside bytes: new epoch, grants stopped and given again.
HAND_OVER_S: Final = 0.1


def host_bandwidth(network: Network, name: str) -> float:
    """What a server at this host can take and give: the narrower of its links and of its rack's."""
    host = network.hosts[name]
    rates = [host.up_bytes_per_s, host.down_bytes_per_s]
    if host.rack is not None:
        rates += [network.capacity(Link(host.rack, way)) for way in ("up", "down")]
    return min(rates)


def place_shards(
    network: Network, candidates: Sequence[str], count: int, replicas: bool = False
) -> tuple[Shard, ...]:
    """`count` shards on the fastest candidates, shares by bandwidth; replicas on other hosts if asked for.

    Leads in one rack share its link, so each further one there counts with its part of it only.
    """
    ranked = sorted(set(candidates), key=lambda name: (-host_bandwidth(network, name), name))
    ranked = [name for name in ranked if host_bandwidth(network, name) > 0]
    if len(ranked) < count or count < 1:
        raise FabricError(f"{count} shards need as many hosts with bandwidth; there are {len(ranked)}")
    servers, inside = _spread_over_racks(network, ranked, count)
    carries = {name: _bandwidth_among(network, name, inside) for name in servers}
    whole = sum(carries.values())
    taken = dict.fromkeys(servers, 1)
    shards = []
    for index, server in enumerate(servers):
        replica = _choose_replica(network, server, ranked, taken) if replicas else None
        if replica is not None:
            taken[replica] = taken.get(replica, 0) + 1
        shards.append(Shard(index, server, replica, carries[server] / whole))
    return tuple(shards)


def _spread_over_racks(
    network: Network, ranked: Sequence[str], count: int
) -> tuple[list[str], dict[str | None, int]]:
    """The hosts that carry most as leads, one after the other, and how many are in each rack."""
    servers: list[str] = []
    inside: dict[str | None, int] = {}
    queues: dict[str | None, list[str]] = {}  # hosts of each rack, the fastest last
    for name in reversed(ranked):
        queues.setdefault(network.hosts[name].rack, []).append(name)
    while len(servers) < count:
        fronts = [queue[-1] for queue in queues.values() if queue]
        chosen = min(
            fronts,
            key=lambda name: (
                -_bandwidth_among(network, name, inside, 1),
                0 if network.hosts[name].rack is None else inside.get(network.hosts[name].rack, 0),
                name,
            ),
        )
        rack = network.hosts[chosen].rack
        servers.append(queues[rack].pop())
        inside[rack] = inside.get(rack, 0) + 1
    return servers, inside


def _bandwidth_among(network: Network, name: str, inside: Mapping[str | None, int], more: int = 0) -> float:
    """A lead's bandwidth among so many others, and `more`, in its rack."""
    host = network.hosts[name]
    own = min(host.up_bytes_per_s, host.down_bytes_per_s)
    if host.rack is None:
        return own
    link = min(network.capacity(Link(host.rack, way)) for way in ("up", "down"))
    return min(own, link / max(1, inside.get(host.rack, 0) + more))


def _choose_replica(
    network: Network, server: str, ranked: Sequence[str], taken: dict[str, int]
) -> str | None:
    """Another host, in another rack if there is one, with few duties and much bandwidth."""
    rack = network.hosts[server].rack
    others = [name for name in ranked if name != server]
    return min(
        others,
        key=lambda name: (
            rack is not None and network.hosts[name].rack == rack,
            taken.get(name, 0),
            -host_bandwidth(network, name),
            name,
        ),
        default=None,
    )


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A shard's lead from one host to another."""

    shard: int
    source: str
    target: str
    moved_bytes: int  # zero to the replica: the state is there
    gain_s: float  # server time saved over the horizon, less the cost
    reason: str


def plan_moves(
    network: Network,
    shards: Sequence[Shard],
    candidates: Sequence[str],
    state_bytes: int,
    horizon_s: float,
    busy: float = 1.0,
) -> tuple[PlannedMove, ...]:
    """Leads that should move now, given the rates of now.

    `state_bytes` is the whole model with optimizer state, split by the shards' shares; `horizon_s` how long
    the rates are expected to hold; `busy` the share of that time a server's link is in use. Moving a shard
    from a link of b to one of c saves busy * horizon * (1 - b/c) seconds of server time.
    """
    leads: dict[str, int] = {}
    for shard in shards:
        leads[shard.server] = leads.get(shard.server, 0) + 1
    whole = sum(shard.share for shard in shards) or 1.0
    moves = []
    slowest_first = sorted(shards, key=lambda s: (_share_of(network, s.server, leads, 0), s.index))
    for shard in slowest_first:
        here = _share_of(network, shard.server, leads, 0)
        best: tuple[float, str, int] | None = None
        options = sorted({*candidates, *([shard.replica] if shard.replica else [])} - {shard.server})
        for target in options:
            if target not in network.hosts:
                continue
            there = _share_of(network, target, leads, 1)
            if there <= here:
                continue
            size = 0 if target == shard.replica else round(state_bytes * shard.share / whole)
            rate = network.rate(shard.server, target)
            cost_s = HAND_OVER_S + (0.0 if size == 0 else size / rate if rate > 0 else INF)
            gain_s = busy * horizon_s * (1 - here / there) - WORTH_MOVING * cost_s
            if gain_s > 0 and (best is None or gain_s > best[0] + 1e-12):
                best = (gain_s, target, size)
        if best is not None:
            gain_s, target, size = best
            there = _share_of(network, target, leads, 1)
            how = "its replica, the state is there" if size == 0 else f"{format_size(size)} of state to move"
            reason = (
                f"{shard.server} has {format_rate(8 * here)}, {target} {format_rate(8 * there)} ({how}): "
                f"saves {format_time(gain_s)} of {format_time(horizon_s)}"
            )
            moves.append(PlannedMove(shard.index, shard.server, target, size, gain_s, reason))
            leads[shard.server] -= 1
            leads[target] = leads.get(target, 0) + 1
    return tuple(moves)


def _share_of(network: Network, name: str, leads: dict[str, int], more: int) -> float:
    """A host's bandwidth for one lead if it has `more` leads than now."""
    if name not in network.hosts:
        return 0.0
    return host_bandwidth(network, name) / max(1, leads.get(name, 0) + more)
