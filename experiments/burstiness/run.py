"""Runs the experiment: trains in the lab, captures, measures, writes one small JSON file per run.

    python -m experiments.burstiness.run                      all runs of settings.toml, two hours and a half
    python -m experiments.burstiness.run --only 1gbit-gloo    one of them
    python -m experiments.burstiness.run --settings short.toml --out DIR

Needs what `mlfabric lab run --capture` needs. Captures are removed once they are measured, unless --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from experiments.burstiness.measure import measure, read_steps
from mlfabric.errors import FabricError
from mlfabric.lab import Lab
from mlfabric.lab.run import RunOptions
from mlfabric.lab.testing import plain_scenario
from mlfabric.traffic.scales import parse_scales
from mlfabric.units import parse_rate

HERE = Path(__file__).parent
SPARE_S = 300.0


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training run."""

    name: str
    rate: str
    way: str
    compute_s: float
    steps: int
    pace: bool = False
    skip: int | None = None  # first steps not measured; default: as all runs
    model: str = "resnet50"
    pieces: bool = True  # capture several frames of a stream as one: two processors carry more


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: int
    queue: str
    scales: str
    skip: int
    runs: tuple[Run, ...]


def load(file: Path) -> Settings:
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), Settings)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise FabricError(f"{file}: {error}") from None


def command(run: Run) -> list[str]:
    words = [sys.executable, "-m", "experiments.burstiness.train", "--way", run.way, "--model", run.model]
    return [*words, "--compute-s", str(run.compute_s), "--steps", str(run.steps)]


def perform(run: Run, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train once; everything that was found."""
    captures = folder / "captures"
    environment = {**os.environ, **({"MLFABRIC_PACE": "1"} if run.pace else {})}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])
    options = RunOptions(
        folder=folder / "run",
        capture=captures,
        capture_pieces=run.pieces,
        environment=environment,
        timeout_s=run.steps * (5 * run.compute_s + 60) + SPARE_S,
    )
    with Lab(plain_scenario(settings.hosts, run.rate, settings.queue), name=f"burst-{run.name}") as lab:
        result = lab.run(command(run), options)
        addresses = {host.name: host.address for host in lab.hosts}
    if not result.ok:
        raise FabricError(f"{run.name}: " + "; ".join(result.complaints))
    return evaluate(run, settings, folder, addresses)


def evaluate(run: Run, settings: Settings, folder: Path, addresses: dict[str, str]) -> dict[str, Any]:
    """All figures of a run that is over."""
    skip = settings.skip if run.skip is None else run.skip
    steps = read_steps(folder / "run", settings.hosts, skip)
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    files = {file.stem: file for file in sorted((folder / "captures").glob("*.pcap*"))}
    found = measure(files, addresses, steps, parse_rate(run.rate), parse_scales(settings.scales))
    return {
        "settings": msgspec.to_builtins(run),
        "skipped_steps": skip,
        "captured": "pieces of up to 16 frames" if run.pieces else "frames",
        "busy_share_of_processors": manifest.get("busy_share"),
        **found,
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=Path, default=HERE / "settings.toml")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--keep", type=Path, default=None, help="keep run folders and captures here")
    asked = parser.parse_args(words)
    settings = load(asked.settings)
    chosen = [run for run in settings.runs if asked.only is None or run.name in asked.only]
    if not chosen:
        raise FabricError(f"no run is called {', '.join(asked.only)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    for run in chosen:
        folder = Path(tempfile.mkdtemp(prefix=f"burst-{run.name}-", dir=asked.keep))
        try:
            found = perform(run, settings, folder)
        finally:
            if asked.keep is None:
                shutil.rmtree(folder, ignore_errors=True)
        (asked.out / f"{run.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        worst = max(
            each[way]["peak_to_mean_5ms"] or 0 for each in found["hosts"].values() for way in ("out", "in")
        )
        print(f"{run.name}: step {found['step_s']['median']:.2f} s, PtM(5 ms) up to {worst:.1f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except FabricError as error:
        sys.exit(f"error: {error}")
