"""Runs are made once each, in folders of their own; a campaign goes on where it was broken off."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from mlfabric.bench.cli import app
from mlfabric.bench.train import report
from mlfabric.bench.train.campaign import Abreast, RunFailed, Wish, carry_out, stop_after
from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.errors import FabricError
from tests.bench.train.results import rising, some_result, some_settings


class Runs:
    """Makes runs that cost nothing, and remembers which, and when each was to stop."""

    def __init__(self, break_off_after: int = 1000, fails: str = "", to: float = 0.9) -> None:
        self.made: list[tuple[str, int]] = []
        self.stops: list[float] = []
        self.left, self.fails, self.to = break_off_after, fails, to

    def make(
        self, settings: RunSettings, folder: Path, stop_s: float, told: Callable[[float], None]
    ) -> RunResult:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.made.append((settings.contender, settings.seed))
        self.stops.append(stop_s)
        if settings.contender == self.fails:
            raise RunFailed("rank 3 on w3 ended with exit code 1")
        folder.mkdir(parents=True, exist_ok=True)
        ours = settings.contender.startswith("mlfabric")
        curve = rising(settings.seed, self.to) if ours else rising(1000)
        seconds = min(settings.limit_s, stop_s)
        result = some_result(settings, curve, seconds=seconds)
        (folder / "result.json").write_bytes(msgspec.json.encode(result))
        return result


class Apart:
    """A run that costs nothing and is over when it has been asked about as often as it has a seed."""

    def __init__(self, runs: Runs, settings: RunSettings, folder: Path, stop_s: float) -> None:
        self.settings, self.asked, self.ended = settings, 0, False
        self._runs, self._folder, self._stop_s = runs, folder, stop_s

    def over(self) -> bool:
        self.asked += 1
        return self.asked >= self.settings.seed

    def result(self) -> RunResult:
        return self._runs.make(self.settings, self._folder, self._stop_s, lambda seconds: None)

    def end(self) -> None:
        self.ended = True


def read(folder: Path) -> RunResult | None:
    path = folder / "result.json"
    return msgspec.json.decode(path.read_bytes(), type=RunResult) if path.exists() else None


WISH = Wish(("gloo", "mlfabric-async"), ("calm",), (1, 2), some_settings())


def test_every_seed_is_run_by_all_before_the_next(tmp_path: Path) -> None:
    runs = Runs()
    outcome = carry_out(WISH, tmp_path, runs.make, read, quiet=True)
    assert runs.made == [("mlfabric-async", 1), ("gloo", 1), ("mlfabric-async", 2), ("gloo", 2)]
    assert [result.settings.seed for result in outcome.results] == [1, 1, 2, 2]
    assert [result.settings.contender for result in outcome.results] == ["gloo", "mlfabric-async"] * 2


def test_who_is_not_there_after_five_times_our_best_is_stopped(tmp_path: Path) -> None:
    runs = Runs()
    outcome = carry_out(WISH, tmp_path, runs.make, read, quiet=True)
    assert runs.stops == [math.inf, 5.0, math.inf, 10.0]  # ours were there after 1 and 2 s
    assert [result.seconds for result in outcome.results] == [5.0, 240.0, 10.0, 240.0]
    assert "> 10 s" in report.markdown(report.make_report(outcome.results, predict=False))


def test_stop_goes_by_the_highest_target_that_ours_reached() -> None:
    settings = some_settings(targets=(0.85, 0.89), contender="gloo")
    ours = msgspec.structs.replace(settings, contender="mlfabric-async")
    low = some_result(ours, rising(10, 0.86))
    high = some_result(msgspec.structs.replace(ours, contender="mlfabric-sync"), rising(30, 0.9))
    assert stop_after(settings, [low]) == 50.0
    assert stop_after(settings, [low, high]) == 150.0
    assert math.isinf(stop_after(settings, [some_result(ours, rising(10), cpu_share=0.9)]))
    assert math.isinf(stop_after(msgspec.structs.replace(settings, seed=2), [low]))
    assert math.isinf(stop_after(msgspec.structs.replace(settings, contender="gloo-fp16"), [low]))


def test_contender_may_have_a_limit_of_its_own() -> None:
    wish = msgspec.structs.replace(WISH, limits={"gloo": 60.0})
    assert {run.contender: run.limit_s for run in wish.runs()} == {"gloo": 60.0, "mlfabric-async": 240.0}


def test_run_stopped_sooner_than_it_would_be_now_is_made_again(tmp_path: Path) -> None:
    carry_out(WISH, tmp_path, Runs().make, read, quiet=True)
    folder = tmp_path / "calm" / "mlfabric-async" / "seed2"
    (folder / "result.json").unlink()
    again = Runs(to=0.5)  # ours is never there this time
    carry_out(WISH, tmp_path, again.make, read, quiet=True)
    assert again.made == [("mlfabric-async", 2), ("gloo", 2)]


def test_ours_and_then_others_are_run_side_by_side_after_the_heavy_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, begun = Runs(), list[Apart]()
    at_once: list[list[int]] = []

    def begin(settings: RunSettings, folder: Path, stop_s: float) -> Apart:
        begun.append(Apart(runs, settings, folder, stop_s))
        return begun[-1]

    def look(seconds: float) -> None:
        at_once.append([run.settings.seed for run in begun if run.asked < run.settings.seed])

    monkeypatch.setattr("time.sleep", look)
    seeds = (3, 2, 5, 4)
    wish = msgspec.structs.replace(WISH, contenders=(*WISH.contenders, "mlfabric-rolling"), seeds=seeds)
    outcome = carry_out(wish, tmp_path, runs.make, read, quiet=True, abreast=Abreast(2, begin))
    assert runs.made[:4] == [("mlfabric-rolling", seed) for seed in seeds]
    assert [(run.settings.contender, run.settings.seed) for run in begun] == [
        (contender, seed) for contender in ("mlfabric-async", "gloo") for seed in seeds
    ]
    assert at_once == [[3, 2], [5, 4], [5, 4], [5, 4]] * 2
    assert runs.stops[4:] == [10.0, 15.0, 25.0, 20.0] * 2  # five times what ours took with the same seed
    assert len(outcome.results) == 12
    assert all(run.ended for run in begun)


def test_runs_side_by_side_are_all_broken_off_together(tmp_path: Path) -> None:
    runs, begun = Runs(break_off_after=2), list[Apart]()

    def begin(settings: RunSettings, folder: Path, stop_s: float) -> Apart:
        begun.append(Apart(runs, settings, folder, stop_s))
        return begun[-1]

    wish = msgspec.structs.replace(WISH, contenders=("mlfabric-rolling", "gloo"))
    with pytest.raises(KeyboardInterrupt):
        carry_out(wish, tmp_path, runs.make, read, quiet=True, abreast=Abreast(2, begin))
    assert [run.ended for run in begun] == [True, True]


def test_failure_of_a_run_is_told_and_the_others_are_made(tmp_path: Path) -> None:
    runs = Runs(fails="mlfabric-async")
    outcome = carry_out(WISH, tmp_path, runs.make, read, quiet=True)
    assert [result.settings.contender for result in outcome.results] == ["gloo", "gloo"]
    assert [str(failure) for failure in outcome.failures] == [
        f"calm mlfabric-async seed {seed} failed: rank 3 on w3 ended with exit code 1" for seed in (1, 2)
    ]


def test_campaign_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        carry_out(WISH, tmp_path, Runs(break_off_after=3).make, read, quiet=True)
    rest = Runs()
    results = carry_out(WISH, tmp_path, rest.make, read, quiet=True)
    assert rest.made == [("gloo", 2)]
    assert len(results.results) == 4
    again = Runs()
    assert carry_out(WISH, tmp_path, again.make, read, quiet=True) == results
    assert again.made == []


def test_run_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    carry_out(WISH, tmp_path, Runs().make, read, quiet=True)
    other = msgspec.structs.replace(WISH, step_sizes={"gloo": StepSize(0.5, 0.0)})
    with pytest.raises(FabricError, match="holds a run with other settings"):
        carry_out(other, tmp_path, Runs().make, read, quiet=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--contenders", "gloo,nccl"], "unknown contender 'nccl'"),
        (["--seeds", "one"], "--seeds are whole numbers"),
        (["--seeds", "1001"], "are for --tune"),
        (["--target", "85"], "between 0 and 1"),
        (["--scenario", "nowhere"], "nowhere"),
        (["--simulate", "--contenders", "gloo-fp16"], "no policy that stands for gloo-fp16"),
        (["--abreast", "0"], "--abreast is at least 1"),
        (["--abreast", "2", "--tune"], "goes neither with"),
        (["--data", "/nowhere"], "does not hold Fashion-MNIST"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["train", *options])
    assert isinstance(result.exception, FabricError)
    assert sentence in str(result.exception)
