"""When a target counts as reached, which runs count, and what several of them say together."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mlfabric.bench.train import report
from mlfabric.bench.train.judging import delay_quantile, mean_delay, pair, reached, summarise
from mlfabric.bench.train.running import SURELY_BELOW, judge_where_it_counts
from tests.bench.train.results import rising, some_result, some_settings


def test_target_is_reached_at_the_first_of_three_in_a_row() -> None:
    curve = [(1.0, 0.8), (2.0, 0.86), (3.0, 0.84), (4.0, 0.85), (5.0, 0.9), (6.0, 0.85), (7.0, 0.2)]
    assert reached(curve, 0.85) == 4.0


def test_two_in_a_row_are_not_enough() -> None:
    assert reached([(1.0, 0.9), (2.0, 0.9), (3.0, 0.1), (4.0, 0.9), (5.0, 0.9)], 0.85) is None
    assert reached([], 0.85) is None


def test_only_where_a_target_may_be_reached_all_images_are_looked_at() -> None:
    """Whatever a quarter of them says within its margin, targets are reached when all of them say so."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    targets, count = (0.85, 0.89), 40
    snapshots = [(2.0 * number, Path(str(number))) for number in range(count)]
    for _ in range(200):
        exact = [(at, min(0.78 + 0.002 * at + draw.gauss(0, 0.01), 0.95)) for at, _ in snapshots]
        by_all = Mock(side_effect=lambda path, exact=exact: exact[int(path.name)][1])
        off = [draw.uniform(-1, 1) * 0.99 * SURELY_BELOW for _ in snapshots]

        def judge(path: Path, quarter: int | None, off: Any = off, by_all: Any = by_all) -> float:
            found: float = by_all(path) if quarter is None else by_all.side_effect(path) + off[int(path.name)]
            return found

        curve = judge_where_it_counts(snapshots, targets, judge)
        assert [reached(curve, each) for each in targets] == [reached(exact, each) for each in targets], seed
        assert by_all.call_count < count, seed


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"overran_share": 0.011}, "1.1% of the steps overran their time"),
        ({"cpu_share": 0.76}, "the processors were 76% busy"),
        ({"steps": 0}, "no step was made"),
        ({"ended_early": True, "curve": rising(10, 0.84)}, "it was ended too early"),
    ],
)
def test_run_that_does_not_count_says_why(more: dict[str, object], why: str) -> None:
    result = some_result(some_settings(), **{"curve": rising(10), **more})  # type: ignore[arg-type]
    assert result.complaints() == [why]
    (row,) = summarise([result])
    assert row.seeds == []
    assert row.refused == {1: [why]}


def test_limits_themselves_are_allowed() -> None:
    assert some_result(some_settings(), rising(10), overran_share=0.01, cpu_share=0.75).complaints() == []


def test_rows_join_seeds_and_leave_out_those_that_do_not_count() -> None:
    runs = [
        some_result(some_settings(seed=1), rising(10), delays={0: 100, 4: 100}),
        some_result(some_settings(seed=2), rising(30), delays={2: 200}),
        some_result(some_settings(seed=3), rising(50), cpu_share=0.9),
        some_result(some_settings("fcfs-1", seed=1), rising(200)),
    ]
    gloo, first_come = summarise(runs)
    assert gloo.seeds == [1, 2]
    assert (gloo.to_target["0.85"].median, gloo.to_target["0.85"].most) == (20.0, 30.0)
    assert gloo.delay_mean == 2.0
    assert gloo.delay_max == 4
    assert gloo.bytes_per_update == pytest.approx(2.0)
    assert math.isinf(first_come.to_target["0.85"].median)
    assert "> 100 s" in report.markdown(report.make_report(runs, predict=False))


def test_pairs_go_seed_by_seed_and_say_where_they_are_least_values() -> None:
    runs = [
        some_result(some_settings("mlfabric-async", 1), rising(10)),
        some_result(some_settings("mlfabric-async", 2), rising(20)),
        some_result(some_settings("gloo", 1), rising(30)),
        some_result(some_settings("gloo", 2), rising(200)),
        some_result(some_settings("gloo", 3), rising(30)),
    ]
    found = pair(runs, "calm", "mlfabric-async", "gloo", 0.85)
    assert found is not None
    assert found.times == [3.0, 5.0]
    assert found.at_least
    assert pair(runs, "calm", "gloo", "mlfabric-async", 0.85) is None


def test_run_that_diverged_was_never_there() -> None:
    runs = [
        some_result(some_settings("mlfabric-async", limit_s=200.0), rising(10)),
        some_result(
            some_settings("gloo", limit_s=200.0), rising(5), diverged_s=20.0, seconds=20.0, overran_share=0.5
        ),
    ]
    made = report.make_report(runs, predict=False)
    assert runs[1].complaints() == []
    assert math.isinf(made.rows[1].to_target["0.85"].median)
    (found,) = made.pairs
    assert (found.times, found.at_least) == ([20.0], True)  # by the limit, not by when it diverged
    written = report.markdown(made)
    assert "| never |" in written
    assert "- gloo, seed 1: diverged after 20 s" in written


def test_pairs_leave_out_runs_that_do_not_count() -> None:
    ours, other = some_settings("mlfabric-async"), some_settings("gloo")
    runs = [some_result(ours, rising(10)), some_result(other, rising(30), cpu_share=0.9)]
    assert pair(runs, "calm", "mlfabric-async", "gloo", 0.85) is None


def test_report_names_our_best_against_the_others_of_its_class_and_is_json() -> None:
    runs = [
        some_result(some_settings("mlfabric-async"), rising(10)),
        some_result(some_settings("mlfabric-sync"), rising(20)),
        some_result(some_settings("gloo"), rising(40)),
        some_result(some_settings("gloo-fp16"), rising(200)),
    ]
    made = report.make_report(runs, predict=False)
    assert [(p.ours, p.other, p.times) for p in made.pairs] == [("mlfabric-async", "gloo", [4.0])]
    assert "mlfabric-async is at 0.85 4.00 times as soon as gloo" in report.markdown(made)
    written = json.loads(json.dumps(report.as_json(made, runs), allow_nan=False))
    assert written["report"]["rows"][3]["to_target"]["0.85"]["median"] is None


def test_delays_are_summed_up() -> None:
    assert mean_delay({0: 1, 10: 3}) == 7.5
    assert delay_quantile({0: 98, 5: 1, 9: 1}, 0.99) == 5
    assert delay_quantile({}, 0.99) == 0
