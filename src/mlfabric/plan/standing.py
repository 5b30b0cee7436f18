"""What a standing plan (`incremental.py`) is made of: transfers, updates, groups; and what an event did."""

from __future__ import annotations

from dataclasses import dataclass

from mlfabric.plan.reservation import Booking
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import Group, JobState, Offer, Part, Placed, PlannedDrop
from mlfabric.plan.writing import weigh


@dataclass(frozen=True, slots=True)
class PlanChange:
    """What an event did to a standing plan: entries made or changed; the rest stands."""

    placed: tuple[Placed, ...] = ()
    groups: tuple[Group, ...] = ()
    drops: tuple[PlannedDrop, ...] = ()
    shifted_from: int | None = None  # positions from this on are held by others than before: `order()` tells


class StandingTransfer:
    """One transfer of the standing plan: a part of an update, or a group's sum of one shard."""

    __slots__ = ("booking", "group", "owner", "shard", "size", "source", "target")

    def __init__(
        self, owner: str, shard: int, source: str, target: str, size: int, group: str | None, booking: Booking
    ) -> None:
        self.owner = owner  # update, or tag of the group
        self.shard = shard  # its place in the job's shards
        self.source = source
        self.target = target
        self.size = size
        self.group = group  # tag of the group it goes into
        self.booking = booking


class StandingUpdate:
    """An update in the standing order."""

    __slots__ = ("deadline", "finish_s", "moves", "offer", "tag")

    def __init__(
        self, offer: Offer, deadline: int, tag: str | None, moves: list[StandingTransfer], finish_s: float
    ) -> None:
        self.offer = offer
        self.deadline = deadline  # the last position it may have, counted from where the plan began
        self.tag = tag
        self.moves = moves
        self.finish_s = finish_s


class StandingGroup:
    """A group: its members, and its sums by shard."""

    __slots__ = ("members", "moves", "parent", "tag")

    def __init__(
        self, tag: str, parent: str | None, members: list[str], moves: list[StandingTransfer]
    ) -> None:
        self.tag = tag
        self.parent = parent
        self.members = members
        self.moves = moves


def delivered_bytes(booking: Booking, now_s: float) -> float:
    return sum((min(end, now_s) - begin) * rate for begin, end, rate in booking.pieces if begin < now_s)


def change_by_drop(offer: Offer, reason: str) -> PlanChange:
    return PlanChange(drops=(PlannedDrop(offer.update, reason),))


def write_placed(job: JobState, entry: StandingUpdate, position: int, why: str) -> Placed:
    """An update's record at this position."""
    delay = job.placed_version + position - entry.offer.base_version
    bound = "no bound" if job.max_delay is None else f"bound {job.max_delay}"
    parts = tuple(
        Part(
            job.shards[move.shard].index,
            move.target,
            move.size,
            move.booking.start_s,
            move.booking.finish_s,
            _mean_rate(move),
            None if move.group is None else f"{move.group}.{job.shards[move.shard].index}",
        )
        for move in entry.moves
    )
    weight = weigh(delay, job.concurrency)
    reason = f"{why}, delay {delay}, {bound}"
    return Placed(entry.offer.update, position, delay, weight, parts, entry.finish_s, reason)


def write_group(job: JobState, group: StandingGroup, move: StandingTransfer, ready_s: float) -> Group:
    """One shard's sum of a group; `ready_s`: when the last member is there."""
    shard, count = job.shards[move.shard].index, len(group.members)
    return Group(
        group=f"{group.tag}.{shard}",
        shard=shard,
        aggregator=move.source,
        members=tuple(group.members),
        size_bytes=move.size,
        ready_s=ready_s,
        start_s=move.booking.start_s,
        finish_s=move.booking.finish_s,
        rate_bytes_per_s=_mean_rate(move),
        reason=f"{move.target} receives {count} updates as one transfer instead of {count}",
        target=move.target,
        parent=None if group.parent is None else f"{group.parent}.{shard}",
    )


def _mean_rate(move: StandingTransfer) -> float:
    lasts = move.booking.finish_s - move.booking.start_s
    return move.size / lasts if lasts > 0 else INF
