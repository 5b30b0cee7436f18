"""What the ranks of a test world do; `tests.torch.worlds` forks a process for each."""

from __future__ import annotations

import contextlib
import hashlib
import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import mlfabric.torch
from tests.torch import cases


def begin(rank: int, size: int, folder: str, backend: str = "mlfabric", timeout_s: float = 60.0) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def agree_with_gloo(rank: int, size: int, folder: str, seed: int, count: int) -> Any:
    """Random calls in the world and in a group of some of its ranks, on both backends."""
    begin(rank, size, folder)
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
    state = mlfabric.torch.managed_state()
    answers = [train(rank, dist.group.WORLD, "plain", hook) for hook in (state, None)]
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
    model = torch.nn.parallel.DistributedDataParallel(
        net, process_group=group, **options.get(form, {})
    )
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
