"""A job on the fabric's own roles whose links are redrawn every five seconds: what is learned of them is
worth nearly as much as being told."""

from __future__ import annotations

from functools import cache
from statistics import median

import msgspec

from mlfabric import scenario as scenarios
from mlfabric.bench.train.settings import RunSettings, StepSize, fit
from mlfabric.scenario import Seconds
from mlfabric.sim.hosted import Hosted, HostedRun

SECONDS = 20.0


@cache
def hosted(told: bool) -> Hosted:
    settings = RunSettings("mlfabric-async", "dynamic-stragglers", 2, StepSize(0.05, 0.9))
    scenario = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
    run = HostedRun(msgspec.structs.replace(scenario, duration=Seconds(SECONDS)), told=told)
    return run.run(SECONDS)


def test_updates_are_applied_at_a_rate_near_that_of_who_is_told_the_links() -> None:
    learned, told = hosted(False), hosted(True)
    assert len(told.delays) / SECONDS > 2.8
    assert len(learned.delays) > 0.65 * len(told.delays)
    assert max(learned.delays) <= 16


def test_what_is_believed_of_links_is_mostly_right_though_they_change() -> None:
    shares = hosted(False).believed
    right = sum(0.75 <= share <= 1.33 for share in shares)
    assert right > 0.55 * len(shares)
    assert 0.9 <= median(shares) <= 1.1


def test_equal_runs_are_equal() -> None:
    before = hosted(False)
    hosted.cache_clear()
    assert hosted(False) == before


def test_links_of_racks_hold_updates_back() -> None:
    settings = RunSettings("mlfabric-async", "racks-8to1", 1, StepSize(0.05, 0.9))
    scenario = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
    seconds = 8.0
    run = HostedRun(scenario)
    updates = len(run.run(seconds).delays)
    carried = [float(run.sim.carried[f"{rack.name}.up"].carried_bytes) for rack in scenario.rack_links()]
    flat = msgspec.structs.replace(
        scenario, racks=(), hosts=tuple(msgspec.structs.replace(host, rack=None) for host in scenario.hosts)
    )
    assert min(carried) > 0
    assert updates < 0.7 * len(HostedRun(flat).run(seconds).delays)
