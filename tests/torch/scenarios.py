"""What the ranks of a test world do; `tests.torch.worlds` forks a process for each."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import random
import runpy
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import mlfabric
import mlfabric.torch
from tests.torch import cases


def begin(
    rank: int,
    size: int,
    folder: str,
    backend: str = "mlfabric",
    timeout_s: float = 60.0,
    engine: str | None = None,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=mlfabric.torch.Options(engine=engine) if engine else None,
    )


def agree_with_gloo(
    rank: int, size: int, folder: str, seed: int, count: int, engine: str | None = None
) -> Any:
    """Random calls in the world and in a group of some of its ranks, on both backends."""
    begin(rank, size, folder, engine=engine)
    draw = random.Random(f"groups {seed}")
    some = sorted(draw.sample(range(size), draw.randint(1, size)))
    ranks = [list(range(size)), some]
    groups = [
        (dist.group.WORLD, dist.new_group(ranks[0], backend="gloo")),
        (dist.new_group(some, backend="mlfabric"), dist.new_group(some, backend="gloo")),
    ]
    for number in range(count):
        which = draw.randrange(2)
        names = tuple(cases.CALLS)
        case = cases.draw_case(f"{seed}/{number}", len(ranks[which]), names, cases.OUR_TYPES)
        if rank not in ranks[which]:
            continue
        me = ranks[which].index(rank)
        ours, gloo = groups[which]
        call, wanted = cases.CALLS[case.name]
        got = call(case, me, ours, case.laid_out)
        said = cases.difference(case, got, wanted(case, me), "the sum of all inputs")
        if not said and cases.gloo_offers(case):
            said = cases.difference(case, got, cases.by_gloo(case, me, gloo), "Gloo")
        if said:
            raise AssertionError(said)
    dist.barrier()
    dist.destroy_process_group()
    return "done"


def every_combination(rank: int, size: int, folder: str, seed: int, names: list[str]) -> Any:
    """Every type, shape, root and layout for some operations, in turn."""
    begin(rank, size, folder)
    gloo = dist.new_group(backend="gloo")
    count = 0
    for name in names:
        call, wanted = cases.CALLS[name]
        for kind in cases.OUR_TYPES:
            for shape in cases.SHAPES:
                case = cases.draw_case(f"{seed}/{name}/{kind}/{shape}", size, (name,), (kind,))
                case.shape = shape
                for root in range(size) if name in ("broadcast", "reduce", "gather", "scatter") else [0]:
                    case.root = root
                    got = call(case, rank, dist.group.WORLD, case.laid_out)
                    said = cases.difference(case, got, wanted(case, rank), "the sum of all inputs")
                    if not said and cases.gloo_offers(case):
                        said = cases.difference(case, got, cases.by_gloo(case, rank, gloo), "Gloo")
                    if said:
                        raise AssertionError(said)
                    count += 1
    dist.destroy_process_group()
    return count


# --- training ------------------------------------------------------------------------------------------


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(20, 64)
        self.middle = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.last = torch.nn.Linear(64, 3)
        self.spare = torch.nn.Linear(64, 64) if unused else None

    def forward(self, x: Any, spare: bool = False) -> Any:
        x = torch.relu(self.first(x))
        x = self.norm(torch.relu(self.middle(x)))
        if spare and self.spare is not None:
            x = self.spare(x)
        return self.last(x)


def train_forms(rank: int, size: int, folder: str, forms: list[str]) -> Any:
    """Train in every form by our backend and by Gloo, from the same start with the same data."""
    begin(rank, size, folder)
    gloo = dist.new_group(backend="gloo")
    answers = {}
    for form in forms:
        answers[form] = [train(rank, group, form) for group in (dist.group.WORLD, gloo)]
    dist.destroy_process_group()
    return answers


def train_by_hook(rank: int, size: int, folder: str) -> Any:
    """A job on Gloo whose gradients go over the fabric."""
    begin(rank, size, folder, "gloo")
    store = dist.FileStore(f"{folder}/address", size)
    options: dict[str, Any] = {"name": f"w{rank}", "expected": size, "job": "own"}
    if rank == 0:
        fabric = mlfabric.join("127.0.0.1:0", scheduler=True, **options)
        store.set("address", fabric.address)
    else:
        fabric = mlfabric.join(store.get("address").decode(), scheduler=False, **options)
    states = (mlfabric.torch.managed_state(), fabric, None)
    answers = [train(rank, dist.group.WORLD, "plain", state) for state in states]
    dist.barrier()
    fabric.close()
    dist.destroy_process_group()
    return answers


def train(rank: int, group: Any, form: str, hook: Any = None, steps: int = 5) -> Any:
    """Losses, and a fingerprint of the final parameters."""
    torch.manual_seed(5)
    net = Net(unused=form == "unused")
    options: dict[str, dict[str, Any]] = {
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    }
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=group, **options.get(form, {}))
    if hook is not None:
        model.register_comm_hook(hook, mlfabric.torch.managed_hook)
    elif form == "mixed":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    losses = []
    rounds = steps + (rank if form == "join" else 0)  # with join some ranks have more to do

    def step(index: int) -> None:
        x = torch.randn(16, 20, generator=draw)
        y = torch.randint(0, 3, (16,), generator=draw)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "mixed"):
            out = model(x, spare=bool(index % 2)) if form == "unused" else model(x)
        loss = torch.nn.functional.cross_entropy(out.float(), y)
        loss.backward()
        losses.append(loss.item())

    with model.join() if form == "join" else contextlib.nullcontext():
        for index in range(rounds):
            if form == "no_sync":
                with model.no_sync():
                    step(index)
            step(index)
            optimizer.step()
            optimizer.zero_grad()
    raw = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    return {"losses": losses, "digest": hashlib.sha256(raw).hexdigest()}


# --- trouble -------------------------------------------------------------------------------------------


def said(call: Any, *arguments: Any, **options: Any) -> str:
    """The error of a call, as its type and sentence; what it returns if it has none."""
    try:
        return f"fine: {call(*arguments, **options)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def mistake(rank: int, size: int, folder: str, what: str) -> Any:
    """Rank 1 calls something else than the others; what everybody hears, then and from the next call."""
    begin(rank, size, folder, timeout_s=20.0)
    odd = rank == 1
    calls: dict[str, Any] = {
        "shape": lambda: dist.all_reduce(torch.ones(9 if odd else 10)),
        "large shape": lambda: dist.all_reduce(torch.ones(200_000 + odd)),
        "dtype": lambda: dist.all_reduce(torch.ones(10, dtype=torch.float64 if odd else torch.float32)),
        "reduction": lambda: dist.all_reduce(
            torch.ones(10), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        ),
        "operation": lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(10)),
        "root": lambda: dist.reduce(torch.ones(200_000), dst=1 if odd else 0),
        "splits": lambda: dist.all_to_all_single(
            torch.zeros(size), torch.ones(size + odd), [1] * size, [1 + odd] + [1] * (size - 1)
        ),
        "unsupported": lambda: dist.all_reduce(
            torch.ones(10, dtype=torch.int32), op=dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM
        ),
    }
    answers = [said(calls[what]), said(dist.barrier)]
    dist.destroy_process_group()
    return answers


def same_mistake(rank: int, size: int, folder: str) -> Any:
    """Everybody makes the same mistakes, and goes on."""
    begin(rank, size, folder, timeout_s=20.0)
    world = dist.group.WORLD
    answers = [
        said(dist.all_reduce, torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG),
        said(dist.all_reduce, torch.ones(3), op=dist.ReduceOp.BAND),
        said(dist.all_reduce, torch.ones(3, device="meta")),
        said(dist.all_reduce, torch.ones(3).to(torch.float8_e5m2)),
        said(dist.broadcast, torch.empty(3, dtype=torch.bits8), 0),
        said(dist.all_reduce, torch.ones(3).to_sparse(), op=dist.ReduceOp.MAX),
        said(dist.all_gather, [torch.ones(3)], torch.ones(3)),
        said(dist.all_gather_single, torch.ones(3), torch.ones(3)),
        said(dist.reduce_scatter_single, torch.ones(3), torch.ones(3)),
        said(dist.all_to_all_single, torch.ones(size), torch.ones(size), [size, 1], [size, 1]),
        said(world.send, [torch.ones(3)], rank, 0),
        said(world.send, [torch.ones(3)], (rank + 1) % size, -4),
        said(dist.init_process_group, "mlfabric", init_method=f"file://{folder}/x", rank=0, world_size=1),
    ]
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [*answers, total.tolist()]


def late(rank: int, size: int, folder: str, what: str, dump: str) -> Any:
    """Rank 1 does not come; the others' limit is short."""
    os.environ["MLFABRIC_DUMP_FILE"] = dump
    begin(rank, size, folder, timeout_s=30.0)
    dist.group.WORLD.set_timeout(timedelta(seconds=1.0))
    store = dist.FileStore(f"{folder}/done", size)
    calls: dict[str, Any] = {
        "small": lambda: dist.all_reduce(torch.ones(10)),
        "large": lambda: dist.all_reduce(torch.ones(200_000)),
        "barrier": dist.barrier,
        "future": lambda: dist.all_reduce(torch.ones(10), async_op=True).get_future().wait(),
        "recv": lambda: dist.recv(torch.ones(10), 1) if rank == 0 else dist.barrier(),
        "send": lambda: dist.send(torch.ones(200_000), 1) if rank == 0 else dist.barrier(),
    }
    answers = []
    if rank != 1:
        answers.append(said(calls[what]))
        store.set(f"{rank}", "x")
    else:
        store.wait([f"{other}" for other in range(size) if other != 1], timedelta(seconds=60))
    answers.append(said(dist.all_reduce, torch.ones(4)))
    dist.destroy_process_group()
    return answers


def patience(rank: int, size: int, folder: str) -> Any:
    """A limit given to wait() leaves the call running."""
    begin(rank, size, folder, timeout_s=30.0)
    store = dist.FileStore(f"{folder}/done", size)
    tensor = torch.ones(10)
    answers = []
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        answers = [said(work.wait, timedelta(seconds=0.2)), work.is_completed(), work.exception() is None]
        store.set("waited", "x")
        work.wait()
        answers += [work.is_completed(), work.is_success(), work.result()[0].tolist() == [2.0] * 10]
    else:
        store.wait(["waited"], timedelta(seconds=30))
        dist.all_reduce(tensor)
    dist.destroy_process_group()
    return answers


def die_when_all_are_there(rank: int, size: int, folder: str) -> None:
    """Rank 1 dies; nobody is in a call then."""
    store = dist.FileStore(f"{folder}/done", size)
    if rank == 1:
        store.wait([str(other) for other in range(size) if other != 1], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(str(rank), "x")


def killed(rank: int, size: int, folder: str, engine: str | None = None) -> Any:
    """Rank 1 dies; the others hear of it at once."""
    begin(rank, size, folder, timeout_s=60.0, engine=engine)
    die_when_all_are_there(rank, size, folder)
    began = time.monotonic()
    answer = said(dist.all_reduce, torch.ones(200_000))
    return [answer, time.monotonic() - began]


def backward_fails(rank: int, size: int, folder: str) -> Any:
    """A rank dies under DDP: backward() raises, and the interpreter lives."""
    begin(rank, size, folder, timeout_s=60.0)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    model(torch.ones(2, 10)).sum().backward()
    die_when_all_are_there(rank, size, folder)

    def step() -> None:
        model(torch.ones(2, 10)).sum().backward()

    return said(step)


def aborted(rank: int, size: int, folder: str, engine: str | None = None) -> Any:
    begin(rank, size, folder, timeout_s=60.0, engine=engine)
    store = dist.FileStore(f"{folder}/done", size)
    if rank == 0:
        store.wait(["calls"], timedelta(seconds=30))
        dist.group.WORLD.abort()
        return [said(dist.all_reduce, torch.ones(3)), dist.group.WORLD._session.closed]
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == 1:
        store.set("calls", "x")
    return [said(work.wait), said(dist.barrier)]


def again_and_again(rank: int, size: int, folder: str) -> Any:
    """Several inits in one process, each a fabric of its own; calls after the end say so."""
    answers: list[Any] = []
    store = _shared(folder, size)
    for number in range(3):
        dist.init_process_group("mlfabric", store=store, rank=rank, world_size=size)
        world = dist.group.WORLD
        total = torch.full((5,), float(number))
        dist.all_reduce(total)
        answers.append(total.tolist() == [float(number * size)] * 5)
        dist.destroy_process_group()
        answers.append(said(world.allreduce, [torch.ones(3)]))
    return answers


def early_leavers(rank: int, size: int, folder: str) -> Any:
    """Ranks leave right after their last call, without a barrier: nobody is hurt."""
    begin(rank, size, folder)
    for _ in range(5):
        tensor = torch.full((50_000,), float(rank))
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, size - 1)
    parts = [torch.zeros(1000) for _ in range(size)]
    dist.all_gather(parts, torch.full((1000,), float(rank)))
    dist.destroy_process_group()
    return [part[0].item() for part in parts]


def without_a_scheduler(rank: int, size: int, folder: str) -> Any:
    """Rank 0 leaves, and the scheduler with it; a group of the others and messages between them go on."""
    begin(rank, size, folder)
    rest = dist.new_group(list(range(1, size)))
    if rank:
        dist.barrier(group=rest)
    dist.barrier()
    store = dist.FileStore(f"{folder}/done", size)
    if rank == 0:
        dist.destroy_process_group()
        store.set("gone", "x")
        return "gone"
    store.wait(["gone"], timedelta(seconds=30))
    total = torch.full((100_000,), float(rank))
    dist.all_reduce(total, group=rest)
    place = torch.zeros(3)
    if rank == 1:
        dist.send(torch.ones(3), 2)
    elif rank == 2:
        dist.recv(place)
    dist.barrier(group=rest)
    left = said(dist.all_reduce, torch.ones(1))  # which ends the group of all
    dist.barrier(group=rest)
    dist.destroy_process_group()
    return [total[5].item(), place.tolist() if rank == 2 else [1.0] * 3, left]


def busy(rank: int, size: int, folder: str) -> Any:
    """A rank that holds its interpreter for seconds is not lost."""
    begin(rank, size, folder)
    dist.barrier()
    if rank == 1:
        ctypes.PyDLL(None).usleep(4_000_000)  # PyDLL keeps the interpreter to itself
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.tolist()


def missing(rank: int, size: int, folder: str) -> Any:
    """Rank 1 never comes to init_process_group."""
    return "absent" if rank == 1 else said(begin, rank, size, folder, "mlfabric", 1.0)


def other_world(rank: int, size: int, folder: str) -> Any:
    """Rank 1 was told of a larger world."""
    return said(begin, rank, size + (rank == 1), folder, "mlfabric", 3.0)


# --- ways to begin -------------------------------------------------------------------------------------


def ways(rank: int, size: int, folder: str, port: int) -> Any:
    """Every way to rendezvous, one after the other."""
    torch.set_num_threads(1)
    answers = []

    def use() -> None:
        total = torch.ones(2)
        dist.all_reduce(total)
        answers.append(total.tolist())
        dist.destroy_process_group()

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("mlfabric")
    use()
    dist.init_process_group("cpu:mlfabric", rank=rank, world_size=size, store=_shared(folder, size))
    use()
    dist.init_process_group("mlfabric", init_method=f"tcp://127.0.0.1:{port + 1}", rank=rank, world_size=size)
    use()
    os.environ.update(MLFABRIC_SECRET="given", MLFABRIC_ADDRESS="127.0.0.1")
    dist.init_process_group("cpu:mlfabric", init_method=f"file://{folder}/given", rank=rank, world_size=size)
    use()
    # A scheduler of somebody else, where another job may have ranks of the same numbers.
    store = _shared(folder, size)
    if not rank:
        scheduler = mlfabric.join("127.0.0.1:0", scheduler=True, name="rank0", secret="given")
        store.set("scheduler", scheduler.address)
    os.environ["MLFABRIC_SCHEDULER"] = store.get("scheduler").decode()
    dist.init_process_group("mlfabric", init_method=f"file://{folder}/there", rank=rank, world_size=size)
    use()
    store.set(f"used by {rank}", "x")
    store.wait([f"used by {each}" for each in range(size)], timedelta(seconds=30))
    if not rank:
        scheduler.close()
    return answers


def _shared(folder: str, size: int) -> Any:
    return dist.FileStore(f"{folder}/shared", size)


def wrong_secret(rank: int, size: int, folder: str) -> Any:
    os.environ["MLFABRIC_SECRET"] = f"secret {rank == 1}"
    return said(begin, rank, size, folder, "mlfabric", 3.0)


# --- to be seen ----------------------------------------------------------------------------------------


def profiled(rank: int, size: int, folder: str) -> Any:
    """The spans that the profiler shows."""
    begin(rank, size, folder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.broadcast(torch.ones(10), 0)
        work.wait()
        dist.barrier()
    dist.destroy_process_group()
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("mlfabric:")})


# --- what is built on collectives ----------------------------------------------------------------------


def built_upon(rank: int, size: int, folder: str) -> Any:
    """Parts of torch that make calls of their own, from Python, from C++ and from callbacks."""
    begin(rank, size, folder)
    answers: dict[str, Any] = {}
    world = dist.group.WORLD

    # A hook whose callback waits for another call: it must not wait on the thread that completes it.
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(torch.randn(4, 32)).sum().backward()

    mesh = init_device_mesh("cpu", (size,))
    sharded = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8))
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh)
    sharded(torch.randn(4, 32)).sum().backward()

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    optimizer.step()
    weights = model.module.weight.detach().clone()
    dist.broadcast(weights, 0)
    answers["zero"] = torch.equal(weights, model.module.weight)

    answers["functional"] = [
        functional.all_reduce(torch.ones(2), "sum", world).tolist(),
        functional.all_gather_tensor(torch.full((1,), float(rank)), 0, world).tolist(),
        functional.reduce_scatter_tensor(torch.ones(size), "sum", 0, world).tolist(),
    ]

    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    totals = [torch.full((50_000,), float(number)) for number in range(3)]

    def reduce_often(number: int) -> None:
        for _ in range(4):
            dist.all_reduce(totals[number], group=groups[number])
            totals[number] /= size

    threads = [threading.Thread(target=reduce_often, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers["threads"] = [total[7].item() for total in totals]
    for group in groups:
        dist.destroy_process_group(group)
    works = [dist.all_reduce(torch.ones(100 * (index % 5)), async_op=True) for index in range(60)]
    answers["many"] = all(work.wait() for work in works)
    dist.destroy_process_group()
    return answers


def example(rank: int, size: int, folder: str, port: int, script: str, arguments: list[str]) -> str:
    """A script as torchrun would start it; what it prints."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="example",
    )
    sys.argv = [script, *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def learn_fashion(
    rank: int,
    size: int,
    folder: str,
    port: int,
    data: str,
    mode: Any,
    lr: float,
    steps: int,
    dies_at: int,
    logs: str,
) -> dict[str, Any]:
    """The example's network on Fashion-MNIST; the last rank, which serves a quarter of the model, may die."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "async_fashion_mnist.py"))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    x, y = script["images"](Path(data), "train")
    model = script["network"]()
    wishes: dict[str, Any] = {} if mode == "sync" else {"log": f"{logs}/{rank}.log", "shards": size}
    with mlfabric.torch.join(model, ("AdamW", {"lr": lr}), mode, host=f"h{rank}", **wishes) as training:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, steps)
        for step in range(steps):
            if rank == size - 1 and step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            chosen = torch.randint(len(y), (64,))
            torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            training.step()
            schedule.step()
        if rank:
            return {"committed": training.committed, "dropped": training.dropped}
        if mode != "sync":
            training.wait_for_others(60.0)
        model.eval()
        x, y = script["images"](Path(data), "t10k")
        with torch.no_grad():
            right = float((model(x).argmax(1) == y).float().mean())
        return {"accuracy": right, "committed": training.committed, "dropped": training.dropped}
