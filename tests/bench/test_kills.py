"""Strikes against a training job in the lab, and the judge of its ledger."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlfabric.bench.cli import app
from mlfabric.bench.kills import run_kills
from mlfabric.bench.kills_job import APART, Life, UpdateStory, leaders_of
from mlfabric.bench.kills_ledger import judge_ledger
from mlfabric.bench.kills_member import LEDGER
from mlfabric.errors import FabricError
from mlfabric.eventlog import FileLog
from mlfabric.events import LogRecord, MessageReceived
from mlfabric.lab.testing import lab_is_possible
from mlfabric.messages import AppliedIds, ArraySpec, Grant, JobReady, JobSettings, LeaderChanged, ShardRange
from mlfabric.roles.actions import Note
from mlfabric.rules import Sum

__all__ = ["lab_is_possible"]

WORKER = next(seat for seat in APART if seat.works)


@pytest.fixture
def worker(tmp_path: Path) -> Life:
    """A worker that has ended its work, with two updates granted: one committed, one dropped. Shard 1 holds
    the ledger, and the model's other array is shard 0."""
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    process.wait()
    life = Life(WORKER, 0, process, tmp_path / "w0.jsonl", tmp_path / "w0.txt", stopped=True)
    shards = (ShardRange(0, 0, 4, "s0"), ShardRange(1, 4, 3, "s0"))
    arrays = (ArraySpec("w", (4,), "float32"), ArraySpec(LEDGER, (3,), "float32"))
    record(life, MessageReceived("c0", JobReady(shards, arrays, Sum().spec(), JobSettings(), "float32")))
    for number, weight in ((0, 0.5), (1, 1.0)):
        record(life, MessageReceived("c0", Grant(f"w0#{number}", number, weight, (), "first")))
    life.updates = {"w0#0": UpdateStory(0, True), "w0#1": UpdateStory(1, False)}
    return life


def record(life: Life, what: MessageReceived | Note) -> None:
    """Write into a worker's log."""
    log = FileLog(life.log)
    kind, name = "event" if isinstance(what, MessageReceived) else "action", type(what).__name__
    log.write(LogRecord("w0:1", "", "w0", "worker", 0.0, 0.0, 0.0, kind, name, what))
    log.close()


def judge(life: Life, ledger: tuple[float, ...], divergence: float = 0.05) -> list[str]:
    path = life.log.with_name("model.npz")
    np.savez(path, ledger=np.array(ledger, np.float32))
    return judge_ledger([life], path, divergence)


@pytest.mark.parametrize(
    ("ledger", "complaint"),
    [
        ((0.5, 0.0, 0.0), ""),
        ((1.0, 0.0, 0.0), "w0#0 .* counts 1 in shard 1, was granted with"),  # twice
        ((0.0, 0.0, 0.0), "w0#0 .* counts 0"),
        ((0.5, 1.0, 0.0), "w0#1 .* counts 1"),
        ((0.5, 0.0, 1.0), "coordinate 2 counts 1, and nobody offered it"),
    ],
)
def test_the_judge_sees_updates_that_count_twice_or_not_at_all(
    worker: Life, ledger: tuple[float, ...], complaint: str
) -> None:
    wrong = judge(worker, ledger)
    assert len(wrong) == bool(complaint), wrong
    if complaint:
        assert re.match(complaint, wrong[0]), wrong


def test_an_update_that_the_shard_of_its_coordinate_lost_must_not_be_in_the_model(worker: Life) -> None:
    worker.lost = ["w0#0"]
    assert judge(worker, (0, 0, 0)), "the log does not say so"
    record(worker, Note("lost", "not in r0", ("w0#0",), shards=(1,)))
    assert not judge(worker, (0, 0, 0))
    assert judge(worker, (0.5, 0, 0))
    worker.lost = []
    assert judge(worker, (0, 0, 0)), "its worker was not told"


def test_an_update_that_another_shard_lost_is_still_in_this_one(worker: Life) -> None:
    worker.lost = ["w0#0"]
    record(worker, Note("lost", "not in r0", ("w0#0",), shards=(0,)))
    assert not judge(worker, (0.5, 0, 0))
    assert judge(worker, (0, 0, 0))


@pytest.mark.parametrize("shard", [0, 1])
def test_a_dropped_update_is_in_the_shards_that_had_applied_it(worker: Life, shard: int) -> None:
    record(worker, Note("partly-applied", "too old", ("w0#1",), shards=(shard,)))
    assert bool(judge(worker, (0.5, 0, 0))) == (shard == 1)
    assert bool(judge(worker, (0.5, 1, 0))) == (shard == 0)


def test_what_a_shard_had_applied_of_a_dropped_update_may_be_lost_by_it_later(worker: Life) -> None:
    record(worker, Note("partly-applied", "too old", ("w0#1",), shards=(1,)))
    change = LeaderChanged(ShardRange(1, 4, 3, "r0", 1), 0, AppliedIds(), "s0 lost")
    record(worker, MessageReceived("c0", change))
    assert not judge(worker, (0.5, 0, 0))
    assert not judge(worker, (0.5, 1, 0))
    assert judge(worker, (0.5, 0, 0), divergence=0), "with a replica that is level nothing is lost"


def test_a_leader_that_has_not_heard_of_its_successor_leads_no_more(worker: Life) -> None:
    other = Life(WORKER, 1, worker.process, worker.log, worker.said)
    worker._hear({"roles": {"server.0": 0, "server.1": 0, "replica.2": 0}, "followed": ["server.0"]})
    other._hear({"roles": {"server.0": 1, "worker": 0}, "followed": []})
    assert leaders_of([worker, other]) == {"server.0": other, "server.1": worker}
    assert "server.0" not in leaders_of([worker, other])["server.0"].followed


@pytest.mark.parametrize("wrong", [["--role", "cook"], ["--how", "fire"], ["--times", "0"], ["--sync"]])
def test_nonsense_is_refused_in_one_sentence(wrong: list[str]) -> None:
    result = CliRunner().invoke(app, ["kills", *wrong])
    assert isinstance(result.exception, FabricError)


def test_training_goes_on_after_the_scheduler_of_a_lab_is_killed(
    lab_is_possible: None, tmp_path: Path
) -> None:
    # Three seconds are promised where hosts are not overloaded; a test machine may be.
    report = run_kills(1, ["scheduler"], ["kill"], seed=5, hold_s=1.5, bar_s=20.0, folder=tmp_path)
    assert not report.problems
    (strike,) = report.strikes
    assert strike.ok, strike
    assert (strike.struck, strike.failed_steps) == ("c0", 0)
    assert report.ledgers == 1
    assert report.updates > 20
