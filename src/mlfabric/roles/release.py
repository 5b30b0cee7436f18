"""How a plan is let go: one steady rate per transfer, and only what has to start now.

Pure functions between the planner's bookings and the grants that the order book sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from mlfabric.messages import MemberInfo
from mlfabric.plan.values import Group, Part, Placed, Plan, Reserved
from mlfabric.topology import Network

# What is planned to start within this share of its own duration (plus a little) is let go now.
LOOKAHEAD = 0.25
LOOKAHEAD_S = 0.005
# A transfer planned at more than this share of its path's rate gets the whole of it.
CRUMB_SHARE = 0.4
# Inside a host a plan's rate is infinite; messages carry finite numbers.
MAX_RATE = 1e12


def remainder(reserved: Reserved, finish_s: float, now: float) -> Reserved:
    """What should be left of a transfer by now; one that is overdue may still need a little."""
    planned = reserved.remaining_bytes
    left = min(max((finish_s - now) * reserved.rate_bytes_per_s, 0.02 * planned), planned)
    return Reserved(reserved.source, reserved.target, left, reserved.rate_bytes_per_s)


def at_full_rate(
    plan: Plan, now: float, network: Network, hosts: Mapping[str, str], servers: Mapping[int, str]
) -> Plan:
    """A plan made for time zero, from `now` on, with one steady rate per transfer: its path's whole rate,
    as late as that allows.

    The planner books what is left of links moment by moment; a transfer that would trickle until another
    ends is better started when that has ended, and leaves no crumbs for the next one to trickle on.
    """
    placed = tuple(
        msgspec.structs.replace(
            entry,
            finish_s=entry.finish_s + now,
            parts=tuple(
                _steady(part, now, network.rate(hosts[entry.update], part.target)) for part in entry.parts
            ),
        )
        for entry in plan.placed
    )
    groups = tuple(
        _steady(group, now, network.rate(group.aggregator, servers[group.shard])) for group in plan.groups
    )
    return replace(plan, placed=placed, groups=groups)


Transfer = TypeVar("Transfer", Part, Group)


def _steady(transfer: Transfer, now: float, full_rate: float) -> Transfer:
    start, finish, rate = transfer.start_s, transfer.finish_s, transfer.rate_bytes_per_s
    if CRUMB_SHARE * full_rate <= rate and full_rate <= MAX_RATE:
        start, rate = max(start, finish - transfer.size_bytes / full_rate), full_rate
    start, finish = start + now, finish + now
    changed = msgspec.structs.replace(transfer, start_s=start, finish_s=finish, rate_bytes_per_s=rate)
    if isinstance(changed, Group):
        return msgspec.structs.replace(changed, ready_s=changed.ready_s + now)
    return changed


def host_of(node: str | None, members: Mapping[str, MemberInfo]) -> str | None:
    return members[node].host if node is not None and node in members else None


def lookahead(duration_s: float) -> float:
    return LOOKAHEAD * duration_s + LOOKAHEAD_S


def due_prefix(plan: Plan, now: float, groups: bool = True) -> tuple[Placed, ...]:
    """The first part of the order that has to start now, with whole groups; without `groups`, up to the
    first update that is to be summed with others."""
    last = -1
    for index, placed in enumerate(plan.placed):
        if not groups and any(part.group is not None for part in placed.parts):
            return plan.placed[: last + 1]
        if any(part.start_s <= now + lookahead(part.finish_s - part.start_s) for part in placed.parts):
            last = index
    changed = True
    while changed:
        inside = {part.group for placed in plan.placed[: last + 1] for part in placed.parts if part.group}
        furthest = max(
            (i for i, placed in enumerate(plan.placed) if any(part.group in inside for part in placed.parts)),
            default=last,
        )
        changed = furthest > last
        last = max(last, furthest)
    return plan.placed[: last + 1]


def goes_straight(placed: Placed) -> bool:
    """Whether an update is summed with no other on its way."""
    return all(part.group is None for part in placed.parts)


def start_at(placed: Placed, now: float) -> Placed:
    """The same update, whose parts start now."""
    parts = tuple(msgspec.structs.replace(part, start_s=now) for part in placed.parts)
    return msgspec.structs.replace(placed, parts=parts)


def node_on(host: str, members: Mapping[str, MemberInfo], worker: str) -> str:
    """The node that sums on this host: the worker itself where it lives there, else the first by name."""
    if members[worker].host == host:
        return worker
    return min(
        name for name, member in members.items() if member.host == host and "aggregator" in member.roles
    )
