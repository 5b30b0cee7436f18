"""What runs on each host of a training run: steps as the scenario times them, through one contender.

It goes on until it is ended. What happened is in the run folder by then: a line per step in
`steps-RANK.jsonl`, and the model as it was now and then in `snapshots/`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.exchange import Alone, Exchange, Exchanged
from mlfabric.bench.train.settings import RunSettings
from mlfabric.bench.train.steps import StepClock
from mlfabric.bench.train.task import Batches, Fashion, loss_of, make_model
from mlfabric.errors import FabricError
from mlfabric.lab.place import Place, inside
from mlfabric.steptimes import step_factor

DIVERGED: Final = "diverged"  # in the run folder: when the first worker found no numbers any more


class Diverged(Exception):  # noqa: N818 - a result, not a fault
    """The model is no model any more: its loss is infinite or undefined."""


class WorkerOrder(msgspec.Struct, frozen=True):
    """What every rank is told."""

    settings: RunSettings
    hosts: tuple[str, ...]
    data: str
    gently: bool = False  # begun at lowest priority, as other runs are under way; raised when all is loaded


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """A step of a worker; times in seconds since the scenario began."""

    computed_s: float  # its time was over and its gradient there
    done_s: float  # and exchanged
    lasts_s: float  # by the scenario
    gradient_s: float  # of it, really computing
    overran: bool
    delays: tuple[int, ...]
    dropped: int


class Worker:
    def __init__(self, order: WorkerOrder, place: Place, rank: int, folder: Path) -> None:
        assert place.scenario is not None
        assert place.host is not None
        self._settings = order.settings
        self._place, self._rank, self._folder = place, rank, folder
        self._gently = order.gently
        self._scenario, self._host = place.scenario, place.host
        self._job = place.scenario.jobs[0]
        self._nominal_s = place.scenario.compute_s(self._job)
        self._data = Fashion(Path(order.data))
        self._batches = Batches(order.settings.seed, rank, len(self._data.labels), order.settings.batch)
        self._model = make_model(order.settings.seed)
        self._exchange = self._make_exchange(order)
        self._exchange.warm_up(lambda: self._backward(0))
        self._clock = StepClock(self._exchange.sends_early)
        self._exchange.watch(self._clock.computed)
        # Snapshots are dealt over the ranks, so that no straggler holds all of them up.
        self._dealt = 1 if self._exchange.same_everywhere else len(order.hosts)
        self._next_snapshot = rank
        if self._exchange.waits_for_its_turn:
            self._dealt, self._next_snapshot = len(order.hosts), 0

    def _make_exchange(self, order: WorkerOrder) -> Exchange:
        entry, size, model = find_entry(self._settings.contender), self._settings.step_size, self._model
        if entry.how == "alone":
            return Alone(model, size)
        if entry.how == "ddp":
            from mlfabric.bench.train.ddp import Ddp

            return Ddp(model, size, entry.options)
        if entry.how == "first-come":
            from mlfabric.bench.train.first_come_worker import FirstCome

            return FirstCome(model, size, entry.options, self._rank, order.hosts, self._folder)
        if entry.how == "torchft":
            from mlfabric.bench.train.peers import TorchftDiloco

            return TorchftDiloco(model, size, entry.options["local_steps"], self._rank, order.hosts)
        if entry.how == "hivemind":
            from mlfabric.bench.train.peers import HivemindLocal

            steps, batch = entry.options["local_steps"], self._settings.batch
            return HivemindLocal(model, size, steps, batch, self._rank, order.hosts, self._folder)
        from mlfabric.bench.train.fabric import FabricExchange

        return FabricExchange(model, size, entry.options)

    def run(self) -> None:
        (self._folder / "snapshots").mkdir(exist_ok=True)
        if self._gently:
            os.setpriority(os.PRIO_PGRP, 0, 0)  # with all threads and processes begun so far
        began = self._place.begin_together()
        try:
            self._train(began)
        except Diverged:
            draft = self._folder / f"{DIVERGED}-{self._rank}"
            draft.write_text(repr(time.monotonic() - began))
            draft.replace(self._folder / DIVERGED)
            # Whoever made the run ends it; a worker that left would be a failure of its own.
            while True:
                time.sleep(60.0)

    def _train(self, began: float) -> None:
        record = os.open(self._folder / f"steps-{self._rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        encode = msgspec.json.Encoder().encode
        step = 0
        while True:
            lasts_s = self._nominal_s * step_factor(self._scenario, self._job, self._host, step)
            self._clock.begin(lasts_s)
            with self._exchange.passing():
                self._backward(step)
            self._clock.computed()
            done = exchange_gradient(self._exchange, self._model)
            done_s = time.monotonic() - began
            line = StepRecord(
                self._clock.over - began,
                done_s,
                lasts_s,
                self._clock.gradient_s,
                self._clock.overran,
                done.delays,
                done.dropped,
            )
            os.write(record, encode(line) + b"\n")
            if done.shared and self._rank < self._dealt:
                self._save_if_due(done_s)
            step += 1

    def _backward(self, step: int) -> None:
        loss = loss_of(self._exchange.module, self._data, self._batches.indices(step))
        if not math.isfinite(loss.item()):
            raise Diverged
        loss.backward()

    def _save_if_due(self, now_s: float) -> None:
        due_s = (self._next_snapshot + 1) * self._settings.snapshot_s
        if now_s < due_s:
            return
        dealt = 1 if self._exchange.waits_for_its_turn else self._dealt
        turns_missed = int((now_s - due_s) / (dealt * self._settings.snapshot_s))
        self._next_snapshot += dealt * (1 + turns_missed)
        if self._exchange.waits_for_its_turn and not self._is_first(self._next_snapshot):
            return
        final = self._folder / "snapshots" / f"{int(now_s * 1000):09d}-{self._rank}.npy"
        draft = final.with_suffix(".new")
        with draft.open("wb") as file:
            np.save(file, self._exchange.weights())
        draft.replace(final)

    def _is_first(self, turn: int) -> bool:
        """Whether nobody else has taken this turn."""
        try:
            (self._folder / f"turn-{turn}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def exchange_gradient(exchange: Exchange, model: Any) -> Exchanged:
    """A contender may refuse what is no number; whatever else it complains of is an error."""
    try:
        return exchange.step()
    except FabricError:
        if is_finite(model):
            raise
        raise Diverged from None


def is_finite(model: Any) -> bool:
    """Weights and gradients, and the sums of their squares, are numbers."""
    with torch.no_grad():
        tensors = [each for p in model.parameters() for each in (p, p.grad) if each is not None]
        return all(bool(torch.isfinite(tensor.square().sum())) for tensor in tensors)


def main(argv: Any = None) -> None:
    order = msgspec.json.decode((argv or sys.argv)[1], type=WorkerOrder)
    torch.set_num_threads(1)
    Worker(order, inside(), int(os.environ["RANK"]), Path(os.environ["MLFABRIC_RUN_FOLDER"])).run()


if __name__ == "__main__":
    main()
