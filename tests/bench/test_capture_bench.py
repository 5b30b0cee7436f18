"""The capture benchmark runs, agrees with itself, and promises nothing it did not measure."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from mlfabric.bench.capture import Tool, measure
from mlfabric.bench.cli import app
from mlfabric.errors import FabricError

runner = CliRunner()


def test_a_small_run_measures_whole_processes_and_agrees() -> None:
    words = ["capture", "--packets", "3000", "--repeat", "1", "--no-slow", "--json"]
    ended = runner.invoke(app, words, catch_exceptions=False)
    found = json.loads(ended.stdout)
    ours = [run for run in found["runs"] if run["tool"].startswith("mlfabric")]
    assert {run["answer"]["packets"] for run in ours if run["task"] != "long capture"} == {3000}
    assert len({run["answer"]["bytes"] for run in found["runs"] if run["task"] != "long capture"}) == 1
    assert all(run["wall_s"] > 0 and run["rss_mb"] > 10 for run in ours)
    assert found["runs"][-1]["answer"]["packets"] == 30_000  # the long capture, for memory
    assert all((figure["met"] is None) == (figure["measured"] is None) for figure in found["figures"])


def test_slow_tools_run_once_and_in_different_rounds() -> None:
    def tool(name: str, slow: bool) -> Tool:
        return Tool(name, "task", (sys.executable, "-c", "print(1)"), lambda _: {}, slow=slow)

    runs = measure([tool("quick", False), tool("slow", True), tool("slower", True)], 2)
    assert [len(run.walls_s) for run in runs] == [2, 1, 1]


def test_nonsense_is_refused() -> None:
    with pytest.raises(FabricError, match="at least 1,000 packets"):
        runner.invoke(app, ["capture", "--packets", "1"], catch_exceptions=False)
