"""Sums inside the network at flow level: the planner's own groups, as streams.

What waits is given to `plan_updates` on the believed network. The parts of a group's members to their
aggregators are one stream, the sums from there to the servers the next one, which starts when the first is
through; in a chain both are one. The model comes back down the same tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mlfabric.plan.planner import plan_updates
from mlfabric.plan.values import Group, JobState, Offer, Part, Plan, Shard
from mlfabric.sim.placing import Placement
from mlfabric.sim.streams import Path
from mlfabric.sim.workload import JobRun
from mlfabric.topology import Link, Network

# Updates that are looked at together; the planner's search grows with them.
MOST_GATHERED: Final = 16
# Transfers of a plan beyond which nothing is gathered: so many servers share the load already.
MOST_TRANSFERS: Final = 400
# Transfers that a plan's search may lay out on trial: plans are made many times a second here.
SEARCHED: Final = 50
REVERSE: Final = {"up": "down", "down": "up"}


@dataclass(frozen=True, slots=True)
class Gathered:
    """Updates that travel as one: their names in the order of application, the ways of push and pull."""

    members: tuple[str, ...]
    push: tuple[Path, ...]  # one after the other
    pull: Path


def gather_updates(
    job: JobRun, placement: Placement, state: JobState, offers: Sequence[Offer]
) -> dict[str, Gathered]:
    """The groups that pay among the first of these offers, by member; an update in none goes by itself."""
    offers = offers[:MOST_GATHERED]
    if len(offers) < 2 or len(offers) * len(placement.shares) > MOST_TRANSFERS:
        return {}
    shards = tuple(
        Shard(index, job.hosts[host], share=share)
        for index, (host, share) in enumerate(sorted(placement.shares.items()))
    )
    places = job.scenario.places(job.spec)
    network = job.believed_network()
    state = replace(
        state,
        shards=shards,
        aggregators=tuple(name for name in places.aggregators if name in network.hosts),
        search_transfers=SEARCHED,
    )
    plan = plan_updates(network, (), state, offers, 0.0)
    gathered: dict[str, Gathered] = {}
    for groups in _by_members(plan):
        sums = _realise(job, network, plan, groups)
        gathered |= dict.fromkeys(sums.members, sums)
    return gathered


def _by_members(plan: Plan) -> Iterable[list[Group]]:
    """The groups of all shards with the same members, together."""
    found: dict[tuple[str, ...], list[Group]] = {}
    for group in plan.groups:
        found.setdefault(group.members, []).append(group)
    return found.values()


def _realise(job: JobRun, network: Network, plan: Plan, groups: Sequence[Group]) -> Gathered:
    members = groups[0].members
    inside = {group.group for group in groups}
    hosts = {name: name.rsplit("/", 1)[0] for name in members}
    first: dict[Link, float] = {}
    for placed in plan.placed:
        if placed.update in hosts:
            for part in placed.parts:
                _add(first, network, hosts[placed.update], _target(part, inside, groups), part.size_bytes)
    second: dict[Link, float] = {}
    for group in groups:
        _add(second, network, group.aggregator, group.target, group.size_bytes)
    size = job.size_bytes
    both = {link: (first.get(link, 0.0) + second.get(link, 0.0)) / size for link in {**first, **second}}
    order = tuple(placed.update for placed in plan.placed if placed.update in hosts)
    if any(group.chain for group in groups):
        push: tuple[Path, ...] = (job.path(both),)
    else:
        push = tuple(
            job.path({link: load / size for link, load in loads.items()}) for loads in (first, second)
        )
    back = job.path({Link(link.owner, REVERSE[link.direction]): load for link, load in both.items()})
    return Gathered(order, push, back)


def _target(part: Part, inside: set[str], groups: Sequence[Group]) -> str:
    """Where a member's part goes first."""
    if part.group in inside:
        return next(group.aggregator for group in groups if group.group == part.group)
    return part.target


def _add(loads: dict[Link, float], network: Network, source: str, target: str, size_bytes: float) -> None:
    for link in network.path(source, target):
        loads[link] = loads.get(link, 0.0) + size_bytes
