"""When a server's replica is brought up to date, within a bound on how far the two may differ.

A message to the replica carries the sum of all steps applied since the last one, so one transfer can stand
for many. Pending movement is bounded by the sum of the norms of the steps the replica lacks. The planner
sends as few messages as the bound allows, each as late as it still comes in time, over what the ledger has
left once the updates themselves are planned: spare capacity first. Only when no message can be in time is a
server step held back, and then no longer than until the replica has it. With a bound of zero every step
travels to the replica before it counts. The server enforces the bound itself; this is the plan that spares it
the waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from mlfabric.plan.reservation import Booking, Ledger
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import HeldStep, ReplicaMessage
from mlfabric.units import format_time

# Norms are sums of floats; a bound is not broken by their last bits.
NORM_TOLERANCE: Final = 1e-12
# Several replicas are planned until none of them delays the others' steps any more, at most so often.
MOST_ROUNDS: Final = 12


@dataclass(frozen=True, slots=True)
class ServerStep:
    """A step the server is going to make: when its bytes are all there, and how far it moves the model."""

    name: str
    at_s: float
    norm: float  # in the unit of the bound


@dataclass(frozen=True, slots=True)
class Follower:
    """One replica of one shard, and what it has not got yet."""

    shard: int
    server: str  # host
    replica: str  # host
    size_bytes: int  # of a message
    bound: float  # the most that may be pending
    pending: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    messages: tuple[ReplicaMessage, ...]
    held: tuple[HeldStep, ...]
    visible_s: tuple[float, ...]  # by step: when it counts


def plan_replication(
    ledger: Ledger, followers: Sequence[Follower], steps: Sequence[ServerStep], now_s: float
) -> ReplicationPlan:
    """Messages to all replicas of one shard for the steps its server is going to make, in order.

    With several replicas each keeps its own bound, and a step counts when the last of them allows it.
    """
    times = [step.at_s for step in steps]
    held: dict[str, HeldStep] = {}
    mark = ledger.mark()
    for _ in range(MOST_ROUNDS):
        ledger.undo(mark)
        before = times
        messages: list[ReplicaMessage] = []
        for follower in sorted(followers, key=lambda f: f.replica):
            plan = _Follow(ledger, follower, steps, times, now_s)
            plan.run()
            messages += plan.messages
            held.update((hold.step, hold) for hold in plan.held)
            times = plan.times
        # A step one replica holds back counts later for the others too: once more with these times.
        if len(followers) < 2 or times == before:
            break
    return ReplicationPlan(tuple(messages), tuple(held.values()), tuple(times))


class _Follow:
    """One replica's messages, made while walking the steps in order.

    Messages follow one another, and every step waits for those it needs; so when a step is looked at, all
    messages sent so far are through.
    """

    def __init__(
        self,
        ledger: Ledger,
        follower: Follower,
        steps: Sequence[ServerStep],
        times: Sequence[float],
        now_s: float,
    ) -> None:
        self.ledger = ledger
        self.follower = follower
        self.path = ledger.path(follower.server, follower.replica)
        self.steps = steps
        # Applied in order: no step counts before the one ahead of it.
        self.times = list(accumulate((max(t, now_s) for t in times), max))
        self.moved = list(accumulate((step.norm for step in steps), initial=follower.pending))
        self.now_s = now_s
        self.free_s = now_s  # when the last message is through
        self.covered = 0  # steps the replica has by then
        self.messages: list[ReplicaMessage] = []
        self.held: list[HeldStep] = []

    def run(self) -> None:
        limit = self.follower.bound * (1 + NORM_TOLERANCE)
        index = 0
        while index < len(self.steps):
            if self.steps[index].norm > limit:
                index = self._replicate_first(index)
                continue
            if self._missing(self.covered, index + 1) > limit:
                self._make_room(index, limit)
            index += 1

    def _missing(self, covered: int, end: int) -> float:
        """Movement up to step `end` that the replica lacks once it has `covered` steps."""
        if not self.messages and covered == 0:
            return self.moved[end]
        return self.moved[end] - self.moved[covered]

    def _replicate_first(self, index: int) -> int:
        """A step that alone is too far goes to the replica before it counts, with all that came meanwhile."""
        start_s = max(self.times[index], self.free_s)
        end = max(index + 1, bisect_right(self.times, start_s))
        name, follower = self.steps[index].name, self.follower
        reason = f"the step of {name} alone moves the model by more than the bound of {follower.bound:g}"
        if follower.bound == 0:
            reason = f"nothing counts before {follower.replica} has it (bound 0)"
        booking = self._send(start_s, end, reason)
        for k in range(index, end):
            self._hold(k, booking.finish_s)
        return end

    def _make_room(self, index: int, limit: float) -> None:
        """Send what makes room for step `index`: as late as it comes in time, or at once and hold it."""
        follower, step, at_s = self.follower, self.steps[index], self.times[index]
        starts = {max(self.free_s, t) for t in (self.now_s, *self.times[self.covered : index])}
        best: tuple[float, float] | None = None
        for start_s in sorted(starts, reverse=True):
            applied = min(bisect_right(self.times, start_s), index)
            if self.moved[index + 1] - self.moved[applied] > limit:
                break  # starting this early carries too little
            finish_s = self.ledger.finish(self.path, follower.size_bytes, start_s)
            if best is None or finish_s < best[0]:
                best = (finish_s, start_s)
            if finish_s <= at_s:
                break
        assert best is not None  # after the step before, everything is carried
        finish_s, start_s = best
        beyond = f"further behind than its bound of {follower.bound:g}"
        if finish_s <= at_s:
            reason = f"there before {step.name} is applied, which would put {follower.replica} {beyond}"
        else:
            reason = f"{step.name} waits for it, which would put {follower.replica} {beyond} otherwise"
        self._send(start_s, min(bisect_right(self.times, start_s), index), reason)
        self._hold(index, finish_s)

    def _send(self, start_s: float, covered: int, reason: str) -> Booking:
        follower = self.follower
        booking = self.ledger.reserve(self.path, follower.size_bytes, start_s)
        names = tuple(step.name for step in self.steps[self.covered : covered])
        self.covered, self.free_s = covered, booking.finish_s
        lasts = booking.finish_s - booking.start_s
        self.messages.append(
            ReplicaMessage(
                follower.shard,
                follower.server,
                follower.replica,
                follower.size_bytes,
                booking.start_s,
                booking.finish_s,
                follower.size_bytes / lasts if lasts > 0 else INF,
                names,
                reason,
            )
        )
        return booking

    def _hold(self, index: int, until_s: float) -> None:
        """Step `index`, and so all after it, counts no earlier."""
        step, follower = self.steps[index], self.follower
        if until_s <= self.times[index]:
            return
        waits = format_time(until_s - self.times[index])
        reason = f"waits {waits} until replica {follower.replica} has caught up, bound {follower.bound:g}"
        self.held.append(HeldStep(step.name, follower.shard, until_s, reason))
        for k in range(index, len(self.times)):
            if self.times[k] >= until_s:
                break
            self.times[k] = until_s
