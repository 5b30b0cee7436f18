"""Steps made of the first gradients that are offered: which of those that wait are granted now.

The rest waits: it takes the place of what is lost on its way, or is dropped, unsent, when the step is
complete.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlfabric.messages import MemberInfo
from mlfabric.roles.entries import Entries, WaitingUpdate
from mlfabric.topology import Network


def choose(
    entries: Entries, network: Network, members: Mapping[str, MemberInfo], now: float
) -> list[WaitingUpdate]:
    """What is planned now: all that waits, where every update is a step of its own."""
    every, waiting = entries.settings.wait_for, entries.decidable()
    if not every or not waiting:
        return waiting
    begun = min(shard.version for shard in entries.shards.values()) // every * every
    room = begun + every - max(entries.placed_count(index) for index in entries.shards)
    old = [each for each in waiting if min(base.count for base in each.offer.bases) < begun]
    fresh = [each for each in waiting if min(base.count for base in each.offer.bases) >= begun]
    takes = {
        name: _takes_s(entries, network, members, name)
        for name, member in members.items()
        if "worker" in member.roles
    }
    usual = sorted(takes.values())[min(every, len(takes)) - 1]
    # A slow sender has its turn if no faster one came in the time that it would take longer.
    turns = {each.offer.update: each.since + max(takes[each.worker] - usual, 0.0) for each in fresh}
    ready = [each for each in fresh if turns[each.offer.update] <= now]
    ready.sort(key=lambda each: (takes[each.worker], each.arrival))
    if room > len(ready) and len(fresh) > len(ready):
        entries.plan_soon(min(at for at in turns.values() if at > now))
    return [*old, *ready[: max(room, 0)]]


def _takes_s(entries: Entries, network: Network, members: Mapping[str, MemberInfo], worker: str) -> float:
    """How long a worker's update would be on its way if nothing else were."""
    here = members[worker].host
    spent = 0.0
    for book in entries.shards.values():
        there = members[book.range.leader].host
        if there != here:
            spent += 4.0 * book.range.count / network.rate(here, there)
    return spent
