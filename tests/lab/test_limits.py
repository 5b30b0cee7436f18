"""Between real hosts: the processes of a host together send no more than it may."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

import mlfabric as mlfabric_package
from mlfabric.bench.transfer_rank import TransferOrder, TransferReport
from mlfabric.lab import RunOptions
from mlfabric.lab.testing import MakeLab
from mlfabric.units import goodput

SIZE = 1_000_000


def test_two_processes_of_a_host_keep_its_limit_together(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(hosts=2, rate="100mbit")
    order = TransferOrder("push", [SIZE], rounds=2, idle_s=0.0, aggregate=False)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(mlfabric_package.__path__[0]).parent),
        "MLFABRIC_MAX_RATE": "20mbit",
    }
    options = RunOptions(folder=tmp_path / "run", ranks_per_host=2, timeout_s=50, environment=environment)
    words = [sys.executable, "-m", "mlfabric.bench.transfer_rank", msgspec.json.encode(order).decode()]
    result = lab.run(words, options)
    assert result.ok, result.complaints
    said = Path(result.ranks[0].log).read_text().splitlines()
    report = msgspec.json.decode(next(line for line in said if line.startswith("{")), type=TransferReport)
    (times,) = report.times
    assert (times.errors, times.dropped) == (0, 0)
    # Two of the three workers are on the host without the server: both updates leave it through its limit.
    least_s = 2 * SIZE / goodput(20e6)
    assert min(times.seconds) >= 0.85 * least_s
    assert min(times.seconds) <= 3 * least_s  # it is a limit, not a stop
