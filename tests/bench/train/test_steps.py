"""Steps last as long as the scenario says, and those that could not are noticed."""

from __future__ import annotations

import pytest

from mlfabric import scenario as scenarios
from mlfabric.bench.train.settings import MODEL_BYTES, ceilings, fit
from mlfabric.bench.train.steps import StepClock
from mlfabric.bench.train.tuning import Trial, Tuned, edge_of, grid, tune
from mlfabric.units import goodput
from tests.bench.train.results import rising, some_result, some_settings


class Hand:
    """A clock that is turned by sleeping, and by whoever computes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_step_lasts_its_time_whatever_its_gradient_took() -> None:
    hand = Hand()
    clock = StepClock(hand, hand.sleep)
    for took in (0.02, 0.05, 0.01, 0.2):
        before = hand.now
        clock.begin(0.4)
        hand.now += took
        clock.computed()
        clock.computed()
        assert hand.now >= before + 0.4 - 1e-9
        assert clock.gradient_s == pytest.approx(took)
    assert hand.now == pytest.approx(100.0 + 4 * 0.4 + 0.03 + 0.15)  # two took longer than any before


def test_step_that_could_not_keep_its_time_overran() -> None:
    hand = Hand()
    clock = StepClock(hand, hand.sleep)
    clock.begin(0.4)
    hand.now += 0.03 + 0.019
    clock.computed()
    in_time = clock.overran
    clock.begin(0.4)
    hand.now += 0.049 + 0.021
    clock.computed()
    assert (in_time, clock.overran) == (False, True)
    assert clock.late_s == pytest.approx(0.021)


def test_scenario_is_fitted_in_proportion() -> None:
    fitted = fit(scenarios.load(scenarios.find("skewed")), some_settings(seed=7, rate="200mbit"))
    links = fitted.host_links()
    assert [link.up_bps for link in links] == pytest.approx([200e6] * 6 + [50e6] * 2)
    assert fitted.seed == 7
    assert fitted.compute_s(fitted.jobs[0]) == pytest.approx(1.75 * MODEL_BYTES / goodput(200e6))


def test_racks_are_fitted_to_eight_hosts() -> None:
    fitted = fit(scenarios.load(scenarios.find("racks-8to1")), some_settings())
    assert len(fitted.host_links()) == 8
    assert {link.up_bps for link in fitted.host_links()} == {200e6}


def test_ceilings_of_equal_links_are_the_textbook_ones() -> None:
    fitted = fit(scenarios.load(scenarios.find("calm")), some_settings())
    found = ceilings(fitted, 60.0)
    transfer_s = MODEL_BYTES / goodput(200e6)
    assert found.ring_per_s == pytest.approx(8 / (1.75 * transfer_s))
    assert found.servers_per_s == pytest.approx(8 / (2 * transfer_s))


def test_links_that_change_lower_the_rings_ceiling_most() -> None:
    fitted = fit(scenarios.load(scenarios.find("dynamic-stragglers")), some_settings())
    found = ceilings(fitted, 300.0)
    assert found.servers_per_s > 2 * found.ring_per_s


def test_tuning_moves_its_grid_until_the_best_is_inside() -> None:
    wanted = grid()[4].lr * 2  # beyond the plain grid

    def seconds(lr: float) -> float:
        return 10 + 10 * abs(lr - wanted) / wanted

    def run(settings: object) -> object:
        size = settings.step_size  # type: ignore[attr-defined]
        at = seconds(size.lr) if size.momentum == 0 else 90.0
        return some_result(settings, rising(at))  # type: ignore[arg-type]

    found: Tuned = tune(some_settings(), 0.85, run)  # type: ignore[arg-type]
    assert found.chosen.momentum == 0.0
    assert not found.on_edge
    assert wanted / 2 <= found.chosen.lr <= wanted * 2
    assert len(found.trials) > len(grid())


def test_best_of_a_grid_may_be_on_its_edge() -> None:
    trials = [Trial(size, 50.0 - 100 * size.lr, 0.8) for size in grid()]
    best = min(trials, key=lambda trial: trial.seconds)
    assert edge_of(trials, best) == 1
