"""Runs are made once each, in folders of their own; a campaign goes on where it was broken off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from mlfabric.bench.cli import app
from mlfabric.bench.train.campaign import Wish, carry_out
from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.errors import FabricError
from tests.bench.train.results import rising, some_result, some_settings


class Runs:
    """Makes runs that cost nothing, and remembers which."""

    def __init__(self, break_off_after: int = 1000) -> None:
        self.made: list[tuple[str, int]] = []
        self.left = break_off_after

    def make(self, settings: RunSettings, folder: Path, told: Callable[[float], None]) -> RunResult:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.made.append((settings.contender, settings.seed))
        folder.mkdir(parents=True)
        result = some_result(settings, rising(settings.seed))
        (folder / "result.json").write_bytes(msgspec.json.encode(result))
        return result


def read(folder: Path) -> RunResult | None:
    path = folder / "result.json"
    return msgspec.json.decode(path.read_bytes(), type=RunResult) if path.exists() else None


WISH = Wish(("gloo", "mlfabric-async"), ("calm",), (1, 2), some_settings())


def test_every_seed_is_run_by_all_before_the_next(tmp_path: Path) -> None:
    runs = Runs()
    results = carry_out(WISH, tmp_path, runs.make, read, quiet=True)
    assert runs.made == [("gloo", 1), ("mlfabric-async", 1), ("gloo", 2), ("mlfabric-async", 2)]
    assert [result.settings.seed for result in results] == [1, 1, 2, 2]


def test_campaign_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        carry_out(WISH, tmp_path, Runs(break_off_after=3).make, read, quiet=True)
    rest = Runs()
    results = carry_out(WISH, tmp_path, rest.make, read, quiet=True)
    assert rest.made == [("mlfabric-async", 2)]
    assert len(results) == 4
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
        (["--data", "/nowhere"], "does not hold Fashion-MNIST"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["train", *options])
    assert isinstance(result.exception, FabricError)
    assert sentence in str(result.exception)
