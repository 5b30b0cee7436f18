"""Who sums whose updates before they reach the server.

The order is cut into blocks, contiguous runs of it. A block goes *direct*, or is *gathered*: its members
send to one host per shard, preferably one of themselves, which forwards the sum once all are there. The
first block goes direct and keeps the server's link busy; each following group may grow as long as its sum is
ready when that link falls free, so on idle links gathering costs nothing and n transfers take the time of
about sqrt(2n). Where no grouping is better than none, none is the answer.

The search tries the length of the direct run, lets groups follow greedily among a few best hosts, and then,
for few updates, improves by local moves from two starts, the greedy plan and the direct one. Every candidate
is laid out on the real ledger and undone, so what is compared is what would be reserved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from mlfabric.plan.reservation import INF, Booking, Ledger

# Two times this close are the same time: float sums of the same transfers differ in their last bits.
TIME_TOLERANCE: Final = 1e-9
# Hosts looked at for each group and shard; more gain little and cost much.
HOSTS_TRIED: Final = 4
# Transfers that the search may lay out on trial, over all candidates of one plan.
TRIAL_TRANSFERS: Final = 3000
# Local moves are worth it for so many updates.
MOVES_UP_TO: Final = 24


class Cargo(NamedTuple):
    """What is to be moved, by place in the order, and to whom."""

    hosts: Sequence[str]
    parts: Sequence[Sequence[int]]  # bytes, by update and shard
    servers: Sequence[str]  # host, by shard
    aggregators: frozenset[str]  # hosts that may sum
    last_counts: bool = False  # cost: the last completion instead of the mean
    limit: float = INF  # bytes per second that one transfer may take


class Block(NamedTuple):
    """A contiguous run of the order: direct, or gathered at one host per shard."""

    first: int
    end: int
    at: tuple[str, ...] | None = None


class Sum(NamedTuple):
    """One shard's sum of one block on its way to the server."""

    block: int
    shard: int
    aggregator: str
    members: range
    ready_s: float
    booking: Booking


class Layout(NamedTuple):
    """A plan of transfers on the ledger."""

    blocks: list[Block]
    parts: list[list[Booking]]  # by update and shard: to the server, or to the aggregator
    sums: list[Sum]
    finishes: list[float]  # by update: when its last shard has it

    def cost(self, last_counts: bool) -> float:
        if last_counts:
            return max(self.finishes)
        return sum(self.finishes) / len(self.finishes)


def aggregate_updates(ledger: Ledger, cargo: Cargo, now_s: float) -> Layout:
    """Cut the order into blocks and reserve their transfers."""
    count = len(cargo.hosts)
    if count < 2 or not cargo.aggregators:
        return lay_out(ledger, cargo, [Block(0, count)] if count else [], now_s)
    search = _Search(ledger, cargo, now_s)
    best = search.best_direct_run()
    if count <= MOVES_UP_TO:
        direct = [Block(0, count)]
        # On equal cost the greedy start wins.
        best = min((search.improve(start) for start in (best, direct)), key=lambda found: found[0])[1]
    return lay_out(ledger, cargo, best, now_s)


def lay_out(ledger: Ledger, cargo: Cargo, blocks: Sequence[Block], now_s: float) -> Layout:
    """Reserve the transfers of the blocks, in order."""
    layout = Layout(list(blocks), [], [], [])
    for number, block in enumerate(blocks):
        if block.at is None:
            for index in range(block.first, block.end):
                _send_direct(ledger, cargo, layout, index, now_s)
        else:
            for index in range(block.first, block.end):
                layout.parts.append(_send_to(ledger, cargo, index, block.at, now_s))
            _forward(ledger, cargo, layout, number, block, now_s)
    return layout


def _rotation(count: int, index: int) -> Iterable[int]:
    """Shards in the order an update's parts are sent: rotated, or all would queue at the same server."""
    if count == 1:
        return (0,)
    turn = index % count
    return (*range(turn, count), *range(turn))


def _send_to(ledger: Ledger, cargo: Cargo, index: int, targets: Sequence[str], now_s: float) -> list[Booking]:
    host, sizes = cargo.hosts[index], cargo.parts[index]
    bookings: list[Booking] = [None] * len(sizes)  # type: ignore[list-item]
    for shard in _rotation(len(sizes), index):
        path = ledger.path(host, targets[shard])
        bookings[shard] = ledger.reserve(path, sizes[shard], now_s, cargo.limit)
    return bookings


def _send_direct(ledger: Ledger, cargo: Cargo, layout: Layout, index: int, now_s: float) -> None:
    bookings = _send_to(ledger, cargo, index, cargo.servers, now_s)
    layout.parts.append(bookings)
    layout.finishes.append(max(booking.finish_s for booking in bookings))


def _forward(ledger: Ledger, cargo: Cargo, layout: Layout, number: int, block: Block, now_s: float) -> None:
    assert block.at is not None
    finish_s = now_s
    members = range(block.first, block.end)
    for shard in _rotation(len(cargo.servers), number):
        at = block.at[shard]
        ready_s = max(layout.parts[index][shard].finish_s for index in members)
        size = max(cargo.parts[index][shard] for index in members)
        booking = ledger.reserve(ledger.path(at, cargo.servers[shard]), size, ready_s, cargo.limit)
        layout.sums.append(Sum(number, shard, at, members, ready_s, booking))
        finish_s = max(finish_s, booking.finish_s)
    layout.finishes.extend([finish_s] * len(members))


class _Search:
    """Candidates for the blocks, compared by laying each out and undoing it."""

    def __init__(self, ledger: Ledger, cargo: Cargo, now_s: float) -> None:
        self.ledger = ledger
        self.cargo = cargo
        self.now_s = now_s
        self.count = len(cargo.hosts)
        self.trials_left = TRIAL_TRANSFERS
        hosts = ledger.network.hosts
        busy = set(cargo.hosts)
        allowed = cargo.aggregators.difference(cargo.servers)
        self.may_sum = [host in allowed for host in cargo.hosts]
        speed = {h: min(hosts[h].up_bytes_per_s, hosts[h].down_bytes_per_s) for h in allowed if h in hosts}
        self.speed = speed
        self.idle = sorted((h for h in speed if h not in busy), key=lambda h: (-speed[h], h))

    def best_direct_run(self) -> list[Block]:
        """The cheapest greedy plan over the lengths of the direct run; all direct if none is cheaper."""
        count = self.count
        best: tuple[float, list[Block]] = (self._trial([Block(0, count)]), [Block(0, count)])
        for run in self._runs():
            blocks, cost = self._greedy(run)
            if cost < best[0] * (1 - TIME_TOLERANCE):
                best = (cost, blocks)
        return best[1]

    def _runs(self) -> list[int]:
        """Lengths of the direct run to try: all of the likely ones, or an even choice of them."""
        likely = math.isqrt(2 * self.count)
        runs = list(range(min(self.count - 1, likely + 1)))
        affordable = max(2, self.trials_left // (self.count * len(self.cargo.servers)))
        if len(runs) > affordable:
            low, high = 0.15 * likely, 0.8 * likely
            steps = {round(low + (high - low) * k / (affordable - 1)) for k in range(affordable)}
            runs = sorted(steps)
        return runs

    def _trial(self, blocks: Sequence[Block]) -> float:
        mark = self.ledger.mark()
        layout = lay_out(self.ledger, self.cargo, blocks, self.now_s)
        self.ledger.undo(mark)
        self.trials_left -= self.count * len(self.cargo.servers)
        return layout.cost(self.cargo.last_counts)

    def _greedy(self, run: int) -> tuple[list[Block], float]:
        """`run` updates direct, then groups, each as long as it is ready when the server's link is free."""
        ledger, cargo = self.ledger, self.cargo
        outer = ledger.mark()
        layout = Layout([], [], [], [])
        if run:
            layout.blocks.append(Block(0, run))
            for index in range(run):
                _send_direct(ledger, cargo, layout, index, self.now_s)
        used: dict[str, int] = {}
        first = run
        while first < self.count:
            at = self._choose_hosts(first, used)
            end = self._grow(layout, first, at) if at is not None and first + 1 < self.count else first + 1
            if at is not None and end > first + 1:
                layout.blocks.append(Block(first, end, at))
                _forward(ledger, cargo, layout, len(layout.blocks) - 1, layout.blocks[-1], self.now_s)
                for host in at:
                    used[host] = used.get(host, 0) + 1
            else:
                layout.blocks.append(Block(first, end))
                del layout.parts[first:]
                _send_direct(ledger, cargo, layout, first, self.now_s)
            first = end
        ledger.undo(outer)
        self.trials_left -= self.count * len(cargo.servers)
        return _merge_direct(layout.blocks), layout.cost(cargo.last_counts)

    def _grow(self, layout: Layout, first: int, at: tuple[str, ...]) -> int:
        """Reserve members of a group beginning at `first`; the place after its last one."""
        ledger, cargo = self.ledger, self.cargo
        shards = range(len(at))
        allowed = []
        for shard in shards:
            path = ledger.path(at[shard], cargo.servers[shard])
            size = cargo.parts[first][shard]
            free_s = ledger.finish(path, size, self.now_s, cargo.limit)
            allowed.append(free_s - _alone(path, size, cargo.limit))
        opening = ledger.mark()
        end = first
        while end < self.count:
            mark = ledger.mark()
            bookings = _send_to(ledger, cargo, end, at, self.now_s)
            late = any(
                bookings[s].finish_s > allowed[s] + TIME_TOLERANCE * (bookings[s].finish_s - self.now_s)
                for s in shards
            )
            if late and end - first >= 2:
                ledger.undo(mark)
                break
            if end - first < 2:
                allowed = [max(allowed[s], bookings[s].finish_s) for s in shards]
            layout.parts.append(bookings)
            end += 1
        if end - first < 2:
            ledger.undo(opening)
            return first + 1
        return end

    def _choose_hosts(self, first: int, used: dict[str, int]) -> tuple[str, ...] | None:
        """A host for each shard: the fastest of the next few members and of the idle, members first."""
        speed = self.speed
        near = range(first, min(first + 2 * HOSTS_TRIED * len(self.cargo.servers), self.count))
        members = {self.cargo.hosts[i] for i in near if self.may_sum[i]}
        idle = [h for h in self.idle if h not in used][: HOSTS_TRIED * len(self.cargo.servers)]
        ranked = sorted((*members, *idle), key=lambda h: (used.get(h, 0), -speed[h], h not in members, h))
        if not ranked:
            return None
        return tuple(ranked[shard % len(ranked)] for shard in range(len(self.cargo.servers)))

    # -- local moves

    def improve(self, blocks: list[Block]) -> tuple[float, list[Block]]:
        """Take the best neighbouring plan until none is better or the trials are spent."""
        self.trials_left = TRIAL_TRANSFERS
        cost = self._trial(blocks)
        while True:
            best = (cost, blocks)
            for candidate in self._neighbours(blocks):
                if self.trials_left <= 0:
                    break
                candidate_cost = self._trial(candidate)
                if candidate_cost < best[0] * (1 - TIME_TOLERANCE):
                    best = (candidate_cost, candidate)
            if best[1] is blocks:
                return cost, blocks
            cost, blocks = best

    def _neighbours(self, blocks: list[Block]) -> Iterator[list[Block]]:
        """Boundaries moved by one, blocks split, joined, made direct, gathered, gathered elsewhere."""
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
                right = after[0]
                if block.end - block.first > 1 or block.at is None:
                    moved = [
                        Block(block.first, block.end - 1, block.at),
                        Block(block.end - 1, right.end, right.at),
                    ]
                    yield _merge_direct([*before, *_tidy(moved), *after[1:]])
                moved = [
                    Block(block.first, block.end + 1, block.at),
                    Block(block.end + 1, right.end, right.at),
                ]
                yield _merge_direct([*before, *_tidy(moved), *after[1:]])
                if block.at is not None or right.at is not None:
                    for joined in (block.at, right.at):
                        if joined is not None:
                            yield [*before, Block(block.first, right.end, joined), *after[1:]]

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
        members = sorted(
            {self.cargo.hosts[i] for i in range(first, end) if self.may_sum[i]}, key=lambda h: (-speed[h], h)
        )
        ranked = sorted(
            (*members[:HOSTS_TRIED], *self.idle[:HOSTS_TRIED]), key=lambda h: (-speed[h], h not in members, h)
        )
        shards = range(len(self.cargo.servers))
        return [tuple(ranked[(k + s) % len(ranked)] for s in shards) for k in range(len(ranked))]


def _alone(path: Iterable[object], size_bytes: float, limit: float) -> float:
    rate = min(limit, *(stairs.capacity for stairs in path))  # type: ignore[attr-defined]
    return size_bytes / rate if rate > 0 else INF


def _tidy(blocks: Iterable[Block]) -> list[Block]:
    """Without empty blocks; a group of one is direct."""
    return [Block(b.first, b.end, b.at if b.end - b.first > 1 else None) for b in blocks if b.end > b.first]


def _merge_direct(blocks: Iterable[Block]) -> list[Block]:
    """Neighbouring direct blocks as one."""
    merged: list[Block] = []
    for block in blocks:
        if merged and merged[-1].at is None and block.at is None:
            merged[-1] = Block(merged[-1].first, block.end)
        else:
            merged.append(block)
    return merged
