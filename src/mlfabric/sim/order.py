"""The order of application: who may overtake whom on the way, so that nobody is applied beyond its bound.

An update that is let go gets the next number. Applied by number it has the delay that was planned for it;
what is left to the bound is its slack. One that is complete may overtake those still on their way only while
each of them has slack left, and every overtaking costs each of them one. Otherwise it waits, at most until
the late one's lease ends: the caller drops that one then. So no delay ever exceeds the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

# Slack of numbers that nothing is awaited for, and of updates without a bound.
ENDLESS: Final = 1 << 60
# Numbers that are through are forgotten this many at a time.
FORGET: Final = 1024


@dataclass(slots=True, eq=False)
class Numbered:
    """An update, or a sum of several, on its way."""

    number: int
    bases: tuple[int, ...]  # of its members, in the order in which they are applied
    lease_until: float
    complete: bool = False


@dataclass(slots=True)
class Settled:
    """What an arrival or a drop decides, in order."""

    applied: list[Numbered] = field(default_factory=list)


class ApplicationOrder:
    """The numbers of one job. `version` counts what is applied; the caller reads it, only this class adds."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.version = 0
        self.placed = 0  # applied, or on its way
        self._open: dict[int, Numbered] = {}
        self._held: list[Numbered] = []  # complete, behind one without slack; by number
        self._next = 0
        self._first = 0  # number of the first entry of the slacks
        self._slack: npt.NDArray[np.int64] = np.full(4 * FORGET, ENDLESS, dtype=np.int64)

    @property
    def waiting(self) -> int:
        """How many are complete and wait for an earlier one."""
        return len(self._held)

    def give_number(self, bases: tuple[int, ...], lease_until: float) -> Numbered:
        """The next number; the caller has made sure that all members are within the bound there."""
        entry = Numbered(self._next, bases, lease_until)
        self._open[entry.number] = entry
        slack = ENDLESS
        if self.bound is not None:
            slack = min(self.bound - (self.placed + k - base) for k, base in enumerate(bases))
            if slack < 0:
                raise ValueError(f"update {entry.number} would be {-slack} beyond its bound if sent next")
        self._make_room()
        self._slack[entry.number - self._first] = slack
        self._next += 1
        self.placed += len(bases)
        return entry

    def _make_room(self) -> None:
        if self._next - self._first < len(self._slack):
            return
        oldest = min(self._open)
        kept = self._slack[oldest - self._first :]
        grown = np.full(max(len(kept) + 2 * FORGET, 4 * FORGET), ENDLESS, dtype=np.int64)
        grown[: len(kept)] = kept
        self._slack, self._first = grown, oldest

    def arrive(self, entry: Numbered) -> Settled:
        """All its bytes are there."""
        entry.complete = True
        settled = Settled()
        if self._may_overtake(entry):
            self._apply(entry, settled)
            self._look_again(settled)
        else:
            self._held.append(entry)
            self._held.sort(key=lambda held: held.number)
        return settled

    def blockers(self) -> list[Numbered]:
        """Those on their way that the first of the waiting may not overtake."""
        if not self._held:
            return []
        first = self._held[0]
        at = first.number - self._first
        return [self._open[int(k) + self._first] for k in np.flatnonzero(self._slack[:at] < len(first.bases))]

    def drop(self, entry: Numbered) -> Settled:
        """It won't be applied; those behind it gain what it would have cost them."""
        settled = Settled()
        if entry.number in self._open:
            self._remove(entry)
            self._look_again(settled)
        return settled

    def _remove(self, entry: Numbered) -> None:
        del self._open[entry.number]
        at = entry.number - self._first
        self._slack[at] = ENDLESS
        behind = self._slack[at + 1 : self._next - self._first]
        behind[behind < ENDLESS // 2] += len(entry.bases)
        self.placed -= len(entry.bases)
        if entry in self._held:
            self._held.remove(entry)

    def _may_overtake(self, entry: Numbered) -> bool:
        before = self._slack[: entry.number - self._first]
        return not len(before) or int(before.min()) >= len(entry.bases)

    def _apply(self, entry: Numbered, settled: Settled) -> None:
        at = entry.number - self._first
        before = self._slack[:at]
        before[before < ENDLESS // 2] -= len(entry.bases)
        self._slack[at] = ENDLESS
        del self._open[entry.number]
        settled.applied.append(entry)
        self.version += len(entry.bases)

    def _look_again(self, settled: Settled) -> None:
        """Whoever waited may go as soon as nobody without slack is before it."""
        while self._held and self._may_overtake(self._held[0]):
            self._apply(self._held.pop(0), settled)
