"""How commands print: JSON on request, tables for people."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgspec
from rich.console import Console


def console() -> Console:
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output, readable and stable."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
