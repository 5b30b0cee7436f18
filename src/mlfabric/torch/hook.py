"""DDP's gradients over the fabric in a job that keeps another backend for everything else.

    model.register_comm_hook(mlfabric.torch.managed_state(), mlfabric.torch.managed_hook)

The state may also be a fabric that the script has joined by itself, whose workers are the ranks of the job.
"""

# No postponed annotations here: DDP looks at those of a hook.

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from mlfabric.api import Fabric
from mlfabric.autoload import register
from mlfabric.collective.calls import Call, changes
from mlfabric.torch.errors import CollectiveError
from mlfabric.torch.memory import dtype_name, view
from mlfabric.torch.work import TIMED_OUT, Deadlines, FabricWork

# How long a bucket may take in a fabric of the script's own; a process group has its own limit.
BUCKET_S = 1800.0


def managed_state(ranks: list[int] | None = None) -> Any:
    """The fabric for the hook: a group of these ranks, or of all, beside the job's own. All ranks call it."""
    if not dist.is_initialized():
        raise CollectiveError("managed_state() needs a process group: call init_process_group() first")
    register()
    return dist.new_group(ranks, backend="mlfabric", group_desc="mlfabric gradients")


def managed_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the fabric."""
    gradients = bucket.buffer()
    if isinstance(state, Fabric):
        work = _in_fabric(state, gradients)
    else:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        work = (state if state is not None else dist.group.WORLD).allreduce([gradients], options)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


def _in_fabric(fabric: Fabric, gradients: torch.Tensor) -> FabricWork:
    """Average over all workers of a fabric's job."""
    block = changes(view(gradients))
    wanted = Call("all_reduce", dtype_name(gradients), gradients.element_size(), "avg", blocks=(block,))
    groups = fabric._client.groups
    call = groups.collective("", (), wanted)
    title = f"the average of {gradients.numel()} gradients"

    def expire() -> None:
        words = f"{title} {TIMED_OUT} {BUCKET_S:g} s"
        groups.give_up(call, lambda why: f"{words}: {why}")

    pool, deadlines = _threads()
    deadlines.watch(BUCKET_S, call.answer, expire)
    return FabricWork(call.answer, lambda: title, [gradients], pool.submit, lambda: groups.waiting_for(call))


@cache
def _threads() -> tuple[ThreadPoolExecutor, Deadlines]:
    return ThreadPoolExecutor(8, thread_name_prefix="mlfabric-hook"), Deadlines()
