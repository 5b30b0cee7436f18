"""The product's own event logs as traffic: transfers' bytes over time, on the scheduler's clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlfabric.errors import FabricError
from mlfabric.eventlog import FileLog, to_plain
from mlfabric.events import Event, LogRecord, TransferArriving, TransferFailed, TransferFinished
from mlfabric.messages import InitialPart
from mlfabric.traffic import analyze, read
from mlfabric.traffic.reading import input_kind


def write(path: Path, rows: list[tuple[str, float, float, Event]]) -> Path:
    """(node, host time, offset, event) as a log."""
    log = FileLog(path)
    for number, (node, at_s, offset_s, event) in enumerate(rows):
        name = type(event).__name__
        log.write(
            LogRecord(
                f"{node}:{number}",
                "",
                node,
                "server.0",
                at_s,
                offset_s,
                0.0002,
                "event",
                name,
                to_plain(event),
            )
        )
    log.close()
    return path


def arriving(transfer: str, size_bytes: int, sender: str = "w0") -> TransferArriving:
    return TransferArriving(transfer, sender, size_bytes, InitialPart(0, 0))


def test_bytes_of_a_transfer_are_spread_over_its_time(tmp_path: Path) -> None:
    rows = [
        ("s0", 100.0, 0.5, arriving("a", 1_000_000)),
        ("s1", 98.6, 2.0, arriving("b", 500_000, "w1")),
        ("s0", 100.1, 0.5, TransferFinished("a")),
        ("s1", 98.7, 2.0, TransferFinished("b")),
        ("s1", 98.9, 2.0, arriving("c", 999)),
        ("s1", 98.9, 2.0, TransferFailed("c", "peer lost")),
    ]
    trace = read(write(tmp_path / "events.jsonl", rows))
    assert trace.total_bytes == 1_500_000
    # Both clocks turned into the scheduler's: from 100.5 to 100.6 s and from 100.6 to 100.7 s.
    assert trace.origin_ns + trace.span_ns == pytest.approx(100.7e9, abs=1000)
    assert trace.origin.layer == "payload"
    assert any("200 us" in each for each in trace.origin.warnings)
    assert any("1 transfers" in each for each in trace.origin.warnings)
    halves = [int(trace.size[trace.time_ns + trace.origin_ns <= 100.6e9 + 1000].sum()), 1_500_000]
    assert halves[0] == 1_000_000
    by_host = {name: part.total_bytes for name, part in trace.by("host", "in")}
    assert by_host == {"s0": 1_000_000, "s1": 500_000}
    assert trace.flows is not None
    first = trace.flows.first_ns[[trace.flows.label(k) for k in range(2)].index("w1 > s1")] + trace.origin_ns
    assert 100.6e9 < first < 100.62e9
    assert analyze(trace).bytes == 1_500_000


def test_a_log_is_known_by_its_first_line_under_any_name(tmp_path: Path) -> None:
    rows = [("s0", 1.0, 0.0, arriving("a", 10)), ("s0", 1.0, 0.0, TransferFinished("a"))]
    path = write(tmp_path / "run.log", rows)
    assert input_kind(path) == "event log"
    assert read(path).total_bytes == 10


def test_a_log_without_transfers_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match="no transfer that arrived whole"):
        read(write(tmp_path / "events.jsonl", [("s0", 1.0, 0.0, TransferFinished("a"))]))
    table = tmp_path / "t.csv"
    table.write_text("time_s,bytes\n0,1\n")
    with pytest.raises(FabricError, match="can't be merged"):
        read([tmp_path / "events.jsonl", table])
