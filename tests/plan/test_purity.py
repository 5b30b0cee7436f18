"""Planning is a function of values: no module of it knows time, chance, threads or the network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mlfabric.plan

FORBIDDEN = {"socket", "time", "random", "threading", "asyncio", "logging", "selectors", "os", "secrets"}
FORBIDDEN |= {"subprocess", "multiprocessing", "datetime", "uuid", "numpy", "scipy"}
MODULES = sorted(Path(mlfabric.plan.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_planning_imports_nothing_impure(module: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & FORBIDDEN
