"""The scheduler's side of all-reduce: who has come, who has not, who sums what.

Every worker of the job takes part. Nobody waits without being told for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlfabric.messages import ReduceFailed, ReducePending, ReducePlan, ReduceWanted
from mlfabric.roles.actions import Action, Send

# Those who wait hear whom they wait for this often.
PENDING_S = 1.0


@dataclass(slots=True)
class _Operation:
    tell_at: float
    wanted: dict[str, ReduceWanted] = field(default_factory=dict)  # by node


class Reductions:
    """The all-reduces of one job that have not been planned yet."""

    def __init__(self) -> None:
        self._operations: dict[int, _Operation] = {}

    def want(self, node: str, message: ReduceWanted, now: float) -> None:
        operation = self._operations.setdefault(message.operation, _Operation(now + PENDING_S))
        operation.wanted[node] = message

    def check(self, number: int, workers: Sequence[str], absent: int) -> list[Action]:
        """Plan the operation once everybody has come; everybody hears of it if they disagree."""
        operation = self._operations[number]
        if absent or any(name not in operation.wanted for name in workers):
            return []
        del self._operations[number]
        first = operation.wanted[workers[0]]
        for name in workers[1:]:
            other = operation.wanted[name]
            if (other.elements, other.dtype) != (first.elements, first.dtype):
                reason = (
                    f"all-reduce {number}: {workers[0]} gave {first.elements} elements of {first.dtype}, "
                    f"{name} gave {other.elements} of {other.dtype}"
                )
                return [Send(each, "reducer", ReduceFailed(number, reason)) for each in workers]
        cuts = tuple(first.elements * i // len(workers) for i in range(len(workers) + 1))
        plan = ReducePlan(number, tuple(workers), cuts, "equal shares")
        return [Send(name, "reducer", plan) for name in workers]

    def tell_pending(self, workers: Sequence[str], absent: int, now: float) -> list[Action]:
        actions: list[Action] = []
        for number, operation in self._operations.items():
            if now < operation.tell_at:
                continue
            operation.tell_at = now + PENDING_S
            missing = tuple(name for name in workers if name not in operation.wanted)
            if not missing:
                missing = (f"{absent} workers that have not joined",)
            pending = ReducePending(number, missing)
            actions += [Send(name, "reducer", pending) for name in sorted(operation.wanted)]
        return actions

    def fail(self, reason: str) -> list[Action]:
        """Somebody is gone: who waits hears of it. Operations under way break by themselves."""
        actions: list[Action] = [
            Send(name, "reducer", ReduceFailed(number, f"all-reduce {number}: {reason}"))
            for number, operation in self._operations.items()
            for name in sorted(operation.wanted)
        ]
        self._operations.clear()
        return actions

    def deadlines(self) -> list[float]:
        return [operation.tell_at for operation in self._operations.values()]
