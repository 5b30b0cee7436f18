"""PyTorch's own: DistributedDataParallel on Gloo, plain, with a compressing hook, with an exchange every few
gradients, or as post-local SGD; and plain on our backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mlfabric.torch  # noqa: F401 - makes the backend known where the package is not installed
from mlfabric.bench.train.exchange import Exchange, Exchanged, make_optimizer, warm_up_alone
from mlfabric.bench.train.settings import StepSize
from mlfabric.errors import FabricError

# Steps by all-reduce before local ones begin: PowerSGD and post-local SGD both want a few.
WARM_UP = 10
ONE_BUCKET_MB = 25


class Ddp(Exchange):
    sends_early = True
    same_everywhere = True
    waits_for_its_turn = False

    def __init__(self, model: Any, size: StepSize, options: Mapping[str, Any]) -> None:
        dist.init_process_group(str(options.get("backend", "gloo")))
        self._first = next(model.parameters())
        # PowerSGD's hook begins its second and third exchange of a bucket on Gloo's threads: with two buckets
        # ranks may begin them in different orders, which ends the program. A size that is named holds for all
        # buckets, the first among them, so that there is one.
        buckets = {"bucket_cap_mb": ONE_BUCKET_MB} if options.get("hook") == "powersgd" else {}
        self.module = DistributedDataParallel(model, **buckets)
        self._optimizer = make_optimizer(model.parameters(), size)
        self._local_steps = int(options.get("local_steps", 0))
        self._accumulated = int(options.get("accumulated", 1))  # gradients of one exchange
        self._steps = 0
        # Their hooks count the passes they see, and do something else after some.
        self._counts_passes = bool(self._local_steps) or options.get("hook") == "powersgd"
        if self._local_steps:
            self._become_local()
        elif "hook" in options:
            self._compress(str(options["hook"]), int(options.get("rank", 1)))

    def _compress(self, hook: str, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if hook == "fp16":
            self.module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=rank, start_powerSGD_iter=WARM_UP
            )
            self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            raise FabricError(f"unknown hook {hook!r}")

    def _become_local(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        # Every rank is a group of its own between two averages.
        alone, _ = dist.new_subgroups(1)
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=WARM_UP)
        self.module.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=self._local_steps, warmup_steps=WARM_UP)
        self._optimizer = PostLocalSGDOptimizer(self._optimizer, averager)

    def warm_up(self, backward: Callable[[], None]) -> None:
        # DDP connects its ranks in the first pass and deals its buckets anew in the second.
        if self._counts_passes:
            with self.module.no_sync():
                warm_up_alone(self.module, backward)
        else:
            warm_up_alone(self.module, backward)

    def watch(self, computed: Callable[[], None]) -> None:
        # The first parameter's gradient is the last to come; the buckets before it are on their way then.
        self._first.register_post_accumulate_grad_hook(lambda parameter: computed())

    def passing(self) -> AbstractContextManager[None]:
        if (self._steps + 1) % self._accumulated:
            kept: AbstractContextManager[None] = self.module.no_sync()
            return kept
        return nullcontext()

    def step(self) -> Exchanged:
        if self._accumulated > 1:
            return self._step_if_exchanged()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        if self._local_steps and self._steps > WARM_UP:
            shared = (self._steps - WARM_UP - 1) % self._local_steps == 0
            return Exchanged((0,) if shared else (), shared=shared)
        return Exchanged((0,))

    def _step_if_exchanged(self) -> Exchanged:
        self._steps += 1
        if self._steps % self._accumulated:
            return Exchanged(shared=False)
        for parameter in self.module.parameters():
            parameter.grad /= self._accumulated  # DDP has their sum here, averaged over ranks
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Exchanged((0,) * self._accumulated)
