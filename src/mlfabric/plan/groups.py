"""The standing plan of a group: which rank sums and distributes which share of every all-reduce.

Ranks on one host share its links, so they sum among themselves first and one copy leaves the host. Rack
uplinks that nobody has told the rate of are taken as scarce: summing inside a rack first costs its hosts
nothing, and is what saves an uplink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mlfabric.plan.allreduce import AllReducePlan, HostShare, longest_s, plan_all_reduce, plan_plain
from mlfabric.topology import Network, Rack

# Shares do not depend on the size; predictions are made for this one.
NOMINAL_BYTES: Final = 16_000_000
# A rack uplink of unknown rate is taken as the sum of its hosts divided by this.
UNKNOWN_OVERSUBSCRIPTION: Final = 8
# Learned rates are never quite equal, and unequal shares keep links less busy: to be worth it they have to be
# expected to be faster by this factor.
UNEVEN_COST: Final = 1.12
# What was learned of a link's two directions is never quite equal either. Shares of sums and of results that
# differ cut an array into nearly twice as many pieces, each with frames of its own between all ranks: they
# have to be expected to be faster by this factor.
SPLIT_COST: Final = 1.05
# So does a share that is smaller than this part of an equal one, if others can carry it in nearly the time;
# if they can't carry all of those, then those that are smaller than the next part.
SMALL_SHARES: Final = (0.9, 0.5)
SMALL_SHARE_COST: Final = 1.02
# Chunks of equal shares; of sums inside hosts first, which fill and empty once more; and where links are
# unequal or racks sum first: a slow link gets its results back no sooner than all of a chunk has left it.
CHUNK_BYTES: Final = 256 * 1024
HOST_CHUNK_BYTES: Final = 128 * 1024
SMALL_CHUNK_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Shares by rank; `domains` sum inside first, by `gathers`."""

    reduces: tuple[float, ...]
    broadcasts: tuple[float, ...]
    gathers: tuple[float, ...]
    domains: tuple[tuple[int, ...], ...]
    chunk_bytes: int
    predicted_s: float  # for NOMINAL_BYTES
    reason: str

    @property
    def is_equal(self) -> bool:
        return max(self.reduces) == min(self.reduces)

    @property
    def cost(self) -> float:
        """What takes longer than predicted by this factor counts with it in a comparison."""
        return 1.0 if self.is_equal else UNEVEN_COST


def plan_group(network: Network, hosts: Sequence[str]) -> GroupPlan:
    """Shares for ranks that live on these hosts, in rank order."""
    network = _with_racks(network, hosts)
    names = sorted(set(hosts))
    plan = plan_all_reduce(network, names, NOMINAL_BYTES)
    if plan.form == "shares":
        plan = _in_few_pieces(network, names, plan)
        plain = plan_plain(network, names, NOMINAL_BYTES)
        if UNEVEN_COST * plan.predicted_s > plain.predicted_s:
            plan = plain
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    count = {host: len(mine) for host, mine in ranks.items()}

    def by_rank(value: Mapping[str, float]) -> tuple[float, ...]:
        return tuple(value[host] / count[host] for host in hosts)

    reduces = by_rank({share.host: share.reduces for share in plan.shares})
    broadcasts = by_rank({share.host: share.broadcasts for share in plan.shares})
    gathers: tuple[float, ...] = ()
    domains: tuple[tuple[int, ...], ...] = ()
    chunk = CHUNK_BYTES
    if any(number > 1 for number in count.values()):
        chunk = HOST_CHUNK_BYTES
        gathers = tuple(1 / count[host] for host in hosts)
        domains = tuple(tuple(ranks[host]) for host in sorted(ranks))
    elif plan.form == "racks":
        chunk = SMALL_CHUNK_BYTES
        gathers = by_rank({share.host: share.gathers for share in plan.shares})
        racks: dict[str | None, list[int]] = {}
        for rank, host in enumerate(hosts):
            racks.setdefault(network.hosts[host].rack, []).append(rank)
        domains = tuple(tuple(racks[name]) for name in sorted(racks, key=str))
    elif max(reduces) > min(reduces):
        chunk = SMALL_CHUNK_BYTES
    return GroupPlan(reduces, broadcasts, gathers, domains, chunk, plan.predicted_s, plan.reason)


def _in_few_pieces(network: Network, names: Sequence[str], plan: AllReducePlan) -> AllReducePlan:
    """The same shares of sums and of results, and none that is small, where that takes hardly longer."""
    alike = []
    for name in names:
        host = network.hosts[name]
        slower = min(host.up_bytes_per_s, host.down_bytes_per_s)
        alike.append(replace(host, up_bytes_per_s=slower, down_bytes_per_s=slower))
    same = plan_all_reduce(Network.of(alike, network.racks.values()), names, NOMINAL_BYTES)
    if same.form == plan.form and same.predicted_s <= SPLIT_COST * plan.predicted_s:
        plan = same
    for part in SMALL_SHARES:
        without = _without_small(plan, part / len(names))
        takes_s = longest_s(network, plan.form, without, NOMINAL_BYTES)
        if takes_s <= SMALL_SHARE_COST * plan.predicted_s:
            return replace(plan, shares=without, predicted_s=takes_s)
    return plan


def _without_small(plan: AllReducePlan, least: float) -> tuple[HostShare, ...]:
    """Its shares, none of them smaller than the least."""
    large = [share for share in plan.shares if min(share.reduces, share.broadcasts) >= least]
    x, y = math.fsum(share.reduces for share in large), math.fsum(share.broadcasts for share in large)
    if not large:
        return plan.shares
    return tuple(
        replace(share, reduces=share.reduces / x, broadcasts=share.broadcasts / y)
        if share in large
        else replace(share, reduces=0.0, broadcasts=0.0)
        for share in plan.shares
    )


def predicted_time(network: Network, hosts: Sequence[str], plan: GroupPlan) -> float:
    """What a plan made earlier would take over the links as they are believed to be now."""
    network = _with_racks(network, hosts)
    by_host: dict[str, HostShare] = {}
    for rank, host in enumerate(hosts):
        sofar = by_host.get(host, HostShare(host, 0.0, 0.0))
        gathers = plan.gathers[rank] if plan.gathers else 0.0
        by_host[host] = replace(
            sofar,
            reduces=sofar.reduces + plan.reduces[rank],
            broadcasts=sofar.broadcasts + plan.broadcasts[rank],
            gathers=sofar.gathers + gathers,
        )
    in_racks = bool(plan.domains) and len(set(hosts)) == len(hosts)
    return longest_s(network, "racks" if in_racks else "shares", tuple(by_host.values()), NOMINAL_BYTES)


def _with_racks(network: Network, hosts: Sequence[str]) -> Network:
    """The network with an uplink for every rack of these hosts."""
    unknown: dict[str, float] = {}
    for name in sorted(set(hosts)):
        host = network.hosts[name]
        if host.rack is not None and host.rack not in network.racks:
            sofar = unknown.get(host.rack, 0.0)
            unknown[host.rack] = sofar + min(host.up_bytes_per_s, host.down_bytes_per_s)
    if not unknown:
        return network
    guessed = [
        Rack(name, rate / UNKNOWN_OVERSUBSCRIPTION, rate / UNKNOWN_OVERSUBSCRIPTION)
        for name, rate in unknown.items()
    ]
    return Network.of(network.hosts.values(), [*network.racks.values(), *guessed])
