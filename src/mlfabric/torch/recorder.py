"""What this process called lately, in the form of torch's flight recorder, for when something hangs.

torch's own recorder and profiler see nothing of a group written in Python; this gives them the same facts.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("mlfabric")


@dataclass(slots=True)
class Record:
    """One call, from the moment it was made."""

    number: int
    group: str
    rank: int
    size: int
    sequence: int
    name: str
    shapes: list[list[int]]
    dtype: str
    timeout_s: float
    is_message: bool
    created_ns: int
    ended_ns: int | None = None
    error: str | None = None

    def end(self, error: str | None) -> None:
        self.ended_ns = time.time_ns()
        self.error = error

    def title(self) -> str:
        """The call in words."""
        shapes = ", ".join(str(tuple(shape)) for shape in self.shapes[:3])
        more = f" and {len(self.shapes) - 3} more" if len(self.shapes) > 3 else ""
        of = f" of {shapes}{more} {self.dtype}" if self.shapes else ""
        return f"{self.name} number {self.sequence} in group {self.group}{of}"

    def entry(self) -> dict[str, Any]:
        """The form that torch's analysis of flight recorder files reads."""
        return {
            "frames": [],
            "record_id": self.number,
            "pg_id": 0,
            "process_group": [self.group, self.group],
            "collective_seq_id": 0 if self.is_message else self.sequence,
            "p2p_seq_id": self.sequence if self.is_message else 0,
            "op_id": self.number,
            "profiling_name": f"mlfabric:{self.name}",
            "time_created_ns": self.created_ns,
            "time_discovered_started_ns": self.created_ns,
            "time_discovered_completed_ns": self.ended_ns if self.error is None else None,
            "input_sizes": self.shapes,
            "input_dtypes": [self.dtype] * len(self.shapes),
            "output_sizes": self.shapes,
            "output_dtypes": [self.dtype] * len(self.shapes),
            "state": "completed" if self.ended_ns is not None and self.error is None else "started",
            "error": self.error,
            "timeout_ms": int(self.timeout_s * 1000),
            "is_p2p": self.is_message,
            "retired": self.ended_ns is not None,
        }


class Recorder:
    def __init__(self, rank: int, entries: int, prefix: str) -> None:
        self._rank = rank
        self._prefix = prefix
        self._records: deque[Record] = deque(maxlen=entries)
        self._numbers = itertools.count(1)
        self._dumped = False

    def begin(
        self,
        group: str,
        rank: int,
        size: int,
        sequence: int,
        name: str,
        tensors: Iterable[torch.Tensor],
        timeout_s: float,
        is_message: bool,
    ) -> Record:
        held = list(tensors)
        dtype = str(held[0].dtype).removeprefix("torch.") if held else ""
        record = Record(
            next(self._numbers),
            group,
            rank,
            size,
            sequence,
            name,
            [list(each.shape) for each in held],
            dtype,
            timeout_s,
            is_message,
            time.time_ns(),
        )
        self._records.append(record)
        return record

    def document(self) -> dict[str, Any]:
        records = list(self._records)
        groups = sorted({(record.group, record.size) for record in records})
        return {
            "version": "2.4",
            "backend": "mlfabric",
            "rank": self._rank,
            "pg_config": {
                name: {"name": name, "desc": name, "ranks": str(list(range(size)))} for name, size in groups
            },
            "pg_status": {
                name: {
                    "last_enqueued_collective": max(
                        (r.sequence for r in records if r.group == name and not r.is_message), default=-1
                    ),
                    "last_completed_collective": max(
                        (
                            r.sequence
                            for r in records
                            if r.group == name and not r.is_message and r.ended_ns and r.error is None
                        ),
                        default=-1,
                    ),
                }
                for name, _ in groups
            },
            "entries": [record.entry() for record in records],
        }

    def dump(self, why: str) -> None:
        """Write the record down, once; a file that can't be written is a line in the log."""
        if self._dumped:
            return
        self._dumped = True
        path = Path(f"{self._prefix}{self._rank}")
        try:
            path.write_text(json.dumps(self.document()), encoding="utf-8")
        except OSError as error:
            logger.warning("%s; the record of recent operations can't be written: %s", why, error)
        else:
            logger.warning("%s; the record of recent operations is in %s", why, path)


def spanned(name: str, begin: Callable[[], Any]) -> Any:
    """Have the profiler show a span from the call to its end, if it runs."""
    if not torch.autograd._profiler_enabled():
        return begin()
    with torch.profiler.record_function(f"mlfabric:{name}") as span:
        work = begin()
        if not work.is_completed():
            span._call_end_callbacks_on_future(work.get_future())
    return work
