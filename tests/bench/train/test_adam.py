"""Adam on arrays makes the steps of torch's, so that no contender has a better one."""

from __future__ import annotations

import numpy as np
import pytest

from mlfabric.bench.train.adam import ArrayAdam
from mlfabric.bench.train.settings import SECOND_MOMENT, StepSize

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_torch(momentum: float) -> None:
    adam = ArrayAdam(StepSize(0.01, momentum), 6)
    weights = np.linspace(-1, 1, 6, dtype=np.float32)
    parameter = torch.from_numpy(weights.copy()).requires_grad_()
    optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(momentum, SECOND_MOMENT))
    rng = np.random.default_rng(3)
    for step in range(200):
        # Sizes far apart, zero among them: where the second moment and its correction matter.
        gradient = (rng.standard_normal(6) * 10.0 ** (step % 5 - 3)).astype(np.float32)
        gradient[0] = 0.0
        weights = weights + adam.step(gradient)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        np.testing.assert_allclose(weights, parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_scale_is_of_the_step_and_not_of_what_is_remembered() -> None:
    plain, scaled = ArrayAdam(StepSize(0.01, 0.9), 3), ArrayAdam(StepSize(0.01, 0.9), 3)
    one, other = np.array([1, -2, 3], np.float32), np.array([2, 2, -1], np.float32)
    np.testing.assert_allclose(scaled.step(one, 0.25), 0.25 * plain.step(one), rtol=1e-6)
    np.testing.assert_allclose(scaled.step(other), plain.step(other), rtol=1e-6)


def test_steps_that_were_returned_stay_as_they_are() -> None:
    adam = ArrayAdam(StepSize(0.01, 0.0), 2)
    first = adam.step(np.array([1, -1], np.float32))
    before = first.copy()
    adam.step(np.array([5, 5], np.float32))
    np.testing.assert_array_equal(first, before)
