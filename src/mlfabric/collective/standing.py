"""The plans that a rank of a group holds, and which of them an operation goes by.

All ranks have to choose the same one. Each announces, with every operation, the newest plan it holds and the
newest it knows all to hold: what all hold may be used, and who comes last knows most. So a plan that arrives
while some wait for a late rank is used at once, though they announced the operation before they had it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mlfabric.collective.frames import Announcement
from mlfabric.collective.routes import Shares, equal_shares


class StandingPlans:
    def __init__(self, size: int, rank: int) -> None:
        self._rank = rank
        self._plans: dict[int, Shares] = {0: equal_shares(size)}
        self._held = [0] * size  # the newest of each rank, as far as heard
        self._common = 0  # the newest that all are known to hold

    def __getitem__(self, number: int) -> Shares:
        return self._plans[number]

    @property
    def newest(self) -> int:
        return self._held[self._rank]

    @property
    def common(self) -> int:
        return self._common

    def adopt(self, shares: Shares) -> bool:
        """Hold a plan; whether it is the newest."""
        if shares.number < self._common:
            return False  # nothing will go by it
        self._plans[shares.number] = shares
        if shares.number <= self.newest:
            return False
        self.heard(self._rank, shares.number)
        return True

    def heard(self, rank: int, newest: int, common: int = 0) -> None:
        """A rank holds a plan, and knows that all hold another."""
        self._held[rank] = max(self._held[rank], newest)
        self._common = max(self._common, common, min(self._held))

    def choose(self, announced: Collection[Announcement], still: Iterable[int]) -> Shares:
        """The plan of an operation, by everybody's announcements. Older ones are dropped: whatever is
        announced later names one that is as new. `still` are no newer than what others that have not begun
        may go by."""
        used = max(min(each.plan for each in announced), max(each.common for each in announced))
        self._common = max(self._common, used)
        oldest = min([used, *still])
        for number in [number for number in self._plans if number < oldest]:
            del self._plans[number]
        return self._plans[used]
