"""Measurements of an experiment: kept in a file, so that none is made twice, and shown as a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

# A share of the processors' time: beyond it a measurement tells of the machine.
MOST_STOLEN = 0.02

Point = TypeVar("Point", bound=msgspec.Struct)
Key = TypeVar("Key", bound=Hashable)


def carry_out(
    file: Path,
    kind: type[Point],
    wanted: Sequence[Key],
    key: Callable[[Point], Key],
    measure: Callable[[Key], Point],
) -> tuple[list[Point], Path]:
    """Measure what the file lacks, as far as the command line says; all points, and where the plot goes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=len(wanted), help="measurements to make now")
    parser.add_argument("--out", type=Path, default=file)
    wishes = parser.parse_args()
    out: Path = wishes.out
    points = msgspec.json.decode(out.read_bytes(), type=list[kind]) if out.exists() else []  # type: ignore[valid-type]
    made = {key(point) for point in points}
    for each in [each for each in wanted if each not in made][: wishes.most]:
        points.append(measure(each))
        print(points[-1], flush=True)
        out.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(point) for point in points) + b"\n]\n")
    return points, out.with_suffix(".png")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
