"""Members pass the model on to each other over real TCP on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.api import Fabric
from mlfabric.numerics import Vector
from mlfabric.runtime.connection import Connection, Sending
from mlfabric.runtime.remote import RemoteEngine
from mlfabric.runtime.trust import NONCE_BYTES, Handshake
from tests.runtime.engines import engine_of
from tests.runtime.test_torchrun import free_port

WORKERS = 5


def test_a_part_that_waits_for_bytes_holds_up_no_other() -> None:
    """Else parts that wait for each other in a ring of members would wait for ever."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        handshake = Handshake("a", b"", bytes(NONCE_BYTES))
        connection = Connection(here, handshake, "b", outbound=True, deadline_s=0.0)
        connection.connected = True
        connection.become_ready()
        first = Sending("first", 1, b"", memoryview(b"12345678"), None, there=0)
        second = Sending("second", 2, b"", memoryview(b"abcdefgh"), None, there=8)
        connection.sendings.extend([first, second])
        assert connection.pump() == [second]
        assert not connection.wants_write()
        first.there = 5
        assert connection.wants_write()
        assert connection.pump() == []
        first.there = 8
        assert connection.pump() == [first]
        came = there.recv(1000)
        assert [came.count(piece) for piece in (b"abcdefgh", b"12345", b"678")] == [1, 1, 1]


@contextmanager
def members(processes: tuple[int, ...] = ()) -> Iterator[list[Fabric]]:
    """A server and workers, each as if on a host of its own with a slow link."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                mf.join(
                    address,
                    name=f"w{number}",
                    host=f"h{number}",
                    roles=("worker", "server") if number == 0 else ("worker",),
                    scheduler=number == 0,
                    expected=WORKERS + 1,
                    up="80mbit",
                    down="80mbit",
                    engine="process" if number in processes else "thread",
                )
            )
            for number in range(WORKERS + 1)
        ]


def all_at_once(fabrics: list[Fabric], do: Callable[[Fabric], Any]) -> list[Future[Any]]:
    pool = ThreadPoolExecutor(len(fabrics))
    answers = [pool.submit(do, fabric) for fabric in fabrics]
    pool.shutdown(wait=False)
    return answers


def publish(fabrics: list[Fabric], values: Vector, shards: int = 1) -> None:
    def call(fabric: Fabric) -> None:
        fabric.publish({"w": values}, apply=mf.Sum(), divergence=None, shards=shards)

    for answer in all_at_once(fabrics, call):
        answer.result(60)


def numbers(count: int) -> Vector:
    return np.random.default_rng(1).standard_normal(count).astype(np.float32)


def pull_and_spoil(fabric: Fabric) -> Vector:
    """A model belongs to whoever pulled it: what others get of it is not changed by that."""
    array = fabric.pull(60).arrays["w"]
    seen = array.copy()
    array[:] = -1.0
    return seen


@pytest.mark.parametrize(("shards", "processes"), [(1, ()), (2, ()), (1, (1,))])
def test_the_leader_sends_one_copy_and_everybody_has_the_same_bits(
    shards: int, processes: tuple[int, ...]
) -> None:
    values = numbers(500_000)
    with members(processes) as joined:
        publish(joined, values, shards)
        leader = engine_of(joined[0])
        before = sum(leader.traffic.sent.values())
        for answer in all_at_once(joined[1:], pull_and_spoil):
            np.testing.assert_array_equal(answer.result(60), values)
        # Those who come a moment too late may share a copy of their own.
        assert sum(leader.traffic.sent.values()) - before <= 2 * values.nbytes


def test_a_member_killed_while_it_passes_the_model_on_costs_nobody_the_model() -> None:
    values = numbers(4_000_000)
    with members(processes=(1,)) as joined:
        publish(joined, values)
        answers = all_at_once(joined[1:], pull_and_spoil)
        second = engine_of(joined[2])
        while not second.traffic.received and not answers[1].done():
            time.sleep(0.001)
        relay = joined[1]._engine
        assert isinstance(relay, RemoteEngine)
        relay._process.kill()
        for answer in answers[1:]:
            np.testing.assert_array_equal(answer.result(60), values)
