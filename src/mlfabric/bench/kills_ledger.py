"""Whether every update of a job is in its model exactly as often as its worker was told: once or not at all.

An update adds its grant's weight to a coordinate of its own, so the final model shows which updates are in
it. The weights are read from the workers' event logs.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from mlfabric.bench.kills_job import Life
from mlfabric.eventlog import read_log

TOLERANCE = 1e-3


def judge_ledger(lives: list[Life], model: Path, divergence: float | None) -> list[str]:
    """What is wrong; nothing: the ledger holds."""
    with np.load(model) as file:
        ledger: Any = file["ledger"]
    last = {life.seat.name: life for life in lives}
    wrong: list[str] = []
    known: set[int] = set()
    for life in lives:
        if not life.updates:
            continue
        lost = set(life.lost)
        weights = granted_weights(life.log)
        heard_all = last[life.seat.name] is life and life.stopped
        for update, story in life.updates.items():
            known.add(story.coordinate)
            value = float(ledger[story.coordinate])
            inside = any(abs(value - weight) < TOLERANCE for weight in weights[update])
            absent = abs(value) < TOLERANCE
            said = f"{update} (committed {story.committed}, lost {update in lost}) counts {value:.4g}"
            if not inside and not absent:
                wrong.append(f"{said}, was granted with {sorted(weights[update])}")
                continue
            must = story.committed is True and update not in lost and (heard_all or divergence == 0)
            must_not = story.committed is False or update in lost
            if (must and absent) or (must_not and inside):
                wrong.append(said)
    strangers = [int(at) for at in np.flatnonzero(np.abs(ledger) > TOLERANCE) if int(at) not in known]
    wrong += [f"coordinate {at} counts {float(ledger[at]):.4g}, and nobody offered it" for at in strangers]
    return wrong


def granted_weights(log: Path) -> dict[str, set[float]]:
    """By update: the weights of all its grants, from a worker's event log."""
    weights: dict[str, set[float]] = defaultdict(set)
    for record in read_log(log):
        if record.kind == "event" and record.type == "MessageReceived":
            message = record.record["message"]
            if message["type"] == "Grant":
                weights[message["update"]].add(message["weight"])
    return weights
