"""MLfabric: a communication library for distributed machine learning.

import mlfabric as mf
with mf.join("10.0.0.1:7070", job="demo", name="w0") as fabric:
    fabric.publish(arrays, apply=mf.SGD(lr=0.1))
    model = fabric.pull()
    outcome = fabric.push(update).result()
"""

from mlfabric.api import Fabric, Ticket, join, local
from mlfabric.client import Committed, Dropped, Model
from mlfabric.errors import ConnectError, FabricError, ScenarioError, ShapeMismatch
from mlfabric.numerics import SGD, Adam, Sum

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
    "Sum",
    "FabricError",
    "ConnectError",
    "ScenarioError",
    "ShapeMismatch",
]
