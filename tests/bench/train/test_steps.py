"""Steps last as long as the scenario says, and those that could not are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlfabric import scenario as scenarios
from mlfabric.bench.train.settings import MODEL_BYTES, ceilings, fit
from mlfabric.bench.train.steps import FIRST_GUESS_S, RESERVE, StepClock
from mlfabric.bench.train.tuning import (
    STEP_SIZES,
    Trial,
    Tuned,
    best_of,
    edge_of,
    grid,
    next_sizes,
    read_tuned,
    summarise_trials,
    tune,
    write_tuned,
)
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
    clock = StepClock(True, hand, hand.sleep)
    for took in (0.02, 0.05, 0.01, 0.2):
        before = hand.now
        clock.begin(0.4)
        hand.now += took
        clock.computed()
        clock.computed()
        assert hand.now >= before + 0.4 - 1e-9
        assert clock.gradient_s == pytest.approx(took)
    assert hand.now == pytest.approx(100.0 + 4 * 0.4 + 0.2 - 0.05 - RESERVE * 0.4)  # the last was a surprise


def test_step_that_could_not_keep_its_time_overran() -> None:
    hand = Hand()
    clock = StepClock(True, hand, hand.sleep)
    clock.begin(0.4)
    hand.now += FIRST_GUESS_S + RESERVE * 0.4 + 0.019
    clock.computed()
    in_time = clock.overran
    clock.begin(0.4)
    hand.now += clock.gradient_s + RESERVE * 0.4 + 0.021
    clock.computed()
    assert (in_time, clock.overran) == (False, True)
    assert clock.late_s == pytest.approx(0.021)


def test_gradient_that_nobody_sends_before_its_end_has_all_of_the_step() -> None:
    hand = Hand()
    clock = StepClock(False, hand, hand.sleep)
    for took, late_s in ((0.01, 0.0), (0.39, 0.0), (0.41, 0.01), (0.43, 0.03)):
        before = hand.now
        clock.begin(0.4)
        assert hand.now == before
        hand.now += took
        clock.computed()
        assert hand.now == pytest.approx(before + 0.4 + late_s)
        assert clock.overran == (late_s > 0.02)


def test_scenario_is_fitted_in_proportion() -> None:
    fitted = fit(scenarios.load(scenarios.find("skewed")), some_settings(seed=7, rate="200mbit"))
    links = fitted.host_links()
    assert [link.up_bps for link in links] == pytest.approx([200e6] * 6 + [50e6] * 2)
    assert fitted.seed == 7
    assert fitted.compute_s(fitted.jobs[0]) == pytest.approx(1.75 * MODEL_BYTES / goodput(200e6))


def test_racks_are_fitted_to_eight_hosts() -> None:
    fitted = fit(scenarios.load(scenarios.find("racks-8to1")), some_settings())
    assert len(fitted.host_links()) == 8
    assert {link.up_bps for link in fitted.host_links()} == {500e6}


def test_ceilings_of_equal_links_are_the_textbook_ones() -> None:
    fitted = fit(scenarios.load(scenarios.find("calm")), some_settings(rate="200mbit"))
    found = ceilings(fitted, 60.0)
    transfer_s = MODEL_BYTES / goodput(200e6)
    assert found.ring_per_s == pytest.approx(8 / (1.75 * transfer_s))
    assert found.servers_per_s == pytest.approx(8 / (2 * transfer_s))


def test_a_transfer_takes_what_it_does_in_the_scenario_as_written() -> None:
    """So that links which are redrawn every 5 s change as often per transfer."""
    written = scenarios.load(scenarios.find("dynamic-stragglers"))
    fitted = fit(written, some_settings())
    as_written = written.size_bytes(written.jobs[0]) / max(link.up_bps for link in written.host_links())
    as_fitted = MODEL_BYTES / max(link.up_bps for link in fitted.host_links())
    assert as_fitted == pytest.approx(as_written, rel=0.05)


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
    assert edge_of(trials, best_of(trials)) == 1


def test_what_was_tuned_is_read_again_also_what_never_got_there(tmp_path: Path) -> None:
    trials = [Trial(size, None, 0.8 - size.lr) for size in grid()]
    write_tuned(tmp_path / "tuned.json", [summarise_trials("gloo", "calm", trials)])
    assert read_tuned(tmp_path / "tuned.json") == {"gloo": min(grid(), key=lambda size: size.lr)}


def test_search_goes_on_where_it_was_broken_off() -> None:
    trials: list[Trial] = []
    while sizes := next_sizes(trials):
        trials.append(Trial(sizes[0], 100.0 - 10 * sizes[0].lr if sizes[0].momentum == 0 else None, 0.8))
        assert len({trial.step_size for trial in trials}) == len(trials)
    assert max(trial.step_size.lr for trial in trials) == 16 * max(STEP_SIZES)  # moved twice, never inside
    assert summarise_trials("gloo", "calm", trials).on_edge
