"""Schedules of the simulator, and who makes the same steps as another."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from experiments.headline.run import Applied, Follower, Recorder, Where, oldest_needed, schedule
from experiments.headline.tune import POLICIES, Bench, Search, table

from mlfabric.bench.train.settings import StepSize
from mlfabric.bench.train.task import Fashion
from mlfabric.bench.train.tuning import Trial, grid, summarise_trials
from mlfabric.sim import results
from tests.bench.train.images import write_easy_images

WHERE = Where(1001, 20.0)


def test_ring_and_planned_all_reduce_make_the_same_steps_at_other_times() -> None:
    ring, planned = schedule("ring", WHERE), schedule("allreduce", WHERE)
    assert [step.parts for step in ring] == [step.parts for step in planned[: len(ring)]]
    assert all(mine.at_s <= theirs.at_s for mine, theirs in zip(planned, ring, strict=False))


def test_trials_of_one_are_timed_again_for_the_other(tmp_path: Path) -> None:
    planned = schedule("allreduce", WHERE)
    trials = [
        Trial(size, planned[9].at_s if size.momentum else None, 0.5, planned[-1].at_s) for size in grid()
    ]
    (tmp_path / "mlfabric-sync.json").write_bytes(msgspec.json.encode(trials))
    found = Bench(Search(WHERE, 0.85, 32, 30), tmp_path, tmp_path).made("gloo")
    ring = schedule("ring", Where(1001, 80.0))
    assert [trial.seconds for trial in found] == [
        ring[9].at_s if t.step_size.momentum else None for t in trials
    ]
    assert [trial.followed_s for trial in found] == [ring[len(planned) - 1].at_s] * len(trials)
    assert "| `gloo` | `ring` |" in table([summarise_trials("gloo", "dynamic-stragglers", found)])


@pytest.mark.parametrize("policy", dict.fromkeys(POLICIES.values()))
def test_schedule_that_stands_for_a_contender_can_be_made(policy: str) -> None:
    if policy == "rolling" and policy not in results.POLICIES:
        pytest.skip("the simulator has no policy of this name yet")
    steps = schedule(policy, Where(1001, 4.0))
    assert steps
    assert all(base <= number for number, step in enumerate(steps) for base, _, _ in step.parts)


def test_search_ends_a_trial_at_the_target_or_when_it_is_hopeless() -> None:
    search = Search(WHERE, 0.85, 32, 30)
    leader = [(20.0, 0.6), (40.0, 0.8), (80.0, 0.85), (90.0, 0.86), (100.0, 0.87)]
    assert not search.enough([(10.0, 0.1)], leader)
    assert search.enough([(61.0, 0.1)], [])
    assert search.enough([(80.0, 0.7)], leader)  # the leader had 0.8 after 40 s
    assert not search.enough([(79.0, 0.7)], leader)
    assert not search.enough([(60.0, 0.81), (70.0, 0.8), (80.0, 0.7)], leader)
    assert search.enough([(79.0, 0.84), (81.0, 0.84)], leader)
    assert search.enough([(1.0, 0.9), (2.0, 0.9), (3.0, 0.9)], leader)


def test_gradients_are_recorded_with_how_far_ahead_they_were_computed() -> None:
    recorder = Recorder()
    recorder.apply([recorder.compute(recorder.read(ahead=2.5))], [1.0], 0.1)
    recorder.apply(
        [recorder.compute(recorder.read(ahead=1.5)), recorder.compute(recorder.read())], [1, 2], 0.2
    )
    # Before the first step nothing has moved.
    assert recorder.steps == [
        Applied(0.1, ((0, 0.0, 1.0),)),
        Applied(0.2, ((1, 1.5, 1.0), (1, 0.0, 2.0))),
    ]


def test_gradient_ahead_is_of_the_model_moved_on_as_it_last_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_easy_images(tmp_path / "data")
    follower = Follower(Fashion(tmp_path / "data"), 1, 1000)
    asked: list[Any] = []

    def gradient(weights: Any, indices: Any) -> Any:
        asked.append(weights[:3].copy())
        return np.ones_like(weights)

    monkeypatch.setattr(follower, "_gradient", gradient)
    plain = [Applied(float(number), ((number, 0.0, 1.0),)) for number in range(3)]
    late = Applied(3.0, ((1, 2.0, 1.0),))
    assert oldest_needed(late) == 0
    follower.follow([*plain, late], StepSize(0.01, 0.0))
    np.testing.assert_allclose(asked[3], asked[1] + 2 * (asked[1] - asked[0]), atol=1e-6)
