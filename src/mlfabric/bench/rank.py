"""One rank of `mlfabric bench allreduce`: runs the contenders in turns and reports, from rank 0, all figures.

In each turn a contender idles, reduces once (the figure after an idle pause), then reduces back to back. The
time of an operation is that of its slowest rank. Contenders take turns, so that whatever else the machine
does meets all of them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from mlfabric.api import Fabric, join
from mlfabric.bench.contenders import Contender, make_contenders, prepare
from mlfabric.numerics import Vector

SLOW_START_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


class RankOrder(msgspec.Struct, frozen=True):
    """What the ranks are to do."""

    contenders: list[str]
    sizes: list[int]
    turns: int
    in_a_row: int
    idle_s: float
    tuned: bool = False  # measure the pause again with the kernel setting `doctor` recommends
    run_s: float = 0.0  # reduce for so long instead, and report every operation


class ContenderTimes(msgspec.Struct):
    """Seconds of each operation, of the slowest rank."""

    contender: str
    size_bytes: int
    in_a_row: list[float]
    after_idle: list[float]
    after_idle_tuned: list[float]
    cpu_s_per_gb: float = 0.0
    errors: int = 0  # elements that were wrong


class OperationTimes(msgspec.Struct):
    """Of a run under way: when each operation began and ended here, when a change of links was noticed."""

    began_s: list[float]
    ended_s: list[float]
    noticed_s: list[float]


class Report(msgspec.Struct):
    ranks: int
    times: list[ContenderTimes] = []
    run: OperationTimes | None = None


def processor_s(fabric: Fabric) -> float:
    """Processor time of this process and, if it has one of its own, the engine's."""
    return time.process_time() + fabric._engine.own_processor_s


class Bench:
    def __init__(self, fabric: Fabric, rank: int, ranks: int, order: RankOrder) -> None:
        self._fabric = fabric
        self._rank = rank
        self._ranks = ranks
        self._order = order

    def measure(self) -> list[ContenderTimes]:
        order = self._order
        contenders = make_contenders(order.contenders, self._fabric)
        results = [ContenderTimes(c.name, size, [], [], []) for size in order.sizes for c in contenders]
        by_key = {(times.size_bytes, times.contender): times for times in results}
        for size in order.sizes:
            array = self._fabric.empty(max(size // 4, 1))
            for contender in contenders:  # links are made, memory is touched
                self._reduce(contender, array)
            for turn in range(order.turns):
                for shift in range(len(contenders)):
                    contender = contenders[(turn + shift) % len(contenders)]
                    self._turn(contender, array, by_key[size, contender.name])
        if order.tuned:
            self._measure_tuned(contenders, by_key)
        return results

    def _turn(self, contender: Contender, array: Vector, times: ContenderTimes) -> None:
        if self._order.idle_s:
            time.sleep(self._order.idle_s)
            times.after_idle.append(self._reduce(contender, array)[0])
        cpu = 0.0
        for _ in range(self._order.in_a_row):
            seconds, used = self._reduce(contender, array, times)
            times.in_a_row.append(seconds)
            cpu += used
        share = cpu / (self._order.in_a_row * array.nbytes / 1e9) / self._ranks
        times.cpu_s_per_gb += share / self._order.turns

    def _measure_tuned(
        self, contenders: list[Contender], by_key: dict[tuple[int, str], ContenderTimes]
    ) -> None:
        with contextlib.suppress(OSError):
            SLOW_START_AFTER_IDLE.write_text("0")
        for size in self._order.sizes:
            array = self._fabric.empty(max(size // 4, 1))
            for _ in range(self._order.turns):
                for contender in contenders:
                    time.sleep(self._order.idle_s)
                    seconds, _ = self._reduce(contender, array)
                    by_key[size, contender.name].after_idle_tuned.append(seconds)

    def _reduce(
        self, contender: Contender, array: Vector, check: ContenderTimes | None = None
    ) -> tuple[float, float]:
        """(seconds of the slowest rank, processor seconds of all ranks)."""
        array[:] = np.float32(self._rank + 1)
        contender.all_reduce(np.zeros(1, np.float32))
        cpu, began = processor_s(self._fabric), time.perf_counter()
        contender.all_reduce(array)
        mine = np.array([time.perf_counter() - began, processor_s(self._fabric) - cpu])
        if check is not None:
            check.errors += int(np.count_nonzero(array != self._ranks * (self._ranks + 1) / 2))
        slowest, total = mine[:1].copy(), mine[1:].copy()
        self._fabric.all_reduce(slowest, combine="max")
        self._fabric.all_reduce(total)
        return float(slowest[0]), float(total[0])

    def run(self) -> OperationTimes:
        """Reduce again and again until every rank's time is up."""
        array = np.ones(max(self._order.sizes[0] // 4, 1), np.float32)
        times = OperationTimes([], [], [])
        sys.stdout.write("running\n")
        sys.stdout.flush()
        ends = time.monotonic() + self._order.run_s
        going = np.ones(1)
        while going[0]:
            times.began_s.append(time.monotonic())
            self._fabric.all_reduce(array, timeout=600)
            times.ended_s.append(time.monotonic())
            going[0] = time.monotonic() < ends
            self._fabric.all_reduce(going, combine="min")
        times.noticed_s = self._fabric._engine.noticed_s
        return times


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=RankOrder)
    prepare(order.contenders)  # imports take longer than a member may be silent
    with join(timeout=60.0) as fabric:
        rank, ranks = fabric.rank_and_size()
        bench = Bench(fabric, rank, ranks, order)
        report = Report(ranks, run=bench.run()) if order.run_s else Report(ranks, times=bench.measure())
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
        fabric.all_reduce(np.zeros(1))  # nobody leaves before all are done


if __name__ == "__main__":
    main()
