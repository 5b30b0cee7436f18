"""A scenario for another cluster: more or fewer hosts, a host that only serves, a job if it has none."""

from __future__ import annotations

from typing import Final

import msgspec

from mlfabric.errors import ScenarioError
from mlfabric.scenario import HostSpec, JobSpec, Scenario

SERVER_NAME: Final = "server"
# A scenario that is only a network is simulated with this job on it: the ring's time to compute a step.
ASSUMED_JOB: Final = JobSpec(name="assumed", compute_transfers=1.75)


def resize(scenario: Scenario, workers: int) -> Scenario:
    """The same scenario with `workers` hosts in its groups, and racks to match; single hosts stay."""
    total = len(scenario.host_names())
    if workers < 2:
        raise ScenarioError(f"{workers} workers make no cluster; give at least 2")
    groups = [i for i, spec in enumerate(scenario.hosts) if spec.count is not None]
    if not groups:
        raise ScenarioError(
            "this scenario names each host by itself; only groups with 'count' can be resized"
        )
    single = len(scenario.hosts) - len(groups)
    hosts = list(scenario.hosts)
    factor = workers / (total - single)
    at = {scenario.hosts[i].name: 0 for i in groups}
    for i in groups:
        spec = scenario.hosts[i]
        count = max(1, round((spec.count or 0) * factor))
        if i == groups[-1]:
            count = max(1, workers - sum(hosts[j].count or 0 for j in groups[:-1]))
        hosts[i] = msgspec.structs.replace(spec, count=count, first=at[spec.name])
        at[spec.name] += count
    racks = tuple(
        spec
        if spec.count is None
        else msgspec.structs.replace(spec, count=max(2, round(spec.count * factor)))
        for spec in scenario.racks
    )
    return msgspec.structs.replace(scenario, hosts=tuple(hosts), racks=racks)


def with_a_job(scenario: Scenario) -> Scenario:
    """The scenario with something to simulate: the assumed job if it has none, and a compute time."""
    if not scenario.jobs:
        return msgspec.structs.replace(scenario, jobs=(ASSUMED_JOB,))
    return scenario


def with_own_server(scenario: Scenario) -> Scenario:
    """One more host, like the others in all but that no worker runs there: every job's only server."""
    if SERVER_NAME in scenario.host_names():
        raise ScenarioError(
            f"the scenario has a host {SERVER_NAME} already; a host only to serve is in its way"
        )
    workers = {job.name: scenario.places(job).workers for job in scenario.jobs}
    jobs = tuple(
        msgspec.structs.replace(job, workers=workers[job.name], servers=(SERVER_NAME,))
        for job in scenario.jobs
    )
    return msgspec.structs.replace(scenario, hosts=(*scenario.hosts, HostSpec(name=SERVER_NAME)), jobs=jobs)
