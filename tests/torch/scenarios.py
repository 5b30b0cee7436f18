"""What the ranks of a test world do; `tests.torch.worlds` forks a process for each."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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
