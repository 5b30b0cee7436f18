"""A look into engines, where a test has to see what an application can't."""

from __future__ import annotations

from mlfabric.api import Fabric
from mlfabric.runtime.engine import Engine


def engine_of(fabric: Fabric) -> Engine:
    """The engine of a member whose engine is a thread."""
    assert isinstance(fabric._engine, Engine)
    return fabric._engine
