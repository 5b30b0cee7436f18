"""The package's public names, and what it may not import."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import numpy as np

import mlfabric.traffic as traffic

_FORBIDDEN = ("plan", "roles", "runtime", "sim", "lab", "torch", "scenario", "topology")


def test_every_public_name_is_there_and_none_is_a_module() -> None:
    for name in traffic.__all__:
        assert not isinstance(getattr(traffic, name), ModuleType)


def test_a_notebook_session_works_from_arrays() -> None:
    trace = traffic.Trace.from_arrays(np.arange(1000) * 1000, np.full(1000, 1500))
    result = traffic.analyze(trace, traffic.AnalysisOptions(scales_ns=(10_000, 100_000), quick=True))
    scale = result.scale(100_000)
    assert scale is not None
    assert scale.peak is not None
    assert scale.peak.bytes == 101 * 1500
    assert traffic.backlog(trace, 12e9).bytes == 1500


def test_traffic_knows_nothing_of_training() -> None:
    root = Path(traffic.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[1:2] not in [[word] for word in _FORBIDDEN], (
                    f"{path.name} imports {name}"
                )
                assert not name.startswith("torch"), f"{path.name} imports {name}"
