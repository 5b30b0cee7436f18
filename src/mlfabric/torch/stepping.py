"""The optimizer that a training loop sees: schedules and gradient scalers work on it, and its step is the
job's. Settings that a schedule changes travel with the updates; loops written for plain PyTorch run as they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlfabric.errors import FabricError
from mlfabric.torch.optimizers import uncompiled


class FabricOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Has the parameter groups of another optimizer, which it shares with it."""

    # A gradient scaler leaves unscaling, and what to do about infinite gradients, to us.
    _step_supports_amp_scaling = True
    add_param_group = uncompiled(torch.optim.Optimizer.add_param_group)

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        step: Callable[[float, bool | None], None],
        zero: Callable[[], None],
        plain_state: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._step = step
        self._zero = zero
        self._plain_state = plain_state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        found = getattr(self, "found_inf", None)
        # `infinite` is None where no scaler is used.
        infinite = None if found is None else bool(found)
        self._step(1.0 / float(scale) if scale is not None else 1.0, infinite)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are collected from wherever the next backward passes put them."""
        self._zero()

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer of plain PyTorch would give it, with the state that servers hold."""
        return self._plain_state()

    def load_state_dict(self, state_dict: Any) -> None:
        raise FabricError("load the optimizer's state before join(), or give join(resume=...) a checkpoint")
