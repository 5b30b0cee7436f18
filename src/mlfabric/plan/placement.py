"""Which hosts lead the shards of a model, which follow, and when a lead moves.

Shards are spread over the fastest hosts in proportion to what their links carry, and over racks, as leads in
one rack share its link; a replica sits on another host, in another rack if there is one. When a server's link
degrades its lead moves to the replica, where the state already is; only if another host is so much better
that the bytes of the move pay does the shard itself move. Moving costs are counted, so links that flap don't
make leads flap.
"""

from __future__ import annotations

from collections import Counter
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
    own = min(host.up_bytes_per_s, host.down_bytes_per_s)
    return own if host.rack is None else min(own, _rack_bandwidth(network, host.rack))


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
    return min(own, _rack_bandwidth(network, host.rack) / max(1, inside.get(host.rack, 0) + more))


def _rack_bandwidth(network: Network, rack: str) -> float:
    return min(network.capacity(Link(rack, way)) for way in ("up", "down"))


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
    leads = _Leads(network, shards)
    whole = sum(shard.share for shard in shards) or 1.0
    moves = []
    slowest_first = sorted(shards, key=lambda s: (leads.bandwidth(s.server), s.index))
    for shard in slowest_first:
        here = leads.bandwidth(shard.server)
        best: tuple[float, str, int] | None = None
        options = sorted({*candidates, *([shard.replica] if shard.replica else [])} - {shard.server})
        for target in options:
            if target not in network.hosts:
                continue
            there = leads.bandwidth(target, coming_from=shard.server)
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
            there = leads.bandwidth(target, coming_from=shard.server)
            how = "its replica, the state is there" if size == 0 else f"{format_size(size)} of state to move"
            reason = (
                f"{shard.server} has {format_rate(8 * here)}, {target} {format_rate(8 * there)} ({how}): "
                f"saves {format_time(gain_s)} of {format_time(horizon_s)}"
            )
            moves.append(PlannedMove(shard.index, shard.server, target, size, gain_s, reason))
            leads.move(shard.server, target)
    return tuple(moves)


class _Leads:
    """How many shards each host leads, and the hosts of each rack together."""

    def __init__(self, network: Network, shards: Sequence[Shard]) -> None:
        self.network = network
        self.on_host = Counter(shard.server for shard in shards)
        self.in_rack = Counter(self._rack(shard.server) for shard in shards)

    def _rack(self, name: str) -> str | None:
        host = self.network.hosts.get(name)
        return None if host is None else host.rack

    def bandwidth(self, name: str, coming_from: str | None = None) -> float:
        """What one lead at this host has, now or once one has come here from another host."""
        if name not in self.network.hosts:
            return 0.0
        host, rack = self.network.hosts[name], self._rack(name)
        here = self.on_host[name] + (coming_from is not None)
        own = min(host.up_bytes_per_s, host.down_bytes_per_s) / max(1, here)
        if rack is None:
            return own
        inside = self.in_rack[rack] + (coming_from is not None and self._rack(coming_from) != rack)
        return min(own, _rack_bandwidth(self.network, rack) / max(1, inside))

    def move(self, source: str, target: str) -> None:
        for name, change in ((source, -1), (target, 1)):
            self.on_host[name] += change
            self.in_rack[self._rack(name)] += change
