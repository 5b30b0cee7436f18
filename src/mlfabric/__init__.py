"""MLfabric: a communication library for distributed machine learning.

    import mlfabric as mf
    with mf.join("10.0.0.1:7070", job="demo", name="w0") as fabric:
        fabric.publish(arrays, apply=mf.SGD(lr=0.1))
        model = fabric.pull()
        outcome = fabric.push(update).result()

The public names are loaded when first used, so that commands which need none of them start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlfabric.api import Fabric, Ticket, join, local
    from mlfabric.client import Committed, Dropped, Model
    from mlfabric.errors import ConnectError, FabricError, ScenarioError, ShapeMismatch
    from mlfabric.rules import SGD, Adam, AdamW, Sum

__version__ = "0.1.0"

__all__ = [
    "join",
    "local",
    "Fabric",
    "Ticket",
    "Model",
    "Committed",
    "Dropped",
    "SGD",
    "Adam",
    "AdamW",
    "Sum",
    "FabricError",
    "ConnectError",
    "ScenarioError",
    "ShapeMismatch",
]

_HOMES = {
    "mlfabric.api": ("join", "local", "Fabric", "Ticket"),
    "mlfabric.client": ("Model", "Committed", "Dropped"),
    "mlfabric.rules": ("SGD", "Adam", "AdamW", "Sum"),
    "mlfabric.errors": ("FabricError", "ConnectError", "ScenarioError", "ShapeMismatch"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'mlfabric' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
