"""One process of `mlfabric bench kills`: `python -m mlfabric.bench.kills_member '{"name": "w0", ...}'`.

It lends itself to the fabric and, as a worker, trains. What it does goes to standard output, a line of JSON
each: its address, the roles it holds when they change, every outcome. It obeys words on standard input:
`stop` (train no more), `model PATH` (write the model there), `leave`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from itertools import count
from typing import Any

import msgspec
import numpy as np

from mlfabric.api import Fabric, join
from mlfabric.client import Committed
from mlfabric.demo.classifier import LAYERS, first_weights, gradient
from mlfabric.errors import FabricError
from mlfabric.numerics import Vector
from mlfabric.roles.server import ServerStatistics
from mlfabric.rules import SGD, Pieces, Sum
from mlfabric.runtime.engine import Engine

BATCH = 32
LEARNING_RATE = 0.02
JOIN_S = 30.0
STEP_S = 60.0  # a call that takes longer has hung
LOOK_S = 0.02
IMAGES = 2000
REDUCED = 50_000  # elements of the array that workers sum where they go in step
# The model's last array has a coordinate for every update there can be.
LEDGER = "zz_ledger"


class KillsPart(msgspec.Struct, frozen=True):
    """What a process is told."""

    name: str
    address: str
    roles: tuple[str, ...]
    rate: str
    log: str
    members: int  # expected; 0 for one that comes later
    embed_scheduler: bool = False
    first_coordinate: int = -1  # its coordinates of the ledger; -1: no worker
    coordinates: int = 0  # of all workers
    compute_s: float = 0.02
    divergence: float | None = 0.05
    sync: bool = False  # every step also sums an array over all workers


def main() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"
    )
    part = msgspec.json.decode(sys.argv[1], type=KillsPart)
    fabric = join(
        part.address,
        job="kills",
        name=part.name,
        host=part.name,
        roles=part.roles,
        scheduler=part.embed_scheduler,
        expected=part.members or None,
        up=part.rate,
        down=part.rate,
        log=part.log,
        timeout=JOIN_S,
        engine="thread",  # whose roles are read here
    )
    say({"address": fabric.address})
    threading.Thread(target=tell_roles, args=(fabric,), daemon=True).start()
    trainer = Trainer(fabric, part)
    if part.first_coordinate >= 0:
        trainer.start()
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "stop":
            trainer.stop()
        elif word == "model":
            write_model(fabric, rest)
        elif word == "leave":
            break
    fabric.close()
    say({"left": True})


def tell_roles(fabric: Fabric) -> None:
    """Say which roles this process holds, each time they change: a server's with its epoch; and for which it
    has a replica that could take over."""
    engine = fabric._engine
    assert isinstance(engine, Engine), "this member's engine is a thread"
    told: dict[str, Any] = {}
    while True:
        figures = {name: role.statistics() for name, role in list(engine.node.roles.items())}
        leads = {name: each for name, each in figures.items() if isinstance(each, ServerStatistics)}
        held = {
            "roles": {name: leads[name].epoch if name in leads else 0 for name in figures},
            "followed": [name for name, each in leads.items() if each.followed],
        }
        if held != told:
            told = held
            say(held)
        time.sleep(LOOK_S)


def write_model(fabric: Fabric, path: str) -> None:
    try:
        arrays = fabric.pull(timeout=STEP_S).arrays
        images, labels = synthetic_images(0)
        np.savez(path, ledger=arrays[LEDGER])
        say({"model": path, "loss": gradient(arrays, images, labels)[1]})
    except (FabricError, TimeoutError) as error:
        say({"failed": str(error), "at_s": time.monotonic()})


def synthetic_images(seed: int) -> tuple[Vector, Vector]:
    """Ten clusters in as many dimensions as a small image has points: easy, but not at once."""
    centres = np.random.default_rng(7).standard_normal((LAYERS[-1], LAYERS[0]))
    rng = np.random.default_rng(1000 + seed)
    labels = rng.integers(0, LAYERS[-1], IMAGES)
    images = centres[labels] + 1.5 * rng.standard_normal((IMAGES, LAYERS[0]))
    return images.astype(np.float32), labels


class Trainer:
    """Trains until it is stopped, one update at a time, and marks each update in the ledger."""

    def __init__(self, fabric: Fabric, part: KillsPart) -> None:
        self._fabric = fabric
        self._part = part
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._part.first_coordinate >= 0:
            self._thread.join(2 * STEP_S)
        say({"stopped": not self._thread.is_alive(), "lost": self._fabric.lost})

    def _train(self) -> None:
        part, fabric = self._part, self._fabric
        weights = first_weights()
        elements = sum(array.size for array in weights.values())
        rule = Pieces(((0, elements, SGD(lr=LEARNING_RATE)), (elements, elements + part.coordinates, Sum())))
        images, labels = synthetic_images(part.first_coordinate)
        rng = np.random.default_rng(part.first_coordinate)
        try:
            model = {**weights, LEDGER: np.zeros(part.coordinates, np.float32)}
            fabric.publish(model, apply=rule, divergence=part.divergence, timeout=STEP_S)
            for step in count():
                if self._is_over():
                    return
                arrays = fabric.pull(timeout=STEP_S).arrays
                batch = rng.integers(0, IMAGES, BATCH)
                gradients, loss = gradient(arrays, images[batch], labels[batch])
                time.sleep(part.compute_s)
                self._push(part.first_coordinate + step, gradients, loss)
        except (FabricError, TimeoutError) as error:
            say({"failed": str(error), "at_s": time.monotonic()})

    def _is_over(self) -> bool:
        """Whether it was stopped; where workers go in step, whether any of them was."""
        if not self._part.sync:
            return self._stopping.is_set()
        wishes = np.full(REDUCED, self._stopping.is_set(), np.float32)
        self._fabric.all_reduce(wishes, timeout=STEP_S)
        return bool(wishes[0])

    def _push(self, coordinate: int, gradients: dict[str, Any], loss: float) -> None:
        mark = np.zeros(self._part.coordinates, np.float32)
        mark[coordinate] = 1
        ticket = self._fabric.push({**gradients, LEDGER: mark})
        say({"offered": ticket.update, "coordinate": coordinate})
        outcome = ticket.result(STEP_S)
        committed = isinstance(outcome, Committed)
        reason = "" if isinstance(outcome, Committed) else outcome.reason
        say(
            {
                "outcome": ticket.update,
                "committed": committed,
                "reason": reason,
                "at_s": time.monotonic(),
                "loss": loss,
            }
        )


_speaking = threading.Lock()


def say(what: dict[str, Any]) -> None:
    with _speaking:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
