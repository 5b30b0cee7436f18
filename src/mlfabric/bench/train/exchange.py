"""What the worker loop asks of a contender, and the one that exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from mlfabric.bench.train.settings import StepSize


class Exchanged(msgspec.Struct, frozen=True):
    """What became of a step's gradient."""

    delays: tuple[int, ...] = ()  # of own updates that were applied, in updates
    dropped: int = 0
    shared: bool = True  # the model here is now the common one, fit to be judged


class Exchange(Protocol):
    module: Any  # what the worker calls with its images
    same_everywhere: bool  # all workers hold the same model after a step, so one of them is enough to judge

    def watch(self, computed: Callable[[], None]) -> None:
        """Call this when the last gradient of a step is there, where communication begins before."""
        ...

    def step(self) -> Exchanged:
        """Backward is through: exchange, and go on with another model."""
        ...


def make_optimizer(model: Any, size: StepSize) -> Any:
    return torch.optim.SGD(model.parameters(), lr=size.lr, momentum=size.momentum)


class Alone:
    same_everywhere = True

    def __init__(self, model: Any, size: StepSize) -> None:
        self.module = model
        self._optimizer = make_optimizer(model, size)

    def watch(self, computed: Callable[[], None]) -> None:
        pass

    def step(self) -> Exchanged:
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Exchanged((0,))
