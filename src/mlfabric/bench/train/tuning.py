"""The step size of each contender: the same small grid for all, on seeds that are not reported.

Five step sizes by two momenta. If the best is on the grid's edge the grid moves half its width that way, for
every contender alike up to `MOVES` times, so that nobody is judged at an edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.errors import FabricError

STEP_SIZES: Final = (0.00025, 0.0005, 0.001, 0.002, 0.004)
MOMENTA: Final = (0.0, 0.9)
MOVES: Final = 2
# Seeds of tuning are these; of reports, lower ones.
FIRST_TUNING_SEED: Final = 1001


class Trial(msgspec.Struct, frozen=True):
    step_size: StepSize
    seconds: float | None  # to the target; None: not reached
    best: float  # accuracy seen
    followed_s: float = 0.0  # how long it was looked at


class Tuned(msgspec.Struct, frozen=True):
    """What a contender's grid showed."""

    contender: str
    scenario: str
    chosen: StepSize
    on_edge: bool  # the best is at the end of the last grid tried
    trials: list[Trial]


def grid(moved: int = 0) -> list[StepSize]:
    """The same step sizes with each momentum: Adam's is a mean, with which a gradient goes no further."""
    shift = 4.0**moved
    return [StepSize(lr * shift, momentum) for momentum in MOMENTA for lr in STEP_SIZES]


def best_of(trials: Sequence[Trial]) -> Trial:
    """Soonest at the target; among those that never were, the most accurate."""
    return min(trials, key=lambda t: (math.inf if t.seconds is None else t.seconds, -t.best, t.step_size.lr))


def edge_of(trials: Sequence[Trial], best: Trial) -> int:
    """-1 or 1 if the best is the smallest or largest step size tried with its momentum, else 0."""
    tried = sorted(t.step_size.lr for t in trials if t.step_size.momentum == best.step_size.momentum)
    if len(tried) == 1:
        return 0
    return {tried[0]: -1, tried[-1]: 1}.get(best.step_size.lr, 0)


def next_sizes(trials: Sequence[Trial]) -> list[StepSize]:
    """What is still to be tried, the middle of the grid first; empty: the search is over."""
    tried = {trial.step_size for trial in trials}
    moved = 0
    for _ in range(MOVES + 1):
        sizes = _from_the_middle(grid(moved))
        left = [size for size in sizes if size not in tried]
        if left:
            return left
        edge = edge_of(trials, best_of(trials))
        if not edge:
            break
        moved += edge
    return []


def _from_the_middle(sizes: Sequence[StepSize]) -> list[StepSize]:
    """So that a good one is known soon."""
    middle = len(STEP_SIZES) // 2
    ranked = enumerate(sizes)
    return [
        size
        for _, size in sorted(ranked, key=lambda item: (abs(item[0] % len(STEP_SIZES) - middle), item[0]))
    ]


def summarise_trials(contender: str, scenario: str, trials: Sequence[Trial]) -> Tuned:
    best = best_of(trials)
    return Tuned(contender, scenario, best.step_size, bool(edge_of(trials, best)), list(trials))


def tune(common: RunSettings, target: float, run: Callable[[RunSettings], RunResult]) -> Tuned:
    """Try the grid for one contender in one scenario."""
    trials: list[Trial] = []
    while sizes := next_sizes(trials):
        result = run(msgspec.structs.replace(common, step_size=sizes[0]))
        most = max((accuracy for _, accuracy in result.curve), default=0.0)
        trials.append(Trial(sizes[0], result.reached(target), most, result.seconds))
    return summarise_trials(common.contender, common.scenario, trials)


def write_tuned(path: Path, tuned: Sequence[Tuned]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(tuned)), indent=1) + b"\n")


def read_tuned(path: Path) -> dict[str, StepSize]:
    """The chosen step size of each contender."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Tuned])
    except (OSError, msgspec.DecodeError) as error:
        raise FabricError(f"{path} is no result of --tune: {error}") from None
    return {tuned.contender: tuned.chosen for tuned in found}
