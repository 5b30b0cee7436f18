"""A plan's records, each with its reason, from what was laid out on the ledger.

Decides one thing, the numbering: positions follow predicted completion as far as deadlines allow. Everything
else here only writes down. The ledger's times may be counted from another moment than the plan's;
`offset_s` lies between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from msgspec import structs

from mlfabric.plan.forest import Cargo, Layout, Sent, Sum, last_position, members_of, node_tag
from mlfabric.plan.replication import Follower, ServerStep, plan_replication
from mlfabric.plan.reservation import Ledger
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
)
from mlfabric.units import format_time

Replicated = tuple[tuple[ReplicaMessage, ...], tuple[HeldStep, ...]]


class Arrival(NamedTuple):
    """What arrives at the servers as one: an update, or a sum. Members by deadline."""

    members: Sequence[int]
    finish_s: float
    last_position: int  # that its last member may have
    node: int  # its place in the layout


def write_plan(
    ledger: Ledger,
    job: JobState,
    kept: Sequence[Offer],
    cargo: Cargo,
    layout: Layout,
    durations_s: Mapping[str, float],
    drops: Sequence[PlannedDrop],
    now_s: float,
    offset_s: float,
) -> Plan:
    """The whole plan; the messages to the replicas are reserved here, once the order is known."""
    messages = number_arrivals(find_arrivals(layout, cargo.deadlines))
    placed = _write_placed(job, kept, cargo, layout, messages, durations_s, now_s, offset_s)
    groups = _write_groups(job, kept, cargo, layout, offset_s)
    replication, held = _replicate(ledger, job, kept, cargo, layout, messages, now_s, offset_s)
    return Plan(placed, groups, tuple(drops), replication, held)


# -- positions


def find_arrivals(layout: Layout, deadlines: Sequence[int]) -> list[Arrival]:
    """The layout's nodes as the servers see them."""
    messages = []
    for k, node in enumerate(layout.nodes):
        members = members_of(node)
        if len(members) > 1:
            members = tuple(sorted(members, key=lambda i: (deadlines[i], i)))
        messages.append(Arrival(members, layout.finishes[members[0]], last_position(members, deadlines), k))
    return messages


def number_arrivals(messages: Sequence[Arrival]) -> list[Arrival]:
    """In the order of application: by predicted completion, except where a deadline wants one earlier.

    From the back, each place goes to the message that completes last among those whose deadline allows it.
    So no two neighbours stand against their completions unless the other way round one would be too late; and
    if any order meets all deadlines this one does: a message that may be last can always be put last. Where
    none may be last any more, as one was overtaken, it is the one that is too late by the least.
    """
    waiting = sorted(range(len(messages)), key=lambda k: (messages[k].last_position, k))
    eligible: list[tuple[float, int]] = []
    reverse: list[Arrival] = []
    position = sum([len(message.members) for message in messages]) - 1
    while position >= 0:
        while waiting and (not eligible or messages[waiting[-1]].last_position >= position):
            k = waiting.pop()
            heappush(eligible, (-messages[k].finish_s, -k))
        message = messages[-heappop(eligible)[1]]
        reverse.append(message)
        position -= len(message.members)
    return reverse[::-1]


def _hurried(messages: Sequence[Arrival]) -> list[bool]:
    """By message: does it stand before one that arrives earlier?"""
    hurried = []
    earliest = INF
    for message in reversed(messages):
        hurried.append(message.finish_s > earliest)
        earliest = min(earliest, message.finish_s)
    return hurried[::-1]


# -- updates


def _write_placed(
    job: JobState,
    kept: Sequence[Offer],
    cargo: Cargo,
    layout: Layout,
    messages: Sequence[Arrival],
    durations_s: Mapping[str, float],
    now_s: float,
    offset_s: float,
) -> tuple[Placed, ...]:
    sums = {found.tag: found for found in layout.sums if found.shard == 0}
    limit = "no bound" if job.max_delay is None else f"bound {job.max_delay}"
    shards = [shard.index for shard in job.shards]
    by_policy = "" if job.policy == "mlfabric" else f" by policy {job.policy}"
    written: dict[int, tuple[Part, ...]] = {}  # members of a paced gather share their bookings
    placed: list[Placed] = []
    sent_of, version, concurrency = layout.sent, job.placed_version, job.concurrency
    for message, hurried in zip(messages, _hurried(messages), strict=True):
        bound = f"{limit}; before others that arrive earlier, later would break it" if hurried else limit
        arrives = f"there in {format_time(message.finish_s - now_s)}"
        finish_s = message.finish_s + offset_s
        ways: dict[str | None, str] = {}  # of inner groups of one message, by tag
        for index in message.members:
            offer, sent, position = kept[index], sent_of[index], len(placed)
            delay = version + position - offer.base_version
            tag = sent.tag
            if tag is None:
                alone = format_time(durations_s[offer.update])
                way = f"straight to the server{by_policy}, {alone} over idle links; {arrives}"
            elif tag in ways:
                way = ways[tag]
            else:
                way = ways[tag] = f"{_tell_group(sums[tag])}; {arrives}"
            parts = written.get(id(sent.bookings))
            if parts is None:
                parts = _write_parts(shards, cargo.parts[index], sent, offset_s)
                written[id(sent.bookings)] = parts
            weight = weigh(delay, concurrency)
            reason = f"{way}, delay {delay}, {bound}"
            placed.append(Placed(offer.update, position, delay, weight, parts, finish_s, reason))
    return tuple(placed)


def weigh(delay_updates: int, concurrency: int) -> float:
    """The share of a full step an update of this delay makes: 1 up to the concurrency, n/delay beyond."""
    return 1.0 if delay_updates <= concurrency else concurrency / delay_updates


def _write_parts(
    shards: Sequence[int], sizes: Sequence[int], sent: Sent, offset_s: float
) -> tuple[Part, ...]:
    parts = []
    for shard, target, size, booking in zip(shards, sent.targets, sizes, sent.bookings, strict=True):
        start_s, finish_s = booking.start_s, booking.finish_s
        rate = size / (finish_s - start_s) if finish_s > start_s else INF
        group = None if sent.tag is None else f"{sent.tag}.{shard}"
        parts.append(Part(shard, target, size, start_s + offset_s, finish_s + offset_s, rate, group))
    return tuple(parts)


def _tell_group(found: Sum) -> str:
    others = len(found.members) - 1
    where = "in a chain ending at" if found.chain else "at"
    return f"summed with {others} other{'' if others == 1 else 's'} {where} {found.aggregator}"


# -- groups


def _write_groups(
    job: JobState, kept: Sequence[Offer], cargo: Cargo, layout: Layout, offset_s: float
) -> tuple[Group, ...]:
    groups = []
    members: dict[str, tuple[tuple[str, ...], set[str]]] = {}  # updates and their hosts, by tag
    for found in layout.sums:
        if found.tag not in members:
            names = tuple([kept[index].update for index in found.members])
            members[found.tag] = (names, {cargo.hosts[index] for index in found.members})
        groups.append(_write_group(job, found, *members[found.tag], offset_s))
    return tuple(groups)


def _write_group(
    job: JobState, found: Sum, members: tuple[str, ...], homes: set[str], offset_s: float
) -> Group:
    shard, booking = job.shards[found.shard].index, found.booking
    lasts = booking.finish_s - booking.start_s
    return Group(
        group=f"{found.tag}.{shard}",
        shard=shard,
        aggregator=found.aggregator,
        members=members,
        size_bytes=found.size_bytes,
        ready_s=found.ready_s + offset_s,
        start_s=booking.start_s + offset_s,
        finish_s=booking.finish_s + offset_s,
        rate_bytes_per_s=found.size_bytes / lasts if lasts > 0 else INF,
        reason=_explain_group(found, found.aggregator in homes),
        target=found.target,
        parent=None if found.parent is None else f"{found.parent}.{shard}",
        chain=found.chain,
    )


def _explain_group(found: Sum, own: bool) -> str:
    count = len(found.members)
    what = f"{found.target} receives {count} updates as one transfer instead of {count}"
    if found.chain:
        return f"{what}: hosts of like speed pass the sum on chunk by chunk, each adding its own"
    who = (
        f"{found.aggregator} has one of them already" if own else f"{found.aggregator} has room on its links"
    )
    wait_s = found.booking.start_s - found.ready_s
    if wait_s > 0:
        return (
            f"{what}: {who}, the sum is ready {format_time(wait_s)} before the link to {found.target} is free"
        )
    return f"{what}: {who}, the sum leaves as soon as the last is in"


# -- replicas


def _replicate(
    ledger: Ledger,
    job: JobState,
    kept: Sequence[Offer],
    cargo: Cargo,
    layout: Layout,
    order: Sequence[Arrival],
    now_s: float,
    offset_s: float,
) -> Replicated:
    """Messages to the replicas of the job's shards, over what its updates leave free."""
    messages: list[ReplicaMessage] = []
    held: list[HeldStep] = []
    if job.divergence is None or not kept:
        return (), ()
    sums = {(found.tag, found.shard): found.booking.finish_s for found in layout.sums}
    norms = [sum([kept[index].norm for index in message.members]) for message in order]
    for s, shard in enumerate(job.shards):
        if shard.replica is None or shard.replica not in ledger.network.hosts:
            continue
        steps = []
        for message, norm in zip(order, norms, strict=True):
            at_s = sums.get((node_tag(message.node), s))
            if at_s is None:  # an update by itself
                at_s = layout.sent[message.members[0]].bookings[s].finish_s
            steps.append(ServerStep(kept[message.members[-1]].update, at_s, norm))
        size = max([parts[s] for parts in cargo.parts])
        follower = Follower(
            shard.index, shard.server, shard.replica, size, job.divergence, shard.pending_norm
        )
        plan = plan_replication(ledger, [follower], steps, now_s)
        messages += plan.messages
        held += plan.held
    return (
        tuple(
            structs.replace(each, start_s=each.start_s + offset_s, finish_s=each.finish_s + offset_s)
            for each in messages
        ),
        tuple(structs.replace(each, until_s=each.until_s + offset_s) for each in held),
    )
