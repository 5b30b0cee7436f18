"""What is done before the common start leaves no trace in the model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mlfabric.bench.train.exchange import WARM_UP_PASSES, Alone  # noqa: E402
from mlfabric.bench.train.settings import StepSize  # noqa: E402


def test_warming_up_moves_nothing() -> None:
    model = torch.nn.Linear(4, 2)
    exchange = Alone(model, StepSize(0.5, 0.9))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    passes = []

    def backward() -> None:
        passes.append(1)
        model(torch.ones(1, 4)).sum().backward()

    exchange.warm_up(backward)
    assert len(passes) == WARM_UP_PASSES
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True))
