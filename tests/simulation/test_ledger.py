"""Exactly once, through aggregators, fail-overs and kills, by seeds."""

from __future__ import annotations

import random

import pytest

from tests.simulation.ledger import LedgerRun


def test_every_update_is_in_the_model_exactly_once() -> None:
    run = LedgerRun().run()
    run.check_everything()
    assert len(run.committed()) == 24


def test_updates_are_aggregated_and_still_counted_once() -> None:
    run = LedgerRun(workers=8, compute_s=0.0, rates=(1e6,)).run()
    run.check_everything()
    statistics = run.leader(0).node.roles["server.0"].statistics()
    assert statistics.aggregated > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_dead_server_loses_only_what_is_reported_lost(shards: int) -> None:
    run = LedgerRun(shards=shards, servers=2, faults=((0.3, "kill", "s0"),)).run()
    run.check_everything()


def test_with_a_bound_of_zero_nothing_committed_is_lost() -> None:
    for at in (0.1, 0.2, 0.25, 0.3, 0.4):
        run = LedgerRun(divergence=0.0, faults=((at, "kill", "s0"),)).run()
        run.check_everything()
        assert not run.lost()


def random_faults(seed: int) -> LedgerRun:
    rng = random.Random(seed)
    workers = rng.randint(2, 6)
    candidates = [f"w{i}" for i in range(1, workers)] + ["a0", "a1", "s0", "r0"]
    victims = rng.sample(candidates, rng.randint(1, 3))
    if "s0" in victims and "r0" in victims:
        victims.remove("r0")  # the second replica may not be filled yet
    faults = tuple(
        (rng.uniform(0.0, 1.0), rng.choice(["kill", "kill", "stall"]), victim) for victim in victims
    )
    return LedgerRun(
        workers=workers,
        steps=rng.randint(2, 6),
        shards=rng.choice([1, 1, 2]),
        divergence=rng.choice([0.0, 0.1, 0.5]),
        max_delay=rng.choice([None, 2, workers]),
        compute_s=rng.choice([0.0, 0.01, 0.05]),
        rates=rng.choice([(1e6,), (2e5, 1e6, 2e6), (1e5,)]),
        faults=faults,
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_ledger_holds_through_random_faults(seed: int) -> None:
    random_faults(seed).run().check_everything()
