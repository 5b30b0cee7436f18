"""Fault plans, job weights, limits and sums at flow level."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from mlfabric import scenario as scenarios
from mlfabric.scenario import BackgroundSpec, FaultSpec, JobSpec, Scenario, Seconds, WireRate
from mlfabric.sim.fluid import Process
from mlfabric.sim.results import POLICIES, simulate
from mlfabric.sim.streams import Path
from mlfabric.sim.workload import build_world
from mlfabric.topology import Link
from mlfabric.units import goodput

EIGHT = scenarios.load(scenarios.find("stragglers"))


def plan_of(*faults: FaultSpec, seconds: float = 12, job: JobSpec | None = None) -> Scenario:
    return msgspec.structs.replace(
        EIGHT, duration=Seconds(seconds), faults=faults, jobs=(job or EIGHT.jobs[0],)
    )


def fault(
    at: float, do: str, host: str | None = None, lasts: float | None = None, **more: object
) -> FaultSpec:
    written = {"at": at, "do": do, "host": host, "lasts": lasts, **more}
    return msgspec.convert(written, FaultSpec, dec_hook=lambda kind, value: kind(value))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_goes_on_after_a_host_was_away(policy: str) -> None:
    """Killed and back, paused and resumed, cut and healed: all that lasts ends by itself."""
    faults = (
        fault(1, "kill", "w0", 2),
        fault(4, "pause", "w1", 1),
        fault(6, "cut", "w2", 1, direction="out"),
        fault(8, "cut", None, 1, between=("w3", "w4")),
    )
    (calm,) = simulate(plan_of(seconds=4), policy)
    (troubled,) = simulate(plan_of(*faults, seconds=9.5), policy)
    (longer,) = simulate(plan_of(*faults, seconds=13.5), policy)
    assert troubled.committed > 0.5 * calm.committed, policy
    assert longer.committed - troubled.committed > 0.7 * calm.committed, policy


@pytest.mark.parametrize("at", [2.03, 2.07, 2.11, 2.15, 2.19])
def test_an_exchange_is_not_through_if_a_host_died_in_it_and_was_back_at_once(at: float) -> None:
    (result,) = simulate(plan_of(fault(at, "kill", "w0", 0.05), seconds=at + 3), "backup")
    assert result.committed > 0


def test_leads_of_a_killed_host_move_and_only_first_come_stops_for_good() -> None:
    early = {p: simulate(plan_of(fault(4, "kill", "w0"), seconds=6), p)[0] for p in ("fcfs-1", "mlfabric")}
    late = {p: simulate(plan_of(fault(4, "kill", "w0"), seconds=12), p)[0] for p in ("fcfs-1", "mlfabric")}
    assert late["fcfs-1"].committed == early["fcfs-1"].committed
    assert late["mlfabric"].committed > 1.5 * early["mlfabric"].committed


def test_a_lead_moves_to_its_replica_without_bytes() -> None:
    kill = fault(4, "kill", "w0")
    copied = msgspec.structs.replace(EIGHT.jobs[0], replicas=("w1",))
    (filled,) = simulate(plan_of(kill, seconds=5.3), "mlfabric")
    (moved,) = simulate(plan_of(kill, seconds=5.3, job=copied), "mlfabric")
    assert moved.moved_bytes < filled.moved_bytes


def test_a_paused_host_loses_the_time_of_its_pause() -> None:
    world, trouble = build_world(plan_of(fault(1, "pause", "w0", 3)))
    ended = {}

    def work(host: str, seconds: float) -> Process:
        yield from trouble.sleep(host, seconds)
        ended[host] = world.now

    world.spawn(work("w0", 2.0))
    world.spawn(work("w1", 2.0))
    world.run(10)
    assert ended == {"w0": pytest.approx(5.0), "w1": pytest.approx(2.0)}


def test_a_cut_link_carries_nothing_until_it_is_healed() -> None:
    scenario = plan_of(fault(2, "cut", "w0", 3, direction="out"))
    world, _ = build_world(scenario)
    up, down = world.index[Link("w0", "up")], world.index[Link("w1", "down")]
    world.send(Path(np.array([up, down]), np.ones(2)), 1e15)
    carried = []
    for until in (2.0, 5.0, 6.0):
        world.run(until)
        carried.append(world.carried[up])
    rate = goodput(10e9)
    assert carried == [pytest.approx(2 * rate), pytest.approx(2 * rate), pytest.approx(3 * rate)]


def test_a_cut_path_stalls_only_who_needs_it() -> None:
    streams = tuple(BackgroundSpec(source="w0", target=target, rate=WireRate(1e9)) for target in ("w1", "w2"))
    scenario = plan_of(fault(1, "cut", None, 2, between=("w0", "w1"), direction="out"), seconds=4)
    world, _ = build_world(msgspec.structs.replace(scenario, background=streams))
    world.run(4.0)
    paced = goodput(1e9)
    assert world.carried[world.index[Link("w2", "down")]] == pytest.approx(4 * paced, rel=1e-6)
    assert world.carried[world.index[Link("w1", "down")]] == pytest.approx(2 * paced, rel=1e-6)


def test_a_heavier_job_gets_more_of_full_links() -> None:
    base = msgspec.structs.replace(EIGHT.jobs[0], compute_transfers=0.05)
    jobs = tuple(
        msgspec.structs.replace(base, name=name, weight=weight) for name, weight in (("a", 4.0), ("b", 1.0))
    )
    scenario = msgspec.structs.replace(EIGHT, duration=Seconds(3), stragglers=(), jobs=jobs)
    heavy, light = simulate(scenario, "mlfabric")
    assert heavy.updates_per_s > 1.8 * light.updates_per_s
    plain = [msgspec.structs.replace(job, weight=1.0) for job in jobs]
    first, second = simulate(msgspec.structs.replace(scenario, jobs=tuple(plain)), "mlfabric")
    assert first.updates_per_s == pytest.approx(second.updates_per_s, rel=0.1)


@pytest.mark.parametrize("policy", ["ring", "fcfs-1", "mlfabric"])
def test_no_host_sends_more_than_the_job_allows(policy: str) -> None:
    most = 0.5e9
    job = msgspec.structs.replace(EIGHT.jobs[0], max_rate=WireRate(most))
    free, limited = (simulate(plan_of(job=each), policy)[0] for each in (EIGHT.jobs[0], job))
    assert limited.bytes_by_link["host up"] <= 8 * goodput(most) * limited.simulated_s * 1.02
    assert limited.bytes_by_link["host up"] < 0.6 * free.bytes_by_link["host up"]


def test_updates_are_summed_inside_racks_where_that_pays() -> None:
    racks = scenarios.load(scenarios.find("racks-8to1"))
    racks = msgspec.structs.replace(racks, duration=Seconds(2.5))
    alone = msgspec.structs.replace(racks.jobs[0], aggregators=())
    (summed,) = simulate(racks, "mlfabric")
    (direct,) = simulate(msgspec.structs.replace(racks, jobs=(alone,)), "mlfabric")
    assert summed.summed > 0.3 * summed.committed
    assert direct.summed == 0
    assert summed.updates_per_s > 1.2 * direct.updates_per_s
