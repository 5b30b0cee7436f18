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
from mlfabric.bench.kills_job import APART, Life, UpdateStory
from mlfabric.bench.kills_ledger import judge_ledger
from mlfabric.errors import FabricError
from mlfabric.eventlog import FileLog
from mlfabric.events import LogRecord, MessageReceived
from mlfabric.lab.testing import lab_is_possible
from mlfabric.messages import Grant

__all__ = ["lab_is_possible"]

WORKER = next(seat for seat in APART if seat.works)


@pytest.fixture
def worker(tmp_path: Path) -> Life:
    """A worker that has ended its work, with two updates granted: one committed, one dropped."""
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    process.wait()
    log = FileLog(tmp_path / "w0.jsonl")
    for number, weight in ((0, 0.5), (1, 1.0)):
        event = MessageReceived("c0", Grant(f"w0#{number}", number, weight, (), "first"))
        record = LogRecord(
            f"w0:{number}", "", "w0", "worker", 0.0, 0.0, 0.0, "event", "MessageReceived", event
        )
        log.write(record)
    log.close()
    life = Life(WORKER, 0, process, log.path, tmp_path / "w0.txt", stopped=True)
    life.updates = {"w0#0": UpdateStory(0, True), "w0#1": UpdateStory(1, False)}
    return life


@pytest.mark.parametrize(
    ("ledger", "complaint"),
    [
        ((0.5, 0.0, 0.0), ""),
        ((1.0, 0.0, 0.0), "w0#0 .* counts 1, was granted with"),  # twice
        ((0.0, 0.0, 0.0), "w0#0 .* counts 0"),
        ((0.5, 1.0, 0.0), "w0#1 .* counts 1"),
        ((0.5, 0.0, 1.0), "coordinate 2 counts 1, and nobody offered it"),
    ],
)
def test_the_judge_sees_updates_that_count_twice_or_not_at_all(
    worker: Life, tmp_path: Path, ledger: tuple[float, ...], complaint: str
) -> None:
    np.savez(tmp_path / "model.npz", ledger=np.array(ledger, np.float32))
    wrong = judge_ledger([worker], tmp_path / "model.npz", 0.05)
    assert len(wrong) == bool(complaint), wrong
    if complaint:
        assert re.match(complaint, wrong[0]), wrong


def test_an_update_reported_lost_must_not_be_in_the_model(worker: Life, tmp_path: Path) -> None:
    worker.lost = ["w0#0"]
    np.savez(tmp_path / "model.npz", ledger=np.zeros(3, np.float32))
    assert not judge_ledger([worker], tmp_path / "model.npz", 0.05)
    np.savez(tmp_path / "model.npz", ledger=np.array([0.5, 0, 0], np.float32))
    assert judge_ledger([worker], tmp_path / "model.npz", 0.05)


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
