"""The first-come server is a fair one: Adam as in torch, whoever comes first, nobody too far ahead."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mlfabric.bench.train.first_come import ServerOrder, ShardServer, shard_ranges
from mlfabric.bench.train.settings import SECOND_MOMENT

torch = pytest.importorskip("torch")


def make_server(workers: int = 2, momentum: float = 0.0, slack: int | None = None) -> ShardServer:
    order = ServerOrder(0, "", 0, 4, workers, 0.5, momentum, slack)
    return ShardServer(np.zeros(4, np.float32), order)


def test_steps_are_those_of_torch_whoever_sends() -> None:
    server = make_server(momentum=0.9)
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=0.5, betas=(0.9, SECOND_MOMENT))
    rng = np.random.default_rng(1)
    for step in range(5):
        gradient = rng.standard_normal(4).astype(np.float32)
        _, weights = server.push(step % 2, gradient)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(weights, parameter.detach().numpy(), rtol=1e-5)


def test_delay_counts_what_others_applied_since_the_last_answer() -> None:
    server = make_server()
    one = np.ones(4, np.float32)
    assert server.push(0, one)[0] == 0
    assert server.push(0, one)[0] == 0
    assert server.push(1, one)[0] == 2
    assert server.push(0, one)[0] == 1


def test_fast_worker_waits_for_the_slowest_beyond_the_slack() -> None:
    server = make_server(slack=1)
    one = np.ones(4, np.float32)
    server.push(0, one)
    answers: list[float] = []
    thread = threading.Thread(target=lambda: answers.append(float(server.push(0, one)[1][0])), daemon=True)
    thread.start()
    thread.join(0.05)
    assert answers == []  # two steps ahead
    server.push(1, one)
    thread.join(10)
    assert answers == [pytest.approx(-1.5)]  # and goes on with what the other brought


def test_shards_cover_the_model() -> None:
    ranges = shard_ranges(1001, 8)
    assert sum(count for _, count in ranges) == 1001
    assert all(start == sum(c for _, c in ranges[:i]) for i, (start, _) in enumerate(ranges))
