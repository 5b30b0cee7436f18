"""What the reader found wrong or worth knowing, collected while it reads and printed once.

A note is a full sentence for people. Counts are kept by name so that a million odd packets make one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# A damaged file can be damaged in thousands of places; the first few say enough.
_MOST_DAMAGE: Final = 20


@dataclass
class Notes:
    """The sentences and counts of one reading."""

    sentences: list[str] = field(default_factory=list)
    damaged: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    _damages: int = 0

    def say(self, sentence: str) -> None:
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def damage(self, sentence: str) -> None:
        """The file is not whole: said, and remembered for the flag that results carry."""
        self.damaged = True
        self._damages += 1
        if self._damages == _MOST_DAMAGE + 1:
            self.say("further damage is not listed")
        elif self._damages <= _MOST_DAMAGE:
            self.say(sentence)

    def count(self, what: str, number: int) -> None:
        if number:
            self.counts[what] = self.counts.get(what, 0) + int(number)
