"""The planning benchmark: its instance is what it says, and its output has the promised form."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mlfabric.bench import plan as bench
from mlfabric.bench.cli import app
from mlfabric.plan.jobs import plan_jobs
from mlfabric.topology import Link


def test_instance_follows_from_the_seed() -> None:
    assert bench.make_instance(100, 64, seed=3) == bench.make_instance(100, 64, seed=3)
    assert bench.make_instance(100, 64, seed=3) != bench.make_instance(100, 64, seed=4)


def test_instance_has_racks_jobs_shards_and_late_offers() -> None:
    instance = bench.make_instance(1000, 1000)
    network = instance.network
    assert len(network.hosts) == 1000
    inside = [host for host in network.hosts.values() if host.rack == "rack0"]
    assert len(inside) == 32
    up = sum(host.up_bytes_per_s for host in inside)
    assert network.capacity(Link("rack0", "up")) == pytest.approx(up / 4)
    assert sum(len(offers) for _, offers in instance.jobs) == 1000
    late = 0
    for job, offers in instance.jobs:
        assert len(job.shards) == 4
        assert all(shard.replica for shard in job.shards)
        late += sum(1 for o in offers if job.placed_version - o.base_version > (job.max_delay or 0))
    assert 70 <= late <= 130


def test_plan_of_the_instance_aggregates_replicates_and_drops() -> None:
    instance = bench.make_instance(200, 200)
    for plan in plan_jobs(instance.network, [], instance.jobs, 0.0).values():
        assert plan.groups
        assert plan.drops
        assert plan.replication


def test_exponent_is_the_slope_in_logarithms() -> None:
    cases = [bench.Case(n, n, "full", 0.01 * n**1.2, 0.0) for n in (250, 500, 1000)]
    assert bench.fit_exponent(cases) == pytest.approx(1.2)


def test_json_has_the_promised_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GROWTH_OFFERS", (40, 80))
    monkeypatch.setattr(
        bench, "SINGLE_CASES", [(60, 60, "full"), (60, 60, "incremental-offer"), (60, 60, "incremental-rate")]
    )
    done = CliRunner().invoke(app, ["plan", "--json", "--repeats", "1"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    assert set(result) == {"cases", "growth_exponent"}
    assert {case["kind"] for case in result["cases"]} == {"full", "incremental-offer", "incremental-rate"}
    for case in result["cases"]:
        assert {"offers", "hosts", "kind", "median_ms"} <= set(case)
        assert case["median_ms"] >= 0
