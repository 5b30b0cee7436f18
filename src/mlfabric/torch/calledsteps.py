"""Carries out the steps that the scheduler calls, one call after the other, on a thread of its own.

A step is an all-reduce of whoever was called; who has no gradient for it adds zeros. Contributors that were
told to also send joiners the model and optimizer state that the first step of a call begins with. What comes
of it waits for the trainer's thread, which alone changes the model.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mlfabric.client import Client
from mlfabric.collective.calls import Call, changes
from mlfabric.errors import FabricError
from mlfabric.events import StepCarriedOut
from mlfabric.groupcalls import OperationCall
from mlfabric.messages import StepCalled
from mlfabric.numerics import Vector
from mlfabric.roles.actions import CarryOutStep, FailJob, GiveUpStep
from mlfabric.roles.roster import GROUPS_KEPT

logger = logging.getLogger("mlfabric")

# A trainer that has to apply a sum before its state can be sent does nothing else.
APPLY_S: Final = 30.0


@dataclass(slots=True)
class StepResult:
    step: int
    mean: Vector  # of the step's gradients; of step -1, the values to begin with
    state: Vector | None  # what the step begins with, where it was joined
    gradients: int = 1  # in the mean; 0: nobody had one, and there is nothing to apply
    delays: tuple[int | None, ...] = ()  # of own gradients that are in; None: one that was dropped
    own: Vector | None = None  # what this worker gave to it, where that matters
    ages: tuple[int, ...] = ()  # of the parts of own gradients that are in


class CalledSteps(ABC):
    """`changed` guards the model: who changes it, or copies it for others, holds it."""

    def __init__(
        self,
        node: str,
        client: Client,
        elements: int,
        state_elements: int,
        values: Callable[[Vector], None],
        state: Callable[[Vector], None],
    ) -> None:
        """`values` fills a vector with what all begin with, `state` one with all that a joiner needs."""
        self.changed = threading.Condition()
        self.results: deque[StepResult] = deque()
        self.applied = -1
        self.holds = -1  # all sums before this step have come
        self.failed: str | None = None
        self._node = node
        self._client = client
        self._elements = elements
        self._state_elements = state_elements
        self._values = values
        self._state = state
        self._calls: queue.SimpleQueue[StepCalled | None] = queue.SimpleQueue()
        self._running: StepCalled | None = None
        self._given_up: tuple[str, str] | None = None  # a group, and why
        self._spare: list[Vector] = []
        self._groups: dict[str, None] = {}  # the last used last
        client.steps = self._hear
        threading.Thread(target=self._run, name=f"mlfabric-steps-{node}", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether no call is carried out or waits to be."""
        return self._running is None and self._calls.empty()

    def release(self, vector: Vector) -> None:
        """A result's vector is needed no more."""
        self._spare.append(vector)

    def _hear(self, action: CarryOutStep | GiveUpStep | FailJob) -> None:
        """On the engine's thread."""
        match action:
            case CarryOutStep(call=call):
                self._calls.put(call)
            case GiveUpStep(group=group, reason=reason):
                self._given_up = (group, reason)
                running = self._running
                if running is not None and running.group == group:
                    self._client.groups.break_group(group, reason)
            case FailJob(reason=reason):
                with self.changed:
                    self.failed = self.failed or reason
                    self.changed.notify_all()
                self._calls.put(None)

    # --- on its own thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._running = call
            error: str | None = None
            try:
                self._carry_out(call)
            except FabricError as failure:
                error = str(failure)
            except Exception as failure:  # whoever waits for this step would wait for ever
                logger.exception("step %d failed at %s", call.step, self._node)
                error = repr(failure)
            if error is not None and len(call.nodes) > 1:
                self._client.groups.break_group(call.group, error)
            self._running = None
            self._tell_end(call, error)

    def _tell_end(self, call: StepCalled, error: str | None) -> None:
        self._client.tell_stepper(StepCarriedOut(call.step, self.holds, error))

    def _carry_out(self, call: StepCalled) -> None:
        vector = self._vector(call)
        self._fill(vector, call)
        state = self._state_of(call)
        summing = self._sum(call, [vector])
        moving = self._move(call, state) if state is not None else []
        joins = self._node in call.joiners
        for operation in summing + (moving if joins else []):
            operation.answer.result()
        result = StepResult(call.step, vector, state if joins else None)
        result.mean /= np.float32(len(call.contributors))
        self._put(result, lambda: self._settle(result, call))
        for operation in moving:
            operation.answer.exception()  # the sum is here; joiners tell themselves if they lack something

    def _vector(self, call: StepCalled) -> Vector:
        """For a step's sum."""
        return self._spare.pop() if self._spare else self._client.empty(self._elements, np.float32)

    def _sum(self, call: StepCalled, arrays: Sequence[Vector], follows: bool = False) -> list[OperationCall]:
        """Begin to sum arrays among those who were called; many that `follow` each other do not wait."""
        if len(call.nodes) == 1:
            return []
        summing = []
        for array in arrays:
            blocks = (changes(array.view("u1").data),)
            wanted = Call(
                "all_reduce", array.dtype.name, array.itemsize, "sum", blocks=blocks, follows=follows
            )
            summing.append(self._client.groups.collective(call.group, call.nodes, wanted))
        self._keep_few(call.group)
        given_up = self._given_up
        if given_up is not None and given_up[0] == call.group:
            self._client.groups.break_group(call.group, given_up[1])
        return summing

    def _put(self, result: StepResult, settle: Callable[[], None]) -> None:
        """A step is through: let the trainer have what came of it."""
        with self.changed:
            settle()
            self.holds = result.step + 1
            self.results.append(result)
            self.changed.notify_all()

    def _fill(self, vector: Vector, call: StepCalled) -> None:
        """What this worker adds to the sum."""
        with self.changed:
            if self._node not in call.contributors:
                vector.fill(0)
            elif call.step < 0:
                self._values(vector)
            else:
                self._give(vector, call)

    @abstractmethod
    def _give(self, vector: Vector, call: StepCalled) -> None:
        """Fill in what there is to give; `changed` is held."""

    @abstractmethod
    def _settle(self, result: StepResult, call: StepCalled) -> None:
        """A step is through: say in the result what became of what was given; `changed` is held."""

    @abstractmethod
    def withdraw(self) -> None:
        """Have nothing to give; `changed` is held."""

    def _state_of(self, call: StepCalled) -> Vector | None:
        """What the first step begins with, or the place for it; None: there is nobody to whom it matters."""
        if self._node not in (*call.feeders, *call.joiners):
            return None
        state, step = self._client.empty(self._state_elements, np.float32), call.step
        if self._node in call.feeders:
            with self.changed:
                if not self.changed.wait_for(
                    lambda: self.applied == step or self.failed is not None, APPLY_S
                ):
                    raise FabricError(f"{self._node} is at step {self.applied} and can't send step {step}")
                self._state(state)
        return state

    def _move(self, call: StepCalled, state: Vector) -> list[OperationCall]:
        """Each feeder sends a slice of the state to every joiner."""
        groups, tag = self._client.groups, call.step
        place = {node: rank for rank, node in enumerate(call.nodes)}
        parts = _slices(len(state), len(call.feeders))
        if self._node in call.feeders:
            mine = state[parts[call.feeders.index(self._node)]].view("u1").data
            return [groups.send(call.group, call.nodes, place[to], tag, mine) for to in call.joiners]
        return [
            groups.receive(call.group, call.nodes, place[feeder], tag, state[part].view("u1").data)
            for feeder, part in zip(call.feeders, parts, strict=True)
        ]

    def _keep_few(self, group: str) -> None:
        """The scheduler calls by the names of the last few groups; others it will not use again."""
        self._groups.pop(group, None)
        self._groups[group] = None
        while len(self._groups) > GROUPS_KEPT:
            oldest = next(iter(self._groups))
            del self._groups[oldest]
            self._client.groups.leave_group(oldest)


@dataclass(slots=True)
class Offer:
    """A gradient that waits for a step."""

    vector: Vector
    base: int  # of the model of this step
    until: int  # the last step it may go into


class OfferedSteps(CalledSteps):
    """Steps that take one gradient of a worker, if the scheduler counts on it."""

    offer: Offer | None = None

    def _give(self, vector: Vector, call: StepCalled) -> None:
        if self.offer is None:
            raise FabricError(f"{self._node} has no gradient for step {call.step}")
        np.copyto(vector, self.offer.vector)

    def _settle(self, result: StepResult, call: StepCalled) -> None:
        offer = self.offer
        if offer is None:
            return
        if self._node in call.contributors and call.step >= 0:
            result.delays = (call.step - offer.base,)
            self.offer = None
        elif call.step >= offer.until:
            result.delays = (None,)
            self.offer = None

    def withdraw(self) -> None:
        self.offer = None


def _slices(elements: int, count: int) -> Sequence[slice]:
    cuts = [elements * index // count for index in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
