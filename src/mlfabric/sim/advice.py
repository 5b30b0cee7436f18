"""Which way of exchanging updates suits a cluster and a model: each mode is run for a while at flow level.

The prediction is a simulation like any other, so it knows no more than the planner would; the sentence says
what limits the steps that wait for everybody.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

import msgspec

from mlfabric.scenario import JobSpec, Scenario, Seconds
from mlfabric.sim.results import POLICIES, simulate
from mlfabric.units import format_time, goodput

# Modes of training with the policy that carries each out.
MODES: Final = {
    "sync": "allreduce",
    "backup": "backup",
    "async": "mlfabric",
    "async, pulls alongside": "mlfabric-alongside",
    "async, two in flight": "mlfabric-overlap",
    "ssp": "ssp",
    "local": "local",
    "one host alone": "alone",
}
# A run is as long as this many nominal steps of all workers together, within bounds in virtual seconds: a
# mode must see many steps and, where links change, many changes, and large clusters must not take minutes.
WORKER_STEPS: Final = 4000
STEPS: Final = (20, 400)
REDRAWS: Final = 12
LIMITING_STEPS: Final = 400


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a mode would do."""

    mode: str
    policy: str
    updates_per_s: float
    # The same with updates worth less the older they are: half at a mean delay of one round of all workers,
    # which is about what runs with real gradients show.
    worth_per_s: float
    local_steps: int  # that one update sums up; 1: it is one gradient
    delay_mean: float
    delay_p99: float
    bytes_per_update: float  # sent by all hosts together
    about: str


@dataclass(frozen=True, slots=True)
class Advice:
    job: str
    workers: int
    predictions: tuple[Prediction, ...]
    use: str
    reason: str


def advise(scenario: Scenario, job: JobSpec) -> Advice:
    """Predict every mode for one job of the scenario, and choose."""
    alone = msgspec.structs.replace(
        scenario, jobs=(job,), faults=(), duration=Seconds(predicted_over(scenario, job))
    )
    predictions = [predict(alone, mode) for mode in MODES]
    chosen = _choose(predictions)
    return Advice(
        job.name,
        len(scenario.places(job).workers),
        tuple(predictions),
        chosen.mode,
        _reason(alone, job, chosen),
    )


def predicted_over(scenario: Scenario, job: JobSpec) -> float:
    """Virtual seconds that each mode is run for."""
    nominal = scenario.compute_s(job)
    steps = min(max(WORKER_STEPS / len(scenario.places(job).workers), STEPS[0]), STEPS[1])
    changes = [float(trace.every) * REDRAWS for trace in scenario.traces if trace.every is not None]
    return min(float(scenario.duration), max(20.0, steps * nominal, *changes))


def predict(scenario: Scenario, mode: str) -> Prediction:
    """What a mode would do with the scenario's only job."""
    policy = MODES[mode]
    (result,) = simulate(scenario, policy)
    sent = result.bytes_by_link["host up"] if policy != "alone" else 0.0
    return Prediction(
        mode,
        policy,
        result.updates_per_s,
        result.updates_per_s / (1 + result.delay_mean / result.workers),
        result.local_steps,
        result.delay_mean,
        result.delay_p99,
        sent / max(result.committed, 1),
        POLICIES[policy].about,
    )


def _choose(predictions: list[Prediction]) -> Prediction:
    """The most updates per second, each worth less the older it is.

    `local` is left out of the choice: one of its updates sums up several steps, so its rate is of another
    kind.
    """
    able = [each for each in predictions if each.local_steps == 1]
    return max(able, key=lambda each: (each.worth_per_s, -each.delay_mean))


def limiting_hosts(scenario: Scenario, job: JobSpec) -> tuple[list[str], float]:
    """The fewest hosts that are last in half of the steps (with ties), and the share of steps they are."""
    workers = scenario.places(job).workers
    size, nominal = scenario.size_bytes(job), scenario.compute_s(job)
    rates = {h.name: [(0.0, goodput(min(h.up_bps, h.down_bps)))] for h in scenario.host_links()}
    for change in scenario.rate_changes():
        rates[change.host].append((change.at_s, goodput(min(change.up_bps, change.down_bps))))
    around = 2 * (len(workers) - 1) / len(workers) * size
    last: dict[str, float] = {}
    now = 0.0
    steps = 0
    while steps < LIMITING_STEPS and now < float(scenario.duration):
        times = {}
        for name in workers:
            known = rates[name]
            rate = known[bisect_right(known, (now, float("inf"))) - 1][1]
            times[name] = nominal * (1 + scenario.straggler_delay(name, steps)) + around / rate
        longest = max(times.values())
        slow = [name for name in workers if times[name] >= longest * (1 - 1e-9)]
        for name in slow:
            last[name] = last.get(name, 0.0) + 1 / len(slow)
        now += longest
        steps += 1
    named: list[str] = []
    share = 0.0
    for name in sorted(last, key=lambda name: (-last[name], name)):
        if share >= 0.5 and last[name] < last[named[-1]] * (1 - 1e-9):
            break
        named.append(name)
        share += last[name] / steps
    return named, share


def _reason(scenario: Scenario, job: JobSpec, chosen: Prediction) -> str:
    workers = len(scenario.places(job).workers)
    named, share = limiting_hosts(scenario, job)
    listed = f" ({', '.join(named)})" if len(named) <= 4 else ""
    verb = "limits" if len(named) == 1 else "limit"
    if len(named) / workers >= 0.45:
        limits = "no few hosts limit the steps: everybody is about as often the last"
    else:
        limits = f"{_count(len(named))} of {_count(workers)} hosts{listed} {verb} {share:.0%} of the steps"
    speed = (
        f"{chosen.updates_per_s:.3g} updates per second at a mean delay of {chosen.delay_mean:.1f}, "
        f"worth {chosen.worth_per_s:.3g} fresh ones"
    )
    return (
        f"{limits}; {chosen.mode} is predicted to commit {speed}, a step computes {_compute(scenario, job)}"
    )


def _compute(scenario: Scenario, job: JobSpec) -> str:
    return format_time(scenario.compute_s(job))


def _count(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if number < len(words) else f"{number:,}"
