"""Other libraries that exchange seldom: torchft DiLoCo and hivemind local updates, used as their guides do.

Neither is a dependency: `pip install torchft hivemind` into the environment that runs the benchmark.
"""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mlfabric.bench.train.exchange import Exchange, Exchanged, make_optimizer, warm_up_alone
from mlfabric.bench.train.settings import StepSize
from mlfabric.errors import FabricError

LIGHTHOUSE_PORT = 29510
STORE_PORT = 29520
# DiLoCo's own outer optimizer.
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
MATCHMAKING_S = 2.0  # in which hivemind's peers find each other
PATIENCE = timedelta(seconds=300)


def _needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise FabricError(f"this contender needs {module}: pip install {module}")


class TorchftDiloco(Exchange):
    """Every worker is a replica group of one; the lighthouse is on the first host."""

    sends_early = False
    same_everywhere = True
    waits_for_its_turn = False

    def __init__(self, model: Any, size: StepSize, local_steps: int, rank: int, hosts: Sequence[str]) -> None:
        _needs("torchft")
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        self.module = model
        self._local_steps, self._steps = local_steps, 0
        if rank == 0:
            self._lighthouse = LighthouseServer(
                bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=len(hosts), join_timeout_ms=60_000
            )
        self._store = dist.TCPStore("0.0.0.0", STORE_PORT, is_master=True, wait_for_workers=False)
        self._inner = make_optimizer(model.parameters(), size)
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=len(hosts),
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=hosts[rank],
            store_port=STORE_PORT,
            lighthouse_addr=f"http://{_address(hosts[0])}:{LIGHTHOUSE_PORT}",
            replica_id=f"worker{rank}",
            hostname=_address(hosts[rank]),
        )
        self._diloco = DiLoCo(
            self._manager, [model], self._inner, outer, sync_every=local_steps, pin_memory=False
        )
        self._diloco.__enter__()

    def warm_up(self, backward: Callable[[], None]) -> None:
        warm_up_alone(self.module, backward)

    def watch(self, computed: Callable[[], None]) -> None:
        pass

    def step(self) -> Exchanged:
        self._inner.step()  # DiLoCo hooks into it
        self._inner.zero_grad()
        self._steps += 1
        shared = self._steps % self._local_steps == 0
        return Exchanged((0,) if shared else (), shared=shared)


class HivemindLocal(Exchange):
    """Local steps; parameters are averaged when all peers together have seen enough samples."""

    sends_early = False
    same_everywhere = False
    waits_for_its_turn = False

    def __init__(
        self,
        model: Any,
        size: StepSize,
        local_steps: int,
        batch: int,
        rank: int,
        hosts: Sequence[str],
        folder: Path,
    ) -> None:
        _needs("hivemind")
        import hivemind

        self.module, self._batch = model, batch
        here = f"/ip4/{_address(hosts[rank])}/tcp/0"
        peers = [] if rank == 0 else _first_peer(folder)
        self._dht = hivemind.DHT(
            host_maddrs=[here], initial_peers=peers, start=True, use_auto_relay=False, use_relay=False
        )
        if rank == 0:
            draft = folder / "hivemind-peers.new"
            draft.write_text("\n".join(str(address) for address in self._dht.get_visible_maddrs()))
            draft.replace(folder / "hivemind-peers")
        self._optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id="bench",
            batch_size_per_step=batch,
            target_batch_size=batch * local_steps * len(hosts),
            params=list(model.parameters()),
            optimizer=lambda parameters: make_optimizer(parameters, size),
            use_local_updates=True,
            matchmaking_time=MATCHMAKING_S,
            averager_opts={"request_timeout": 1.0},
            averaging_timeout=PATIENCE.total_seconds(),
        )
        self._epoch = 0

    def warm_up(self, backward: Callable[[], None]) -> None:
        warm_up_alone(self.module, backward)

    def watch(self, computed: Callable[[], None]) -> None:
        pass

    def step(self) -> Exchanged:
        self._optimizer.step(batch_size=self._batch)
        self._optimizer.zero_grad()
        before, self._epoch = self._epoch, self._optimizer.local_epoch
        shared = self._epoch != before
        return Exchanged((0,) if shared else (), shared=shared)


def _address(host: str) -> str:
    return socket.gethostbyname(host)


def _first_peer(folder: Path) -> list[str]:
    path, give_up = folder / "hivemind-peers", time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > give_up:
            raise FabricError("the first peer has not told its address")
        time.sleep(0.05)
    return path.read_text().split()
