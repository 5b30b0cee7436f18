"""One rank of `mlfabric bench push` or `pull`: rank 0 serves the model, the others push to it or pull it.

Every size is a job of its own, with its own model; the scheduler, in the process of rank 0, outlives them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np

from mlfabric.api import Fabric, join_with
from mlfabric.bench.rank import processor_s
from mlfabric.client import Dropped
from mlfabric.config import Settings, from_environment
from mlfabric.data import ArrayData
from mlfabric.errors import FabricError
from mlfabric.eventlog import NoLog
from mlfabric.messages import StatusReport, StatusWanted
from mlfabric.numerics import Vector
from mlfabric.roles.actions import SchedulerSettings
from mlfabric.rules import Sum
from mlfabric.runtime.engine import Engine
from mlfabric.runtime.probe import ask_scheduler
from mlfabric.runtime.tls import Tls

WAIT_S = 3600.0
# A first round makes connections; the next ones show how fast the links are.
WARM_ROUNDS = 3
LEAVE_S = 3.0


class TransferOrder(msgspec.Struct, frozen=True):
    """What the ranks are to do."""

    kind: str  # push or pull
    sizes: list[int]
    rounds: int
    idle_s: float
    aggregate: bool = True  # workers sum for others, or pass the model on


class Belief(msgspec.Struct, frozen=True):
    """A host's rates as the planner sees them."""

    host: str
    up_bytes_per_s: float
    down_bytes_per_s: float


class TransferTimes(msgspec.Struct):
    """The rounds of one size; seconds of the slowest rank."""

    size_bytes: int
    seconds: list[float] = []
    beliefs: list[list[Belief]] = []  # before each round
    cpu_s_per_gb: float = 0.0  # of all ranks, per GB that workers pushed or pulled
    errors: int = 0  # elements that were wrong
    dropped: int = 0  # updates that did not get into the model


class TransferReport(msgspec.Struct):
    server: str = ""  # host
    workers: list[str] = []  # hosts
    times: list[TransferTimes] = []


class TransferBench:
    def __init__(self, order: TransferOrder, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        if "RANK" not in env or "WORLD_SIZE" not in env:
            raise FabricError(
                "run it on each of your hosts under torchrun, or let it make hosts: "
                f"mlfabric bench {order.kind} --lab 8"
            )
        self._order = order
        self._rank = int(env["RANK"])
        self._workers = int(env["WORLD_SIZE"]) - 1
        self._settings = from_environment(name=f"rank{self._rank}", environment=env)
        if self._workers < 1:
            raise FabricError("it takes two ranks at least: one serves the model")

    def run(self) -> TransferReport:
        """Rank 0 reports; the other ranks' reports hold nothing."""
        report = TransferReport()
        with _scheduler(self._settings):
            for number, size in enumerate(self._order.sizes):
                with self._join(number) as fabric:
                    times = self._measure(fabric, size)
                    if self._rank == 0:
                        report.times.append(times)
                        report.server, report.workers = self._places(number)
                    self._meet(fabric)  # nobody leaves before all are done
                    if self._rank == 0:
                        self._wait_until_alone(number)
        return report

    def _join(self, number: int) -> Fabric:
        settings = replace(
            self._settings,
            name=f"rank{self._rank}-{number}",
            job=self._job(number),
            embed_scheduler=False,
            expected=self._workers + 1,
        )
        return join_with(settings, ("worker", "server" if self._rank == 0 else "aggregator"), 60.0)

    def _job(self, number: int) -> str:
        return f"{self._order.kind}{number}"

    def _measure(self, fabric: Fabric, size: int) -> TransferTimes:
        times = TransferTimes(size)
        array = np.full(max(size // 4, 1), self._rank, np.float32)
        # A model of the server's numbers, so that what is pulled can be checked.
        first = np.zeros_like(array) if self._order.kind == "push" else _pattern(len(array))
        fabric.publish(
            {"model": first},
            apply=Sum(),
            max_delay="none",
            divergence=None,
            shards=1,
            aggregate=self._order.aggregate,
            timeout=WAIT_S,
        )
        for number in range(WARM_ROUNDS + self._order.rounds):
            time.sleep(self._order.idle_s)
            beliefs = self._beliefs() if self._rank == 0 else []
            seconds, cpu = self._round(fabric, array, times)
            if number >= WARM_ROUNDS:
                times.seconds.append(seconds)
                times.beliefs.append(beliefs)
                moved_gb = self._workers * array.nbytes / 1e9
                times.cpu_s_per_gb += cpu / moved_gb / self._order.rounds
        if self._order.kind == "push" and self._rank == 0:
            rounds = WARM_ROUNDS + self._order.rounds
            expected = rounds * self._workers * (self._workers + 1) / 2
            model = fabric.pull(WAIT_S).arrays["model"]
            times.errors = int(np.count_nonzero(model != np.float32(expected)))
        counted = np.array([times.errors, times.dropped], np.float64)
        fabric.all_reduce(counted)
        times.errors, times.dropped = int(counted[0]), int(counted[1])
        return times

    def _round(self, fabric: Fabric, array: Vector, times: TransferTimes) -> tuple[float, float]:
        """(seconds of the slowest rank, processor seconds of all ranks)."""
        self._meet(fabric)
        cpu, began = processor_s(fabric), time.perf_counter()
        if self._rank > 0:
            if self._order.kind == "push":
                times.dropped += isinstance(fabric.push({"model": array}).result(WAIT_S), Dropped)
            else:
                model = fabric.pull(WAIT_S).arrays["model"]
        took = time.perf_counter() - began
        self._meet(fabric)
        mine = np.array([took, processor_s(fabric) - cpu])
        if self._rank > 0 and self._order.kind == "pull":
            times.errors += int(np.count_nonzero(model != _pattern(len(array))))
        slowest, total = mine[:1].copy(), mine[1:].copy()
        fabric.all_reduce(slowest, WAIT_S, combine="max")
        fabric.all_reduce(total, WAIT_S)
        return float(slowest[0]), float(total[0])

    def _meet(self, fabric: Fabric) -> None:
        fabric.all_reduce(np.zeros(1, np.float32), WAIT_S)

    def _status(self, job: str = "") -> StatusReport:
        settings = self._settings
        tls = Tls(settings.tls) if settings.tls is not None else None
        answer = ask_scheduler(settings.scheduler, settings.secret, StatusWanted(), 10.0, job, tls)
        assert isinstance(answer, StatusReport)
        return answer

    def _beliefs(self) -> list[Belief]:
        hosts = {m.host: Belief(m.host, m.up_bytes_per_s, m.down_bytes_per_s) for m in self._status().members}
        return list(hosts.values())

    def _wait_until_alone(self, number: int) -> None:
        """Without its server a job fails: the server leaves last."""
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until:
            if sum(m.job == self._job(number) for m in self._status().members) <= 1:
                return
            time.sleep(0.02)

    def _places(self, number: int) -> tuple[str, list[str]]:
        """The server's host, and the host of each worker."""
        members = [m for m in self._status().members if m.job == self._job(number)]
        server = next(m.host for m in members if m.leads)
        return server, [m.host for m in members if "aggregator" in m.roles]


def _pattern(count: int) -> Vector:
    return np.arange(count, dtype=np.float32) % np.float32(1021)


@contextmanager
def _scheduler(settings: Settings) -> Iterator[None]:
    """Where torchrun started us without a scheduler, rank 0 runs one."""
    if not settings.embed_scheduler:
        yield
        return
    tls = Tls(settings.tls) if settings.tls is not None else None
    engine = Engine(
        "scheduler", ArrayData(), NoLog(), settings.scheduler, settings.secret, settings.insecure, tls=tls
    )
    engine.node.start_role("scheduler", SchedulerSettings("scheduler"))
    engine.start()
    try:
        yield
    finally:
        engine.stop(0.0)


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=TransferOrder)
    report = TransferBench(order).run()
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
