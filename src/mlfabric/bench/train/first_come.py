"""A first-come asynchronous parameter server over plain blocking sockets, the usual form of one.

A worker has one connection to every server. It sends the gradient of the server's shard; the server applies
it at once, whoever's it is, and answers with its shard of the model as it is then. One thread per connection,
one lock per shard, no coordination between servers. With `slack` the answer waits until the worker is no more
than so many steps ahead of the slowest (stale synchronous parallel).

    python -m mlfabric.bench.train.first_come '{"port": 7000, ...}'

runs one server, beside a worker, as a process of its own.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from itertools import pairwise

import msgspec
import numpy as np

from mlfabric.bench.train.adam import ArrayAdam
from mlfabric.bench.train.settings import StepSize
from mlfabric.numerics import Vector

HELLO = struct.Struct("!I")  # the worker's rank
ANSWER = struct.Struct("!I")  # the update's delay; the shard follows
CONNECT_S = 60.0


class ServerOrder(msgspec.Struct, frozen=True):
    """What a server is told."""

    port: int
    weights: str  # a file with the first weights of the whole model
    start: int
    count: int
    workers: int
    lr: float
    momentum: float
    slack: int | None = None


class ShardServer:
    """A shard, stepped by whatever comes."""

    def __init__(self, weights: Vector, order: ServerOrder) -> None:
        self._weights = weights
        self._adam = ArrayAdam(StepSize(order.lr, order.momentum), len(weights))
        self._slack = order.slack
        self._changed = threading.Condition()
        self._version = 0
        self._bases = [0] * order.workers
        self._clocks = [0] * order.workers

    def push(self, worker: int, gradient: Vector) -> tuple[int, Vector]:
        """Apply a gradient; its delay, and a copy of the shard as it is when the worker may go on."""
        with self._changed:
            delay = self._version - self._bases[worker]
            self._weights += self._adam.step(gradient)
            self._version += 1
            self._clocks[worker] += 1
            self._changed.notify_all()
            if self._slack is not None:
                slack = self._slack
                self._changed.wait_for(lambda: self._clocks[worker] - min(self._clocks) <= slack)
            self._bases[worker] = self._version
            return delay, self._weights.copy()


def serve(order: ServerOrder) -> None:
    whole = np.load(order.weights)
    shard = ShardServer(whole[order.start : order.start + order.count].copy(), order)
    with socket.create_server(("0.0.0.0", order.port), backlog=order.workers) as listener:
        threads = []
        for _ in range(order.workers):
            connection, _ = listener.accept()
            threads.append(threading.Thread(target=_serve_worker, args=(connection, shard, order.count)))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _serve_worker(connection: socket.socket, shard: ShardServer, count: int) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = bytearray(HELLO.size)
        gradient = np.empty(count, np.float32)
        if not _receive(connection, memoryview(hello)):
            return
        (worker,) = HELLO.unpack(hello)
        while _receive(connection, gradient.view("u1").data):
            delay, weights = shard.push(worker, gradient)
            connection.sendall(ANSWER.pack(delay))
            connection.sendall(weights.view("u1").data)


class FirstComeClient:
    """A worker's connections; a thread each, so that shards travel at the same time."""

    def __init__(self, rank: int, servers: list[tuple[str, int]], ranges: list[tuple[int, int]]) -> None:
        self._ranges = ranges
        self._sockets = [_connect(address) for address in servers]
        for connection in self._sockets:
            connection.sendall(HELLO.pack(rank))

    def exchange(self, gradient: Vector, weights: Vector) -> int:
        """Send a gradient, fill in the model; the delay, of the shard where it was largest."""
        delays = [0] * len(self._sockets)
        errors: list[Exception] = []

        def one(index: int) -> None:
            start, count = self._ranges[index]
            connection = self._sockets[index]
            try:
                connection.sendall(gradient[start : start + count].view("u1").data)
                answer = bytearray(ANSWER.size)
                place = weights[start : start + count].view("u1").data
                if not (_receive(connection, memoryview(answer)) and _receive(connection, place)):
                    raise ConnectionError("a server has gone")
                (delays[index],) = ANSWER.unpack(answer)
            except Exception as error:  # told to the caller below
                errors.append(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(1, len(self._sockets))]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return max(delays)


def shard_ranges(elements: int, servers: int) -> list[tuple[int, int]]:
    """Start and count of equal shards."""
    edges = [elements * index // servers for index in range(servers + 1)]
    return [(begin, end - begin) for begin, end in pairwise(edges)]


def _connect(address: tuple[str, int]) -> socket.socket:
    give_up = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=CONNECT_S)
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _receive(connection: socket.socket, place: memoryview) -> bool:
    """Fill the place; False if the other end has gone."""
    got = 0
    while got < len(place):
        now = connection.recv_into(place[got:])
        if now == 0:
            return False
        got += now
    return True


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=ServerOrder))
