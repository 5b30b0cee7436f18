"""Which updates a shard has applied: exact, and bounded by what workers still care about."""

from __future__ import annotations

from mlfabric.messages import AppliedIds, split_update_id


class AppliedSet:
    """A set of update ids. What a worker has settled, below its floor, is forgotten and counts as in it."""

    def __init__(self, ids: AppliedIds | None = None) -> None:
        ids = ids or AppliedIds()
        self._floor = dict(ids.floor)
        self._above = {label: set(numbers) for label, numbers in ids.above.items()}

    def __contains__(self, update: str) -> bool:
        label, number = split_update_id(update)
        return number < self._floor.get(label, 0) or number in self._above.get(label, ())

    def add(self, update: str, floor: int = 0) -> None:
        label, number = split_update_id(update)
        self._above.setdefault(label, set()).add(number)
        if floor > self._floor.get(label, 0):
            self._floor[label] = floor
            self._above[label] = {kept for kept in self._above[label] if kept >= floor}

    def frozen(self) -> AppliedIds:
        return AppliedIds(
            floor=dict(sorted(self._floor.items())),
            above={
                label: tuple(sorted(numbers)) for label, numbers in sorted(self._above.items()) if numbers
            },
        )

    def __len__(self) -> int:
        return sum(len(numbers) for numbers in self._above.values())
