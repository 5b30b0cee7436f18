"""DDP's gradients over the fabric in a job that keeps another backend for everything else.

model.register_comm_hook(mlfabric.torch.managed_state(), mlfabric.torch.managed_hook)
"""

# No postponed annotations here: DDP looks at those of a hook.

from typing import Any

import torch
import torch.distributed as dist

from mlfabric.autoload import register
from mlfabric.torch.errors import CollectiveError


def managed_state(ranks: list[int] | None = None) -> Any:
    """The fabric for the hook: a group of these ranks, or of all, beside the job's own. All ranks call it."""
    if not dist.is_initialized():
        raise CollectiveError("managed_state() needs a process group: call init_process_group() first")
    register()
    return dist.new_group(ranks, backend="mlfabric", group_desc="mlfabric gradients")


def managed_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the fabric."""
    group = state if state is not None else dist.group.WORLD
    gradients = bucket.buffer()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    future: torch.futures.Future[Any] = group.allreduce([gradients], options).get_future()
    return future.then(lambda done: done.value()[0])
