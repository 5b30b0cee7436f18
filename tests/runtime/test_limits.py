"""A limit holds for all that a process sends, of whatever kind, and can be changed while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.api import Fabric, LocalFabric
from mlfabric.config import parse_address, read_limit
from mlfabric.errors import FabricError
from mlfabric.messages import LimitAnswered, LimitWanted, StatusReport, StatusWanted
from mlfabric.rules import Sum
from mlfabric.runtime.probe import ask_scheduler
from tests.runtime.engines import engine_of

SIZE = 1_200_000
LIMIT = 4_000_000.0  # payload bytes per second


def took(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def set_limit(fabric: Fabric, target: str, rate: float | None) -> LimitAnswered:
    answer = ask_scheduler(parse_address(fabric.address), b"", LimitWanted(target, rate), 10.0)
    assert isinstance(answer, LimitAnswered)
    return answer


def wait_for_limit(fabric: Fabric, rate: float | None) -> None:
    until = time.monotonic() + 10
    while engine_of(fabric).allowance.limit_bytes_per_s != rate:
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def pair() -> object:
    with mf.local(2) as fabric:
        yield fabric


def test_pushes_pulls_and_collectives_keep_a_limit_that_is_set_while_they_run(pair: LocalFabric) -> None:
    model = {"model": np.ones(SIZE // 4, np.float32)}
    pair.run(lambda each: each.publish(model, apply=Sum(), max_delay="none", divergence=None, shards=1))
    before = ask_scheduler(parse_address(pair.address), b"", StatusWanted(), 10.0)
    assert isinstance(before, StatusReport)
    leader = before.jobs[0].shards[0].leader
    far = next(each for each in pair.workers if each.name != leader)
    array = np.ones(SIZE // 4, np.float32)
    pair.run(lambda each: each.all_reduce(array.copy()))
    assert set_limit(pair, "local", LIMIT) == LimitAnswered("job")
    for each in pair.workers:
        wait_for_limit(each, LIMIT)
    least_s = 0.8 * SIZE / LIMIT
    assert took(lambda: far.push(model).result()) >= least_s
    assert took(lambda: far.pull()) >= least_s
    assert took(lambda: pair.run(lambda each: each.all_reduce(array.copy()))) >= least_s
    report = ask_scheduler(parse_address(pair.address), b"", StatusWanted(), 10.0)
    assert isinstance(report, StatusReport)
    assert [member.limit_bytes_per_s for member in report.members] == [LIMIT, LIMIT]
    assert report.jobs[0].max_rate_bytes_per_s == LIMIT
    assert set_limit(pair, "local", None) == LimitAnswered("job")
    for each in pair.workers:
        wait_for_limit(each, None)
    pair.run(lambda each: each.all_reduce(array.copy()))


def test_a_host_that_nobody_knows_can_not_be_limited(pair: LocalFabric) -> None:
    assert "no job or host is called moon" in set_limit(pair, "moon", 1.0).error


def test_limits_are_read_as_people_write_them() -> None:
    assert read_limit("none") is None
    assert read_limit("8mbit") == pytest.approx(1e6 * 1448 / 1514)
    with pytest.raises(FabricError, match="lets nothing through"):
        read_limit("0mbit")
    with pytest.raises(FabricError, match="not a rate"):
        read_limit("fast")


def test_the_traffic_of_collectives_is_counted_too(pair: LocalFabric) -> None:
    array = np.ones(50_000, np.float32)
    pair.run(lambda each: each.all_reduce(array.copy()))
    first, second = pair.workers
    for near, far in ((first, second), (second, first)):
        # Each sends its part of the array to be summed, and the sum of its own part back: the whole in all.
        assert near.traffic.sent[far.name] == pytest.approx(array.nbytes, rel=0.01)
        assert near.traffic.sent[far.name] <= far.traffic.received[near.name]
