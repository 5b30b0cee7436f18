"""Who may import whom, read from the source: the core stays pure, the shells stay few."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mlfabric

ROOT = Path(mlfabric.__file__).parent

# What the pure part never imports, by whatever way.
IMPURE = frozenset(
    {"socket", "selectors", "time", "random", "secrets", "threading", "asyncio", "logging", "concurrent"}
)
PURE = ("plan", "roles", "collective")
# Parts that must not know of each other: who -> whom not.
STRANGERS = {
    "plan": ("roles", "runtime", "sim", "lab", "torch", "api", "client", "cli", "config", "node"),
    "roles": ("runtime", "sim", "lab", "torch", "api", "client", "cli", "config", "node", "data", "eventlog"),
    "collective": (
        "runtime",
        "sim",
        "lab",
        "torch",
        "api",
        "client",
        "cli",
        "config",
        "node",
        "roles",
        "plan",
    ),
    "sim": ("runtime", "lab", "torch", "api", "cli", "config"),
    "runtime": ("sim", "lab", "torch", "api", "cli"),
    "traffic": ("plan", "roles", "runtime", "sim", "lab", "torch", "api", "client", "node"),
}
# Who imports sockets, selectors or threads, and why.
SHELLS = {
    "runtime": "sockets and the engine's thread",
    "api": "waits for the engine",
    "bench": "changes a lab's links while its ranks run",
    "client": "its calls come from several threads",
    "config": "asks for the host's name",
    "commands": "the command line",
    "demo": "a program of its own",
    "lab": "real hosts and processes",
    "traffic": "its live meter reads an interface",
    "torch": "finds an address of its host, and completes torch's futures",
}
SHELL_ONLY = frozenset({"socket", "selectors", "threading"})


def module_name(path: Path) -> str:
    parts = ["mlfabric", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """The full names a module imports, at its top or inside functions; those for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; name the module"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
IMPORTS = {name: imported(path) for name, path in MODULES.items()}


def part_of(module: str) -> str:
    return [*module.split("."), ""][1]


def reached(module: str) -> dict[str, tuple[str, ...]]:
    """Everything a module imports directly or through modules of ours, each with the way to it.

    The package itself is left out: it is the door for users, and importing any part of it opens that door.
    """
    ways: dict[str, tuple[str, ...]] = {}
    waiting: list[tuple[str, ...]] = [(module,)]
    while waiting:
        way = waiting.pop(0)
        for name in sorted(IMPORTS[way[-1]]):
            if name in ways:
                continue
            ways[name] = (*way, name)
            if name in MODULES and name != "mlfabric":
                waiting.append((*way, name))
    return ways


def of_parts(*parts: str) -> list[str]:
    return [module for module in MODULES if part_of(module) in parts]


@pytest.mark.parametrize("module", of_parts(*PURE))
def test_the_pure_part_reaches_no_sockets_clocks_chance_threads_or_logs(module: str) -> None:
    for name, way in reached(module).items():
        assert name.split(".")[0] not in IMPURE, " imports ".join(way)


def test_the_pure_part_imports_its_vocabulary_by_name() -> None:
    for module in of_parts(*PURE):
        assert "mlfabric" not in IMPORTS[module], f"{module} imports the whole package"


@pytest.mark.parametrize(("part", "others"), STRANGERS.items(), ids=list(STRANGERS))
def test_parts_do_not_reach_into_parts_they_must_not_know(part: str, others: tuple[str, ...]) -> None:
    for module in of_parts(part):
        for name, way in reached(module).items():
            if name.startswith("mlfabric."):
                assert part_of(name) not in others, " imports ".join(way)


def test_only_shells_import_sockets_selectors_and_threads() -> None:
    users = {
        part_of(module) for module, names in IMPORTS.items() if SHELL_ONLY & {n.split(".")[0] for n in names}
    }
    assert users <= SHELLS.keys()


def test_this_test_sees_the_modules_there_are() -> None:
    assert {"mlfabric.plan.planner", "mlfabric.roles.server", "mlfabric.runtime.engine"} <= MODULES.keys()
    assert "socket" in reached("mlfabric.runtime.engine")
    way = reached("mlfabric.roles.scheduler")["mlfabric.plan.planner"]
    assert way[0] == "mlfabric.roles.scheduler"
    assert way[-2:] == ("mlfabric.roles.orderbook", "mlfabric.plan.planner")


def test_every_public_name_is_there_and_loaded_when_used() -> None:
    import mlfabric

    for name in mlfabric.__all__:
        assert getattr(mlfabric, name).__name__ == name
    assert set(mlfabric.__all__) <= set(dir(mlfabric))
