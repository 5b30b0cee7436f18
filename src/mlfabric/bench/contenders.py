"""Who is compared: each can all-reduce an array between the ranks of this run."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

from mlfabric.api import Fabric
from mlfabric.errors import FabricError
from mlfabric.numerics import Vector


class Contender(Protocol):
    name: str

    def all_reduce(self, array: Vector) -> None: ...


class FabricContender:
    name = "mlfabric"

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def all_reduce(self, array: Vector) -> None:
        self._fabric.all_reduce(array, timeout=600)


class GlooContender:
    """PyTorch's own, in the same processes; its arithmetic on one thread, as ours."""

    name = "gloo"

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise FabricError("--against gloo needs PyTorch: pip install 'mlfabric[torch]'")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._torch: Any = torch
        self._dist: Any = dist

    def all_reduce(self, array: Vector) -> None:
        self._dist.all_reduce(self._torch.from_numpy(array))


def prepare(names: list[str]) -> None:
    """Import what contenders need."""
    if "gloo" in names and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch.distributed")


def make_contenders(names: list[str], fabric: Fabric) -> list[Contender]:
    made: list[Contender] = []
    for name in names:
        if name == "mlfabric":
            made.append(FabricContender(fabric))
        elif name == "gloo":
            made.append(GlooContender())
        else:
            raise FabricError(f"unknown contender {name!r}; known are mlfabric and gloo")
    return made
