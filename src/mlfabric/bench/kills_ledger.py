"""Whether every update of a job is in its model exactly as often as its worker was told: once or not at all.

An update adds its grant's weight to a coordinate of its own, so the final model shows which updates are in
it, as far as the shard goes that holds the coordinate. Weights, and the shards that lost or applied an update
apart from the others, are read from the workers' event logs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlfabric.bench.kills_job import Life
from mlfabric.bench.kills_member import LEDGER
from mlfabric.eventlog import read_log

TOLERANCE = 1e-3


@dataclass(slots=True)
class WorkerLog:
    """What a worker's event log tells of its updates, and of the shards of the ledger."""

    weights: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))  # of all its grants
    lost: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # by which shards
    applied: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # by these alone
    again: set[tuple[str, int]] = field(default_factory=set)  # of those: a fail-over may have lost it since
    bounds: tuple[tuple[int, int, int], ...] = ()  # (shard, first coordinate, behind its last)

    def shard_of(self, coordinate: int) -> int:
        return next((shard for shard, start, stop in self.bounds if start <= coordinate < stop), 0)


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
        log = read_worker(life.log)
        heard_all = last[life.seat.name] is life and life.stopped
        for update, story in life.updates.items():
            known.add(story.coordinate)
            value = float(ledger[story.coordinate])
            inside = any(abs(value - weight) < TOLERANCE for weight in log.weights[update])
            absent = abs(value) < TOLERANCE
            shard = log.shard_of(story.coordinate)
            said = f"{update} ({_told(update, story.committed, log)}) counts {value:.4g} in shard {shard}"
            if heard_all and (update in life.lost) != bool(log.lost[update]):
                wrong.append(f"{said}, and its worker was told that it is lost: {update in life.lost}")
            if not inside and not absent:
                wrong.append(f"{said}, was granted with {sorted(log.weights[update])}")
                continue
            must = must_not = False
            if story.committed:
                must_not = shard in log.lost[update]
                must = not must_not and (heard_all or divergence == 0)
            elif story.committed is False:
                must_not = shard not in log.applied[update]
                must = not must_not and (divergence == 0 or (heard_all and (update, shard) not in log.again))
            if (must and absent) or (must_not and inside):
                wrong.append(said)
    strangers = [int(at) for at in np.flatnonzero(np.abs(ledger) > TOLERANCE) if int(at) not in known]
    wrong += [f"coordinate {at} counts {float(ledger[at]):.4g}, and nobody offered it" for at in strangers]
    return wrong


def _told(update: str, committed: bool | None, log: WorkerLog) -> str:
    told = "without an outcome" if committed is None else "committed" if committed else "dropped"
    for verb, shards in (("lost", log.lost[update]), ("applied", log.applied[update])):
        if shards:
            told += f", {verb} by shard {', '.join(map(str, sorted(shards)))}"
    return told


def read_worker(path: Path) -> WorkerLog:
    log = WorkerLog()
    for record in read_log(path):
        if record.kind == "event" and record.type == "MessageReceived":
            _hear(log, record.record["message"])
        elif record.type == "Note" and record.role == "worker":
            note = record.record
            told = {"lost": log.lost, "partly-applied": log.applied}.get(note["what"])
            if told is not None:
                for update in note.get("updates", ()):
                    told[update].update(note.get("shards", ()))
    return log


def _hear(log: WorkerLog, message: Any) -> None:
    match message:
        case {"type": "Grant", "update": update, "weight": weight}:
            log.weights[update].add(weight)
        case {"type": "JobReady", "arrays": arrays, "shards": shards}:
            sizes = {array["name"]: int(np.prod(array["shape"])) for array in arrays}
            names = [array["name"] for array in arrays]
            first = sum(sizes[name] for name in names[: names.index(LEDGER)])
            log.bounds = tuple(
                (shard["index"], shard["start"] - first, shard["start"] + shard["count"] - first)
                for shard in shards
            )
        case {"type": "LeaderChanged", "shard": {"index": index}}:
            log.again |= {(update, index) for update, shards in log.applied.items() if index in shards}
