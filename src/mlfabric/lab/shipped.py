"""Scenarios that come with MLfabric, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from mlfabric.errors import ScenarioError
from mlfabric.scenario import Scenario, load

FOLDER = Path(__file__).parent.parent / "scenarios"


def shipped_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def scenario_path(given: str | Path) -> Path:
    """The file a path or a shipped name means; a path that exists wins."""
    path = Path(given)
    if path.exists() or path.suffix == ".toml" or len(path.parts) > 1:
        return path
    shipped = FOLDER / f"{given}.toml"
    if shipped.exists():
        return shipped
    near = difflib.get_close_matches(str(given), shipped_names(), 1)
    hint = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(shipped_names()) or 'none'}"
    raise ScenarioError(f"there is no file {given} and no shipped scenario of that name; {hint}")


def load_named(given: str | Path) -> Scenario:
    return load(scenario_path(given))
