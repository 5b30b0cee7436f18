"""Carries out steps that roll on, part by part: what waits is given, and several are under way at a time.

Step n is of part n modulo the number of parts. A call has one of each, or a few; the next is begun while the
one before it is still on its way, so that links have no pause between them, and each takes the sums as they
are when it begins.

The optimizer's settings travel behind every sum, so that a step is by those of its gradients. Sums by a codec
have no room for them: there they are summed once a call, and its steps are by the mean of what workers have
when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mlfabric.client import Client
from mlfabric.events import StepCarriedOut
from mlfabric.groupcalls import OperationCall
from mlfabric.messages import StepCalled
from mlfabric.numerics import Vector
from mlfabric.torch.arithmetic import convert
from mlfabric.torch.calledsteps import CalledSteps, StepResult

# Parts of a model, at most; smaller than this none is cut: it would be all overhead.
MOST_PARTS: Final = 8
LEAST_BYTES: Final = 512 * 1024
# Steps under way at the same time: their all-reduces overlap, as rounds of a large one do. With more of them
# links are fuller and gradients older, which costs more (by simulation with 4: a sixth of the time to 0.85).
AT_ONCE: Final = 2


def cut_parts(elements: int, least_bytes: int | None = None) -> list[int]:
    """Where a flat model is cut, the same at every worker; both ends are among the cuts."""
    least = LEAST_BYTES if least_bytes is None else least_bytes
    count = min(max(4 * elements // least, 1), MOST_PARTS)
    return [elements * number // count for number in range(count + 1)]


@dataclass(slots=True)
class Gradient:
    """One on its way into the model."""

    base: int  # the step whose model it is of
    left: int  # parts of it that are in no step yet; when none are left its delay is told
    delay: int = 0  # of the part that is latest
    dropped: bool = False  # some of it


class Gathered:
    """Gradients of one worker, summed, by part; behind each sum its settings and how many there are."""

    def __init__(self, parts: Sequence[slice], settings: int) -> None:
        self._parts = parts
        self._total = np.zeros(parts[-1].stop, np.float32)
        self._rest = np.zeros((len(parts), settings + 1), np.float32)
        self.gradients: list[list[Gradient]] = [[] for _ in parts]

    @property
    def most(self) -> int:
        """Gradients of the part that has most of them."""
        return max(map(len, self.gradients))

    def add(self, vector: Vector, settings: Sequence[float], gradient: Gradient) -> None:
        rest = np.array([*settings, 1], np.float32)
        for number, part in enumerate(self._parts):
            self._add(number, vector[part], rest, [gradient])

    def replace(self, number: int, part: Vector, gradient: Gradient) -> None:
        """Have this of a part, instead of what there was."""
        self.gradients[number].clear()
        self._add(number, part, np.float32(1), [gradient])

    def move(self, number: int, to: Gathered) -> None:
        """Add a part to another's, and have nothing of it any more."""
        if self.gradients[number]:
            to._add(number, self._total[self._parts[number]], self._rest[number], self.gradients[number])
            self.gradients[number] = []

    def _add(self, number: int, total: Vector, rest: Vector | np.float32, gradients: list[Gradient]) -> None:
        part = self._parts[number]
        if self.gradients[number]:
            self._total[part] += total
            self._rest[number] += rest
        else:
            self._total[part] = total
            self._rest[number] = rest
        self.gradients[number] += gradients

    def read(self, number: int, vector: Vector) -> None:
        """Fill a vector with the sum of a part and what stands behind it."""
        part = self._parts[number]
        elements = part.stop - part.start
        vector[:elements] = self._total[part]
        vector[elements:] = self._rest[number]

    def sum_of(self, number: int) -> Vector:
        part: Vector = self._total[self._parts[number]]
        return part

    def clear(self) -> None:
        for gradients in self.gradients:
            gradients.clear()


@dataclass(slots=True)
class _UnderWay:
    step: int
    vector: Vector
    narrow: Vector | None  # what is summed instead: its gradient by the codec, and how many there are
    summing: list[OperationCall]


@dataclass(slots=True)
class _Settings:
    """Of all workers of a call, on their way; behind them, of how many."""

    vector: Vector
    summing: list[OperationCall]

    def mean(self) -> Vector:
        for operation in self.summing:
            operation.answer.result()
        found: Vector = self.vector[:-1] / self.vector[-1]
        return found


class RolledSteps(CalledSteps):
    """Steps that take what there is. `waiting` is for the next steps, `given` is in those under way."""

    def __init__(
        self,
        node: str,
        client: Client,
        parts: Sequence[slice],
        settings: Sequence[float],
        state_elements: int,
        values: Callable[[Vector], None],
        state: Callable[[Vector], None],
        max_delay: int,
        codec: str,
        keeps: bool,
    ) -> None:
        """`settings` are summed with every part. `keeps`: results say what this worker gave."""
        self._parts, self._behind = parts, len(settings) + 1
        self.settings = settings  # as they are now; `changed` is held by who changes them
        self.waiting, self.given = Gathered(parts, len(settings)), Gathered(parts, len(settings))
        self.joining = False  # the model that comes is not the one that gradients here are of
        self._next = 0  # the first step that has taken nothing here
        self._dropped = 0  # gradients that were dropped since the last step
        self._max_delay, self._keeps = max_delay, keeps
        self._dtype = None if codec == "float32" else np.dtype(codec)
        self._narrow: dict[int, list[Vector]] = {}  # free ones, by length
        largest = max(part.stop - part.start for part in parts)
        super().__init__(node, client, largest + self._behind, state_elements, values, state)

    def delay_of(self, base: int) -> int:
        """How old the oldest part of a gradient will be that is added now; `changed` is held."""
        return max(-(-(self._next - base) // len(self._parts)), 0)

    def _carry_out(self, call: StepCalled) -> None:
        if call.step < 0:
            super()._carry_out(call)
            return
        joins = self._node in call.joiners
        if joins:
            with self.changed:
                self.joining = True
                for number in range(len(self._parts)):
                    self._drop(number)
        state = self._state_of(call)
        moving = self._move(call, state) if state is not None else []
        settings = self._sum_settings(call)
        under_way: deque[_UnderWay] = deque()
        for step in range(call.step, call.step + call.count):
            if len(under_way) == AT_ONCE:
                self._end(under_way.popleft(), call, settings)
            under_way.append(self._begin(step, call))
            if joins and step == call.step:
                for operation in moving:
                    operation.answer.result()
                self._end(under_way.popleft(), call, settings, state)
        while under_way:
            self._end(under_way.popleft(), call, settings)
        for operation in moving:
            operation.answer.exception()  # joiners tell themselves if they lack something

    def _sum_settings(self, call: StepCalled) -> _Settings | None:
        """Begin to sum the settings of all who were called, where they do not travel with every part."""
        if not self._by_codec(call) or not self.settings:
            return None
        vector = self._client.empty(self._behind, np.float32)
        with self.changed:
            vector[:] = [*self.settings, 1]
        return _Settings(vector, self._sum(call, [vector]))

    def _by_codec(self, call: StepCalled) -> bool:
        return self._dtype is not None and len(call.nodes) > 1

    def _vector(self, call: StepCalled) -> Vector:
        if call.step < 0:  # all parts at once
            return self._client.empty(self._parts[-1].stop, np.float32)
        return super()._vector(call)

    def release(self, vector: Vector) -> None:
        if len(vector) == self._elements:
            super().release(vector)

    def _begin(self, step: int, call: StepCalled) -> _UnderWay:
        number = step % len(self._parts)
        vector = self._vector(call)
        whole = self._used(vector, step)
        with self.changed:
            self._next = step + 1
            if any(self._delay(each.base, step) > self._max_delay for each in self.waiting.gradients[number]):
                self._drop(number)  # only after failures: who gives is at most as old when it gives
            self.waiting.move(number, self.given)
            if self.given.gradients[number]:
                self.given.read(number, whole)
            else:
                whole.fill(0)
        narrow = self._narrowed(whole) if self._by_codec(call) else None
        summing = self._sum(call, [whole if narrow is None else narrow], follows=True)
        return _UnderWay(step, vector, narrow, summing)

    def _used(self, vector: Vector, step: int) -> Vector:
        """Of a vector that has room for the largest part, what is used for this step's."""
        part = self._parts[step % len(self._parts)]
        return vector[: part.stop - part.start + self._behind]

    def _narrowed(self, whole: Vector) -> Vector:
        elements = len(whole) - self._behind
        spare = self._narrow.setdefault(elements + 1, [])
        narrow = spare.pop() if spare else self._client.empty(elements + 1, self._dtype)
        convert(whole[:elements], narrow[:-1])
        narrow[-1] = whole[-1]
        return narrow

    def _widened(self, narrow: Vector, settings: _Settings | None, mean: Vector) -> None:
        elements = len(mean) - self._behind
        convert(narrow[:-1], mean[:elements])
        mean[-1] = narrow[-1]
        if settings is not None:
            mean[elements:-1] = settings.mean() * mean[-1]
        self._narrow[elements + 1].append(narrow)

    def _end(
        self, under_way: _UnderWay, call: StepCalled, settings: _Settings | None, state: Vector | None = None
    ) -> None:
        for operation in under_way.summing:
            operation.answer.result()
        mean = self._used(under_way.vector, under_way.step)
        if under_way.narrow is not None:
            self._widened(under_way.narrow, settings, mean)
        result = StepResult(under_way.step, under_way.vector, state)
        result.gradients = round(float(mean[-1]))
        if result.gradients:
            mean /= np.float32(result.gradients)
        self._put(result, lambda: self._settle(result, call))

    def _settle(self, result: StepResult, call: StepCalled) -> None:
        if call.step < 0:
            return
        number = result.step % len(self._parts)
        given = self.given.gradients[number]
        if self._keeps and given:
            result.own = self.given.sum_of(number).copy()
        result.ages = tuple(self._delay(gradient.base, result.step) for gradient in given)
        for gradient, age in zip(given, result.ages, strict=True):
            gradient.left -= 1
            gradient.delay = max(gradient.delay, age)
        over = [gradient for gradient in given if gradient.left == 0]
        dropped = [None] * (self._dropped + sum(gradient.dropped for gradient in over))
        result.delays = (*dropped, *(gradient.delay for gradient in over if not gradient.dropped))
        self._dropped = 0
        given.clear()

    def _delay(self, base: int, step: int) -> int:
        """Steps of the same part between the model that a gradient is of and the step it is in."""
        return max((step - base) // len(self._parts), 0)

    def _drop(self, number: int) -> None:
        """Have nothing of a part wait; gradients of which other parts are in steps count as dropped, too."""
        for gradient in self.waiting.gradients[number]:
            gradient.left -= 1
            gradient.dropped = True
            self._dropped += gradient.left == 0
        self.waiting.gradients[number].clear()

    def _give(self, vector: Vector, call: StepCalled) -> None:
        raise AssertionError("steps that roll are given to part by part")

    def _tell_end(self, call: StepCalled, error: str | None) -> None:
        # With the lock, so that what the trainer says of new gradients is not said in between.
        with self.changed:
            for number in range(len(self._parts)):  # of steps that failed
                self.given.move(number, self.waiting)
            if error is not None:
                self.joining = (
                    False  # else it would have nothing to give, and would not be called to join again
                )
            more = bool(self.waiting.most)
            self._client.tell_stepper(StepCarriedOut(call.step, self.holds, error, more))
            self.changed.notify_all()

    def withdraw(self) -> None:
        self.waiting.clear()
