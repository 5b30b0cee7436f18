"""Several jobs on one network: split by weight, or one job's burst at a time.

Splitting gives each job its weight's part of every link it shares; a link only one job uses is all its own.
Interleaving lets a job have a contended link to itself while its burst lasts, the short and the heavy first
(burst time over weight, which makes the weighted mean completion least), so that bursts don't collide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlfabric.errors import FabricError
from mlfabric.plan.planner import lay_plan, plan_updates
from mlfabric.plan.reservation import open_ledger
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import JobState, Offer, Plan, Reserved
from mlfabric.topology import Host, Network, Rack
from mlfabric.units import format_time


@dataclass(frozen=True, slots=True)
class Burst:
    """What a job wants to send over one link at once."""

    job: str
    lasts_s: float  # alone on the link
    weight: float = 1.0
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of time in which the link is one job's alone."""

    job: str
    start_s: float
    finish_s: float
    reason: str


def interleave_bursts(bursts: Sequence[Burst], now_s: float) -> tuple[Turn, ...]:
    """Turns on a contended link, without preemption; of those ready, the least time per weight first."""
    waiting = sorted(bursts, key=lambda b: (b.lasts_s / b.weight, b.job))
    turns: list[Turn] = []
    at_s = now_s
    while waiting:
        ready = [burst for burst in waiting if burst.ready_s <= at_s]
        if not ready:
            at_s = min(burst.ready_s for burst in waiting)
            continue
        burst = ready[0]
        waiting.remove(burst)
        others = f"{len(waiting)} other job{'s wait' if len(waiting) > 1 else ' waits'}"
        behind = f", {others}" if waiting else ""
        lasts = format_time(burst.lasts_s)
        reason = f"its burst of {lasts} at weight {burst.weight:g} is the shortest per weight{behind}"
        turns.append(Turn(burst.job, at_s, at_s + burst.lasts_s, reason))
        at_s += burst.lasts_s
    return tuple(turns)


def split_network(
    network: Network, weights: Mapping[str, float], users: Mapping[str, Iterable[str]]
) -> dict[str, Network]:
    """Each job's own network: of every host's and rack's links the part its weight gives it there.

    `users` names for each job the hosts it uses; other hosts are left out of its network.
    """
    at: dict[str, float] = {}
    places = {job: _owners(network, hosts) for job, hosts in users.items()}
    for job, owners in places.items():
        for owner in owners:
            at[owner] = at.get(owner, 0.0) + weights[job]
    networks = {}
    for job, owners in places.items():
        weight = weights[job]
        hosts = (scale_host(network.hosts[n], weight / at[n]) for n in owners if n in network.hosts)
        racks = (_scale_rack(network.racks[n], weight / at[n]) for n in owners if n in network.racks)
        networks[job] = Network.of(hosts, racks)
    return networks


def _owners(network: Network, hosts: Iterable[str]) -> list[str]:
    """Hosts and their racks, by name."""
    known = {name for name in hosts if name in network.hosts}
    racks = {network.hosts[name].rack for name in known}
    return sorted(known | {rack for rack in racks if rack is not None})


def scale_host(host: Host, part: float) -> Host:
    return replace(
        host, up_bytes_per_s=host.up_bytes_per_s * part, down_bytes_per_s=host.down_bytes_per_s * part
    )


def _scale_rack(rack: Rack, part: float) -> Rack:
    return replace(
        rack, up_bytes_per_s=rack.up_bytes_per_s * part, down_bytes_per_s=rack.down_bytes_per_s * part
    )


def take_turns(
    network: Network, jobs: Sequence[tuple[JobState, Sequence[Offer]]], now: float
) -> tuple[Turn, ...]:
    """In which order the jobs have the links they share, each with what waits now as its burst."""
    bursts = [Burst(job.name, _burst_s(network, job, offers), job.weight) for job, offers in jobs]
    return interleave_bursts(bursts, now)


def plan_jobs(
    network: Network,
    reserved: Sequence[Reserved],
    jobs: Sequence[tuple[JobState, Sequence[Offer]]],
    now: float,
    policy: str = "interleave",
) -> dict[str, Plan]:
    """Plans of several jobs that share the network.

    "interleave": the jobs take turns, short per weight first, each over all that those before left free.
    "weights": each job plans on its part of every link, as if the others always used theirs.
    """
    if policy == "interleave":
        ledger = open_ledger(network, reserved, 0.0)
        by_name = {job.name: (job, offers) for job, offers in jobs}
        return {
            turn.job: lay_plan(ledger, *by_name[turn.job], 0.0, offset_s=now).plan
            for turn in take_turns(network, jobs, now)
        }
    if policy != "weights":
        raise FabricError(f"unknown policy {policy!r} between jobs; known are interleave, weights")
    users = {
        job.name: {*(offer.host for offer in offers), *job.aggregators, *(s.server for s in job.shards)}
        for job, offers in jobs
    }
    networks = split_network(network, {job.name: job.weight for job, _ in jobs}, users)
    plans = {}
    for job, offers in sorted(jobs, key=lambda pair: pair[0].name):
        own = [
            r
            for r in reserved
            if r.source in networks[job.name].hosts and r.target in networks[job.name].hosts
        ]
        plans[job.name] = plan_updates(networks[job.name], own, job, offers, now)
    return plans


def _burst_s(network: Network, job: JobState, offers: Sequence[Offer]) -> float:
    """Seconds a job's offers keep its busiest server's link, sent one by one."""
    whole = sum(shard.share for shard in job.shards) or 1.0
    total = sum(offer.size_bytes for offer in offers)
    down = (
        (shard.share / whole, network.hosts[shard.server].down_bytes_per_s)
        for shard in job.shards
        if shard.server in network.hosts
    )
    return max((total * share / rate if rate > 0 else INF for share, rate in down), default=0.0)
