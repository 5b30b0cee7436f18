"""What the worker loop asks of a contender, and the one that exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import msgspec
import torch

from mlfabric.bench.train.settings import SECOND_MOMENT, StepSize
from mlfabric.bench.train.task import flat_weights
from mlfabric.numerics import Vector
from mlfabric.torch.optimizers import load_stepping

WARM_UP_PASSES: Final = 3


class Exchanged(msgspec.Struct, frozen=True):
    """What became of a step's gradient."""

    delays: tuple[int, ...] = ()  # of own updates that were applied, in updates
    dropped: int = 0
    shared: bool = True  # the model here is now the common one, fit to be judged


class Exchange(Protocol):
    module: Any  # what the worker calls with its images
    sends_early: bool  # gradients leave while others are still computed
    same_everywhere: bool  # all workers hold the same model after a step, so one of them is enough to judge
    waits_for_its_turn: bool  # it may be left out for long: whoever has the model first writes it down

    def warm_up(self, backward: Callable[[], None]) -> None:
        """Before the common start: whatever is slow only the first time. The model stays as it is."""
        ...

    def watch(self, computed: Callable[[], None]) -> None:
        """Call this when the last gradient of a step is there, where communication begins before."""
        ...

    def passing(self) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a step."""
        return nullcontext()

    def step(self) -> Exchanged:
        """Backward is through: exchange, and go on with another model."""
        ...

    def weights(self) -> Vector:
        """The model that is to be judged, where a step was shared."""
        return flat_weights(self.module)


def warm_up_alone(model: Any, backward: Callable[[], None]) -> None:
    """A model's first passes cost several times a later one, and an optimizer's first step seconds."""
    load_stepping()
    for _ in range(WARM_UP_PASSES):
        backward()
        model.zero_grad()


def adam_settings(size: StepSize) -> dict[str, Any]:
    """Of torch's; fused it takes half of the processor's time."""
    return {"lr": size.lr, "betas": (size.momentum, SECOND_MOMENT), "fused": True}


def make_optimizer(parameters: Any, size: StepSize) -> Any:
    return torch.optim.Adam(parameters, **adam_settings(size))


class Alone(Exchange):
    sends_early = False
    same_everywhere = True
    waits_for_its_turn = False

    def __init__(self, model: Any, size: StepSize) -> None:
        self.module = model
        self._optimizer = make_optimizer(model.parameters(), size)

    def warm_up(self, backward: Callable[[], None]) -> None:
        warm_up_alone(self.module, backward)

    def watch(self, computed: Callable[[], None]) -> None:
        pass

    def step(self) -> Exchanged:
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Exchanged((0,))
