"""Which hosts serve a job's model, by what their links have to spare, and when others would serve it better.

One slow server holds every update back, so shards sit on as few fast hosts as carry all that the workers
want, each with as many as it has bandwidth to spare beside its own transfers. The simulator deals any shares,
the scheduler whole shards of equal size. Shards change hosts where what the servers can take rises by enough
to pay for the bytes that move.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from mlfabric.plan.placement import HAND_OVER_S, WORTH_MOVING, place_shards
from mlfabric.topology import Host, Network, Rack

# A host serves only if it has at least this share of what the best one has to spare.
SERVES_FROM: Final = 0.25
# No more serve than carry this many times what all workers want together.
HEADROOM: Final = 1.5
# Shares are placed anew if that raises what the servers can take by this factor.
WORTH_PLACING: Final = 1.1
# Whole shards are, by this one: rates that were learned waver, and updates on their way are sent once more.
WORTH_MOVING_LEADS: Final = 1.2
# Some of a host's link is left to serve with, however busy its own worker is.
SPARE_LEAST: Final = 0.02


def own_traffic(rate: float, size_bytes: float, compute_s: float, transfers: int) -> float:
    """Bytes per second that a worker sends whose round is a step and so many transfers one after another."""
    return size_bytes / (compute_s + transfers * size_bytes / rate) if rate > 0 else 0.0


def to_spare(rate: float, own: float) -> float:
    """What a host has left to serve with beside its own traffic."""
    return max(rate - own, SPARE_LEAST * rate)


def room(spare: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Updates' bytes per second that servers with these shares can take and give."""
    return min((spare[host] / share for host, share in shares.items() if share > 0), default=0.0)


def serving_shares(
    spare: Mapping[str, float], wanted: float, rack_of: Mapping[str, str | None], racks: Iterable[Rack] = ()
) -> dict[str, float]:
    """Shares of the model by what hosts have to spare, on the fewest fast hosts that carry what is wanted.

    Of hosts alike the first in `spare` counts as the faster.
    """
    most = max(spare.values(), default=0.0)
    ranked = sorted(
        (host for host, left in spare.items() if left >= SERVES_FROM * most > 0), key=lambda h: -spare[h]
    )
    able: list[str] = []
    carried = 0.0
    for host in _dealt_over_racks(ranked, spare, most, rack_of):
        if carried >= HEADROOM * wanted and able:
            break
        able.append(host)
        carried += spare[host]
    if not able:
        return {}
    known = {rack.name: rack for rack in racks}
    inside = {host: rack for host in able if (rack := rack_of.get(host)) in known}
    network = Network.of((Host(h, spare[h], spare[h], inside.get(h)) for h in able), known.values())
    return {shard.server: shard.share for shard in place_shards(network, able, len(able))}


def _dealt_over_racks(
    ranked: list[str], spare: Mapping[str, float], most: float, rack_of: Mapping[str, str | None]
) -> list[str]:
    """Hosts of like speed by turns from every rack, or the first few would all be behind one uplink."""
    if not any(rack_of.get(host) for host in ranked):
        return ranked
    turns: dict[str | None, int] = {}
    keys = {}
    for place, host in enumerate(ranked):
        rack = rack_of.get(host)
        turns[rack] = turns.get(rack, 0) + 1
        keys[host] = (-round(4 * spare[host] / most), turns[rack], place)
    return sorted(ranked, key=keys.__getitem__)


def deal(shares: Mapping[str, float], count: int) -> Counter[str]:
    """How many of `count` equal shards each host leads, as near to its share as whole shards come."""
    dealt: Counter[str] = Counter()
    for _ in range(count):
        dealt[min(shares, key=lambda host: ((dealt[host] + 1) / shares[host], host))] += 1
    return dealt


@dataclass(frozen=True, slots=True)
class LeadsPlanned:
    """Shards that change hosts (shard -> host), and why."""

    moves: Mapping[int, str]
    reason: str = ""


def plan_leads(
    network: Network,
    spare: Mapping[str, float],
    wanted: float,
    led_by: Mapping[int, str],
    followed_by: Mapping[int, str | None],
    shard_bytes: float,
    horizon_s: float,
    only_to_replicas: bool = False,
    worth: float = WORTH_MOVING_LEADS,
) -> LeadsPlanned:
    """Which of the equal shards should be led from another host, given the rates of now.

    `spare` has the hosts that may lead. `shard_bytes` is what moving a shard costs, optimizer state included;
    to the host that follows it, it is free. `horizon_s`: how long the rates are expected to hold.
    """
    rack_of = {host: network.hosts[host].rack for host in spare}
    shares = serving_shares(spare, wanted, rack_of, network.racks.values())
    if not shares:
        return LeadsPlanned({})
    count = len(led_by)
    if only_to_replicas:
        moves = _moves_to_replicas(spare, led_by, followed_by)
    else:
        moves = _moves(led_by, followed_by, Counter(led_by.values()), deal(shares, count))
    before, after = (
        _useful(spare, Counter(leads.values()), count, wanted) for leads in (led_by, {**led_by, **moves})
    )
    if not moves or after < worth * before:
        return LeadsPlanned({})
    cost_s = HAND_OVER_S + _moving_s(network, led_by, followed_by, moves, shard_bytes)
    if horizon_s * (1 - before / after) <= WORTH_MOVING * cost_s:
        return LeadsPlanned({})
    return LeadsPlanned(moves, f"servers can take {after / before:.1f} times as much" if before else "")


def _useful(spare: Mapping[str, float], leads: Mapping[str, int], count: int, wanted: float) -> float:
    """What servers with so many of the shards can take, as far as there is use for it."""
    if any(host not in spare for host in leads):
        return 0.0
    return min(room(spare, {host: n / count for host, n in leads.items()}), HEADROOM * wanted)


def _moves(
    led_by: Mapping[int, str],
    followed_by: Mapping[int, str | None],
    now: Mapping[str, int],
    then: Mapping[str, int],
) -> dict[int, str]:
    """As few shards as possible change hosts, to where the state is already if that one leads more."""
    over = {host: n - then.get(host, 0) for host, n in now.items() if n > then.get(host, 0)}
    lacking = {host: n - now.get(host, 0) for host, n in sorted(then.items()) if n > now.get(host, 0)}
    moves: dict[int, str] = {}
    for to_replica in (True, False):
        for shard, host in sorted(led_by.items()):
            if over.get(host, 0) == 0 or shard in moves or not lacking:
                continue
            replica = followed_by.get(shard)
            target = replica if to_replica else max(lacking, key=lambda h: (lacking[h], h))
            if target is None or target not in lacking:
                continue
            moves[shard] = target
            over[host] -= 1
            lacking[target] -= 1
            if lacking[target] == 0:
                del lacking[target]
    return moves


def _moves_to_replicas(
    spare: Mapping[str, float], led_by: Mapping[int, str], followed_by: Mapping[int, str | None]
) -> dict[int, str]:
    """One lead after the other goes from the host that has most for its link to a replica's that has less."""
    led = dict(led_by)
    loads = Counter(led.values())
    moves: dict[int, str] = {}
    while True:
        best: tuple[float, int, str] | None = None
        fullest = max(loads, key=lambda host: (_load(spare, loads[host], host), host))
        here = _load(spare, loads[fullest], fullest)
        for shard, host in sorted(led.items()):
            target = followed_by.get(shard)
            if host != fullest or shard in moves or target is None or target not in spare or target == host:
                continue
            there = _load(spare, loads[target] + 1, target)
            if there < here and (best is None or there < best[0]):
                best = (there, shard, target)
        if best is None:
            return moves
        _, shard, target = best
        led[shard] = moves[shard] = target
        loads[fullest] -= 1
        loads[target] += 1


def _load(spare: Mapping[str, float], shards: int, host: str) -> float:
    return shards / spare[host] if spare.get(host, 0.0) > 0 else math.inf if shards else 0.0


def _moving_s(
    network: Network,
    led_by: Mapping[int, str],
    followed_by: Mapping[int, str | None],
    moves: Mapping[int, str],
    shard_bytes: float,
) -> float:
    """How long the bytes of these moves keep the busiest link."""
    loads: Counter[tuple[str, str]] = Counter()
    for shard, target in moves.items():
        if followed_by.get(shard) != target:
            loads[led_by[shard], "up"] += 1
            loads[target, "down"] += 1
    times = [0.0]
    for (host, way), shards in loads.items():
        if host in network.hosts:
            own = network.hosts[host]
            times.append(shards * shard_bytes / (own.up_bytes_per_s if way == "up" else own.down_bytes_per_s))
    return max(times)
