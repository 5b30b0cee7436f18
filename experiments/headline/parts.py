"""How soon at a target by steps that roll on part by part, if rounds follow each other at one pace.

    python -m experiments.headline.parts --sizes 0.001,0.9 0.0005,0.9 --at-once 2 --round 0.9 --seed 1001

Real gradients in virtual time, as `mlfabric.torch.rolling` makes and applies them; workers compute as long as
the scenario says. The network is only a pace, so this tells what parts, their overlap and step sizes do to
learning, not what links allow.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch

from experiments.headline.run import gradient_of, parse_size
from mlfabric import scenario as scenarios
from mlfabric.bench.train.judging import Curve, reached
from mlfabric.bench.train.settings import SECOND_MOMENT, RunSettings, fit
from mlfabric.bench.train.task import (
    Batches,
    Fashion,
    accuracy,
    find_data,
    flat_weights,
    load_weights,
    make_model,
)
from mlfabric.numerics import Vector
from mlfabric.steptimes import step_factor
from mlfabric.torch.rolledsteps import AT_ONCE, MOST_PARTS, Gathered, Gradient
from mlfabric.torch.rolling import DELAYS_KEPT

LOOK_EVERY_S = 2.0
BETWEEN_S = 0.008  # from one gradient to the next, seen in the lab

CommonModels = Iterator[tuple[float, Vector]]  # when, and the common model from then on


class Pace(msgspec.Struct, frozen=True):
    """How steps follow each other."""

    parts: int
    at_once: int
    round_s: float
    codec: str = "float32"  # of what is summed


class Worker:
    def __init__(self, parts: Sequence[slice], batches: Batches) -> None:
        self.waiting = Gathered(parts, 0)
        self.batches = batches
        self.ages: deque[int] = deque(maxlen=DELAYS_KEPT * len(parts))
        self.step = 0


class PartsRun:
    """The common model, stepped part by part, and where it is expected to be next."""

    def __init__(self, settings: RunSettings, pace: Pace, data: Fashion) -> None:
        self._pace, self._data, self._size = pace, data, settings.step_size
        self._scenario = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
        self._job = self._scenario.jobs[0]
        self._hosts = self._scenario.places(self._job).workers
        self._module = make_model(settings.seed)
        self._model = flat_weights(self._module).copy()
        cuts = [len(self._model) * number // pace.parts for number in range(pace.parts + 1)]
        self._parts = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
        self._moments = np.zeros((2, len(self._model)), np.float32)
        self._moved = np.zeros_like(self._model)
        self._applied = 0
        images = len(data.labels)
        self._workers = [
            Worker(self._parts, Batches(settings.seed, rank, images, settings.batch))
            for rank in range(len(self._hosts))
        ]
        self._queue: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._count = itertools.count()

    def course(self) -> CommonModels:
        """The common model after each of its parts' steps, without end."""
        for rank in range(len(self._workers)):
            self._at(0.0, self._compute, rank)
        self._at(self._pace.round_s / self._pace.parts, self._begin, 0)
        while True:
            now, _, do, about = heapq.heappop(self._queue)
            if do(now, *about):
                yield now, self._model

    def _at(self, when: float, do: Any, *about: Any) -> None:
        heapq.heappush(self._queue, (when, next(self._count), do, about))

    def _compute(self, now: float, rank: int) -> None:
        worker = self._workers[rank]
        ahead = np.float32(1 + fmean(worker.ages) if any(worker.ages) else 0)
        indices = worker.batches.indices(worker.step)
        gradient = gradient_of(self._module, self._data, self._model + ahead * self._moved, indices)
        factor = step_factor(self._scenario, self._job, self._hosts[rank], worker.step)
        worker.step += 1
        over = now + self._scenario.compute_s(self._job) * factor + BETWEEN_S
        self._at(over, self._give, rank, gradient, self._applied)

    def _give(self, now: float, rank: int, gradient: Vector, base: int) -> None:
        self._workers[rank].waiting.add(gradient, (), Gradient(base, len(self._parts)))
        self._compute(now, rank)

    def _begin(self, now: float, step: int) -> None:
        number, pace = step % len(self._parts), self._pace
        total, count = np.zeros_like(self._model[self._parts[number]]), 0
        for worker in self._workers:
            given = worker.waiting.gradients[number]
            if given:
                total += self._carried(worker.waiting.sum_of(number))
                count += len(given)
                worker.ages.extend(max((step - each.base) // len(self._parts), 0) for each in given)
                given.clear()
        every = pace.round_s / pace.parts
        self._at(now + pace.at_once * every, self._end, step, self._carried(total) / max(count, 1), count)
        self._at(now + every, self._begin, step + 1)

    def _carried(self, vector: Vector) -> Vector:
        """What is left of it on the network."""
        carried: Vector = vector.astype(self._pace.codec).astype(np.float32)
        return carried

    def _end(self, now: float, step: int, mean: Vector, count: int) -> bool:
        """Whether the model has moved."""
        self._applied = step + 1
        if not count:
            return False
        part, times = self._parts[step % len(self._parts)], step // len(self._parts) + 1
        first, second = self._size.momentum, SECOND_MOMENT
        moments = self._moments[:, part]
        moments[0] += (1 - first) * (mean - moments[0])
        moments[1] += (1 - second) * (mean * mean - moments[1])
        scale = np.sqrt(moments[1] / (1 - second**times)) + 1e-8
        self._moved[part] = -self._size.lr * moments[0] / (1 - first**times) / scale
        self._model[part] += self._moved[part]
        return True


def follow(
    course: CommonModels, seed: int, data: Fashion, enough: Callable[[Curve], bool]
) -> list[tuple[float, float]]:
    """Accuracy against time, until what was seen is enough."""
    module, curve, next_s = make_model(seed), list[tuple[float, float]](), LOOK_EVERY_S
    for now, model in course:
        if now < next_s:
            continue
        next_s = now + LOOK_EVERY_S
        load_weights(module, model)
        curve.append((now, accuracy(module, data, quarter=0) if np.isfinite(model).all() else 0.0))
        if enough(curve):
            break
    return curve


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=parse_size, required=True, metavar="RATE,BETA")
    parser.add_argument("--parts", type=int, default=MOST_PARTS)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--round", type=float, default=0.9, help="seconds from round to round")
    parser.add_argument("--scenario", default="dynamic-stragglers")
    parser.add_argument("--seed", type=int, default=1001)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--target", type=float, default=0.87)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    data, pace = Fashion(find_data(None)), Pace(given.parts, given.at_once, given.round)
    for size in given.sizes:
        settings = RunSettings("mlfabric-rolling", given.scenario, given.seed, size)

        def enough(curve: Curve) -> bool:
            return curve[-1][0] > given.seconds or reached(curve, given.target) is not None

        curve = follow(PartsRun(settings, pace, data).course(), given.seed, data, enough)
        at = ", ".join(f"{target:g} {reached(curve, target)}" for target in (0.8, 0.84, 0.85, 0.87))
        print(f"{size.lr:g}, {size.momentum:g}: reached {at}; last {curve[-1][1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
