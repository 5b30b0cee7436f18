"""The step size of every contender by schedules of the simulator: the same grid for all, on a seed of tuning.

Five step sizes by two momenta, moved while the best is on the edge, as `bench train --tune` does in a lab. A
trial is real training that follows the contender's schedule. It ends when it is at the target, when it has
learned nothing for a while, when it is not where the best trial before it was in half the time, or when that
was at the target sooner. Trials are kept in a folder,
so that the search may be broken off at any time; what is complete goes into a file for `bench train --tuned`.
"""

from __future__ import annotations

import argparse
import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from experiments.headline.run import SCENARIO, Applied, Follower, Where, schedule
from mlfabric.bench.train.judging import Curve, reached
from mlfabric.bench.train.settings import DEFAULT_BATCH, DEFAULT_RATE, REACHED_IN_A_ROW, StepSize
from mlfabric.bench.train.task import Fashion, find_data
from mlfabric.bench.train.tuning import (
    FIRST_TUNING_SEED,
    Trial,
    Tuned,
    best_of,
    next_sizes,
    summarise_trials,
    write_tuned,
)
from mlfabric.errors import FabricError

# Whose schedule stands for whom.
POLICIES = {
    "alone": "alone",
    "gloo": "ring",
    "fcfs-1": "fcfs-1",
    "fcfs-sharded": "uniform-shards",
    "ssp": "ssp",
    "mlfabric-sync": "allreduce",
    "mlfabric-rolling": "rolling",
    "mlfabric-fastest": "backup",
    "mlfabric-async": "mlfabric",
    "mlfabric-alongside": "mlfabric-alongside",
    "mlfabric-ssp": "ssp",
    "mlfabric-backup": "rounds-7",
}
# Whose steps are of the same gradients as another's, only at other times: trained once, timed twice.
SAME_STEPS = {"gloo": "mlfabric-sync", "mlfabric-ssp": "ssp"}
Leader = list[tuple[float, float]]
HOPELESS_AFTER_S, HOPELESS_BELOW = 60.0, 0.2


@dataclass(frozen=True)
class Search:
    """All that trials depend on."""

    where: Where
    target: float
    batch: int
    look_every: int

    def enough(self, curve: Curve, leader: Curve) -> bool:
        """The leader is the best trial before."""
        at, seen = curve[-1]
        if at > HOPELESS_AFTER_S:
            lately = max(seen for _, seen in curve[-REACHED_IN_A_ROW:])
            led = max((seen for then, seen in leader if then <= at / 2), default=0.0)
            if seen < HOPELESS_BELOW or lately < led:
                return True
        best_s = reached(leader, self.target)
        return reached(curve, self.target) is not None or (best_s is not None and at > best_s)


class Bench:
    """A contender's trials, made and remembered in a folder."""

    def __init__(self, search: Search, folder: Path, data: Path) -> None:
        self._search, self._folder, self._data = search, folder, data
        self._follower: Follower | None = None
        self._steps: dict[str, list[Applied]] = {}

    def made(self, contender: str) -> list[Trial]:
        if contender in SAME_STEPS:
            return self._timed_again(contender, SAME_STEPS[contender])
        path = self._folder / f"{contender}.json"
        return msgspec.json.decode(path.read_bytes(), type=list[Trial]) if path.exists() else []

    def make(self, contender: str, size: StepSize) -> Trial:
        search, made, ahead = self._search, self.made(contender), f"leader-{contender}.json"
        path = self._folder / ahead
        leader = msgspec.json.decode(path.read_bytes(), type=Leader) if path.exists() else []
        if self._follower is None:
            data, seed = Fashion(self._data), search.where.seed
            self._follower = Follower(data, seed, search.look_every, search.batch)
        curve = self._follower.follow(
            self._schedule(contender), size, lambda curve: search.enough(curve, leader)
        )
        most = max((seen for _, seen in curve), default=0.0)
        trial = Trial(size, reached(curve, search.target), most, curve[-1][0] if curve else 0.0)
        if best_of([*made, trial]) == trial:
            self._write(ahead, curve)
        self._write(f"{contender}.json", [*made, trial])
        return trial

    def _timed_again(self, contender: str, trained: str) -> list[Trial]:
        if not (trials := self.made(trained)):
            return []
        longer = replace(self._search.where, seconds=4 * self._search.where.seconds)
        there, here = self._schedule(trained), schedule(POLICIES[contender], longer)
        if any(one.parts != other.parts for one, other in zip(there, here, strict=False)):
            raise FabricError(f"{contender} does not make the steps of {trained}; train it by itself")
        times = [step.at_s for step in there]

        def at(seconds: float) -> float:
            return here[min(bisect_left(times, seconds), len(here) - 1)].at_s

        return [
            Trial(t.step_size, None if t.seconds is None else at(t.seconds), t.best, at(t.followed_s))
            for t in trials
        ]

    def _schedule(self, contender: str) -> list[Applied]:
        policy = POLICIES[contender]
        path = self._folder / f"schedule-{policy}.json"
        if policy not in self._steps and path.exists():
            self._steps[policy] = msgspec.json.decode(path.read_bytes(), type=list[Applied])
        elif policy not in self._steps:
            self._steps[policy] = schedule(policy, self._search.where)
            self._write(path.name, self._steps[policy])
        return self._steps[policy]

    def _write(self, name: str, value: object) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{name}.new"
        draft.write_bytes(msgspec.json.encode(value))
        draft.replace(self._folder / name)


def table(found: Sequence[Tuned]) -> str:
    """For people."""
    lines = ["| contender | schedule | learning rate, momentum | to the target | best accuracy | trials |"]
    lines.append("|---|---|---|---|---|---|")
    for tuned in found:
        best = next(trial for trial in tuned.trials if trial.step_size == tuned.chosen)
        at = f"{best.seconds:.0f} s" if best.seconds is not None else f"> {best.followed_s:.0f} s"
        edge = ", on the edge" if tuned.on_edge else ""
        lines.append(
            f"| `{tuned.contender}` | `{POLICIES[tuned.contender]}` | {tuned.chosen.lr:g}, "
            f"{tuned.chosen.momentum:g}{edge} | {at} | {best.best:.3f} | {len(tuned.trials)} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", nargs="*", default=list(POLICIES), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--seed", type=int, default=FIRST_TUNING_SEED)
    parser.add_argument("--seconds", type=float, default=250.0, help="of the schedules")
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--scenario", default=SCENARIO)
    parser.add_argument("--rate", default=DEFAULT_RATE, help="of the fastest link")
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH)
    parser.add_argument("--look-every", type=int, default=30, help="gradients")
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/headline-tuning"), help="where trials are kept"
    )
    parser.add_argument("--out", type=Path, help="write what is complete, for `bench train --tuned`")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds; no trial begins later")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    where = Where(given.seed, given.seconds, given.scenario, given.rate)
    search = Search(where, given.target, given.batch, given.look_every)
    name = f"adam-{given.scenario}-{given.rate}-batch{given.batch}-seed{given.seed}"
    name += f"-{given.seconds:g}s-{given.target:g}"
    bench = Bench(search, given.folder / name, find_data(given.data))
    for contender in (name for name in given.contenders if name not in SAME_STEPS):
        while sizes := next_sizes(bench.made(contender)):
            if time.monotonic() - began > given.stop_after:
                return
            trial = bench.make(contender, sizes[0])
            at = f"{trial.seconds:.0f} s" if trial.seconds is not None else f"> {trial.followed_s:.0f} s"
            size = f"lr {trial.step_size.lr:g} momentum {trial.step_size.momentum:g}"
            print(f"{contender} {size}: {at}, best {trial.best:.3f}", flush=True)
    found = [
        summarise_trials(contender, given.scenario, made)
        for contender in POLICIES
        if (made := bench.made(contender)) and not next_sizes(made)
    ]
    if given.out is not None:
        write_tuned(given.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
