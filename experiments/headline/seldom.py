"""Step sizes of contenders that send less: real training in virtual time, an exchange only takes its time.

    python -m experiments.headline.seldom gloo-powersgd gloo-local --out tuned.json

The same search for each as `experiments.headline.tune` makes for those the simulator has a schedule of: five
step sizes by two momenta, moved while the best is on the edge, on a seed of tuning. Workers compute as long
as the scenario says. Who exchanges whole models together waits for the slowest worker, then for a ring over
the scenario's links (half as long in float16); whose exchanges are small waits for the slowest worker only;
averages and steps that roll on come at one pace.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from experiments.headline.parts import BETWEEN_S, CommonModels, Pace, PartsRun, follow
from experiments.headline.run import gradient_of
from mlfabric import scenario as scenarios
from mlfabric.bench.train.adam import ArrayAdam
from mlfabric.bench.train.ddp import WARM_UP
from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.judging import Curve, reached
from mlfabric.bench.train.peers import MATCHMAKING_S, OUTER
from mlfabric.bench.train.settings import RunSettings, ceilings, fit
from mlfabric.bench.train.task import (
    Batches,
    Fashion,
    find_data,
    flat_weights,
    make_model,
)
from mlfabric.bench.train.tuning import (
    FIRST_TUNING_SEED,
    Trial,
    Tuned,
    next_sizes,
    summarise_trials,
    write_tuned,
)
from mlfabric.numerics import Vector
from mlfabric.steptimes import step_factor
from mlfabric.torch.rolledsteps import AT_ONCE, MOST_PARTS, cut_parts

ROUND_S: Final = 0.9  # from average to average of the whole model, where they roll on; seen in the lab
SMALL_EXCHANGE_S: Final = 0.03  # two all-reduces of some tens of kilobytes
HOPELESS_AFTER_S, HOPELESS_BELOW = 30.0, 0.3


class Crew:
    """Eight workers with models and optimizers of their own, and how long each of their steps takes."""

    def __init__(self, settings: RunSettings, data: Fashion) -> None:
        self._scenario = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
        self._job = self._scenario.jobs[0]
        self._hosts = self._scenario.places(self._job).workers
        self.settings, self.data = settings, data
        self._module = make_model(settings.seed)
        self.first = flat_weights(self._module).copy()
        self.shapes = [tuple(parameter.shape) for parameter in self._module.parameters()]
        self.models = [self.first.copy() for _ in self._hosts]
        self.optimizers = [ArrayAdam(settings.step_size, len(self.first)) for _ in self._hosts]
        images = len(data.labels)
        self._batches = [
            Batches(settings.seed, rank, images, settings.batch) for rank in range(len(self._hosts))
        ]
        self.all_reduce_s = len(self._hosts) / ceilings(self._scenario, settings.limit_s).ring_per_s

    def __len__(self) -> int:
        return len(self._hosts)

    def lasts_s(self, rank: int, step: int) -> float:
        factor = step_factor(self._scenario, self._job, self._hosts[rank], step)
        return self._scenario.compute_s(self._job) * factor + BETWEEN_S

    def gradient(self, rank: int, step: int) -> Vector:
        indices = self._batches[rank].indices(step)
        found: Vector = gradient_of(self._module, self.data, self.models[rank], indices)
        return found

    def step_alone(self, rank: int, step: int) -> None:
        self.models[rank] += self.optimizers[rank].step(self.gradient(rank, step))

    def mean_model(self) -> Vector:
        mean: Vector = np.mean(self.models, axis=0)
        return mean

    def have(self, model: Vector) -> None:
        for each in self.models:
            np.copyto(each, model)


def in_step(crew: Crew, combine: Any, exchange_s: float, steps: Iterable[int]) -> CommonModels:
    """Every step of all of them together, by what `combine` makes of their gradients."""
    now = 0.0
    for step in steps:
        mean = combine([crew.gradient(rank, step) for rank in range(len(crew))])
        now += max(crew.lasts_s(rank, step) for rank in range(len(crew))) + exchange_s
        crew.have(crew.models[0] + crew.optimizers[0].step(mean))
        yield now, crew.models[0]


def local_rounds(crew: Crew, first: int, local_steps: int, begin_s: float) -> CommonModels:
    """Everybody on its own for some steps, then the mean of all models, as it is."""
    now = begin_s
    for start in itertools.count(first, local_steps):
        now += max(
            sum(crew.lasts_s(rank, step) for step in range(start, start + local_steps))
            for rank in range(len(crew))
        )
        for rank in range(len(crew)):
            for step in range(start, start + local_steps):
                crew.step_alone(rank, step)
        now += crew.all_reduce_s
        yield now, crew.mean_model()


def post_local(crew: Crew) -> CommonModels:
    begin_s = 0.0
    for now, model in in_step(crew, lambda found: np.mean(found, axis=0), crew.all_reduce_s, range(WARM_UP)):
        begin_s = now
        yield now, model
    crew.optimizers = [copy.deepcopy(crew.optimizers[0]) for _ in crew.optimizers]
    for now, model in local_rounds(crew, WARM_UP, _local_steps("gloo-local"), begin_s):
        crew.have(model)
        yield now, model


def diloco(crew: Crew) -> CommonModels:
    """Rounds whose mean moves the model by Nesterov's steps."""
    model, moved = crew.first.copy(), np.zeros_like(crew.first)
    rate, momentum = np.float32(OUTER["lr"]), np.float32(OUTER["momentum"])
    for now, mean in local_rounds(crew, 0, _local_steps("torchft-diloco"), 0.0):
        gradient = model - mean
        moved = momentum * moved + gradient
        model = model - rate * (gradient + momentum * moved)
        crew.have(model)
        yield now, model


class PowerSgd:
    """Gradients by factors of a low rank, what is lost kept for the next: as PyTorch's hook has it."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self._ends = np.cumsum([int(np.prod(shape)) for shape in crew.shapes]).tolist()
        self._shapes, self._rank, self._steps = crew.shapes, rank, 0
        self._lost = [np.zeros_like(crew.first) for _ in range(len(crew))]
        self._right: dict[int, Any] = {}

    def __call__(self, gradients: list[Vector]) -> Vector:
        self._steps += 1
        if self._steps <= WARM_UP:
            plain: Vector = np.mean(gradients, axis=0)
            return plain
        whole = [gradient + lost for gradient, lost in zip(gradients, self._lost, strict=True)]
        result: Vector = np.mean(whole, axis=0)
        for start, stop, shape in zip([0, *self._ends], self._ends, self._shapes, strict=False):
            rows, columns = shape[0], (stop - start) // shape[0]
            if len(shape) == 1 or (rows + columns) * self._rank * 2 >= rows * columns:
                continue  # it would save less than half
            mean = torch.from_numpy(result[start:stop].reshape(rows, columns))
            right = self._right.get(start)
            if right is None:
                right = torch.randn(columns, self._rank, generator=torch.Generator().manual_seed(start))
            left, _ = torch.linalg.qr(mean @ torch.linalg.qr(right)[0])
            self._right[start] = right = mean.T @ left
            mean.copy_(left @ right.T)
        for kept, mine in zip(self._lost, whole, strict=True):
            np.subtract(mine, result, out=kept)
        return result


def powersgd(crew: Crew) -> CommonModels:
    options = find_entry("gloo-powersgd").options
    return in_step(crew, PowerSgd(crew, int(options["rank"])), SMALL_EXCHANGE_S, itertools.count())


def mean_in_half(gradients: Sequence[Vector]) -> Vector:
    """As PyTorch's fp16 hook has it: each is divided by how many there are, and summed as float16."""
    total = torch.zeros(len(gradients[0]), dtype=torch.float16)
    for gradient in gradients:
        total += torch.from_numpy(gradient).half() / len(gradients)
    mean: Vector = total.float().numpy()
    return mean


def half_precision(crew: Crew) -> CommonModels:
    return in_step(crew, mean_in_half, crew.all_reduce_s / 2, itertools.count())


def shared_count(crew: Crew) -> CommonModels:
    """Everybody on its own until all together have made their steps, then the mean of all models."""
    together, now = _local_steps("hivemind-local") * len(crew), 0.0
    steps = [0] * len(crew)
    while True:
        ready = [(now + crew.lasts_s(rank, steps[rank]), rank) for rank in range(len(crew))]
        heapq.heapify(ready)
        for _ in range(together):
            now, rank = heapq.heappop(ready)
            crew.step_alone(rank, steps[rank])
            steps[rank] += 1
            heapq.heappush(ready, (now + crew.lasts_s(rank, steps[rank]), rank))
        # Whoever computes finishes its gradient first.
        for rank in range(len(crew)):
            crew.step_alone(rank, steps[rank])
            steps[rank] += 1
        now = max(ready)[0] + MATCHMAKING_S + crew.all_reduce_s
        crew.have(crew.mean_model())
        yield now, crew.models[0]


def rolling_half(crew: Crew) -> CommonModels:
    """Steps of full gradients that roll on, summed in float16: half the bytes, no shorter rounds assumed."""
    codec = str(find_entry("mlfabric-rolling-fp16").options["codec"])
    return PartsRun(crew.settings, Pace(MOST_PARTS, AT_ONCE, ROUND_S, codec), crew.data).course()


def rolling_local(crew: Crew) -> CommonModels:
    """Nobody waits: part by part, all are moved by the mean of how far each has come since it last gave."""
    cuts = cut_parts(len(crew.first))
    parts = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    every, common = ROUND_S / len(parts), crew.first.copy()
    under_way: dict[int, list[Vector]] = {}  # what each gave, by part
    queue = [(crew.lasts_s(rank, 0), rank, 0) for rank in range(len(crew))]
    queue += [(number * every, len(crew), number) for number in range(1, AT_ONCE + 1)]
    heapq.heapify(queue)
    while True:
        now, who, number = heapq.heappop(queue)
        if who < len(crew):
            crew.step_alone(who, number)
            heapq.heappush(queue, (now + crew.lasts_s(who, number + 1), who, number + 1))
            continue
        # Part `number` begins, and the one that was begun `AT_ONCE` before it ends.
        if number > AT_ONCE:
            last = (number - AT_ONCE) % len(parts)
            gave = under_way.pop(last)
            mean = np.mean(gave, axis=0)
            common[parts[last]] += mean
            for model, own in zip(crew.models, gave, strict=True):
                model[parts[last]] += mean - own
            if last == len(parts) - 1:
                yield now, common
        part = parts[number % len(parts)]
        under_way[number % len(parts)] = [model[part] - common[part] for model in crew.models]
        if number >= AT_ONCE:
            heapq.heappush(queue, (now + every, len(crew), number + 1))


COURSES: Final = {
    "gloo-powersgd": powersgd,
    "gloo-fp16": half_precision,
    "gloo-local": post_local,
    "torchft-diloco": diloco,
    "hivemind-local": shared_count,
    "mlfabric-rolling-fp16": rolling_half,
    "mlfabric-rolling-local": rolling_local,
}


def _local_steps(contender: str) -> int:
    return int(find_entry(contender).options["local_steps"])


def search(contender: str, seed: int, seconds: float, target: float, data: Fashion, scenario: str) -> Tuned:
    trials: list[Trial] = []
    best_s, leader = seconds, list[tuple[float, float]]()
    while sizes := next_sizes(trials):
        settings = RunSettings(contender, scenario, seed, sizes[0], limit_s=seconds)

        def enough(curve: Curve) -> bool:
            at, seen = curve[-1]
            led = max((found for then, found in leader if then <= at / 2), default=0.0)  # noqa: B023
            hopeless = at > HOPELESS_AFTER_S and (seen < HOPELESS_BELOW or seen < led)
            return at > best_s or hopeless or reached(curve, target) is not None  # noqa: B023

        curve = follow(COURSES[contender](Crew(settings, data)), seed, data, enough)
        at = reached(curve, target)
        trials.append(Trial(sizes[0], at, max(found for _, found in curve), curve[-1][0]))
        if at is not None and at < best_s:
            best_s, leader = at, curve
        print(contender, f"lr {sizes[0].lr:g} momentum {sizes[0].momentum:g}:", at, trials[-1], flush=True)
    return summarise_trials(contender, scenario, trials)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=list(COURSES))
    parser.add_argument("--seed", type=int, default=FIRST_TUNING_SEED)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--scenario", default="dynamic-stragglers")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="for `bench train --tuned`")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.contenders if name not in COURSES]:
        parser.error(f"no course for {', '.join(unknown)}; there is one for {', '.join(COURSES)}")
    torch.set_num_threads(1)
    data, found = Fashion(find_data(given.data)), list[Tuned]()
    for contender in given.contenders:
        found.append(search(contender, given.seed, given.seconds, given.target, data, given.scenario))
        write_tuned(given.out, found)


if __name__ == "__main__":
    main()
