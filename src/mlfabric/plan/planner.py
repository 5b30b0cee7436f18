"""The plan of one job's waiting updates: order, aggregate, reserve; each entry with its reason.

`plan_updates` is the whole in one call, a function of values. It orders the offers by the job's policy, looks
again at the head of the order with the transfers under way in hand, cuts the order into direct runs and
groups, and numbers the updates by predicted completion as far as their deadlines allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from mlfabric.plan.aggregation import Block, Cargo, Layout, aggregate_updates
from mlfabric.plan.fair import lay_out_fairly
from mlfabric.plan.ordering import estimate_duration, order_updates, position_deadline
from mlfabric.plan.reservation import INF, Booking, Ledger, open_ledger
from mlfabric.plan.values import (
    Group,
    JobState,
    Offer,
    Part,
    Placed,
    Plan,
    PlannedDrop,
    Reserved,
    Shard,
)
from mlfabric.topology import Network
from mlfabric.units import format_time

# How many positions at the head of the order are chosen again by estimated finish, and among how many.
HEAD_POSITIONS: Final = 6
HEAD_CHOICES: Final = 4


def plan_updates(
    network: Network, reserved: Sequence[Reserved], job: JobState, offers: Sequence[Offer], now: float
) -> Plan:
    """Decide for every offer: its place, its transfers and their times, or its drop; and why."""
    return plan_on_ledger(open_ledger(network, reserved, now), job, offers, now)


def plan_on_ledger(ledger: Ledger, job: JobState, offers: Sequence[Offer], now_s: float) -> Plan:
    """The same on a ledger that already holds other transfers; the plan's own are added to it."""
    reachable, unreachable = _split_reachable(ledger.network, job.shards, offers)
    durations = estimate_durations(ledger.network, job.shards, reachable)
    ordered = order_updates(reachable, job, durations)
    kept = ordered.kept
    if job.policy == "mlfabric":
        kept = _choose_head(ledger, job, kept, now_s)
    parts = [split_bytes(offer.size_bytes, job.shards) for offer in kept]
    cargo = Cargo(
        hosts=[offer.host for offer in kept],
        parts=parts,
        servers=[shard.server for shard in job.shards],
        aggregators=frozenset(job.aggregators) if job.policy == "mlfabric" else frozenset(),
        last_counts=job.objective == "last",
        limit=INF if job.max_rate_bytes_per_s is None else job.max_rate_bytes_per_s,
    )
    if job.policy == "fair-share":
        layout = lay_out_fairly(ledger, cargo, now_s)
    else:
        layout = aggregate_updates(ledger, cargo, now_s)
    drops = (*unreachable, *ordered.drops)
    return _write_plan(job, kept, cargo, layout, durations, drops, now_s)


def split_bytes(size_bytes: int, shards: Sequence[Shard]) -> list[int]:
    """An update's bytes by shard: whole bytes that add up."""
    whole = sum(shard.share for shard in shards)
    parts = []
    begin, share = 0, 0.0
    for shard in shards:
        share += shard.share
        end = round(size_bytes * share / whole)
        parts.append(end - begin)
        begin = end
    return parts


def estimate_durations(
    network: Network, shards: Sequence[Shard], offers: Sequence[Offer]
) -> dict[str, float]:
    return {offer.update: estimate_duration(network, shards, offer) for offer in offers}


def _split_reachable(
    network: Network, shards: Sequence[Shard], offers: Sequence[Offer]
) -> tuple[list[Offer], list[PlannedDrop]]:
    """Offers that can be sent at all; the others are dropped, by name."""
    reachable, drops = [], []
    dead = sorted({s.server for s in shards if s.server not in network.hosts})
    for offer in offers:
        host = network.hosts.get(offer.host)
        if host is None:
            drops.append(PlannedDrop(offer.update, f"host {offer.host} is not in the network"))
        elif dead:
            drops.append(PlannedDrop(offer.update, f"server {dead[0]} is not in the network"))
        elif any(network.rate(offer.host, shard.server) <= 0 for shard in shards):
            cut = next(s.server for s in shards if network.rate(offer.host, s.server) <= 0)
            drops.append(PlannedDrop(offer.update, f"no bandwidth from {offer.host} to server {cut}"))
        else:
            reachable.append(offer)
    return reachable, sorted(drops, key=lambda drop: drop.update)


def _choose_head(ledger: Ledger, job: JobState, kept: Sequence[Offer], now_s: float) -> tuple[Offer, ...]:
    """The first few positions again, each to whom the transfers under way let through first.

    An update may come forward only if all it overtakes can still take one position more.
    """
    order = list(kept)
    if len(order) < 2:
        return tuple(order)
    mark = ledger.mark()
    servers = [shard.server for shard in job.shards]
    for position in range(min(HEAD_POSITIONS, len(order) - 1)):
        best, best_finish = position, INF
        for index in range(position, min(position + HEAD_CHOICES, len(order))):
            offer = order[index]
            if index > position and position_deadline(order[index - 1], job) < index:
                break  # the one before can't be overtaken
            sizes = split_bytes(offer.size_bytes, job.shards)
            finish_s = max(
                ledger.finish(ledger.path(offer.host, server), size, now_s)
                for server, size in zip(servers, sizes, strict=True)
            )
            if finish_s < best_finish * (1 - 1e-9):
                best, best_finish = index, finish_s
        offer = order.pop(best)
        order.insert(position, offer)
        for server, size in zip(servers, split_bytes(offer.size_bytes, job.shards), strict=True):
            ledger.reserve(ledger.path(offer.host, server), size, now_s)
    ledger.undo(mark)
    return tuple(order)


# -- positions


class _Message(NamedTuple):
    """What arrives at the servers as one: an update or a group's sum. Members by deadline."""

    members: tuple[int, ...]
    finish_s: float
    last_position: int  # that its last member may have


def _messages(layout: Layout, deadlines: Sequence[int]) -> list[_Message]:
    messages = []
    for block in layout.blocks:
        if block.at is None:
            messages += [
                _Message((i,), layout.finishes[i], deadlines[i]) for i in range(block.first, block.end)
            ]
        else:
            members = tuple(sorted(range(block.first, block.end), key=lambda i: (deadlines[i], i)))
            after = len(members) - 1
            last = min(deadlines[i] + after - k for k, i in enumerate(members))
            messages.append(_Message(members, layout.finishes[block.first], last))
    return messages


def _number(messages: Sequence[_Message]) -> list[int]:
    """Updates by position: by predicted completion, except where a deadline wants one earlier.

    From the back, each place goes to the message that completes last among those whose deadline allows it.
    If any order meets all deadlines this one does: a message that may be last can always be put last.
    """
    waiting = sorted(range(len(messages)), key=lambda k: (messages[k].last_position, k))
    eligible: list[tuple[float, int]] = []
    reverse: list[int] = []
    position = sum(len(message.members) for message in messages) - 1
    while position >= 0:
        while waiting and messages[waiting[-1]].last_position >= position:
            k = waiting.pop()
            heappush(eligible, (-messages[k].finish_s, -k))
        message = messages[-heappop(eligible)[1]]
        reverse.extend(reversed(message.members))
        position -= len(message.members)
    return reverse[::-1]


# -- the records


def _write_plan(
    job: JobState,
    kept: Sequence[Offer],
    cargo: Cargo,
    layout: Layout,
    durations_s: Mapping[str, float],
    drops: Sequence[PlannedDrop],
    now_s: float,
) -> Plan:
    deadlines = [position_deadline(offer, job) for offer in kept]
    numbered = _number(_messages(layout, deadlines))
    block_of = {
        index: number for number, block in enumerate(layout.blocks) for index in range(block.first, block.end)
    }
    groups = tuple(_write_group(job, kept, cargo, layout, s, now_s) for s in range(len(layout.sums)))
    placed = []
    for position, index in enumerate(numbered):
        offer = kept[index]
        delay = job.placed_version + position - offer.base_version
        number = block_of[index]
        block = layout.blocks[number]
        parts = tuple(
            _write_part(job.shards[s].index, cargo, block, number, index, s, booking)
            for s, booking in enumerate(layout.parts[index])
        )
        placed.append(
            Placed(
                update=offer.update,
                position=position,
                delay_updates=delay,
                weight=weigh(delay, job.concurrency),
                parts=parts,
                finish_s=layout.finishes[index],
                reason=_explain(job, block, offer, delay, layout.finishes[index] - now_s, durations_s),
            )
        )
    return Plan(tuple(placed), groups, tuple(drops))


def weigh(delay_updates: int, concurrency: int) -> float:
    """The share of a full step an update of this delay makes: 1 up to the concurrency, n/delay beyond."""
    return 1.0 if delay_updates <= concurrency else concurrency / delay_updates


def _write_part(
    shard: int, cargo: Cargo, block: Block, number: int, index: int, s: int, booking: Booking
) -> Part:
    size = cargo.parts[index][s]
    target = cargo.servers[s] if block.at is None else block.at[s]
    return Part(
        shard,
        target,
        size,
        booking.start_s,
        booking.finish_s,
        _mean_rate(booking, size),
        None if block.at is None else f"g{number}.{shard}",
    )


def _mean_rate(booking: Booking, size_bytes: int) -> float:
    lasts = booking.finish_s - booking.start_s
    return size_bytes / lasts if lasts > 0 else INF


def _write_group(
    job: JobState, kept: Sequence[Offer], cargo: Cargo, layout: Layout, s: int, now_s: float
) -> Group:
    found = layout.sums[s]
    shard = job.shards[found.shard].index
    size = max(cargo.parts[index][found.shard] for index in found.members)
    own = any(cargo.hosts[index] == found.aggregator for index in found.members)
    booking = found.booking
    wait = booking.start_s - found.ready_s
    server = cargo.servers[found.shard]
    when = (
        f"ready as {server}'s link falls free"
        if wait <= 0
        else f"ready {format_time(wait)} before {server}'s link is free"
    )
    return Group(
        group=f"g{found.block}.{shard}",
        shard=shard,
        aggregator=found.aggregator,
        members=tuple(kept[index].update for index in found.members),
        size_bytes=size,
        ready_s=found.ready_s,
        start_s=booking.start_s,
        finish_s=booking.finish_s,
        rate_bytes_per_s=_mean_rate(booking, size),
        reason=f"{len(found.members)} updates cross to {server} as one sum, {when}; "
        f"{found.aggregator} {'is a member' if own else 'is idle'}",
        target=server,
    )


def _explain(
    job: JobState, block: Block, offer: Offer, delay: int, after_s: float, durations_s: Mapping[str, float]
) -> str:
    bound = "no bound" if job.max_delay is None else f"bound {job.max_delay}"
    if block.at is None:
        how = f"direct by policy {job.policy}, alone it takes {format_time(durations_s[offer.update])}"
    else:
        how = f"summed with {block.end - block.first - 1} others at {block.at[0]}"
    return f"{how}; there in {format_time(after_s)}, delay {delay}, {bound}"
