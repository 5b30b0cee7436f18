"""Rounds of whatever is ready while everybody computes: nobody waits, and rounds go on without the dead."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from mlfabric import scenario as scenarios
from mlfabric.scenario import FaultSpec, RateStep, Scenario, Seconds, TraceSpec, WireRate
from mlfabric.sim.results import simulate, simulate_jobs
from mlfabric.sim.workload import JobRun


def calm(seconds: float = 20, *faults: FaultSpec, jitter: float = 0.0, steps: int | None = None) -> Scenario:
    written = scenarios.load(scenarios.find("calm"))
    job = msgspec.structs.replace(written.jobs[0], compute_jitter=jitter, steps=steps)
    return msgspec.structs.replace(written, duration=Seconds(seconds), jobs=(job,), faults=faults)


def fault(at: float, do: str, host: str, lasts: float | None = None) -> FaultSpec:
    written = {"at": at, "do": do, "host": host, "lasts": lasts}
    return msgspec.convert(written, FaultSpec, dec_hook=lambda kind, value: kind(value))


class Recorder:
    """A learner whose gradients are what they were computed from: the step, and how far ahead of it."""

    def __init__(self) -> None:
        self.rounds: list[list[tuple[int, float]]] = []
        self.at_s: list[float] = []

    def read(self, ahead: float = 0.0) -> tuple[int, float]:
        return len(self.rounds), ahead

    def compute(self, model: Any, steps: int = 1) -> Any:
        return model

    def apply(self, gradients: list[Any], weights: list[float], now: float) -> None:
        assert set(weights) == {1.0}
        self.rounds.append(gradients)
        self.at_s.append(now)

    def delays(self) -> list[int]:
        """In rounds."""
        return [number - base for number, taken in enumerate(self.rounds) for base, _ in taken]


def record(scenario: Scenario) -> tuple[JobRun, Recorder]:
    recorder = Recorder()
    (run,) = simulate_jobs(scenario, "rolling", make_learner=lambda: recorder)
    return run, recorder


def computed_per_s(run: JobRun) -> float:
    return len(run) / run.nominal_s


def test_gradients_are_as_many_as_computing_allows() -> None:
    run, _ = record(calm())
    assert run.tally.committed / run.world.now == pytest.approx(computed_per_s(run), rel=0.03)


def test_a_slow_link_slows_rounds_but_not_gradients() -> None:
    scenario = calm(40)
    slow = TraceSpec(hosts=("w0",), steps=(RateStep(at=Seconds(0), rate=WireRate(0.2e9)),))
    fast, _ = record(scenario)
    slowed, recorder = record(msgspec.structs.replace(scenario, traces=(slow,)))
    assert slowed.tally.steps < 0.5 * fast.tally.steps
    # What waits for the round under way when the run ends isn't counted.
    most = computed_per_s(slowed) * (40 - 2 * max(np.diff(recorder.at_s)))
    assert slowed.tally.committed >= most
    # It slows the others' gradients no less than its own.
    assert min(slowed.tally.by_worker.values()) >= 0.95 * max(slowed.tally.by_worker.values())


@pytest.mark.parametrize("name", ["calm", "skewed", "dynamic-stragglers"])
def test_no_gradient_is_many_rounds_old(name: str) -> None:
    written = scenarios.load(scenarios.find(name))
    _, recorder = record(msgspec.structs.replace(written, duration=Seconds(30)))
    delays = recorder.delays()
    assert sum(delays) / len(delays) < 2.5
    # A straggling step takes a few times as long as others, and rounds as short as computing go on meanwhile.
    assert max(delays) <= 10


def test_delays_are_booked_in_updates() -> None:
    run, recorder = record(calm(jitter=0.1))
    ends = np.cumsum([0, *map(len, recorder.rounds)])
    updates = [ends[number] - ends[base] for number, taken in enumerate(recorder.rounds) for base, _ in taken]
    assert list(run.tally.delays) == updates


def test_workers_compute_ahead_by_what_their_last_gradients_were_late() -> None:
    _, recorder = record(calm(jitter=0.1))
    assert all(ahead == 0 for taken in recorder.rounds for base, ahead in taken if base == 0)
    lately = [each for taken in recorder.rounds[20:] for each in taken]
    delays = recorder.delays()[-len(lately) :]
    assert sum(ahead for _, ahead in lately) / len(lately) == pytest.approx(1 + np.mean(delays), rel=0.1)


def test_a_worker_alone_has_each_gradient_applied_while_it_computes_the_next() -> None:
    scenario = calm()
    alone = msgspec.structs.replace(scenario.jobs[0], workers=("w0",))
    run, recorder = record(msgspec.structs.replace(scenario, jobs=(alone,)))
    assert run.tally.steps == run.tally.committed > 0
    assert recorder.delays() == [0] + [1] * (run.tally.steps - 1)


def test_rounds_go_on_without_a_killed_worker_and_only_its_own_gradients_are_lost() -> None:
    run, recorder = record(calm(20, fault(5, "kill", "w0")))
    assert max(np.diff(recorder.at_s)) < 1.0 + 4 * run.nominal_s
    assert recorder.at_s[-1] > 19
    assert 0 < run.tally.lost <= 2 + 1.0 / run.nominal_s
    computed = [int(20 / run.nominal_s)] * 7
    done = [run.tally.by_worker[worker] for worker in range(1, 8)]
    assert done == pytest.approx(computed, abs=4)


def test_a_restarted_worker_gives_gradients_again() -> None:
    gone, _ = record(calm(20, fault(5, "kill", "w0")))
    back, _ = record(calm(20, fault(5, "kill", "w0", 3)))
    assert back.tally.by_worker[0] > 2 * gone.tally.by_worker[0]


@pytest.mark.parametrize("at", [2.03, 2.09, 2.15, 2.21])
def test_a_worker_that_is_back_at_once_has_lost_what_it_had(at: float) -> None:
    run, _ = record(calm(at + 4, fault(at, "kill", "w0", 0.05)))
    assert run.tally.by_worker[0] < run.tally.by_worker[1]


def test_every_gradient_of_a_job_with_an_end_is_applied() -> None:
    run, _ = record(calm(30, jitter=0.1, steps=11))
    assert run.tally.by_worker == dict.fromkeys(range(8), 11)


def test_equal_inputs_give_equal_results() -> None:
    scenario = calm(8, fault(2, "kill", "w3", 2), jitter=0.1)
    assert simulate(scenario, "rolling") == simulate(scenario, "rolling")


def test_a_model_is_moved_on_by_what_its_last_step_changed() -> None:
    pytest.importorskip("sklearn")
    from mlfabric.sim.training import DigitsLearner, read_digits

    learner = DigitsLearner(read_digits(), 0.93, seed=1)
    first = learner.read()
    np.testing.assert_equal(learner.read(2.0), first)
    learner.apply([learner.compute(first)], [1.0], 0.0)
    second, ahead = learner.read(), learner.read(1.5)
    for was, now, then in zip(first, second, ahead, strict=True):
        for name in now:
            np.testing.assert_allclose(
                then[name], now[name] + 1.5 * (now[name] - was[name]), rtol=1e-4, atol=1e-7
            )
