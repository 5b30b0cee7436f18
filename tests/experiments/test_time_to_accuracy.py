"""What is kept of a campaign is small and says what counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from experiments.time_to_accuracy.run import (
    HERE,
    Settings,
    beside_kept,
    forget_invalid,
    load,
    read_kept,
    take_up,
    write_results,
)

from mlfabric import scenario as scenarios
from mlfabric.bench.train.campaign import split_done
from mlfabric.bench.train.running import read_run
from mlfabric.errors import FabricError
from tests.bench.train.results import rising, some_result, some_settings


def test_settings_as_committed_are_those_of_the_experiment() -> None:
    # Step sizes are searched after the settings are made: whoever has none is refused when it is to run.
    settings = msgspec.structs.replace(load(HERE / "settings.toml"), tuned=None)
    assert {"calm", "skewed", "dynamic", "stragglers", "dynamic-stragglers", "racks-8to1"} == set(
        settings.scenarios
    )
    for scenario in settings.scenarios:
        scenarios.find(scenario)
        wish = settings.wish(scenario, HERE)
        seeds = [
            settings.few_seeds if name in settings.limits else settings.seeds for name in wish.contenders
        ]
        assert len(wish.runs()) == sum(map(len, seeds))
        assert wish.common.targets == (0.85, 0.89)


def test_contender_without_a_tuned_step_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text("[]")
    settings = Settings(("calm",), ("gloo",), (1,), (0.85,), "1min", tuned="tuned.json")
    with pytest.raises(FabricError, match="no step size for gloo"):
        settings.wish("calm", tmp_path)


def test_results_are_small_and_tell_what_is_not_valid(tmp_path: Path) -> None:
    runs = [
        some_result(some_settings("mlfabric-async"), rising(10)),
        some_result(some_settings("gloo"), rising(40), cpu_share=0.9),
        some_result(some_settings("fcfs-1"), rising(1000), diverged_s=3.0),
    ]
    write_results(runs, "calm", tmp_path)
    found = read_kept(tmp_path / "calm.json")
    assert [run.reached(0.85) for run in found] == [10.0, 40.0, None]
    assert [bool(run.complaints()) for run in found] == [False, True, False]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100_000
    assert "mlfabric-async" in (tmp_path / "calm.md").read_text()


def test_runs_whose_results_are_kept_are_not_made_again_elsewhere(tmp_path: Path) -> None:
    wish = Settings(("calm",), ("gloo", "fcfs-1"), (1,), (0.85,), "1min").wish("calm", tmp_path)
    kept, missing = wish.runs()
    other = msgspec.structs.replace(kept, limit_s=7.0)
    results, runs = tmp_path / "results", tmp_path / "runs"
    write_results([some_result(run, rising(10)) for run in (kept, other)], "calm", results)
    take_up(wish, results, runs)
    done, to_do = split_done(wish.runs(), runs, read_run)
    assert [run.settings for run in done] == [kept]
    assert to_do == [missing]
    take_up(wish, tmp_path / "nowhere", runs)


def test_results_of_other_contenders_and_seeds_stay_where_new_ones_are_written(tmp_path: Path) -> None:
    kept = [some_result(some_settings(name, seed), rising(10)) for name in ("ssp", "gloo") for seed in (1, 2)]
    write_results(kept, "calm", tmp_path)
    new = [
        some_result(some_settings(name, seed), rising(20))
        for name, seed in (("gloo", 2), ("ssp", 0), ("alone", 1))
    ]
    found = beside_kept(new, tmp_path / "calm.json")
    assert [(run.settings.contender, run.settings.seed, run.reached(0.85)) for run in found] == [
        ("ssp", 0, 20.0),
        ("ssp", 1, 10.0),
        ("ssp", 2, 10.0),
        ("gloo", 1, 10.0),
        ("gloo", 2, 20.0),
        ("alone", 1, 20.0),
    ]


def test_results_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "calm.json").write_text('{"runs": []}')
    with pytest.raises(FabricError, match=r"calm.json does not hold runs"):
        read_kept(tmp_path / "calm.json")


def test_only_runs_that_do_not_count_are_forgotten(tmp_path: Path) -> None:
    settings = Settings(("calm",), ("gloo", "fcfs-1"), (1,), (0.85,), "1min")
    wish = settings.wish("calm", tmp_path)
    for run, busy in zip(wish.runs(), (0.9, 0.5), strict=True):
        run.folder(tmp_path).mkdir(parents=True)
        result = some_result(run, rising(10), cpu_share=busy)
        (run.folder(tmp_path) / "result.json").write_bytes(msgspec.json.encode(result))
    forget_invalid(wish, tmp_path)
    assert [read_run(run.folder(tmp_path)) is None for run in wish.runs()] == [True, False]
