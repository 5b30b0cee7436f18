"""One host's process of a run: trains through the servers that all hosts share, and says what it saw.

It goes on until it is ended. A line per step is in `steps-RANK.jsonl` of the run folder by then, the fabric's
events in `events-RANK.jsonl`, the weights it leads or follows in `weights-RANK/`.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from mlfabric.api import Fabric, join_with
from mlfabric.bench.train.settings import RunSettings
from mlfabric.bench.train.steps import StepClock
from mlfabric.bench.train.task import Batches, Fashion, flat_weights, load_weights, loss_of, make_model
from mlfabric.client import Committed, Model
from mlfabric.config import from_environment
from mlfabric.lab.place import Place, inside
from mlfabric.messages import MEMBER_ROLES
from mlfabric.rules import SGD
from mlfabric.steptimes import step_factor

ARRAY = "model"
PATIENCE_S = 60.0
JUDGED_IMAGES = 256  # the same ones at every look


class Order(msgspec.Struct, frozen=True):
    """What every rank is told."""

    settings: RunSettings
    divergence: float | None
    data: str
    observers: tuple[int, ...] = ()  # ranks that look at every model they get


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A step: when its model was there, in seconds since the beginning, and what it was."""

    at_s: float
    version: int
    epochs: int  # of all shards together: it rises with every change of a leader
    committed: bool
    lost: int  # own updates that a fail-over lost, so far
    loss: float | None = None  # on the images that are always the same


def weights_folder(folder: Path, rank: int) -> Path:
    return folder / f"weights-{rank}"


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"events-{rank}.jsonl"


class Member:
    def __init__(self, order: Order, place: Place) -> None:
        assert place.scenario is not None
        assert place.host is not None
        assert place.folder is not None
        self._order, self._place, self._folder = order, place, place.folder
        self._scenario, self._host = place.scenario, place.host
        settings, self._job = order.settings, place.scenario.jobs[0]
        self._nominal_s = place.scenario.compute_s(self._job)
        self._data = Fashion(Path(order.data))
        self._batches = Batches(settings.seed, place.rank, len(self._data.labels), settings.batch)
        self._model = make_model(settings.seed)
        self._observes = place.rank in order.observers

    def join(self) -> Fabric:
        settings = replace(
            from_environment(log=log_file(self._folder, self._place.rank)),
            mirror=weights_folder(self._folder, self._place.rank),
        )
        return join_with(settings, MEMBER_ROLES, PATIENCE_S)

    def run(self, fabric: Fabric) -> None:
        size = self._order.settings.step_size
        fabric.publish(
            {ARRAY: flat_weights(self._model)},
            apply=SGD(size.lr, size.momentum),
            divergence=self._order.divergence,
            timeout=PATIENCE_S,
        )
        pulled = fabric.pull(PATIENCE_S)
        load_weights(self._model, pulled.arrays[ARRAY])
        clock = StepClock(at_the_end=False)
        record = os.open(
            self._folder / f"steps-{self._place.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        began = self._place.begin_together()
        step = 0
        while True:
            lasts_s = self._nominal_s * step_factor(self._scenario, self._job, self._host, step)
            clock.begin(lasts_s)
            loss_of(self._model, self._data, self._batches.indices(step)).backward()
            clock.computed()
            outcome = fabric.push({ARRAY: self._take_gradient()}).result(PATIENCE_S)
            pulled = fabric.pull(PATIENCE_S)
            at_s = time.monotonic() - began
            load_weights(self._model, pulled.arrays[ARRAY])
            committed = isinstance(outcome, Committed)
            line = self._line(at_s, pulled, committed, len(fabric.lost))
            os.write(record, msgspec.json.encode(line) + b"\n")
            step += 1

    def _line(self, at_s: float, pulled: Model, committed: bool, lost: int) -> Line:
        epochs = sum(version.epoch for version in pulled.versions)
        return Line(at_s, pulled.version, epochs, committed, lost, self._look() if self._observes else None)

    def _look(self) -> float:
        """How good the model is that was just pulled."""
        with torch.no_grad():
            return float(loss_of(self._model, self._data, torch.arange(JUDGED_IMAGES)))

    def _take_gradient(self) -> Any:
        gradients = [p.grad.reshape(-1) for p in self._model.parameters()]
        flat = torch.cat(gradients).numpy()
        self._model.zero_grad()
        return flat


def main() -> None:
    torch.set_num_threads(1)
    member = Member(msgspec.json.decode(sys.argv[1], type=Order), inside())
    with member.join() as fabric:
        member.run(fabric)


if __name__ == "__main__":
    main()
