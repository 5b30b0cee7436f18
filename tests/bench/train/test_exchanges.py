"""How contenders are set up: what is exchanged when, by which optimizer, and which model is judged."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mlfabric.bench.train import fabric  # noqa: E402
from mlfabric.bench.train.ddp import Ddp  # noqa: E402
from mlfabric.bench.train.entries import ENTRIES  # noqa: E402
from mlfabric.bench.train.exchange import Exchanged, make_optimizer  # noqa: E402
from mlfabric.bench.train.fabric import FabricExchange  # noqa: E402
from mlfabric.bench.train.settings import StepSize  # noqa: E402
from mlfabric.bench.train.task import flat_weights  # noqa: E402

SIZE = StepSize(0.01, 0.9)


def make_linear() -> Any:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 2)


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchrun's environment, of a world of one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("single_rank")
def test_gradients_that_accumulate_are_one_step_by_their_mean() -> None:
    exchange = Ddp(make_linear(), SIZE, ENTRIES["gloo-accumulated"].options)
    alone = make_linear()
    optimizer = make_optimizer(alone.parameters(), SIZE)
    computed: list[int] = []
    exchange.watch(lambda: computed.append(1))
    inputs = torch.arange(32.0).view(8, 4)
    for first in (0, 4):
        told, synced = [], []
        for row in range(first, first + 4):
            with exchange.passing():
                synced.append(exchange.module.require_backward_grad_sync)
                exchange.module(inputs[row]).square().sum().backward()
            told.append(exchange.step())
        assert synced == [False, False, False, True]
        assert told == [Exchanged(shared=False)] * 3 + [Exchanged((0,) * 4)]
        alone(inputs[first : first + 4]).square().sum().div(4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(computed) == 8  # the clock is told of every gradient
    np.testing.assert_allclose(exchange.weights(), flat_weights(alone), rtol=1e-5)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("contender", ["gloo", "mlfabric-ddp"])
def test_plain_ddp_steps_after_every_gradient(contender: str) -> None:
    exchange = Ddp(make_linear(), SIZE, ENTRIES[contender].options)
    assert torch.distributed.get_backend() == contender.removesuffix("-ddp")
    before = exchange.weights()
    with exchange.passing():
        exchange.module(torch.ones(4)).sum().backward()
    assert exchange.step() == Exchanged((0,))
    np.testing.assert_allclose(np.abs(exchange.weights() - before), 0.01, rtol=1e-3)  # Adam's first step


class Joined:
    """A training that only remembers how it was asked for."""

    def __init__(self, model: Any, optimizer: Any, **options: Any) -> None:
        self.optimizer, self.options = optimizer, options

    def weights(self) -> Any:
        return np.full(10, 7.0, np.float32)


def joined_as(contender: str, monkeypatch: pytest.MonkeyPatch) -> FabricExchange:
    monkeypatch.setattr(fabric, "join", Joined)
    return FabricExchange(make_linear(), SIZE, ENTRIES[contender].options)


@pytest.mark.parametrize("contender", ["mlfabric-rolling", "mlfabric-rolling-fp16", "mlfabric-rolling-local"])
def test_rolling_is_judged_by_the_common_model_dealt_over_the_ranks(
    contender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = joined_as(contender, monkeypatch)
    assert not exchange.same_everywhere
    assert not exchange.waits_for_its_turn
    assert (exchange.weights() == 7.0).all()  # what the module holds is ahead of it
    training: Any = exchange.training
    assert training.options == {"timeout": 300.0, **ENTRIES[contender].options}
    assert training.optimizer == ("Adam", {"lr": 0.01, "betas": (0.9, 0.99), "fused": True})


def test_others_of_ours_are_judged_by_what_the_module_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = joined_as("mlfabric-async", monkeypatch)
    np.testing.assert_array_equal(exchange.weights(), flat_weights(exchange.module))
    training: Any = exchange.training
    assert training.options["divergence"] is None
