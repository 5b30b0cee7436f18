"""Ours: a model trained through `mlfabric.torch.join`, as any user would call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlfabric.bench.train.exchange import Exchange, Exchanged, adam_settings, warm_up_alone
from mlfabric.bench.train.settings import StepSize
from mlfabric.bench.train.task import flat_weights
from mlfabric.numerics import Vector
from mlfabric.torch import join

# What a contender does not choose is the default of join(), but for replicas: nobody else has any.
WITHOUT_REPLICAS = {"divergence": None}


class FabricExchange(Exchange):
    sends_early = False

    def __init__(self, model: Any, size: StepSize, options: Mapping[str, Any]) -> None:
        served = options["mode"] not in ("sync", "fastest", "rolling")
        chosen = {**WITHOUT_REPLICAS, **options} if served else dict(options)
        optimizer = ("Adam", adam_settings(size))
        self.module = model
        self.same_everywhere = chosen["mode"] == "sync"
        self.waits_for_its_turn = chosen["mode"] == "fastest"
        self._runs_ahead = chosen["mode"] == "rolling"
        self._local_steps = int(chosen.get("local_steps", 1)) if chosen["mode"] == "local" else 1
        self.training = join(model, optimizer, timeout=300.0, **chosen)
        self._told, self._dropped = 0, 0

    def warm_up(self, backward: Callable[[], None]) -> None:
        warm_up_alone(self.module, backward)

    def watch(self, computed: Callable[[], None]) -> None:
        pass

    def step(self) -> Exchanged:
        training = self.training
        training.step()
        if training.mode == "sync":
            return Exchanged((0,))
        delays = tuple(training.delays[self._told :])
        self._told += len(delays)
        dropped, self._dropped = training.dropped - self._dropped, training.dropped
        return Exchanged(delays, dropped, shared=training.steps % self._local_steps == 0)

    def weights(self) -> Vector:
        if not self._runs_ahead:
            return flat_weights(self.module)
        # The module holds what the common model is expected to be when its gradient is applied.
        training: Any = self.training
        common: Vector = training.weights()
        return common
