"""The search for groups: a direct run, then gathers that grow while the server's link is busy.

Works on *units*, a list of nodes in order: single updates, or sums of a rack. Every candidate is laid out on
the real ledger and undone, so what is compared is what would be reserved; the number of transfers laid out
on trial is bounded, never the clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from mlfabric.plan.forest import (
    Cargo,
    Gather,
    Layout,
    Node,
    deliver,
    empty_layout,
    forward,
    lay_out,
    members_of,
    send,
)
from mlfabric.plan.numbering import plan_cost
from mlfabric.plan.reservation import Booking, Ledger
from mlfabric.plan.staircase import INF, Path

# Two durations this close are the same: float sums of the same transfers differ in their last bits.
TIME_TOLERANCE: Final = 1e-9
# Hosts looked at for each group and shard; more gain little and cost much.
HOSTS_TRIED: Final = 4
# Transfers that the search over direct runs may lay out on trial.
TRIAL_TRANSFERS: Final = 1000


class Block(NamedTuple):
    """A contiguous run of the units: each by itself, or gathered at one host per shard."""

    first: int
    end: int
    at: tuple[str, ...] | None = None


class GroupSearch:
    """Candidates for the groups of a list of units."""

    def __init__(
        self,
        ledger: Ledger,
        cargo: Cargo,
        units: Sequence[Node],
        depth: int,
        now_s: float,
        trial_transfers: int = TRIAL_TRANSFERS,
    ) -> None:
        self.ledger = ledger
        self.cargo = cargo
        self.units = units
        self.depth = depth  # levels of gathers over the units
        self.now_s = now_s
        self.count = len(units)
        self.transfers = len(cargo.servers) * sum(len(members_of(unit)) for unit in units)
        self.trials_left = trial_transfers
        hosts = ledger.network.hosts
        allowed = cargo.aggregators.difference(cargo.servers)
        self.speed = {
            name: min(hosts[name].up_bytes_per_s, hosts[name].down_bytes_per_s)
            for name in allowed
            if name in hosts
        }
        self.homes = [tuple(h for h in _homes(cargo, unit) if self.speed.get(h, 0.0) > 0) for unit in units]
        busy = set(cargo.hosts)
        speed = self.speed
        self.idle = sorted(
            (h for h in speed if h not in busy and speed[h] > 0), key=lambda h: (-speed[h], h)
        )[: max(64, HOSTS_TRIED * len(cargo.servers))]

    def nodes(self, blocks: Iterable[Block]) -> list[Node]:
        """The blocks as nodes for the servers."""
        nodes: list[Node] = []
        for block in blocks:
            inside = self.units[block.first : block.end]
            if block.at is None:
                nodes.extend(inside)
            else:
                nodes.append(Gather(tuple(inside), block.at))
        return nodes

    # -- greedy plans

    def best_direct_run(self) -> tuple[float, list[Node]]:
        """The cheapest greedy plan over the lengths of the direct run; all direct if none is cheaper."""
        best: tuple[float, list[Node]] = (INF, list(self.units))
        for run in self._runs():
            cost, nodes = self._greedy(run)
            if cost < best[0] * (1 - TIME_TOLERANCE):
                best = (cost, nodes)
        single = len(self.units) == len(self.cargo.hosts)
        if not single or least_direct_cost(self.ledger, self.cargo) < best[0]:
            cost = self.trial([Block(0, self.count)])
            if cost <= best[0]:
                best = (cost, list(self.units))
        return best

    def blocks(self, nodes: Sequence[Node]) -> list[Block]:
        """A one-level plan of the units as blocks."""
        blocks = []
        first = 0
        for node in nodes:
            end = first + (len(node.children) if isinstance(node, Gather) and node not in self.units else 1)
            blocks.append(
                Block(first, end, node.at if isinstance(node, Gather) and end - first > 1 else None)
            )
            first = end
        return _merge_direct(blocks)

    def _runs(self) -> list[int]:
        """Lengths of the direct run to try: all of the likely ones, or an even choice of them."""
        likely = math.isqrt(2 * self.count)
        runs = list(range(min(self.count - 1, likely + 1)))
        affordable = max(2, self.trials_left // self.transfers)
        if len(runs) > affordable:
            low, high = 0.15 * likely, 0.8 * likely
            runs = sorted({round(low + (high - low) * k / (affordable - 1)) for k in range(affordable)})
        return runs

    def trial(self, blocks: Sequence[Block]) -> float:
        """The cost of a plan, by laying it out and undoing it; infinite if it breaks a deadline."""
        nodes = self.nodes(blocks)
        if not self.cargo.meets_deadlines(nodes):
            return INF
        mark = self.ledger.mark()
        layout = lay_out(self.ledger, self.cargo, nodes, self.now_s)
        self.ledger.undo(mark)
        self.trials_left -= self.transfers
        return plan_cost(nodes, layout.finishes, self.cargo, self.now_s)

    def _greedy(self, run: int) -> tuple[float, list[Node]]:
        """`run` units direct, then groups, each as long as it is ready when the server's link is free."""
        ledger, cargo, units = self.ledger, self.cargo, self.units
        mark = ledger.mark()
        layout = empty_layout()
        used: dict[str, int] = {}
        nodes: list[Node] = list(units[:run])
        for unit in nodes:
            deliver(ledger, cargo, layout, unit, 0, self.now_s)
        first = run
        while first < self.count:
            grown = self._group(layout, first, cargo.servers, self.depth, used, grace=True)
            if grown is None:
                node, first = units[first], first + 1
                deliver(ledger, cargo, layout, node, 0, self.now_s)
            else:
                node, first, bookings = grown
                finish_s = max(booking.finish_s for booking in bookings)
                layout.finishes.update((index, finish_s) for index in members_of(node))
            nodes.append(node)
        ledger.undo(mark)
        self.trials_left -= self.transfers
        if not cargo.meets_deadlines(nodes):
            return INF, nodes
        return plan_cost(nodes, layout.finishes, cargo, self.now_s), nodes

    def _group(
        self,
        layout: Layout,
        first: int,
        targets: Sequence[str],
        depth: int,
        used: dict[str, int],
        grace: bool,
    ) -> tuple[Node, int, Sequence[Booking]] | None:
        """Reserve a group of the units from `first` on as long as none of them makes its sum late.

        Late is: not there when the way to the targets falls free; with `grace`, nor when the first two are
        there. Where a level is left, each further child is a group itself if one is ready when the host can
        take it. None if not even two make a group.
        """
        ledger, cargo, units = self.ledger, self.cargo, self.units
        at = self._choose_hosts(first, used, targets) if first + 1 < self.count else None
        if at is None:
            return None
        opening = ledger.mark()
        shards = range(len(at))
        allowed = [self._free_s(at[s], targets[s], cargo.parts[0][s]) for s in shards]
        for host in at:
            used[host] = used.get(host, 0) + 1
        children: list[Node] = []
        arrivals: list[Sequence[Booking]] = []
        index = first
        while index < self.count:
            mark = ledger.mark()
            inner = self._group(layout, index, at, depth - 1, used, False) if depth > 1 and arrivals else None
            if inner is None:
                child, after = units[index], index + 1
                bookings = send(ledger, cargo, layout, child, at, "", "", self.now_s)
            else:
                child, after, bookings = inner
            if grace and len(arrivals) < 2:
                allowed = [max(allowed[s], bookings[s].finish_s) for s in shards]
            elif any(
                bookings[s].finish_s > allowed[s] + TIME_TOLERANCE * (bookings[s].finish_s - self.now_s)
                for s in shards
            ):
                ledger.undo(mark)
                break
            children.append(child)
            arrivals.append(bookings)
            index = after
        if len(children) < 2:
            ledger.undo(opening)
            for host in at:
                used[host] -= 1
            return None
        node = Gather(tuple(children), at)
        return node, index, forward(ledger, cargo, layout, node, arrivals, targets, "", None)

    def _free_s(self, aggregator: str, server: str, size_bytes: int) -> float:
        """When the server's link is free for a sum from this aggregator."""
        path = self.ledger.path(aggregator, server)
        finish_s = self.ledger.finish(path, size_bytes, self.now_s)
        return finish_s - _alone(path, size_bytes)

    def _choose_hosts(
        self, first: int, used: dict[str, int], targets: Sequence[str]
    ) -> tuple[str, ...] | None:
        """A host for each shard: the fastest of the next few units' own and of the idle, own first."""
        speed, shards = self.speed, len(self.cargo.servers)
        near = range(first, min(first + 2 * HOSTS_TRIED * shards, self.count))
        own = {home for index in near for home in self.homes[index] if home not in targets}
        idle = [h for h in self.idle if h not in used and h not in targets][: HOSTS_TRIED * shards]
        ranked = sorted((*own, *idle), key=lambda h: (used.get(h, 0), -speed[h], h not in own, h))
        if not ranked:
            return None
        return tuple(ranked[shard % len(ranked)] for shard in range(shards))

    # -- local moves

    def improve(self, blocks: list[Block]) -> tuple[float, list[Block]]:
        """Take the best neighbouring plan until none is better or the trials are spent."""
        self.trials_left = self.cargo.search_transfers
        cost = self.trial(blocks)
        tried = {tuple(blocks)}
        while True:
            best = (cost, blocks)
            for candidate in self._neighbours(blocks):
                if self.trials_left <= 0:
                    break
                key = tuple(candidate)
                if key not in tried:
                    tried.add(key)
                    candidate_cost = self.trial(candidate)
                    if candidate_cost < best[0] * (1 - TIME_TOLERANCE):
                        best = (candidate_cost, candidate)
            if best[1] is blocks:
                return cost, blocks
            cost, blocks = best

    def _neighbours(self, blocks: list[Block]) -> Iterator[list[Block]]:
        """Blocks made direct, gathered elsewhere, cut in two, moved by one at a border, joined."""
        for i, block in enumerate(blocks):
            before, after = blocks[:i], blocks[i + 1 :]
            if block.at is not None:
                yield _merge_direct([*before, Block(block.first, block.end), *after])
            if block.end - block.first >= 2:
                for at in self._hosts_for(block.first, block.end):
                    if at != block.at:
                        yield [*before, Block(block.first, block.end, at), *after]
            for cut in range(block.first + 1, block.end):
                for left in self._sides(block, block.first, cut):
                    for right in self._sides(block, cut, block.end):
                        if left.at is not None or right.at is not None:
                            yield _merge_direct([*before, left, right, *after])
            if after:
                for pair in _across(block, after[0]):
                    yield _merge_direct([*before, *pair, *after[1:]])

    def _sides(self, block: Block, first: int, end: int) -> list[Block]:
        sides = [Block(first, end)]
        if end - first >= 2:
            if block.at is not None:
                sides.append(Block(first, end, block.at))
            sides.extend(Block(first, end, at) for at in self._hosts_for(first, end)[:2] if at != block.at)
        return sides

    def _hosts_for(self, first: int, end: int) -> list[tuple[str, ...]]:
        """A few choices of hosts for a block: best members and best idle hosts, rotated over the shards."""
        speed = self.speed
        own = sorted(
            {home for index in range(first, end) for home in self.homes[index]}, key=lambda h: (-speed[h], h)
        )
        ranked = sorted(
            (*own[:HOSTS_TRIED], *self.idle[:HOSTS_TRIED]), key=lambda h: (-speed[h], h not in own, h)
        )
        shards = range(len(self.cargo.servers))
        return [tuple(ranked[(k + s) % len(ranked)] for s in shards) for k in range(len(ranked))]


def least_direct_cost(ledger: Ledger, cargo: Cargo) -> float:
    """No plan without sums costs less: every server takes in all parts one after the other."""
    least = 0.0
    for shard, server in enumerate(cargo.servers):
        coming = [
            parts[shard] for parts, host in zip(cargo.parts, cargo.hosts, strict=True) if host != server
        ]
        if coming:
            # The k-th to come in is there no sooner than k of the smallest take.
            total = float(min(coming) * len(coming))
            if not cargo.last_counts:
                total *= (len(coming) + 1) / 2 / len(cargo.hosts)
            least = max(least, total / ledger.network.hosts[server].down_bytes_per_s)
    return least


def _homes(cargo: Cargo, unit: Node) -> Iterable[str]:
    """Where a unit is before it is sent."""
    if isinstance(unit, int):
        return (cargo.hosts[unit],)
    if isinstance(unit, Gather):
        return sorted(set(unit.at))
    return sorted({cargo.hosts[order[-1]] for order in unit.orders})


def _alone(path: Path, size_bytes: float) -> float:
    """Seconds a transfer takes over idle links."""
    return size_bytes / min([stairs.capacity for stairs in path], default=INF)


def _across(left: Block, right: Block) -> Iterator[list[Block]]:
    """Two neighbours with their border moved by one either way, or joined."""
    for border in (left.end - 1, left.end + 1):
        pair = (Block(left.first, border, left.at), Block(border, right.end, right.at))
        yield [Block(b.first, b.end, b.at if b.end - b.first > 1 else None) for b in pair if b.end > b.first]
    for at in (left.at, right.at):
        if at is not None:
            yield [Block(left.first, right.end, at)]


def _merge_direct(blocks: Iterable[Block]) -> list[Block]:
    """Neighbouring direct blocks as one."""
    merged: list[Block] = []
    for block in blocks:
        if merged and merged[-1].at is None and block.at is None:
            merged[-1] = Block(merged[-1].first, block.end)
        else:
            merged.append(block)
    return merged
