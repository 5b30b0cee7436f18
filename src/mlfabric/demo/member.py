"""One process of the demo: `python -m mlfabric.demo.member '{"name": "w0", ...}'`.

A worker trains until it is told to stop (SIGUSR1) and stays a member until the end (SIGTERM); the others
only lend themselves to the fabric. What a worker did
goes to standard output as one line of JSON at the end.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from mlfabric.api import Fabric, join_with
from mlfabric.client import Committed
from mlfabric.config import from_environment
from mlfabric.demo.classifier import Digits, first_weights, gradient
from mlfabric.errors import FabricError
from mlfabric.rules import SGD

BATCH = 64
LEARNING_RATE = 0.03
MOMENTUM = 0.6


class Part(msgspec.Struct, frozen=True):
    """What a process of the demo is told."""

    name: str
    address: str
    roles: tuple[str, ...]
    up: str  # rates of its link
    down: str
    folder: str
    members: int
    embed_scheduler: bool = False
    compute_s: float = 0.02
    divergence: float = 0.02


class Report(msgspec.Struct, frozen=True):
    """What a worker did."""

    name: str
    committed: int
    dropped: int
    lost: int
    delays: tuple[int, ...]
    reasons: tuple[str, ...]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    part = msgspec.json.decode(sys.argv[1], type=Part)
    folder = Path(part.folder)
    settings = replace(
        from_environment(
            part.address,
            job="demo",
            name=part.name,
            host=part.name,
            up=part.up,
            down=part.down,
            embed_scheduler=part.embed_scheduler,
            expected=part.members,
            log=folder / "events.jsonl",
        ),
        mirror=folder / part.name,
    )
    trained, ended = threading.Event(), threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: trained.set())
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the demo's own process decides
    with join_with(settings, part.roles, timeout=30) as fabric:
        if "worker" in part.roles:
            report = _train(fabric, part, folder, trained, ended)
            sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
            sys.stdout.flush()
        ended.wait()


def _train(
    fabric: Fabric, part: Part, folder: Path, trained: threading.Event, ended: threading.Event
) -> Report:
    digits = Digits(folder / "digits.npz")
    rng = np.random.default_rng(int(part.name[1:]))
    rule = SGD(lr=LEARNING_RATE, momentum=MOMENTUM)
    fabric.publish(first_weights(), apply=rule, divergence=part.divergence)
    dropped = 0
    delays: list[int] = []
    reasons: list[str] = []
    try:
        while not trained.is_set() and not ended.is_set():
            model = fabric.pull(timeout=30)
            began = time.monotonic()
            batch = rng.integers(0, len(digits.labels), BATCH)
            update, _ = gradient(model.arrays, digits.images[batch], digits.labels[batch])
            time.sleep(max(part.compute_s - (time.monotonic() - began), 0))
            outcome = fabric.push(update).result(timeout=30)
            if isinstance(outcome, Committed):
                delays.append(outcome.delay_updates)
            else:
                dropped += 1
                reasons.append(outcome.reason)
    except (FabricError, TimeoutError) as error:
        logging.getLogger("mlfabric").warning("worker %s: %s", part.name, error)
    return Report(part.name, len(delays), dropped, len(fabric.lost), tuple(delays), tuple(reasons))


if __name__ == "__main__":
    main()
