"""The ways in which workers train: all of a job do in the same one, and one that does not hears of it."""

from __future__ import annotations

from typing import Final

FASTEST: Final = "fastest"
ROLLING: Final = "rolling"


def different_mode(mode: str, way: str) -> str:
    """A sentence, empty if the job trains in this mode; `way` is what its first worker said."""
    if mode == way:
        return ""
    theirs = f"train in mode {way}" if way else "push updates of their own making"
    return f"the job's workers {theirs}, this one trains in mode {mode}; all of a job train in the same mode"
