"""Several jobs on one network."""

from __future__ import annotations

import itertools
import random

import pytest

from mlfabric.errors import FabricError
from mlfabric.plan.jobs import Burst, interleave_bursts, plan_jobs, split_network
from mlfabric.plan.values import JobState, Offer, Shard
from mlfabric.topology import Host, Network, Rack


def two_jobs() -> tuple[Network, list[tuple[JobState, list[Offer]]]]:
    hosts = [Host("s", 1e8, 1e8), *(Host(f"w{i}", 1e8, 1e8) for i in range(4))]
    jobs = []
    for name, weight, size in (("big", 1.0, 2 * 10**8), ("small", 3.0, 10**8)):
        offers = [Offer(f"{name}{i}", f"{name}{i}", f"w{i}", size, 0, job=name) for i in range(4)]
        jobs.append((JobState(name, shards=(Shard(0, "s"),), weight=weight), offers))
    return Network.of(hosts), jobs


def test_interleaving_minimises_weighted_completion() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        bursts = [Burst(f"j{k}", draw.uniform(0.1, 3), draw.uniform(0.2, 4)) for k in range(5)]
        weights = {b.job: b.weight for b in bursts}
        ours = sum(weights[t.job] * t.finish_s for t in interleave_bursts(bursts, 0.0))
        best = min(
            sum(b.weight * end for b, end in zip(order, itertools.accumulate(x.lasts_s for x in order)))  # noqa: B905
            for order in itertools.permutations(bursts)
        )
        assert ours == pytest.approx(best), seed


def test_turns_never_overlap_and_never_start_before_ready() -> None:
    bursts = [Burst("a", 2.0, ready_s=1.0), Burst("b", 1.0, ready_s=9.0), Burst("c", 1.0)]
    turns = interleave_bursts(bursts, 0.0)
    assert [(t.job, t.start_s, t.finish_s) for t in turns] == [("c", 0, 1), ("a", 1, 3), ("b", 9, 10)]
    assert all(turn.reason for turn in turns)


def test_interleaved_jobs_take_turns_at_the_server() -> None:
    network, jobs = two_jobs()
    plans = plan_jobs(network, [], jobs, 0.0, policy="interleave")
    small = [p for placed in plans["small"].placed for p in placed.parts]
    big = [p for placed in plans["big"].placed for p in placed.parts]
    assert max(p.finish_s for p in small) <= min(p.start_s for p in big) + 1e-9
    assert plans == plan_jobs(network, [], jobs[::-1], 0.0, policy="interleave")


def test_weighted_jobs_get_their_part_of_a_shared_link() -> None:
    network, jobs = two_jobs()
    plans = plan_jobs(network, [], jobs, 0.0, policy="weights")
    assert max(p.finish_s for p in plans["small"].placed) == pytest.approx(4 / 0.75)
    assert max(p.finish_s for p in plans["big"].placed) == pytest.approx(8 / 0.25)


def test_link_of_one_job_alone_is_not_split() -> None:
    hosts = [Host("a", 100, 100, "r"), Host("b", 100, 100, "r"), Host("c", 100, 100)]
    split = split_network(
        Network.of(hosts, [Rack("r", 80, 80)]), {"x": 1, "y": 3}, {"x": {"a", "c"}, "y": {"b", "c"}}
    )
    assert split["x"].hosts["a"].up_bytes_per_s == 100
    assert split["x"].hosts["c"].up_bytes_per_s == 25
    assert split["y"].racks["r"].up_bytes_per_s == 60
    assert "b" not in split["x"].hosts


def test_unknown_policy_between_jobs_is_named() -> None:
    network, jobs = two_jobs()
    with pytest.raises(FabricError, match="known are interleave, weights"):
        plan_jobs(network, [], jobs, 0.0, policy="luck")
