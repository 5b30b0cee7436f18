"""One run: a lab of the scenario, a worker on each host, then the snapshots judged on the test images.

It is made in this process, or in one of its own (`ApartRun`), so that several may be under way.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import torch

from mlfabric import scenario as scenarios
from mlfabric.bench.train.campaign import Abreast, RunFailed
from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.settings import REACHED_IN_A_ROW, RunSettings, fit
from mlfabric.bench.train.task import QUARTERS, Fashion, accuracy, load_weights, make_model
from mlfabric.bench.train.worker import DIVERGED, StepRecord, WorkerOrder
from mlfabric.errors import FabricError
from mlfabric.lab import Lab, RunOptions
from mlfabric.lab.manifest import MachineLoad, versions

RESULT: Final = "result.json"
MEASURED: Final = "measured.json"  # there while a run is made and its snapshots are not judged
# While it runs, a look at some of the test images now and then, only to know when it may end: another quarter
# of them each time, so that the last four looks are of all. Where the target is far the next look is later,
# by as much again for each so much that is missing.
LOOK_EVERY_S: Final = 5.0
FAR: Final = 0.02
# By so much the mean of four looks is above the target, twice in a row, before a run is ended.
LOOK_MARGIN: Final = 0.004
LOOKS_IN_A_ROW: Final = 2
# A model that gets so much less than a target right of a quarter of the images is not at the target: three
# standard deviations of what the other three quarters may differ by.
SURELY_BELOW: Final = 0.018
GRACE_S: Final = 2.0  # for workers to end
LOWEST_PRIORITY: Final = 19  # of Linux


class Measured(msgspec.Struct, frozen=True):
    """What only the run itself could tell."""

    settings: RunSettings
    seconds: float
    early: bool
    cpu_share: float
    stolen_share: float = 0.0
    diverged_s: float | None = None


class Watch:
    """Decides when a run may end: its time is over, the target was seen often enough, or it has diverged.

    It looks in a thread of lowest priority, so that no worker waits for a processor because of it.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        data: Fashion,
        stop_s: float = math.inf,
        told: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._settings, self._data, self._told = settings, data, told
        self._folder, self._snapshots = folder, folder / "snapshots"
        self._until_s = min(settings.limit_s, stop_s)
        self._model = make_model(settings.seed)
        self._next_s = self._pause_s = LOOK_EVERY_S
        self._seen = ""
        self._looks: deque[float] = deque(maxlen=QUARTERS)
        self._next_quarter = 0
        self._in_a_row = 0
        self._looking: threading.Thread | None = None
        self._load: MachineLoad | None = None
        self.cpu_share = 0.0
        self.stolen_share = 0.0
        self.seconds = 0.0
        self.early = False
        self.diverged_s: float | None = None

    def over(self, seconds: float) -> bool:
        if self._load is None:
            self._load = MachineLoad()
        self.seconds = seconds
        if seconds >= self._next_s:
            self._next_s = seconds + self._pause_s
            self._told(seconds)
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self._look, daemon=True)
                self._looking.start()
        self.early = self._in_a_row >= LOOKS_IN_A_ROW
        if (self._folder / DIVERGED).exists():
            self.diverged_s = float((self._folder / DIVERGED).read_text())
        if seconds < self._until_s and not self.early and self.diverged_s is None:
            return False
        self._load.update()
        self.cpu_share, self.stolen_share = self._load.busy_share(), self._load.stolen_share()
        if self._looking is not None:
            self._looking.join()
        return True

    def _look(self) -> None:
        with without_haste():
            self._look_at_newest()

    def _look_at_newest(self) -> None:
        newest = max(self._snapshots.glob("*.npy"), default=None) if self._snapshots.exists() else None
        if newest is None or newest.name == self._seen:
            return
        self._seen = newest.name
        load_weights(self._model, read_snapshot(newest))
        self._looks.append(accuracy(self._model, self._data, self._next_quarter))
        self._next_quarter = (self._next_quarter + 1) % QUARTERS
        missing = max(self._settings.targets) - self._looks[-1]
        self._pause_s = LOOK_EVERY_S * (1 + max(missing, 0.0) / FAR)
        good = fmean(self._looks) >= max(self._settings.targets) + LOOK_MARGIN
        self._in_a_row = self._in_a_row + 1 if good and len(self._looks) == QUARTERS else 0


@contextmanager
def without_haste() -> Iterator[None]:
    """At lowest priority, with the threads that this one begins: no run's worker waits for a processor."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY)
    try:
        yield
    finally:
        with suppress(PermissionError):  # only root may go back
            os.setpriority(os.PRIO_PROCESS, thread, before)


def make_run(
    settings: RunSettings,
    folder: Path,
    data_folder: Path,
    stop_s: float = math.inf,
    told: Callable[[float], None] = lambda seconds: None,
) -> RunResult:
    """Run it, and judge its snapshots. The result is written last, so that it is whole.

    It is stopped after `stop_s`, if that is before its limit. One that was made and not judged is judged; of
    one that was broken off nothing is kept.
    """
    measured = _measure(settings, folder, data_folder, stop_s, told)
    torch.set_num_threads(os.cpu_count() or 1)
    with without_haste():
        result = read_result(measured, folder / "run", Fashion(data_folder))
    write_record(folder / RESULT, result)
    shutil.rmtree(folder / "run" / "snapshots")
    (folder / MEASURED).unlink()
    return result


def _measure(
    settings: RunSettings,
    folder: Path,
    data_folder: Path,
    stop_s: float,
    told: Callable[[float], None] = lambda seconds: None,
    gently: bool = False,
) -> Measured:
    """What was measured, if it was before."""
    measured = _read_measured(folder, settings)
    if measured is None:
        measured = _run_in_lab(settings, folder, data_folder, Fashion(data_folder), stop_s, told, gently)
        write_record(folder / MEASURED, measured)
    return measured


class Order(msgspec.Struct, frozen=True):
    """A run, for a process of its own."""

    settings: RunSettings
    folder: str
    data: str
    stop_s: float | None


class ApartRun:
    """A run in a process of its own. Its snapshots are judged when its result is asked for."""

    def __init__(self, settings: RunSettings, folder: Path, data_folder: Path, stop_s: float) -> None:
        order = Order(settings, str(folder), str(data_folder), stop_s if math.isfinite(stop_s) else None)
        words = [sys.executable, "-m", "mlfabric.bench.train.running", msgspec.json.encode(order).decode()]
        self._judge = partial(make_run, settings, folder, data_folder)
        self._said = folder.with_suffix(".stderr")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with self._said.open("w") as said:
            self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said)

    def over(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> RunResult:
        if self._process.wait() != 0:
            said = self._said.read_text().strip()
            raise RunFailed(said.split("\n")[-1] or "its process ended without a word")
        self._said.unlink()
        return self._judge()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def runs_abreast(most: int, data_folder: Path) -> Abreast | None:
    """So many at a time, where that is more than one."""

    def begin(settings: RunSettings, folder: Path, stop_s: float) -> ApartRun:
        return ApartRun(settings, folder, data_folder, stop_s)

    return Abreast(most, begin) if most > 1 else None


def measure_ordered(order: Order) -> None:
    """What the process of an `ApartRun` does.

    Its workers load without taking processors from other runs; not ours, as their engines' processes would
    stay at the priority they began with.
    """
    stop_s = math.inf if order.stop_s is None else order.stop_s
    gently = not find_entry(order.settings.contender).ours
    _measure(order.settings, Path(order.folder), Path(order.data), stop_s, gently=gently)


def _run_in_lab(
    settings: RunSettings,
    folder: Path,
    data_folder: Path,
    data: Fashion,
    stop_s: float,
    told: Callable[[float], None],
    gently: bool,
) -> Measured:
    entry = find_entry(settings.contender)
    scenario = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    hosts = scenario.places(scenario.jobs[0]).workers
    if entry.how == "alone":
        hosts = hosts[:1]
    order = WorkerOrder(settings, hosts, str(data_folder), gently)
    watch = Watch(settings, folder / "run", data, stop_s, told)
    command = [sys.executable, "-m", "mlfabric.bench.train.worker", msgspec.json.encode(order).decode()]
    if gently:
        command = ["nice", "-n", str(LOWEST_PRIORITY), *command]
    options = RunOptions(hosts=hosts, folder=folder / "run", together=True, until=watch.over, grace_s=GRACE_S)
    with Lab(scenario) as lab:
        try:
            done = lab.run(command, options)
        except FabricError as error:  # a worker that never was ready
            raise RunFailed(str(error)) from None
    if not done.ok and watch.diverged_s is None:
        raise RunFailed(done.complaints[0])
    return Measured(
        settings, watch.seconds, watch.early, watch.cpu_share, watch.stolen_share, watch.diverged_s
    )


def _read_measured(folder: Path, settings: RunSettings) -> Measured | None:
    try:
        found = msgspec.json.decode((folder / MEASURED).read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.settings == settings else None


def write_record(path: Path, value: msgspec.Struct) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
    draft.replace(path)


def read_result(measured: Measured, folder: Path, data: Fashion) -> RunResult:
    """What the run folder says."""
    settings, seconds = measured.settings, measured.seconds
    records: list[list[StepRecord]] = []
    decoder = msgspec.json.Decoder(StepRecord)
    for path in sorted(folder.glob("steps-*.jsonl"), key=lambda path: int(path.stem.split("-")[1])):
        # A worker may have been ended in the middle of a line.
        whole = path.read_bytes().split(b"\n")[:-1]
        found = (decoder.decode(line) for line in whole)
        records.append([record for record in found if record.done_s <= seconds])
    steps = [record for each in records for record in each]
    count = max(len(steps), 1)
    delays = Counter(delay for record in steps for delay in record.delays)
    entry = find_entry(settings.contender)
    # A local step is a gradient too, whether its worker tells of it at once or with others.
    infrequent = entry.kind == "infrequent"
    return RunResult(
        settings=settings,
        seconds=seconds,
        ended_early=measured.early,
        diverged_s=measured.diverged_s,
        curve=judge_snapshots(folder / "snapshots", settings, data, seconds),
        steps=len(steps),
        updates=len(steps) if infrequent else sum(delays.values()),
        dropped=sum(record.dropped for record in steps),
        delays=dict(delays),
        overran_share=sum(record.overran for record in steps) / count,
        gradient_s=sum(record.gradient_s for record in steps) / count,
        compute_s=sum(record.lasts_s for record in steps) / count,
        exchange_s=sum(record.done_s - record.computed_s for record in steps) / count,
        cpu_share=measured.cpu_share,
        stolen_share=measured.stolen_share,
        link_bytes=read_links(folder / "links.csv"),
        steps_by_rank=[len(each) for each in records],
        versions=versions(),
    )


def judge_snapshots(
    folder: Path, settings: RunSettings, data: Fashion, until_s: float
) -> list[tuple[float, float]]:
    """Accuracy against time, from the snapshots."""
    model = make_model(settings.seed)

    def judge(path: Path, quarter: int | None) -> float:
        load_weights(model, read_snapshot(path))
        return accuracy(model, data, quarter)

    timed = [
        (int(path.stem.split("-")[0]) / 1000, path)
        for path in (sorted(folder.glob("*.npy")) if folder.exists() else [])
    ]
    return judge_where_it_counts([each for each in timed if each[0] <= until_s], settings.targets, judge)


def judge_where_it_counts(
    snapshots: Sequence[tuple[float, Path]],
    targets: Sequence[float],
    judge: Callable[[Path, int | None], float],
) -> list[tuple[float, float]]:
    """Every third of them by a quarter of the images, all images where a target may be reached first.

    Three in a row are at a target if none of them is below it; the last one is judged first, as one that is
    below rules out all that it is among. What was reached when is the same as if all were judged by all
    images, but for an accident of one in a thousand; a long run would take as long again to judge.
    """
    found: dict[int, float] = {}
    by_all: set[int] = set()

    def below(index: int, target: float) -> bool:
        if index not in found:
            found[index] = judge(snapshots[index][1], 0)
        return found[index] < target - (0.0 if index in by_all else SURELY_BELOW)

    def really_below(index: int, target: float) -> bool:
        if index not in by_all:
            by_all.add(index)
            found[index] = judge(snapshots[index][1], None)
        return found[index] < target

    def last_below(target: float) -> int | None:
        in_a_row = range(start + REACHED_IN_A_ROW - 1, start - 1, -1)
        for is_below in (below, really_below):
            for index in in_a_row:
                if is_below(index, target):
                    return index
        return None

    start = 0
    for target in sorted(targets):
        while start + REACHED_IN_A_ROW <= len(snapshots) and (missed := last_below(target)) is not None:
            start = missed + 1
    for index in range(0, len(snapshots), REACHED_IN_A_ROW):
        below(index, 0.0)  # for the picture
    return [(snapshots[index][0], found[index]) for index in sorted(found)]


def read_snapshot(path: Path) -> Any:
    import numpy as np

    return np.load(path)


def read_links(path: Path) -> dict[str, int]:
    """Bytes on the wire by link and direction, over the whole run."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    if path.exists():
        with path.open() as file:
            for line in csv.DictReader(file):
                sent = int(line["sent_bytes"])
                first.setdefault(line["link"], sent)
                last[line["link"]] = sent
    return {link: last[link] - first[link] for link in last}


def read_run(folder: Path) -> RunResult | None:
    """The result of a run that was made; None if there is none, or not a whole one."""
    try:
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=RunResult)
    except (OSError, msgspec.DecodeError):
        return None


if __name__ == "__main__":
    # Ended like this, it takes its lab down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        measure_ordered(msgspec.json.decode(sys.argv[1], type=Order))
    except FabricError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
