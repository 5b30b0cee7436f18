"""A plan's records, each with its reason, from what was laid out on the ledger.

Decides nothing but when the replicas get their messages, for which the order must be known. The ledger's
times may be counted from another moment than the plan's; `offset_s` lies between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from mlfabric.plan.forest import Cargo, Layout, Sent, Sum, node_tag
from mlfabric.plan.numbering import Arrival, applied_s, find_arrivals, hold_others_up, number_arrivals
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
    messages = number_arrivals(find_arrivals(layout.nodes, layout.finishes, cargo.deadlines))
    placed = _write_placed(job, kept, cargo, layout, messages, durations_s, now_s, offset_s)
    groups = _write_groups(job, kept, cargo, layout, offset_s)
    replication, held = _replicate(ledger, job, kept, cargo, layout, messages, now_s, offset_s)
    return Plan(placed, groups, tuple(drops), replication, held)


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
    orders = zip(messages, hold_others_up(messages), applied_s(messages), strict=True)
    for message, hurried, at_s in orders:
        bound = f"{limit}; before others that arrive earlier, later would break it" if hurried else limit
        arrives = f"at the server in {format_time(message.finish_s - now_s)}"
        if at_s > message.finish_s:
            arrives = f"{arrives}, applied in {format_time(at_s - now_s)} behind others of an older model"
        finish_s = message.finish_s + offset_s
        ways: dict[str | None, str] = {}  # of inner groups of one message, by tag
        for index in message.members:
            offer, sent, position = kept[index], sent_of[index], len(placed)
            delay = version + position - offer.base_version
            tag = sent.tag
            if tag is None:
                alone_s = durations_s[offer.update]
                alone = f"{format_time(alone_s)} over idle links" if alone_s > 0 else "it is on that host"
                way = f"straight to the server{by_policy}, {alone}; {arrives}"
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
        followers = [name for name in (shard.replica, *shard.more_replicas) if name in ledger.network.hosts]
        if not followers:
            continue
        steps = []
        for message, norm in zip(order, norms, strict=True):
            at_s = sums.get((node_tag(message.node), s))
            if at_s is None:  # an update by itself
                at_s = layout.sent[message.members[0]].bookings[s].finish_s
            steps.append(ServerStep(kept[message.members[-1]].update, at_s, norm))
        size = max([parts[s] for parts in cargo.parts])
        plan = plan_replication(
            ledger,
            [
                Follower(shard.index, shard.server, name, size, job.divergence, shard.pending_norm)
                for name in followers
                if name is not None
            ],
            steps,
            now_s,
        )
        messages += plan.messages
        held += plan.held
    return (
        tuple(
            structs.replace(each, start_s=each.start_s + offset_s, finish_s=each.finish_s + offset_s)
            for each in messages
        ),
        tuple(structs.replace(each, until_s=each.until_s + offset_s) for each in held),
    )
