"""What the engine costs a training step: the time of forward and backward passes while it moves bytes.

    python -m benchmarks.interference [--rate 200mbit,1gbit] [--pattern push,all_reduce] [--hosts 2]
        [--turns 4] [--contenders alone,apart,thread,default]

On the first of some lab hosts a real model (ResNet-18, eight images of 32x32, one torch thread) is trained,
without an optimizer, while arrays of its gradients' size are all-reduced, or updates of it pushed and models
pulled, again and again. As it stands it takes about three and a half minutes. The contenders take turns, each
with the same number of operations:

- alone: no traffic at all;
- default: mlfabric as a user gets it who says nothing; what it chose is in the table;
- thread, process: mlfabric's engine in a thread of the trainer and in a process of its own;
- copied: the engine in a process of its own, but arrays that it can't see, so that they are copied;
- gloo: PyTorch's own all-reduce, whose threads need no interpreter;
- apart: mlfabric's engine, as a thread, in another process of the host that does nothing else.

`apart` is the yardstick: it takes as much of the machine (processors, caches, memory, the kernel's work for
the network) from the trainer as the engine does, but can't hold its interpreter. On a machine with few
processors the other hosts' work is part of that. So two ratios are told, each the median over turns: to
`alone`, what a step costs more in all; to `apart`, what it costs more because the engine is the trainer's.

Both need a machine that has nothing else to do. The last columns need it less: what of a step's time its
thread ran, and what it neither ran nor waited for a processor, by the kernel's own account. A trainer on one
thread that reads no file waits for nothing then but the interpreter, or memory that the kernel has to fetch.
`own` is the sum of both, by that of `apart`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import mlfabric as mf
from mlfabric.api import ALL_ROLES, join_with
from mlfabric.bench.hosts import LabWish
from mlfabric.config import from_environment
from mlfabric.errors import FabricError
from mlfabric.lab.manifest import MachineLoad
from mlfabric.traffic.tables import console, table
from mlfabric.units import goodput, parse_rate

# Gradients of the model; tests use less.
ELEMENTS = 11_689_512
IMAGES = 8
SIDE = 32
PATTERNS = ("push", "all_reduce")
CONTENDERS = ("alone", "apart", "thread", "default", "process", "copied", "gloo")
USUAL = "alone,apart,thread,default"
# Operations of a turn take about so long on links that are full.
TURN_S = 2.4
COLUMNS = (
    "contender",
    "step ms",
    "p10 - p90",
    "steps",
    "MB/s",
    "to alone",
    "to apart",
    "ran ms",
    "blocked ms",
    "own",
)


class Wish(msgspec.Struct, frozen=True):
    pattern: str
    turns: int
    operations: int
    elements: int
    contenders: tuple[str, ...]


class Turn(msgspec.Struct, frozen=True):
    contender: str
    steps_s: list[float]  # those that ran while bytes were moved all the time
    ran_s: list[float]  # of each, what its thread ran
    blocked_s: list[float]  # and what it neither ran nor waited for a processor
    seconds: float  # of all operations
    cpu_s: float  # of the trainer's process, its children not counted


class Result(msgspec.Struct, frozen=True):
    turns: list[Turn]
    chosen: str  # the default engine, where it took part


# --- moving bytes -----------------------------------------------------------------------------------------


class FabricMover:
    """Operations of one member of a fabric of its own."""

    def __init__(self, name: str, rank: int, ranks: int, offset: int, engine: str | None, wish: Wish) -> None:
        where = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + offset}"
        self._wish = wish
        settings = from_environment(
            where,
            job=name,
            name=f"{name}{rank}",
            embed_scheduler=rank == 0,
            expected=ranks,
            engine=engine,
        )
        # A busy machine's silence is nobody's death here.
        self._fabric = join_with(replace(settings, least_lease_s=60.0), ALL_ROLES, timeout=60.0)
        self.engine = self._fabric.engine
        self._array = np.zeros(wish.elements, np.float32)
        if name != "copied":
            self._array = self._fabric.empty(wish.elements)
            self._array[:] = 0.0
        if wish.pattern == "push":
            self._fabric.publish({"model": self._array}, apply=mf.SGD(lr=0.1), max_delay="none", shards=ranks)
        self._fabric.all_reduce(np.zeros(1), 60)

    def move(self) -> None:
        for _ in range(self._wish.operations):
            if self._wish.pattern == "push":
                ticket = self._fabric.push({"model": self._array})
                self._fabric.pull(300)
                ticket.result(300)
            else:
                self._fabric.all_reduce(self._array, 300)
        self._fabric.all_reduce(np.zeros(1), 300)

    def close(self) -> None:
        self._fabric.close()


class GlooMover:
    def __init__(self, wish: Wish) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self._wish = wish
        self._reduce: Callable[[Any], Any] = dist.all_reduce
        self._array, self._last = torch.zeros(wish.elements), torch.zeros(1)
        self._end = dist.destroy_process_group

    def move(self) -> None:
        for _ in range(self._wish.operations):
            self._reduce(self._array)
        self._reduce(self._last)

    def close(self) -> None:
        self._end()


class ApartMover:
    """The first host's member in a process of its own, which is told when to move."""

    def __init__(self, wish: Wish) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.interference", "apart", msgspec.json.encode(wish).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def move(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("move\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "moved\n":
            raise FabricError("the process apart has failed")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def be_apart(wish: Wish) -> None:
    mover = FabricMover("apart", 0, int(os.environ["WORLD_SIZE"]), 3, "thread", wish)
    for _ in sys.stdin:
        mover.move()
        print("moved", flush=True)
    mover.close()


# --- the ranks --------------------------------------------------------------------------------------------


def make_movers(wish: Wish, rank: int, ranks: int) -> dict[str, Any]:
    """In an order that all ranks share: what is the default depends on who is in the process already."""
    movers: dict[str, Any] = {}
    for name in sorted(wish.contenders, key=lambda name: name != "default"):
        # Only the trainer's engine is looked at; the others' are threads that nobody disturbs.
        engines = {"thread": "thread", "process": "process", "copied": "process", "default": None}
        if name in engines:
            offset = 10 + CONTENDERS.index(name)
            movers[name] = FabricMover(name, rank, ranks, offset, "thread" if rank else engines[name], wish)
        elif name == "apart":
            movers[name] = (
                ApartMover(wish) if rank == 0 else FabricMover("apart", rank, ranks, 3, "thread", wish)
            )
        elif name == "gloo":
            movers[name] = GlooMover(wish)
    return movers


class StepTimes:
    """Times steps of the calling thread, and asks the kernel what it did meanwhile."""

    def __init__(self) -> None:
        self._account = Path("/proc/thread-self/schedstat")
        self.steps_s: list[float] = []
        self.ran_s: list[float] = []
        self.blocked_s: list[float] = []

    def time(self, step: Callable[[], None], counts: Callable[[], bool]) -> None:
        """A step after which `counts` is false is left out."""
        ran, waited, began = *self._read(), time.perf_counter()
        step()
        took = time.perf_counter() - began
        ran_now, waited_now = self._read()
        if counts():
            self.steps_s.append(took)
            self.ran_s.append(ran_now - ran)
            self.blocked_s.append(max(took - (ran_now - ran) - (waited_now - waited), 0.0))

    def _read(self) -> tuple[float, float]:
        ran, waited, _ = self._account.read_text(encoding="ascii").split()
        return int(ran) / 1e9, int(waited) / 1e9


def train_beside(name: str, mover: Any, step: Callable[[], None], steps_alone: int) -> Turn:
    """Steps while bytes are moved by another thread, which only waits; or some steps without."""
    times = StepTimes()
    cpu, began = time.process_time(), time.perf_counter()
    if mover is None:
        for _ in range(steps_alone):
            times.time(step, lambda: True)
    else:
        thread = threading.Thread(target=mover.move)
        thread.start()
        while thread.is_alive():
            times.time(step, thread.is_alive)
        thread.join()
    took, used = time.perf_counter() - began, time.process_time() - cpu
    return Turn(name, times.steps_s, times.ran_s, times.blocked_s, took, used)


def make_step() -> Callable[[], None]:
    import torch

    from benchmarks.models import resnet18

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = resnet18()
    images, labels = torch.randn(IMAGES, 3, SIDE, SIDE), torch.randint(1000, (IMAGES,))
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        model.zero_grad(set_to_none=False)
        loss(model(images), labels).backward()

    for _ in range(3):
        step()
    return step


def be_rank(wish: Wish) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch.distributed  # noqa: F401 - it takes seconds, in which nobody should wait for us

    step = make_step() if rank == 0 else None
    movers = make_movers(wish, rank, ranks)
    names = wish.contenders
    turns: list[Turn] = []
    for turn in range(wish.turns):
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]  # nobody always follows the same
            mover = movers.get(name)
            if step is not None:
                turns.append(train_beside(name, mover, step, 30))
            elif mover is not None:
                mover.move()
    for mover in movers.values():
        with contextlib.suppress(FabricError):
            mover.close()
    if rank == 0:
        chosen = movers["default"].engine if "default" in movers else ""
        print(msgspec.json.encode(Result(turns, chosen)).decode(), flush=True)


# --- the whole --------------------------------------------------------------------------------------------


def measure(hosts: int, rate: str, wish: Wish) -> Result:
    from mlfabric.lab import Lab, RunOptions

    with (
        Lab(LabWish(hosts, rate, {}).scenario(), verify=False) as lab,
        tempfile.TemporaryDirectory(prefix="mlfabric-interference-") as folder,
    ):
        argv = [sys.executable, "-m", "benchmarks.interference", "rank", msgspec.json.encode(wish).decode()]
        result = lab.run(argv, RunOptions(folder=Path(folder) / "run", timeout_s=1200))
        lines = Path(result.ranks[0].log).read_text(errors="replace").splitlines()
        said = next((line for line in lines if line.startswith('{"turns"')), None)
        if said is None:
            raise FabricError(f"the ranks failed: {lines[-1] if lines else 'they said nothing'}")
        return msgspec.json.decode(said, type=Result)


def operations_of(rate: str, elements: int) -> int:
    """So many fill a link of this rate for the time of a turn."""
    return max(round(TURN_S * goodput(parse_rate(rate)) / (elements * 4)), 1)


def show(hosts: int, rate: str, wish: Wish, result: Result) -> None:
    shown = table(
        f"{wish.pattern} of {wish.elements * 4 / 1e6:.3g} MB, {hosts} hosts at {rate}: "
        f"{wish.turns} turns of {wish.operations} operations",
        COLUMNS,
    )
    steps: dict[str, list[float]] = {}  # the median step of each turn
    owned: dict[str, list[float]] = {}  # and what of it does not depend on who else wants a processor
    for name in wish.contenders:
        own = [turn for turn in result.turns if turn.contender == name]
        if not all(turn.steps_s for turn in own):
            raise FabricError(f"no step was as short as the operations of {name}; give more --operations")
        steps[name] = [statistics.median(turn.steps_s) for turn in own]
        owned[name] = [
            statistics.median(map(sum, zip(turn.ran_s, turn.blocked_s, strict=True))) for turn in own
        ]
        all_steps = sorted(step for turn in own for step in turn.steps_s)
        low, high = (all_steps[int(part * (len(all_steps) - 1))] for part in (0.1, 0.9))
        moved = wish.operations * wish.elements * 4 / 1e6 / statistics.median(turn.seconds for turn in own)
        ran = statistics.median(value for turn in own for value in turn.ran_s) * 1e3
        blocked = statistics.median(value for turn in own for value in turn.blocked_s) * 1e3
        shown.add_row(
            f"{name} ({result.chosen})" if name == "default" else name,
            f"{statistics.median(all_steps) * 1e3:.1f}",
            f"{low * 1e3:.0f} - {high * 1e3:.0f}",
            str(len(all_steps)),
            "" if name == "alone" else f"{moved:.0f}",
            ratio(steps[name], steps.get("alone")),
            ratio(steps[name], steps.get("apart")) if name != "alone" else "",
            f"{ran:.1f}",
            f"{blocked:.2f} ({blocked / ran:.1%})",
            ratio(owned[name], owned.get("apart")) if name != "alone" else "",
        )
    console().print(shown)


def ratio(of: list[float], to: list[float] | None) -> str:
    """The median over turns: what slows the machine down for a while slows both."""
    if to is None:
        return ""
    return f"{statistics.median(one / other for one, other in zip(of, to, strict=True)):.3f}"


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in ("rank", "apart"):
        wish = msgspec.json.decode(sys.argv[2], type=Wish)
        (be_rank if sys.argv[1] == "rank" else be_apart)(wish)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", default="2")
    parser.add_argument("--rate", default="200mbit,1gbit")
    parser.add_argument("--pattern", default=",".join(PATTERNS))
    parser.add_argument("--contenders", default=USUAL, help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--operations", type=int, default=0, help="in each turn; by itself as the rate allows"
    )
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    options = parser.parse_args()
    contenders = tuple(options.contenders.split(","))
    if not set(contenders) <= set(CONTENDERS):
        parser.error(f"contenders are {', '.join(CONTENDERS)}")
    for rate in options.rate.split(","):
        for pattern in options.pattern.split(","):
            if pattern not in PATTERNS or (pattern == "push" and "gloo" in contenders):
                parser.error("patterns are push and all_reduce; gloo can only do the latter")
            for hosts in options.hosts.split(","):
                count = options.operations or operations_of(rate, options.elements)
                wish = Wish(pattern, options.turns, count, options.elements, contenders)
                load, began = MachineLoad(), time.monotonic()
                show(int(hosts), rate, wish, measure(int(hosts), rate, wish))
                load.update()
                took, stolen = time.monotonic() - began, load.stolen_share()
                print(f"{took:.0f} s; {stolen:.1%} of the processors' time was stolen\n", flush=True)


if __name__ == "__main__":
    main()
