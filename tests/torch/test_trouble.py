"""Wrong use, missing ranks, death and time-outs: one clear error on every rank, no hang, no crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.torch.worlds import Worlds, failed

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "all_reduce of 9 elements of float32 by sum"),
        ("large shape", "200001 elements"),
        ("dtype", "10 elements of float64"),
        ("reduction", "by max"),
        ("operation", "barrier"),
        ("root", "with root 1"),
        ("splits", "all_to_all"),
        ("unsupported", "avg needs a fraction"),
    ],
)
def test_a_rank_that_calls_something_else_is_named_on_every_rank(
    worlds: Worlds, what: str, words: str
) -> None:
    answers = worlds.check("mistake", 3, what=what)
    for rank, (first, second) in enumerate(answers):
        # A rank that needs no word of the odd one may be through, and hears of it with its next call.
        heard = second if first.startswith("fine") else first
        assert heard.startswith("CollectiveError"), (rank, first, second)
        assert words in first + second, (rank, first, second)
        assert "CollectiveError" in second


def test_the_same_mistake_on_all_ranks_leaves_the_group_usable(worlds: Worlds) -> None:
    answers = worlds.check("same_mistake", 2)
    words = (
        "avg needs a fraction, which int32 can't hold",
        "band works on whole numbers",
        "works on CPU tensors",
        "sum of float8_e5m2 is not supported",
        "tensors of bits8 can't be sent",
        "sparse tensors only works with ReduceOp.SUM",
        "1 outputs are given, 2 are needed",
        "not 2 times the 3 of the input",
        "not 2 times the 3 of the output",
        "add up to 3, it has 2 rows",
        "can't exchange messages with rank",
        "a tag is a number from 0",
        "twice",
    )
    for answer in answers:
        *heard, total = answer
        assert total == [2.0] * 3
        for said, part in zip(heard, words, strict=True):
            assert part in said


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "what",
    [
        "large",
        "future",
        "recv",
        *(pytest.param(each, marks=FULL) for each in ("small", "barrier", "send")),
    ],
)
def test_a_rank_that_does_not_come_is_named_on_every_rank(worlds: Worlds, what: str, tmp_path: Path) -> None:
    answers = worlds.check("late", 3, what=what, dump=str(tmp_path / "trace_"))
    for rank, heard in enumerate(answers):
        for said in heard:
            assert "timed out after 1 s" in said, (rank, said)
            assert "rank 1 (rank1) did not" in said
            assert rank == 1 or "Timeout" in said or "RuntimeError" in said
    trace = json.loads((tmp_path / "trace_0").read_text())
    last = next(entry for entry in trace["entries"] if entry["state"] != "completed")
    name = {"barrier": "barrier", "recv": "recv", "send": "send"}.get(what, "all_reduce")
    assert last["profiling_name"] == f"mlfabric:{name}"
    assert last["timeout_ms"] == 1000


def test_a_limit_given_to_wait_leaves_the_call_running(worlds: Worlds) -> None:
    first, *flags = worlds.check("patience", 2)[0]
    assert "is not complete after 0.2 s: rank 1 (rank1) did not come" in first
    assert flags == [False, True, True, True, True]


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_killed_rank_is_an_error_at_once(worlds: Worlds, engine: str) -> None:
    answers = worlds.run("killed", 3, engine=engine)
    assert failed(answers[1])
    for rank in (0, 2):
        said, took = answers[rank]
        assert "rank 1 (rank1) was lost" in said
        assert took < 20.0


def test_backward_raises_when_a_rank_dies(worlds: Worlds) -> None:
    answers = worlds.run("backward_fails", 3)
    for rank in (0, 2):
        assert "rank 1 (rank1) was lost" in answers[rank]
        assert not failed(answers[rank])


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_abort_ends_what_runs_on_every_rank(worlds: Worlds, engine: str) -> None:
    answers = worlds.check("aborted", 3, engine=engine)
    assert "group world was aborted" in answers[0][0]
    assert answers[0][1]
    for rank in (1, 2):
        for said in answers[rank]:
            assert "group world was aborted by rank 0" in said


def test_a_process_may_begin_again_after_the_end(worlds: Worlds) -> None:
    for answer in worlds.check("again_and_again", 2):
        assert answer[::2] == [True] * 3
        assert all("was destroyed" in said for said in answer[1::2])


def test_ranks_may_leave_after_their_last_call(worlds: Worlds) -> None:
    for _ in range(3):
        assert worlds.check("early_leavers", 4) == [[0.0, 1.0, 2.0, 3.0]] * 4


def test_a_group_outlives_the_scheduler(worlds: Worlds) -> None:
    gone, *answers = worlds.check("without_a_scheduler", 4)
    assert gone == "gone"
    for total, place, left in answers:
        assert (total, place) == (6.0, [1.0] * 3)
        assert "rank 0 (rank0) has left" in left


@pytest.mark.full
def test_a_busy_rank_is_not_lost(worlds: Worlds) -> None:
    assert worlds.check("busy", 2) == [[2.0] * 3] * 2


def test_a_rank_missing_at_the_start_is_named(worlds: Worlds) -> None:
    answers = worlds.check("missing", 3)
    for rank in (0, 2):
        assert "rank 1 did not come to init_process_group in time" in answers[rank]


def test_worlds_that_differ_are_an_error_everywhere(worlds: Worlds) -> None:
    for said in worlds.check("other_world", 3):
        assert "rank 0 was told of 3 ranks, rank 1 of 4" in said


def test_ranks_with_another_secret_stay_out(worlds: Worlds) -> None:
    answers = worlds.check("wrong_secret", 2, timeout=60.0)
    assert all("Error" in said for said in answers)
    assert "secret" in answers[1]
