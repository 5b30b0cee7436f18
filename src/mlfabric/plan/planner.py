"""The plan of one job's waiting updates: order, aggregate, reserve; each entry with its reason.

`plan_updates` is the whole in one call, a function of values. It orders the offers by the job's policy, looks
again at the head of the order with the transfers under way in hand, cuts the order into direct runs and
groups, and numbers the updates by predicted completion as far as their deadlines allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from mlfabric.plan.aggregation import aggregate_updates
from mlfabric.plan.fair import lay_out_fairly
from mlfabric.plan.forest import Cargo, Layout, Sent, Sum, last_position, members_of
from mlfabric.plan.ordering import estimate_durations, order_updates, position_deadline
from mlfabric.plan.replication import Follower, ServerStep, plan_replication
from mlfabric.plan.reservation import Booking, Ledger, open_ledger
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import (
    Group,
    HeldStep,
    JobState,
    Offer,
    Part,
    Placed,
    Plan,
    PlannedDrop,
    ReplicaMessage,
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
    return lay_plan(ledger, job, offers, now_s).plan


class Laid(NamedTuple):
    """A plan together with what it booked."""

    plan: Plan
    kept: Sequence[Offer]  # by index of the cargo
    cargo: Cargo
    layout: Layout


def lay_plan(ledger: Ledger, job: JobState, offers: Sequence[Offer], now_s: float) -> Laid:
    """Order, aggregate, reserve."""
    if job.max_rate_bytes_per_s is not None:
        ledger = ledger.limited(job.max_rate_bytes_per_s)
    reachable, durations, unreachable = _split_reachable(ledger.network, job.shards, offers)
    ordered = order_updates(reachable, job, durations)
    kept = ordered.kept
    if job.policy == "mlfabric":
        kept = _choose_head(ledger, job, kept, now_s)
    split = {size: split_bytes(size, job.shards) for size in {offer.size_bytes for offer in kept}}
    parts = [split[offer.size_bytes] for offer in kept]
    cargo = Cargo(
        hosts=[offer.host for offer in kept],
        parts=parts,
        servers=[shard.server for shard in job.shards],
        aggregators=frozenset(job.aggregators) if job.policy == "mlfabric" else frozenset(),
        last_counts=job.objective == "last",
        deadlines=[position_deadline(offer, job) for offer in kept],
        chunk_bytes=job.chunk_bytes,
        levels=job.levels,
        search_transfers=job.search_transfers,
    )
    if job.policy == "fair-share":
        layout = lay_out_fairly(ledger, cargo, now_s)
    else:
        layout = aggregate_updates(ledger, cargo, now_s)
    drops = (*unreachable, *ordered.drops)
    plan = _write_plan(ledger, job, kept, cargo, layout, durations, drops, now_s)
    return Laid(plan, kept, cargo, layout)


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


def _split_reachable(
    network: Network, shards: Sequence[Shard], offers: Sequence[Offer]
) -> tuple[list[Offer], dict[str, float], list[PlannedDrop]]:
    """Offers that can be sent at all, with their durations; the others are dropped, by name."""
    known = [offer for offer in offers if offer.host in network.hosts]
    gone = sorted({shard.server for shard in shards if shard.server not in network.hosts})
    if gone or not shards:
        why = f"server {gone[0]} is not in the network" if gone else "its job has no server for it"
        drops = [PlannedDrop(offer.update, why) for offer in known]
        reachable, durations = [], {}
    else:
        durations = estimate_durations(network, shards, known)
        reachable, drops = known, []
        if INF in durations.values():
            reachable = [offer for offer in known if durations[offer.update] < INF]
            drops = [
                PlannedDrop(offer.update, f"no bandwidth from {offer.host} to its servers")
                for offer in known
                if durations[offer.update] == INF
            ]
    if len(known) < len(offers):
        drops += [
            PlannedDrop(offer.update, f"host {offer.host} is not in the network")
            for offer in offers
            if offer.host not in network.hosts
        ]
    return reachable, durations, sorted(drops, key=lambda drop: drop.update)


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
    """What arrives at the servers as one: an update, or a sum. Members by deadline."""

    members: Sequence[int]
    finish_s: float
    last_position: int  # that its last member may have


def _messages(layout: Layout, deadlines: Sequence[int]) -> list[_Message]:
    messages = []
    for node in layout.nodes:
        members = members_of(node)
        if len(members) > 1:
            members = tuple(sorted(members, key=lambda i: (deadlines[i], i)))
        messages.append(_Message(members, layout.finishes[members[0]], last_position(members, deadlines)))
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
    ledger: Ledger,
    job: JobState,
    kept: Sequence[Offer],
    cargo: Cargo,
    layout: Layout,
    durations_s: Mapping[str, float],
    drops: Sequence[PlannedDrop],
    now_s: float,
) -> Plan:
    first_sums = {found.tag: found for found in layout.sums if found.shard == 0}
    bound = "no bound" if job.max_delay is None else f"bound {job.max_delay}"
    shards = [shard.index for shard in job.shards]
    ways: dict[str, str] = {}  # of groups, by tag
    placed = []
    order = _number(_messages(layout, cargo.deadlines))
    for position, index in enumerate(order):
        offer, sent, finish_s = kept[index], layout.sent[index], layout.finishes[index]
        delay = job.placed_version + position - offer.base_version
        if sent.tag is None:
            alone = format_time(durations_s[offer.update])
            way = f"direct by policy {job.policy}, alone it takes {alone}"
            way = f"{way}; there in {format_time(finish_s - now_s)}"
        elif sent.tag in ways:
            way = ways[sent.tag]
        else:
            way = f"{_tell_group(first_sums[sent.tag])}; there in {format_time(finish_s - now_s)}"
            ways[sent.tag] = way
        placed.append(
            Placed(
                offer.update,
                position,
                delay,
                weigh(delay, job.concurrency),
                _write_parts(shards, cargo.parts[index], sent),
                finish_s,
                f"{way}, delay {delay}, {bound}",
            )
        )
    groups = _write_groups(job, kept, cargo, layout)
    replication, held = _replicate(ledger, job, kept, cargo, layout, order, now_s)
    return Plan(tuple(placed), groups, tuple(drops), replication, held)


def _tell_group(found: Sum) -> str:
    others = len(found.members) - 1
    where = "in a chain ending at" if found.chain else "at"
    return f"summed with {others} other{'' if others == 1 else 's'} {where} {found.aggregator}"


def _replicate(
    ledger: Ledger,
    job: JobState,
    kept: Sequence[Offer],
    cargo: Cargo,
    layout: Layout,
    order: Sequence[int],
    now_s: float,
) -> tuple[tuple[ReplicaMessage, ...], tuple[HeldStep, ...]]:
    """Messages to the replicas of the job's shards, over what its updates leave free."""
    messages: list[ReplicaMessage] = []
    held: list[HeldStep] = []
    if job.divergence is None or not kept:
        return (), ()
    sums = {(found.members, found.shard): found.booking.finish_s for found in layout.sums}
    rank = {index: position for position, index in enumerate(order)}
    arriving = sorted((members_of(node) for node in layout.nodes), key=lambda members: rank[members[0]])
    norms = [sum(kept[index].norm for index in members) for members in arriving]
    for s, shard in enumerate(job.shards):
        if shard.replica is None or shard.replica not in ledger.network.hosts:
            continue
        steps = []
        for members, norm in zip(arriving, norms, strict=True):
            at_s = sums.get((members, s))
            if at_s is None:
                at_s = layout.sent[members[0]].bookings[s].finish_s
            steps.append(ServerStep(kept[members[-1]].update, at_s, norm))
        size = max(parts[s] for parts in cargo.parts)
        follower = Follower(
            shard.index, shard.server, shard.replica, size, job.divergence, shard.pending_norm
        )
        plan = plan_replication(ledger, [follower], steps, now_s)
        messages += plan.messages
        held += plan.held
    return tuple(messages), tuple(held)


def weigh(delay_updates: int, concurrency: int) -> float:
    """The share of a full step an update of this delay makes: 1 up to the concurrency, n/delay beyond."""
    return 1.0 if delay_updates <= concurrency else concurrency / delay_updates


def _write_parts(shards: Sequence[int], sizes: Sequence[int], sent: Sent) -> tuple[Part, ...]:
    parts = []
    for shard, target, size, booking in zip(shards, sent.targets, sizes, sent.bookings, strict=True):
        start_s, finish_s = booking.start_s, booking.finish_s
        rate = size / (finish_s - start_s) if finish_s > start_s else INF
        group = None if sent.tag is None else f"{sent.tag}.{shard}"
        parts.append(Part(shard, target, size, start_s, finish_s, rate, group))
    return tuple(parts)


def _write_groups(job: JobState, kept: Sequence[Offer], cargo: Cargo, layout: Layout) -> tuple[Group, ...]:
    groups = []
    members: dict[str, tuple[tuple[str, ...], set[str]]] = {}  # updates and their hosts, by tag
    for found in layout.sums:
        if found.tag not in members:
            names = tuple(kept[index].update for index in found.members)
            members[found.tag] = (names, {cargo.hosts[index] for index in found.members})
        groups.append(_write_group(job, found, *members[found.tag]))
    return tuple(groups)


def _mean_rate(booking: Booking, size_bytes: int) -> float:
    lasts = booking.finish_s - booking.start_s
    return size_bytes / lasts if lasts > 0 else INF


def _write_group(job: JobState, found: Sum, members: tuple[str, ...], homes: set[str]) -> Group:
    shard, booking = job.shards[found.shard].index, found.booking
    own = found.aggregator in homes
    wait = booking.start_s - found.ready_s
    if found.chain:
        how = "handed on chunk by chunk by hosts of like speed"
    elif wait <= 0:
        how = f"on its way as soon as it is ready; {found.aggregator} {'is a member' if own else 'is idle'}"
    else:
        how = f"ready {format_time(wait)} before the link is free, so it costs nothing"
    return Group(
        group=f"{found.tag}.{shard}",
        shard=shard,
        aggregator=found.aggregator,
        members=members,
        size_bytes=found.size_bytes,
        ready_s=found.ready_s,
        start_s=booking.start_s,
        finish_s=booking.finish_s,
        rate_bytes_per_s=_mean_rate(booking, found.size_bytes),
        reason=f"{len(found.members)} updates reach {found.target} as one sum, {how}",
        target=found.target,
        parent=None if found.parent is None else f"{found.parent}.{shard}",
        chain=found.chain,
    )
