"""A worker of the first-come server; starts the server that lives on its host, if one does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from mlfabric.bench.train.exchange import Exchange, Exchanged, warm_up_alone
from mlfabric.bench.train.first_come import FirstComeClient, ServerOrder, shard_ranges
from mlfabric.bench.train.settings import StepSize
from mlfabric.bench.train.task import flat_weights, load_weights

PORT = 29700


class FirstCome(Exchange):
    sends_early = False
    same_everywhere = False
    waits_for_its_turn = False

    def __init__(
        self,
        model: Any,
        size: StepSize,
        options: Mapping[str, Any],
        rank: int,
        hosts: Sequence[str],
        folder: Path,
    ) -> None:
        self.module = model
        self._weights = flat_weights(model)
        servers = list(hosts[: int(options["servers"]) or len(hosts)])
        ranges = shard_ranges(len(self._weights), len(servers))
        if rank < len(servers):
            first = folder / f"first-weights-{rank}.npy"
            np.save(first, self._weights)
            start, count = ranges[rank]
            order = ServerOrder(
                PORT, str(first), start, count, len(hosts), size.lr, size.momentum, options.get("slack")
            )
            argv = [sys.executable, "-m", "mlfabric.bench.train.first_come"]
            # In the worker's process group: it ends when the worker is ended.
            self._server = subprocess.Popen([*argv, msgspec.json.encode(order).decode()])
        self._client = FirstComeClient(rank, [(name, PORT) for name in servers], ranges)

    def warm_up(self, backward: Callable[[], None]) -> None:
        warm_up_alone(self.module, backward)

    def watch(self, computed: Callable[[], None]) -> None:
        pass

    def step(self) -> Exchanged:
        gradient = torch.cat([p.grad.reshape(-1) for p in self.module.parameters()]).numpy()
        delay = self._client.exchange(gradient, self._weights)
        load_weights(self.module, self._weights)
        self.module.zero_grad()
        return Exchanged((delay,))
