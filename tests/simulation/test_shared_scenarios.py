"""One scenario file for lab and simulator: the same rates, stragglers and faults; both take all of them."""

from __future__ import annotations

from itertools import takewhile

import msgspec
import pytest

from mlfabric import scenario as scenarios
from mlfabric.errors import FabricError
from mlfabric.lab import blueprint
from mlfabric.lab.place import Place
from mlfabric.lab.timeline import happenings
from mlfabric.scenario import JobSpec, Scenario, Seconds
from mlfabric.sim.estimate import Estimator
from mlfabric.sim.resizing import with_a_job
from mlfabric.sim.results import simulate
from mlfabric.sim.workload import JobRun, build_world

SHIPPED = sorted(scenarios.SHIPPED.glob("*.toml"))


def shipped(name: str, seed: int, seconds: float) -> Scenario:
    written = scenarios.load(scenarios.find(name))
    return msgspec.structs.replace(written, seed=seed, duration=Seconds(seconds))


@pytest.mark.parametrize("seed", [1, 2, 77])
@pytest.mark.parametrize("name", ["lab-trouble", "dynamic-stragglers", "dynamic", "many-jobs"])
def test_rates_and_faults_happen_as_in_the_lab(name: str, seed: int) -> None:
    scenario = shipped(name, seed, 60)
    world, trouble = build_world(with_a_job(scenario))
    world.run(59.999)
    planned = list(takewhile(lambda happening: happening.at_s < 60, happenings(scenario)))
    assert trouble.happened == planned, f"seed {seed}"
    assert len(planned) >= 48


@pytest.mark.parametrize("seed", [1, 2, 77])
def test_steps_straggle_as_in_the_lab(seed: int) -> None:
    scenario = shipped("lab-trouble", seed, 60)
    world, trouble = build_world(scenario)
    job = JobRun(world, trouble, scenario, scenario.job(), Estimator(world))
    straggled = 0
    for worker, name in enumerate(job.names):
        in_lab = Place(host=name, scenario=scenario)
        for step in range(40):
            late_s = job.compute_s(worker, step) - job.nominal_s
            assert late_s == pytest.approx(in_lab.straggler_delay_s(step), abs=1e-12)
            straggled += late_s > 0
    assert straggled > 5


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_scenario_is_drawn_for_the_lab(path: object) -> None:
    scenario = scenarios.load(str(path))
    if len(scenario.host_names()) > 1000 and not scenario.racks:
        with pytest.raises(FabricError, match="links meet in one bridge, and a bridge of the lab takes 1000"):
            blueprint.draw(scenario)
        return
    drawn = blueprint.draw(scenario)
    assert [port.owner for port in drawn.hosts] == scenario.host_names()
    assert next(happenings(scenario), None) is not None or not scenario.traces


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_scenario_is_simulated_unchanged(path: object) -> None:
    scenario = scenarios.load(str(path))
    large = len(scenario.host_names()) > 500
    seconds = 0.2 if large else 2.0 * max(len(scenario.jobs), 1)
    scenario = msgspec.structs.replace(scenario, duration=Seconds(seconds))
    results = simulate(scenario, "ring" if large else "mlfabric")
    assert len(results) == max(len(scenario.jobs), 1)
    if not large:
        started = [job for job in scenario.jobs or (JobSpec(),) if job.start < seconds]
        assert all(result.committed > 0 for result in results[: len(started)])
