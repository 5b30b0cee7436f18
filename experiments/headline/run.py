"""How soon is a target accuracy reached, by who sends what when, at which step size?

Two parts: a schedule (when each update is applied, and from which model it was computed), from the simulator,
and real training that follows it, once for every step size. So one schedule serves a whole grid.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from mlfabric import scenario as scenarios
from mlfabric.bench.train.adam import ArrayAdam
from mlfabric.bench.train.judging import Curve, reached
from mlfabric.bench.train.settings import DEFAULT_BATCH, DEFAULT_RATE, RunSettings, StepSize, fit
from mlfabric.bench.train.task import (
    Batches,
    Fashion,
    accuracy,
    find_data,
    flat_weights,
    load_weights,
    loss_of,
    make_model,
)
from mlfabric.bench.train.tuning import Trial, Tuned, best_of, edge_of, write_tuned
from mlfabric.messages import JobSettings
from mlfabric.scenario import Scenario, Seconds
from mlfabric.sim.hosted import HostedRun
from mlfabric.sim.results import simulate_jobs

SCENARIO = "dynamic-stragglers"
ROUNDS = "rounds-"  # our own roles: a step is the mean of the first so many gradients
TARGETS = (0.80, 0.85, 0.87, 0.89)


@dataclass(frozen=True)
class Applied:
    """One step: when, and of each of its gradients the step whose model it is of, how many steps ahead of it
    it was computed, and its weight."""

    at_s: float
    parts: tuple[tuple[int, float, float], ...]


@dataclass
class Recorder:
    """A learner that only remembers."""

    steps: list[Applied] = field(default_factory=list)

    def read(self, ahead: float = 0.0) -> tuple[int, float]:
        # Nothing has moved before the first step, so that there is no way to look ahead along.
        return len(self.steps), ahead if self.steps else 0.0

    def compute(self, model: Any, steps: int = 1) -> Any:
        return model

    def apply(self, gradients: list[Any], weights: list[float], now: float) -> None:
        parts = ((*model, weight) for model, weight in zip(gradients, weights, strict=True))
        self.steps.append(Applied(now, tuple(parts)))


@dataclass(frozen=True)
class Where:
    """What a schedule depends on, beside its policy."""

    seed: int
    seconds: float
    scenario: str = SCENARIO
    rate: str = DEFAULT_RATE
    max_delay: int | None = None  # of the asynchronous policies; else as the scenario says

    def fitted(self) -> Scenario:
        settings = RunSettings("gloo", self.scenario, self.seed, StepSize(0.001, 0.0), rate=self.rate)
        scenario = fit(scenarios.load(scenarios.find(self.scenario)), settings)
        if self.max_delay is not None:
            job = msgspec.structs.replace(scenario.jobs[0], max_delay=self.max_delay)
            scenario = msgspec.structs.replace(scenario, jobs=(job,))
        return msgspec.structs.replace(scenario, duration=Seconds(self.seconds))


def schedule(policy: str, where: Where) -> list[Applied]:
    scenario = where.fitted()
    if policy.startswith(ROUNDS):
        count = int(policy.removeprefix(ROUNDS))
        settings = JobSettings(shards=0, divergence=None, wait_for=count, max_delay=count - 1)
        run = HostedRun(scenario, settings=settings)
        return [Applied(at, ((k, 0.0, 1.0),) * count) for k, at in enumerate(run.run(where.seconds).steps_s)]
    recorder = Recorder()
    simulate_jobs(scenario, policy, lambda seconds: None, lambda: recorder)
    return recorder.steps


def has_diverged(curve: Curve) -> bool:
    return len(curve) > 8 and curve[-1][1] < 0.15


def oldest_needed(step: Applied) -> int:
    """Of the models that its gradients are of: whoever looks ahead needs the one before, too."""
    return min(base - 1 if ahead else base for base, ahead, _ in step.parts)


def gradient_of(module: Any, data: Fashion, weights: Any, indices: Any) -> Any:
    """Of a model with these weights, in one array."""
    load_weights(module, weights)
    module.zero_grad()
    loss_of(module, data, indices).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()]).numpy()


def parse_size(written: str) -> StepSize:
    lr, momentum = map(float, written.split(","))
    return StepSize(lr, momentum)


class Follower:
    """Training that applies real gradients as a schedule says."""

    def __init__(self, data: Fashion, seed: int, look_every: int, batch: int = DEFAULT_BATCH) -> None:
        self._data, self._seed, self._look_every = data, seed, look_every
        self._batch = batch
        self._module = make_model(seed)

    def follow(
        self, steps: Sequence[Applied], size: StepSize, enough: Callable[[Curve], bool] = has_diverged
    ) -> list[tuple[float, float]]:
        """Accuracy against time, until the schedule ends or what was seen is enough."""
        weights = flat_weights(make_model(self._seed)).copy()
        models, adam = {0: weights}, ArrayAdam(size, len(weights))
        batches = Batches(self._seed, 0, len(self._data.labels), self._batch)
        needed = np.minimum.accumulate([oldest_needed(step) for step in reversed(steps)])[::-1]
        drawn = since = 0
        curve: list[tuple[float, float]] = []
        for number, step in enumerate(steps):
            whole = sum(weight for _, _, weight in step.parts)
            mean: Any = None
            for base, ahead, weight in step.parts:
                model = models[base]
                if ahead:
                    model = model + np.float32(ahead) * (model - models[base - 1])
                gradient = self._gradient(model, batches.indices(drawn))
                gradient *= np.float32(weight / whole)
                mean = gradient if mean is None else mean + gradient
                drawn += 1
            weights = weights + adam.step(mean, 1.0 if len(step.parts) > 1 else whole)
            models[number + 1] = weights
            for old in [k for k in models if number + 1 < len(steps) and k < needed[number + 1]]:
                del models[old]
            since += len(step.parts)
            if since >= self._look_every:
                since = 0
                curve.append((step.at_s, self._accuracy(weights)))
                if enough(curve):
                    break
        return curve

    def _gradient(self, weights: Any, indices: Any) -> Any:
        return gradient_of(self._module, self._data, weights, indices)

    def _accuracy(self, weights: Any) -> float:
        if not np.isfinite(weights).all():
            return 0.0
        load_weights(self._module, weights)
        return accuracy(self._module, self._data, quarter=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help=f"of `mlfabric sim`, or {ROUNDS}K")
    parser.add_argument("--sizes", nargs="+", default=["0.0005,0", "0.001,0", "0.0005,0.9", "0.001,0.9"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--scenario", default=SCENARIO)
    parser.add_argument("--rate", default=DEFAULT_RATE, help="of the fastest link")
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH)
    parser.add_argument(
        "--max-delay", type=int, help="of the asynchronous policies; else as the scenario says"
    )
    parser.add_argument("--look-every", type=int, default=30, help="gradients")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--target", type=float, default=0.85, help="by which the best is chosen")
    parser.add_argument("--contender", help="write what was chosen as `--tune` does, under this name")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    where = Where(given.seed, given.seconds, given.scenario, given.rate, given.max_delay)
    steps = schedule(given.policy, where)
    gradients = sum(len(step.parts) for step in steps)
    print(
        f"{given.policy} seed {given.seed}: {len(steps) / given.seconds:.2f} steps/s, "
        f"{gradients / given.seconds:.2f} gradients/s",
        flush=True,
    )
    data = Fashion(find_data(given.data))
    follower = Follower(data, given.seed, given.look_every, given.batch)
    trials = []
    for size in map(parse_size, given.sizes):
        curve = follower.follow(steps, size)
        best = max(found for _, found in curve)
        times = {target: at for target in TARGETS if (at := reached(curve, target)) is not None}
        shown = ", ".join(f"{target:.2f} at {at:.0f} s" for target, at in times.items())
        print(
            f"  lr {size.lr:g} momentum {size.momentum:g}: {shown or 'nothing'}; best {best:.3f}", flush=True
        )
        trials.append(Trial(size, reached(curve, given.target), best, curve[-1][0]))
    if given.out is not None:
        chosen = best_of(trials)
        name = given.contender or given.policy
        tuned = Tuned(name, given.scenario, chosen.step_size, bool(edge_of(trials, chosen)), trials)
        write_tuned(given.out, [tuned])


if __name__ == "__main__":
    main()
