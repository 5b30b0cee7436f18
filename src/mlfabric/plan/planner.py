"""The plan of one job's waiting updates: order, aggregate, reserve; each entry with its reason.

`plan_updates` is the whole in one call, a function of values. It orders the offers by the job's policy, looks
again at the head of the order with the transfers under way in hand, and cuts the order into direct runs and
groups; `writing.py` numbers the updates and writes it all down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mlfabric.plan.aggregation import aggregate_updates
from mlfabric.plan.fair import lay_out_fairly
from mlfabric.plan.forest import Cargo, Layout, lay_out
from mlfabric.plan.grouping import TIME_TOLERANCE
from mlfabric.plan.ordering import estimate_durations, order_updates, position_deadline
from mlfabric.plan.reservation import Ledger, open_ledger
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import JobState, Offer, Plan, PlannedDrop, Reserved, Shard
from mlfabric.plan.writing import write_plan
from mlfabric.topology import Network

# How many positions at the head of the order are chosen again by estimated finish, and among how many.
HEAD_POSITIONS: Final = 6
HEAD_CHOICES: Final = 4


def plan_updates(
    network: Network, reserved: Sequence[Reserved], job: JobState, offers: Sequence[Offer], now: float
) -> Plan:
    """Decide for every offer: its place, its transfers and their times, or its drop; and why.

    Planned from time zero and moved to `now` in the end: floats are finer near zero, and a plan must not
    depend on how long the clock has run.
    """
    return lay_plan(open_ledger(network, reserved, 0.0), job, offers, 0.0, offset_s=now).plan


def plan_on_ledger(ledger: Ledger, job: JobState, offers: Sequence[Offer], now_s: float) -> Plan:
    """The same on a ledger that already holds other transfers; the plan's own are added to it."""
    return lay_plan(ledger, job, offers, now_s).plan


class Laid(NamedTuple):
    """A plan together with what it booked."""

    plan: Plan
    kept: Sequence[Offer]  # by index of the cargo
    cargo: Cargo
    layout: Layout


def lay_plan(
    ledger: Ledger, job: JobState, offers: Sequence[Offer], now_s: float, offset_s: float = 0.0
) -> Laid:
    """Order, aggregate, reserve. The times in the plan are `offset_s` later than those on the ledger."""
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
        aggregators=frozenset(job.aggregators),
        last_counts=job.objective == "last",
        deadlines=[position_deadline(offer, job) for offer in kept],
        chunk_bytes=job.chunk_bytes,
        levels=job.levels,
        search_transfers=job.search_transfers,
    )
    if job.policy == "fair-share":
        layout = lay_out_fairly(ledger, cargo, now_s)
    elif job.policy == "mlfabric":
        layout = aggregate_updates(ledger, cargo, now_s)
    else:
        layout = lay_out(ledger, cargo, range(len(kept)), now_s)
    drops = (*unreachable, *ordered.drops)
    plan = write_plan(ledger, job, kept, cargo, layout, durations, drops, now_s, offset_s)
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
        best, best_s = position, INF
        for index in range(position, min(position + HEAD_CHOICES, len(order))):
            offer = order[index]
            if index > position and position_deadline(order[index - 1], job) < index:
                break  # the one before can't be overtaken
            sizes = split_bytes(offer.size_bytes, job.shards)
            lasts_s = max(
                ledger.finish(ledger.path(offer.host, server), size, now_s) - now_s
                for server, size in zip(servers, sizes, strict=True)
            )
            if lasts_s < best_s * (1 - TIME_TOLERANCE):
                best, best_s = index, lasts_s
        offer = order.pop(best)
        order.insert(position, offer)
        for server, size in zip(servers, split_bytes(offer.size_bytes, job.shards), strict=True):
            ledger.reserve(ledger.path(offer.host, server), size, now_s)
    ledger.undo(mark)
    return tuple(order)
