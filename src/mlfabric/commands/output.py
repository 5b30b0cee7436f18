"""How commands print: JSON on request, tables for people."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgspec
from rich.console import Console

# Tables that go into a file or a pipe are not squeezed into eighty columns.
PIPED_WIDTH = 160


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def print_json(value: Any) -> None:
    """One JSON document on standard output, readable and stable."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
