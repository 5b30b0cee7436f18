"""Contenders that send less, in virtual time: who waits for whom, and what is averaged."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import itertools
from pathlib import Path

import numpy as np
from experiments.headline import seldom
from experiments.headline.seldom import COURSES, Crew, PowerSgd, local_rounds, mean_in_half

from mlfabric.bench.train.peers import MATCHMAKING_S
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.bench.train.task import Fashion
from tests.bench.train.images import write_easy_images


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    write_easy_images(tmp_path / "data")
    settings = RunSettings("gloo-local", "dynamic-stragglers", 1001, StepSize(0.001, 0.9), workers=3, batch=2)
    return Crew(settings, Fashion(tmp_path / "data"))


@pytest.mark.parametrize("contender", COURSES)
def test_course_moves_the_model_while_time_goes_on(contender: str, crew: Crew) -> None:
    first = crew.first.copy()
    seen = [(now, model.copy()) for now, model in itertools.islice(COURSES[contender](crew), 2)]
    times = [now for now, _ in seen]
    assert times == sorted(times)
    assert times[0] > 0
    for (_, before), (_, after) in itertools.pairwise([(0.0, first), *seen]):
        assert np.isfinite(after).all()
        assert not np.array_equal(before, after)


def test_round_waits_for_the_slowest_worker_and_the_exchange(crew: Crew) -> None:
    (now, mean), *_ = itertools.islice(local_rounds(crew, 0, 4, 10.0), 1)
    alone = [sum(crew.lasts_s(rank, step) for step in range(4)) for rank in range(3)]
    assert now == pytest.approx(10.0 + max(alone) + crew.all_reduce_s)
    np.testing.assert_allclose(mean, np.mean(crew.models, axis=0))


def test_what_low_rank_loses_is_in_the_next_step(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seldom, "WARM_UP", 0)
    rng = np.random.default_rng(7)
    combine = PowerSgd(crew, rank=2)
    gradients = [rng.standard_normal(len(crew.first)).astype(np.float32) for _ in range(3)]
    sent = np.zeros_like(crew.first)
    for times in range(1, 4):
        sent += combine(gradients)
        # All that was given and is not sent yet is kept by the workers.
        kept = np.mean(combine._lost, axis=0)
        np.testing.assert_allclose(sent + kept, times * np.mean(gradients, axis=0), atol=1e-4)


def test_rolling_averages_lose_nothing_and_count_nothing_twice(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [0] * len(crew)

    def step(rank: int, number: int) -> None:
        made[rank] += 1
        crew.models[rank] += rank + 1  # whole numbers, so that sums are exact

    monkeypatch.setattr(crew, "step_alone", step)
    for model in (crew.first, *crew.models):
        model.fill(0)
    least = 0.0  # by then half of what has been done is to be common
    for _, common in itertools.islice(COURSES["mlfabric-rolling-local"](crew), 8):
        moved = sum(times * (rank + 1) for rank, times in enumerate(made)) / len(crew)
        np.testing.assert_allclose(crew.mean_model(), moved, rtol=1e-5)
        assert least <= common.mean() < moved
        least = moved / 2


def test_peers_average_once_all_together_have_made_their_steps(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [0] * len(crew)

    def step(rank: int, number: int) -> None:
        assert number == made[rank]
        made[rank] += 1
        crew.models[rank] += rank + 1

    monkeypatch.setattr(crew, "step_alone", step)
    for model in crew.models:
        model.fill(0)
    (now, mean), *_ = itertools.islice(COURSES["hivemind-local"](crew), 1)
    assert sum(made) == 8 * len(crew) + len(crew)  # and what each was computing by then
    assert max(made) > min(made)  # nobody waits for the slowest between averages
    computed = [sum(crew.lasts_s(rank, number) for number in range(made[rank])) for rank in range(len(crew))]
    assert now == pytest.approx(max(computed) + MATCHMAKING_S + crew.all_reduce_s)
    moved = sum(times * (rank + 1) for rank, times in enumerate(made)) / len(crew)
    np.testing.assert_allclose(mean, moved, rtol=1e-6)


def test_steps_in_half_precision_are_those_of_the_mean_but_for_rounding(crew: Crew) -> None:
    gradients = [crew.gradient(rank, 0) for rank in range(len(crew))]
    half, plain = mean_in_half(gradients), np.mean(gradients, axis=0)
    assert not np.array_equal(half, plain)
    assert (np.abs(half - plain) <= 2**-8 * np.mean(np.abs(gradients), axis=0) + 1e-6).all()
