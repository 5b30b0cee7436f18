"""A host that takes part in no operation finds out that its link has changed, by probes of those that do."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import mlfabric as mlfabric_package
from mlfabric.lab import RunOptions
from mlfabric.lab.testing import MakeLab
from mlfabric.scenario import parse
from mlfabric.units import goodput, parse_rate

PACKAGE = Path(mlfabric_package.__path__[0]).parent
SLOW, FAST = "40mbit", "160mbit"
SCENARIO = f"""
name = "probing"
network = {{ rate = "200mbit" }}
[[hosts]]
name = "w"
count = 3
[[hosts]]
name = "apart"
rate = "{SLOW}"
"""


def test_a_host_apart_notices_that_its_link_was_raised_and_cut(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(parse(SCENARIO))
    begun = threading.Event()
    moments: list[float] = []

    def change() -> None:
        begun.wait(60)
        for rate in (FAST, SLOW):
            time.sleep(2)
            lab.host("apart").set_rate(rate)
            moments.append(time.monotonic())

    def heard(rank: int, host: str, line: str) -> None:
        if line.startswith("believes"):
            begun.set()

    changer = threading.Thread(target=change, daemon=True)
    changer.start()
    options = RunOptions(
        folder=tmp_path / "run",
        timeout_s=90,
        on_line=heard,
        environment={**os.environ, "PYTHONPATH": str(PACKAGE)},
    )
    result = lab.run([sys.executable, str(Path(__file__).parent / "probing_rank.py"), "8"], options)
    changer.join(10)
    assert result.ok, result.complaints
    said = Path(result.ranks[3].log).read_text().splitlines()
    believed = [tuple(map(float, line.split()[1:])) for line in said if line.startswith("believes")]
    raised, cut = moments
    slow, fast = goodput(parse_rate(SLOW)), goodput(parse_rate(FAST))
    # The limits leave room for a machine that is busy with more than this.
    for way in (1, 2):
        before = [each[way] for each in believed if each[0] < raised][-1]
        assert 0.6 * slow < before < 1.4 * slow
        assert any(each[way] > 2 * slow for each in believed if raised < each[0] < raised + 1.5)
        assert max(each[way] for each in believed) < 1.3 * fast
        after = [each[way] for each in believed if each[0] < cut + 2.5][-1]
        assert 0.6 * slow < after < 1.4 * slow
