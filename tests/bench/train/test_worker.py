"""What a worker does around its steps: warming up leaves no trace, divergence is told from failure."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from mlfabric.bench.train.exchange import WARM_UP_PASSES, Alone, Exchanged  # noqa: E402
from mlfabric.bench.train.settings import StepSize  # noqa: E402
from mlfabric.bench.train.worker import Diverged, exchange_gradient  # noqa: E402
from mlfabric.errors import FabricError  # noqa: E402


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


class Refusing(Alone):
    def step(self) -> Exchanged:
        raise FabricError("it is refused")


def test_refusal_of_what_is_no_number_is_divergence() -> None:
    model = torch.nn.Linear(4, 2)
    exchange = Refusing(model, StepSize(0.5, 0.9))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(FabricError, match="it is refused"):
        exchange_gradient(exchange, model)
    for spoiled in (math.nan, math.inf, 1e30):  # the last: its square is no number any more
        model.weight.grad[0, 0] = spoiled
        with pytest.raises(Diverged):
            exchange_gradient(exchange, model)
