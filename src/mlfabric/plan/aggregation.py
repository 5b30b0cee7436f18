"""Who sums whose updates before they reach the servers.

The server's downlink is what many updates wait for. While it is busy with the first of the order, later ones
are summed elsewhere and arrive as one. Candidates, each laid out on the real ledger:

- nothing gathered at all, and that is the answer where no other is better;
- a direct run, then groups along the order, at members or idle hosts (`grouping.py`), improved by local moves
  from two starts when there are few;
- the same with groups inside groups (`levels=2`);
- racks first: what is in one rack is summed there, so its uplink carries one copy; the sums go on as units;
- chains by speed class, where chunks may be forwarded as they are summed (`chains.py`).

No plan is taken that would make a member miss its deadline: a message of j updates fills j positions, and
there must be an order of the messages in which all are in time. `decide_forward` is the rule for an
aggregator that waits for a late member.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mlfabric.plan.chains import chain_plans
from mlfabric.plan.forest import Cargo, Gather, Layout, Node, lay_out
from mlfabric.plan.grouping import HOSTS_TRIED, TIME_TOLERANCE, Block, GroupSearch, least_direct_cost
from mlfabric.plan.numbering import find_arrivals, hold_others_up, number_arrivals, plan_cost
from mlfabric.plan.reservation import Ledger
from mlfabric.plan.staircase import INF
from mlfabric.units import format_time

# Local moves are worth it for so many updates.
MOVES_UP_TO: Final = 16
# Beyond so many transfers only the likeliest form is laid out: racks first if there are racks.
SEARCHED_TRANSFERS: Final = 250
# Into how many groups by speed a rack may be cut.
RACK_CUTS: Final = (1, 2, 4)
# More groups must promise to cost this much less: the estimate knows nothing of sums in each other's way.
WORTH_CUTTING: Final = 0.75
# So many of the slowest updates that must be applied early are tried ahead of all others.
SLOW_FIRST: Final = (1, 2)


def aggregate_updates(ledger: Ledger, cargo: Cargo, now_s: float) -> Layout:
    """Choose the nodes that bring the updates to the servers, and reserve them."""
    count = len(cargo.hosts)
    direct: list[Node] = list(range(count))
    if count < 2 or not (cargo.aggregators or cargo.may_be_late()):
        return lay_out(ledger, cargo, direct, now_s)
    mark = ledger.mark()
    best_cost, best, standing = INF, direct, None
    for candidate in _candidates(ledger, cargo, direct, mark, now_s):
        if candidate is direct and least_direct_cost(ledger, cargo) >= best_cost:
            continue
        nodes: list[Node] | None = candidate if cargo.meets_deadlines(candidate) else None
        while nodes is not None:
            ledger.undo(mark)
            standing = lay_out(ledger, cargo, nodes, now_s)
            cost = plan_cost(nodes, standing.finishes, cargo, now_s)
            better = cost < best_cost * (1 - TIME_TOLERANCE)
            if better:
                best_cost, best = cost, nodes
            nodes = _late_first(cargo, standing) if better or nodes is candidate else None
    if standing is None or standing.nodes is not best:
        ledger.undo(mark)
        standing = lay_out(ledger, cargo, best, now_s)
    return standing


def _late_first(cargo: Cargo, layout: Layout) -> list[Node] | None:
    """The same nodes, what would hold others up at the server first on its links; None if nothing would."""
    if not cargo.may_be_late():
        return None
    order = number_arrivals(find_arrivals(layout.nodes, layout.finishes, cargo.deadlines))
    late = {arrival.node for arrival, holds in zip(order, hold_others_up(order), strict=True) if holds}
    numbers = sorted(range(len(layout.nodes)), key=lambda k: k not in late)
    return [layout.nodes[k] for k in numbers] if numbers != list(range(len(numbers))) else None


def _candidates(
    ledger: Ledger, cargo: Cargo, updates: list[Node], mark: int, now_s: float
) -> Iterator[list[Node]]:
    """Lists of nodes to compare. Between two of them the ledger may hold the one before, after `mark`."""
    count = len(updates)
    many = count * len(cargo.servers) > SEARCHED_TRANSFERS
    if cargo.aggregators:
        gathered = _gather_racks(ledger, cargo, few=many)
        for nodes in gathered:
            ledger.undo(mark)
            yield from _over(ledger, cargo, nodes, cargo.levels - 1, now_s)
        if not (gathered and many):
            ledger.undo(mark)
            yield from _over(ledger, cargo, updates, 1, now_s)
            if cargo.levels > 1:
                ledger.undo(mark)
                yield from _over(ledger, cargo, updates, cargo.levels, now_s)
        yield from chain_plans(ledger, cargo, few=many)
    if cargo.may_be_late():
        yield from _slow_first(ledger, cargo, mark, now_s)
    yield updates


def _slow_first(ledger: Ledger, cargo: Cargo, mark: int, now_s: float) -> Iterator[list[Node]]:
    """The slowest of the updates that others may have to wait for straight and first, then the others."""
    hosts, count = ledger.network.hosts, len(cargo.hosts)
    leaves_s = [
        sum(parts) / hosts[name].up_bytes_per_s for parts, name in zip(cargo.parts, cargo.hosts, strict=True)
    ]
    near = [index for index in range(count) if cargo.deadlines[index] < count - 1]
    for few in SLOW_FIRST:
        slow: list[Node] = [*sorted(near, key=lambda i: (-leaves_s[i], i))[:few]]
        rest: list[Node] = [index for index in range(count) if index not in slow]
        if len(slow) < few or len(rest) < 2:
            break
        ledger.undo(mark)
        lay_out(ledger, cargo, slow, now_s)
        search = GroupSearch(ledger, cargo, rest, 1, now_s, trial_transfers=0)  # two direct runs
        yield slow + search.best_direct_run()[1]


def _over(ledger: Ledger, cargo: Cargo, units: list[Node], depth: int, now_s: float) -> Iterator[list[Node]]:
    """Units to the servers through so many levels of groups."""
    if depth < 1:
        yield units
        return
    search = GroupSearch(ledger, cargo, units, depth, now_s)
    cost, greedy = search.best_direct_run()
    found = [(cost, greedy)]
    if depth == 1 and len(units) <= MOVES_UP_TO:
        for start in (search.blocks(greedy), [Block(0, len(units))]):
            cost, blocks = search.improve(start)
            found.append((cost, search.nodes(blocks)))
    yield min(found, key=lambda pair: pair[0])[1]


class _Racks(NamedTuple):
    """What the rough estimates about racks look at, by update."""

    cargo: Cargo
    leaves_s: Sequence[float]  # alone over its uplink
    takes: Sequence[float]  # its host's downlink
    rank: Sequence[
        tuple[float, str] | None
    ]  # of its host as an aggregator, fastest first; None: it may not sum


def _gather_racks(ledger: Ledger, cargo: Cargo, few: bool) -> list[list[Node]]:
    """What is in one rack summed there, in a few groups by speed; nothing without racks.

    Cutting a rack spares its fast hosts the wait for its slow ones but makes more sums for the servers to
    take; where only a few plans can be tried, a rough estimate of both decides how often to cut.
    """
    found = [ledger.network.hosts[name] for name in cargo.hosts]
    servers = {ledger.network.hosts[server].rack for server in cargo.servers}
    members: dict[str, list[int]] = {}
    alone: list[Node] = []
    for index, host in enumerate(found):
        if host.rack is None or (host.rack in servers and len(servers) == 1):
            alone.append(index)
        else:
            members.setdefault(host.rack, []).append(index)
    if not any(len(inside) > 1 for inside in members.values()):
        return []
    able = cargo.aggregators.difference(cargo.servers)
    racks = _Racks(
        cargo,
        [sum(parts) / host.up_bytes_per_s for parts, host in zip(cargo.parts, found, strict=True)],
        [host.down_bytes_per_s for host in found],
        [
            (-min(host.up_bytes_per_s, host.down_bytes_per_s), host.name) if host.name in able else None
            for host in found
        ],
    )
    ranked = [[i for _, i in sorted([(racks.leaves_s[i], i) for i in inside])] for inside in members.values()]
    tried: list[list[tuple[float, list[int]]]] = []
    least = INF
    for cuts in RACK_CUTS:
        groups = [group for inside in ranked for group in _cut(inside, cuts)]
        if few:
            at_once = [(0.0, group) for group in sorted(groups, key=len, reverse=True)]
            if _estimate_cost(ledger, cargo, at_once) >= least * WORTH_CUTTING:
                continue  # not even if all were ready at once
        timed = sorted([(_estimate_ready(racks, group), group) for group in groups])
        cost = _estimate_cost(ledger, cargo, timed) if few else 0.0
        if cost < least * WORTH_CUTTING:
            least, tried = cost, [timed]
        elif not few and timed not in tried:
            tried.append(timed)
    return [[*alone, *(_gather_at_members(racks, sorted(group)) for _, group in timed)] for timed in tried]


def _cut(members: list[int], cuts: int) -> list[list[int]]:
    """A list in at most so many runs of like length, none shorter than two if it can be helped."""
    size = max(2, -(-len(members) // cuts))
    return [members[first : first + size] for first in range(0, len(members), size)]


def _estimate_ready(racks: _Racks, group: Sequence[int]) -> float:
    """Seconds until a group's sums can leave: its slowest uplink or its aggregators' downlinks decide."""
    cargo, leaves_s, takes = racks.cargo, racks.leaves_s, racks.takes
    fastest = max([takes[i] for i in group])
    coming = (len(group) - 1) * max(cargo.parts[group[0]])
    homes = [cargo.hosts[i] for i in group]
    slowest_s = leaves_s[group[-1]]
    if len(set(homes)) < len(homes):  # some have several to send
        busy_s: dict[str, float] = {}
        for i, home in zip(group, homes, strict=True):
            busy_s[home] = busy_s.get(home, 0.0) + leaves_s[i]
        slowest_s = max(busy_s.values())
    return max(slowest_s, coming / fastest)


def _estimate_cost(ledger: Ledger, cargo: Cargo, timed: Sequence[tuple[float, Sequence[int]]]) -> float:
    """Mean or last completion if the slowest server takes the sums in as they get ready."""
    hosts = ledger.network.hosts
    each_s = max(
        cargo.parts[0][shard] / hosts[server].down_bytes_per_s for shard, server in enumerate(cargo.servers)
    )
    at_s, total, count = 0.0, 0.0, 0
    for ready_s, group in timed:
        at_s = max(at_s, ready_s) + each_s
        total += at_s * len(group)
        count += len(group)
    return at_s if cargo.last_counts else total / count


def _gather_at_members(racks: _Racks, members: Sequence[int]) -> Node:
    """The members gathered at the fastest of themselves, another one for each shard."""
    cargo = racks.cargo
    able = {racks.rank[i] for i in members}
    fastest = [name for _, name in sorted([rank for rank in able if rank is not None])[:HOSTS_TRIED]]
    if len(members) < 2 or not fastest:
        return members[0] if len(members) == 1 else Gather(tuple(members), tuple(cargo.servers))
    at = tuple(fastest[shard % len(fastest)] for shard in range(len(cargo.servers)))
    return Gather(tuple(members), at)


# -- late members


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """Whether an aggregator sends what it has, or until when it waits; and why."""

    forward: bool
    wait_until_s: float
    left_out: tuple[str, ...]
    reason: str


def decide_forward(
    now_s: float,
    present: int,
    missing_s: Sequence[tuple[str, float]],
    server_free_s: float,
    transfer_s: float,
    queued_behind: int,
    latest_s: float = INF,
) -> ForwardChoice:
    """Wait for missing members or forward without them, whichever costs the updates less time in sum.

    `missing_s` gives for each missing member when it is expected (infinite: silent). Waiting until then holds
    up the members present from the moment the server's link is free; leaving one out costs it and everything
    queued behind it a transfer of its own. `latest_s` is when the oldest member's slack ends.
    """
    if not missing_s:
        return ForwardChoice(True, now_s, (), "all members are there")
    if present == 0:
        until = min(arrival for _, arrival in missing_s)
        return ForwardChoice(False, until, (), "no member is there yet")
    idle_from_s = max(now_s, server_free_s)
    by_arrival = sorted(missing_s, key=lambda member: (member[1], member[0]))
    best_cost, best_wait = transfer_s * (queued_behind + len(by_arrival)) * len(by_arrival), 0
    for waited in range(1, len(by_arrival) + 1):
        arrival_s = by_arrival[waited - 1][1]
        if arrival_s > latest_s or arrival_s == INF:
            break
        held = (present + waited - 1) * max(0.0, arrival_s - idle_from_s)
        alone = len(by_arrival) - waited
        cost = held + transfer_s * (queued_behind + alone) * alone
        if cost <= best_cost:
            best_cost, best_wait = cost, waited
    left_out = tuple(sorted(name for name, _ in by_arrival[best_wait:]))
    if best_wait:
        last, until_s = by_arrival[best_wait - 1]
        return ForwardChoice(
            False,
            until_s,
            left_out,
            f"{last} is due in {format_time(until_s - now_s)}, cheaper than its own way",
        )
    late = ", ".join(
        f"{name} silent" if at == INF else f"{name} due in {format_time(at - now_s)}"
        for name, at in by_arrival
    )
    return ForwardChoice(
        True,
        now_s,
        left_out,
        f"waiting costs more than sending alone takes ({format_time(transfer_s)}): {late}",
    )
