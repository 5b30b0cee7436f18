"""Runs at flow level: rates against the plain form, laws of the policies, and the commands."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from mlfabric import scenario as scenarios
from mlfabric.commands.sim import app
from mlfabric.errors import FabricError, ScenarioError
from mlfabric.scenario import MODEL_PARAMETERS, JobSpec, Scenario, Seconds
from mlfabric.sim.advice import MODES, advise, limiting_hosts, predict, predicted_over
from mlfabric.sim.estimate import Estimator
from mlfabric.sim.flows import Flow, share_rates
from mlfabric.sim.fluid import Fluid
from mlfabric.sim.resizing import resize
from mlfabric.sim.results import POLICIES, simulate
from mlfabric.sim.streams import Bundle, Path, Stream, Table, fill_rates
from mlfabric.topology import Host, Link, Network


def shortened(name: str, seconds: float, workers: int | None = None) -> Scenario:
    written = scenarios.load(scenarios.find(name))
    if workers is not None:
        written = resize(written, workers)
    return msgspec.structs.replace(written, duration=Seconds(seconds))


@pytest.mark.parametrize("seed", range(40))
def test_rates_equal_the_plain_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts = [f"h{i}" for i in range(rng.integers(2, 8))]
    network = Network.of(Host(n, float(rng.integers(1, 9)), float(rng.integers(1, 9))) for n in hosts)
    world = Fluid(network)
    flows, streams = [], []
    for number in range(int(rng.integers(1, 15))):
        source, target = rng.choice(len(hosts), 2, replace=False)
        path = network.path(hosts[source], hosts[target])
        pace = float(rng.choice([0.5, 2.0, np.inf]))
        flows.append(Flow(str(number), path, 1.0, pace))
        links = np.array([world.index[link] for link in path])
        ones = np.ones(len(links))
        # The same way written as links of its own or as a bundle.
        way = Path(links, ones) if number % 2 else Path(links[:0], ones[:0], Bundle(links, ones))
        streams.append(Stream(way, 1.0, pace))
    share_rates(flows, {link: network.capacity(link) for link in network.links()})
    table = Table(len(streams), len(world.capacity))
    for row, stream in enumerate(streams):
        table.write(row, stream)
    rates, used = fill_rates(table, np.arange(len(streams)), world.capacity)
    assert rates == pytest.approx([flow.rate for flow in flows], rel=1e-6)
    assert (used <= world.capacity * (1 + 1e-9)).all()


def test_a_stream_takes_its_size_over_the_narrowest_link() -> None:
    world = Fluid(Network.of([Host("a", 10.0, 10.0), Host("b", 10.0, 2.0)]))
    links = np.array([world.index[Link("a", "up")], world.index[Link("b", "down")]])
    done = world.send(Path(links, np.ones(2)), 10.0).done
    fired = []
    for until in (4.9, 5.1):
        world.run(until)
        fired.append(done.fired)
    assert fired == [False, True]
    assert world.carried[links] == pytest.approx([10.0, 10.0])


def test_beliefs_follow_a_link_down_at_once_and_up_by_probing() -> None:
    world = Fluid(Network.of([Host("a", 1e8, 1e8), Host("b", 1e8, 1e8)]))
    estimator = Estimator(world)
    up = world.index[Link("a", "up")]
    links = np.array([up, world.index[Link("b", "down")]])
    stream = world.send(Path(links, np.ones(2)), 1e12)
    world.set_capacity(up, 1e7)
    world.run(0.1)
    estimator.observe()
    assert estimator.believed[up] == pytest.approx(1e7)
    world.set_capacity(up, 1e8)
    world.set_pace(stream, 1e7)
    world.run(0.2)
    estimator.observe()
    assert 1e7 < estimator.believed[up] < 1.3e7


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_equal_seeds_give_equal_runs(policy: str) -> None:
    scenario = shortened("dynamic-stragglers", 4)
    assert simulate(scenario, policy) == simulate(scenario, policy)


def test_mean_delay_is_one_less_than_the_workers_whatever_the_order() -> None:
    """Holds for any order in which each worker pulls at its own commit; here nothing is dropped."""
    scenario = shortened("stragglers", 25)
    for policy in ("fcfs-1-dedicated", "uniform-shards"):
        (result,) = simulate(scenario, policy)
        assert result.delay_mean == pytest.approx(7, abs=0.3)


@pytest.mark.parametrize("policy", sorted(name for name, spec in POLICIES.items() if spec.bounded))
@pytest.mark.parametrize("seed", range(4))
def test_no_update_is_applied_beyond_the_delay_bound(policy: str, seed: int) -> None:
    scenario = msgspec.structs.replace(shortened("dynamic-stragglers", 8), seed=seed)
    bound = 5 + 3 * seed
    job = msgspec.structs.replace(scenario.jobs[0], max_delay=bound)
    (result,) = simulate(msgspec.structs.replace(scenario, jobs=(job,)), policy)
    assert result.delay_max <= bound, (policy, seed)
    assert result.committed > 10, (policy, seed)
    assert result.within_per_s == result.updates_per_s


def test_a_ring_on_calm_links_takes_its_formula() -> None:
    scenario = shortened("calm", 60)
    job = msgspec.structs.replace(scenario.jobs[0], compute_jitter=0.0)
    scenario = msgspec.structs.replace(scenario, jobs=(job,))
    (result,) = simulate(scenario, "ring")
    transfer = scenario.compute_s(job) / 1.75
    assert result.steps_per_s == pytest.approx(1 / (transfer * (1.75 + 2 * 7 / 8)), rel=0.02)


def test_planned_modes_lead_where_links_change_and_steps_straggle() -> None:
    scenario = shortened("dynamic-stragglers", 30)
    policies = ("fcfs-1", "fcfs-1-dedicated", "ring", "uniform-shards", "mlfabric-overlap")
    rate = {policy: simulate(scenario, policy)[0].updates_per_s for policy in policies}
    best = rate["mlfabric-overlap"]
    assert best > 2.5 * max(rate["fcfs-1-dedicated"], rate["ring"], rate["uniform-shards"])
    assert best > 1.4 * rate["fcfs-1"]  # half of whose updates never cross a link: see the docs


def test_jobs_share_one_network() -> None:
    results = simulate(shortened("many-jobs", 62, 4), "mlfabric")
    assert [result.job for result in results] == ["vision", "large", "late"]
    assert all(result.committed > 0 for result in results)


def test_unknown_names_are_told_in_a_sentence() -> None:
    with pytest.raises(ScenarioError, match="did you mean calm"):
        scenarios.find("clam")
    with pytest.raises(FabricError, match="unknown policy 'best'; known are mlfabric"):
        simulate(shortened("calm", 1), "best")


def test_compare_prints_a_row_per_policy_and_json() -> None:
    words = ["compare", "calm", "--duration", "5s", "--policies", "ring,mlfabric"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "ring" in shown.output
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [result["policy"] for result in told["results"]] == ["ring", "mlfabric"]
    assert told["results"][0]["updates_per_s"] > 0


def test_training_reaches_a_target_under_the_virtual_clock() -> None:
    pytest.importorskip("sklearn")
    words = [
        "run",
        "calm",
        "--duration",
        "12s",
        "--policy",
        "mlfabric",
        "--train",
        "--target",
        "0.5",
        "--json",
    ]
    (result,) = json.loads(CliRunner().invoke(app, words).stdout)["results"]
    assert 0 < result["time_to_target_s"] < 12
    assert max(right for _, right in result["accuracy"]) >= 0.5


def test_advice_names_the_hosts_that_limit_the_steps() -> None:
    scenario = shortened("skewed", 4)
    named, share = limiting_hosts(scenario, scenario.job())
    assert named == ["slow0", "slow1"]
    assert share == pytest.approx(1.0)
    advice = advise(scenario, scenario.job())
    assert "two of eight hosts (slow0, slow1) limit 100% of the steps" in advice.reason
    assert {each.mode for each in advice.predictions} >= {"sync", "backup", "async", "ssp", "local"}
    assert advice.use == "backup"


def test_a_calm_cluster_is_advised_to_stay_fresh() -> None:
    scenario = shortened("calm", 4)
    advice = advise(scenario, scenario.job())
    assert advice.use in ("sync", "backup")


@pytest.mark.parametrize("mode", ["sync", "backup", "async", "ssp", "local", "one host alone"])
def test_predictions_hold_in_a_longer_run_with_another_seed(mode: str) -> None:
    scenario = shortened("dynamic-stragglers", 100)
    briefly = msgspec.structs.replace(scenario, duration=Seconds(predicted_over(scenario, scenario.job())))
    assert float(briefly.duration) == 60
    predicted = predict(briefly, mode)
    (run,) = simulate(msgspec.structs.replace(scenario, seed=2), MODES[mode])
    assert predicted.updates_per_s == pytest.approx(run.updates_per_s, rel=0.2)
    assert predicted.delay_mean == pytest.approx(run.delay_mean, rel=0.2, abs=0.5)
    if mode != "one host alone":
        sent = run.bytes_by_link["host up"] / run.committed
        assert predicted.bytes_per_update == pytest.approx(sent, rel=0.2)


def test_an_update_says_what_it_is() -> None:
    """One of `local` sums up eight steps; counted by gradients it is no less than a step per exchange."""
    scenario = shortened("calm", 20)
    (local,), (steps,) = simulate(scenario, "local"), simulate(scenario, "allreduce")
    assert (local.local_steps, steps.local_steps) == (8, 1)
    assert local.updates_per_s < steps.updates_per_s < 8 * local.updates_per_s


def test_sizes_of_well_known_models() -> None:
    megabytes = {
        name: scenarios.parse(f'[[hosts]]\nname="a"\n[[jobs]]\nmodel="{name}"').size_bytes(
            JobSpec(model=name)
        )
        / 1e6
        for name in MODEL_PARAMETERS
    }
    assert megabytes["resnet50"] == pytest.approx(102, rel=0.01)
    assert megabytes["vgg16"] == pytest.approx(553, rel=0.01)
    assert megabytes["transformer-1.3b"] == pytest.approx(5200)
