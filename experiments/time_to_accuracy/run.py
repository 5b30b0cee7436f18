"""Runs the campaign, scenario by scenario, and writes what is kept of it.

    python -m experiments.time_to_accuracy.run                            all of settings.toml
    python -m experiments.time_to_accuracy.run --only calm --seeds 1      a part of it
    python -m experiments.time_to_accuracy.run --list                     what is left, and how long at most
    python -m experiments.time_to_accuracy.run --again                    runs that do not count once more

Runs are kept whole in `--out` and not made again: it may be broken off at any time. After every scenario its
results are written to `--results`: a line of JSON for each run, a table, a plot. Runs that stand there
already stay, and are not made again, so a campaign may go on on another machine of the kind.
Needs what `mlfabric bench train` needs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mlfabric.bench.train import report
from mlfabric.bench.train.campaign import AROUND_S, Wish, carry_out, split_done
from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.machine import strains
from mlfabric.bench.train.plots import draw
from mlfabric.bench.train.running import RESULT, make_run, read_run, runs_abreast, write_record
from mlfabric.bench.train.settings import DEFAULT_BATCH, DEFAULT_RATE, RunSettings
from mlfabric.bench.train.task import find_data
from mlfabric.bench.train.tuning import read_tuned
from mlfabric.errors import FabricError
from mlfabric.units import format_time, parse_time

HERE = Path(__file__).parent
OUT = Path("runs/time_to_accuracy")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scenarios: tuple[str, ...]
    contenders: tuple[str, ...]
    seeds: tuple[int, ...]
    targets: tuple[float, ...]
    limit: str
    limits: dict[str, str] = {}  # of contenders that are not followed as long
    few_seeds: tuple[int, ...] = ()  # theirs, unless seeds are named by hand; else all
    rate: str = DEFAULT_RATE
    batch: int = DEFAULT_BATCH
    workers: int = 8
    compute: float = 1.75  # of a step, in times a transfer of the model takes on the fastest link
    tuned: str | None = None  # a file beside the settings

    def wish(self, scenario: str, folder: Path) -> Wish:
        first = self.contenders[0]
        common = RunSettings(
            first,
            scenario,
            self.seeds[0],
            find_entry(first).step_size,
            rate=self.rate,
            workers=self.workers,
            batch=self.batch,
            compute=self.compute,
            targets=tuple(sorted(self.targets)),
            limit_s=parse_time(self.limit),
        )
        sizes = read_tuned(folder / self.tuned) if self.tuned is not None else {}
        if self.tuned is not None and (missing := [name for name in self.contenders if name not in sizes]):
            raise FabricError(f"{self.tuned} has no step size for {', '.join(missing)}")
        limits = {name: parse_time(limit) for name, limit in self.limits.items()}
        few = dict.fromkeys(limits, self.few_seeds) if self.few_seeds else {}
        return Wish(self.contenders, (scenario,), self.seeds, common, sizes, limits, few)


def load(file: Path) -> Settings:
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), Settings)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise FabricError(f"{file}: {error}") from None


def kept(run: RunResult) -> RunResult:
    """What is written of a run: no more digits than were measured."""
    curve = [(round(at, 1), round(accuracy, 4)) for at, accuracy in run.curve]
    return msgspec.structs.replace(run, curve=curve)


def read_kept(file: Path) -> list[RunResult]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[RunResult]) if file.exists() else []
    except msgspec.DecodeError as error:
        raise FabricError(
            f"{file} does not hold runs ({error}); remove it, or name another --results"
        ) from None


def take_up(wish: Wish, results: Path, root: Path) -> None:
    """Have the runs whose results were kept, made here or not, as if they had just been made."""
    wanted = wish.runs()
    for scenario in wish.scenarios:
        for run in read_kept(results / f"{scenario}.json"):
            folder = run.settings.folder(root)
            if run.settings in wanted and read_run(folder) is None:
                folder.mkdir(parents=True, exist_ok=True)
                write_record(folder / RESULT, run)


def beside_kept(runs: Sequence[RunResult], file: Path) -> list[RunResult]:
    """With those of other contenders and seeds that stand in the file; contenders keep their order."""
    by_key = {(run.settings.contender, run.settings.seed): run for run in (*read_kept(file), *runs)}
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in by_key))}
    return [by_key[key] for key in sorted(by_key, key=lambda key: (places[key[0]], key[1]))]


def write_results(runs: Sequence[RunResult], scenario: str, folder: Path) -> None:
    """What is kept of a scenario's runs: each of them, a table, a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    made = report.make_report(runs)
    lines = b",\n".join(msgspec.json.encode(kept(run)) for run in runs)
    (folder / f"{scenario}.json").write_bytes(b"[\n" + lines + b"\n]\n")
    (folder / f"{scenario}.md").write_text(report.markdown(made) + "\n")
    draw(runs, folder, names=("accuracy",), dpi=80)


def forget_invalid(wish: Wish, root: Path) -> None:
    """So that they are made again."""
    for settings in wish.runs():
        found = read_run(settings.folder(root))
        if found is not None and found.complaints():
            (settings.folder(root) / RESULT).unlink()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--settings", type=Path, default=HERE / "settings.toml")
    parser.add_argument("--only", nargs="+", metavar="SCENARIO")
    parser.add_argument("--contenders", nargs="+", help="instead of those of the settings")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the settings")
    parser.add_argument("--again", action="store_true", help="make runs that do not count once more")
    parser.add_argument(
        "--abreast", type=int, default=1, help="so many runs at a time of those that leave processors idle"
    )
    parser.add_argument("--list", action="store_true", help="only say what is left")
    parser.add_argument(
        "--out", type=Path, help=f"whole runs; else {OUT}, and there a folder for other settings"
    )
    parser.add_argument("--results", type=Path, help="what is kept of them; else results/, likewise")
    parser.add_argument("--data", type=Path)
    given = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that runs under way are ended, and their labs
    settings = load(given.settings)
    own = "" if given.settings.resolve() == HERE / "settings.toml" else given.settings.stem
    out, results = given.out or OUT / own, given.results or HERE / "results" / own
    if given.seeds:
        settings = msgspec.structs.replace(settings, seeds=tuple(given.seeds), few_seeds=())
    if given.contenders:
        settings = msgspec.structs.replace(settings, contenders=tuple(given.contenders))
    wishes = {
        scenario: settings.wish(scenario, given.settings.parent)
        for scenario in (given.only or settings.scenarios)
    }
    for wish in wishes.values():
        take_up(wish, results, out)
    if given.list:
        for scenario, wish in wishes.items():
            done, to_do = split_done(wish.runs(), out, read_run)
            at_most = sum(run.limit_s + AROUND_S for run in to_do)
            print(f"{scenario}: {len(done)} runs made, {len(to_do)} left, {format_time(at_most)} at most")
        return
    data = find_data(given.data)

    def make(run: RunSettings, folder: Path, stop_s: float, told: Callable[[float], None]) -> RunResult:
        return make_run(run, folder, data, stop_s, told)

    failures = []
    for scenario, wish in wishes.items():
        if given.again:
            forget_invalid(wish, out)
        _, to_do = split_done(wish.runs(), out, read_run)
        for each in strains(to_do, data):
            sys.stderr.write(f"{each}\n")
        outcome = carry_out(wish, out, make, read_run, abreast=runs_abreast(given.abreast, data))
        failures += outcome.failures
        there, _ = split_done(wish.runs(), out, read_run)
        if there:
            write_results(beside_kept(there, results / f"{scenario}.json"), scenario, results)
    for failure in failures:
        sys.stderr.write(f"{failure}\n")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except FabricError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
