"""The lab: a cluster in a box. Hosts are network namespaces, racks bridges, links are shaped by the kernel.

    with Lab("my-scenario.toml") as lab:
        lab.host("w3").set_rate("50mbit")
        lab.cut("w1", "w2")

`Lab` builds and removes, `inside` tells a program running in a lab where it is. Both are imported when asked
for, so that the lab's own small programs start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlfabric.lab.place import inside
    from mlfabric.lab.run import RunOptions, RunResult
    from mlfabric.lab.session import Lab, LabHost

__all__ = ["Lab", "LabHost", "RunOptions", "RunResult", "inside"]

_HOMES = {"Lab": "session", "LabHost": "session", "RunOptions": "run", "RunResult": "run", "inside": "place"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"mlfabric.lab has no {name!r}")
    return getattr(importlib.import_module(f"mlfabric.lab.{_HOMES[name]}"), name)
