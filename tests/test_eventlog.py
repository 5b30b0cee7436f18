"""Event logs on disk: what is written is read back, and what is broken is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings

from mlfabric.errors import FabricError
from mlfabric.eventlog import FileLog, MemoryLog, read_log, to_plain
from mlfabric.events import LogRecord, MessageReceived, TransferArriving
from mlfabric.messages import ModelPart, OfferUpdate, Version
from tests.records import records


def record(number: int, content: msgspec.Struct) -> LogRecord:
    kind = type(content).__name__
    return LogRecord(f"w0:{number}", "w0:0", "w0", "worker", 1.5, -0.25, 1e-3, "event", kind, content)


def test_a_log_reads_back_as_it_was_written_by_several_writers(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    offer = OfferUpdate("w0#1", 80, (Version(0, 3),), 0.5, 0, (0,))
    events = [MessageReceived("w0", offer), TransferArriving("t", "s0", 40, ModelPart("p", 0, Version(1, 2)))]
    written = [record(number, event) for number, event in enumerate(events * 3)]
    logs = [FileLog(path), FileLog(path)]
    for number, each in enumerate(written):
        logs[number % 2].write(each)
    for log in logs:
        log.close()
    back = read_log(path)
    assert [msgspec.structs.replace(each, record=None) for each in back] == [
        msgspec.structs.replace(each, record=None) for each in written
    ]
    assert [each.record for each in back] == [to_plain(each.record) for each in written]
    assert msgspec.convert(back[0].record, MessageReceived) == events[0]


@settings(max_examples=60, deadline=None)
@given(records(MessageReceived))
def test_an_event_converts_back_from_its_plain_form(event: MessageReceived) -> None:
    assert msgspec.convert(to_plain(event), MessageReceived) == event


def test_a_line_cut_by_a_kill_is_left_out_and_a_strange_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = FileLog(path)
    for number in range(3):
        log.write(record(number, TransferArriving("t", "s0", 40, ModelPart("p", 0, Version(1, 2)))))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [each.id for each in read_log(path)] == ["w0:0", "w0:1"]
    path.write_bytes(whole + b"Traceback\n")
    with pytest.raises(FabricError, match=r"run\.jsonl:4: not a line of an event log"):
        read_log(path)
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(FabricError, match=r"run\.jsonl:1: not a line"):
        read_log(path)


def test_a_log_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match=r"can't read the event log .*none\.jsonl: No such file"):
        read_log(tmp_path / "none.jsonl")
    with pytest.raises(FabricError, match="can't write the event log"):
        FileLog(tmp_path)


def test_a_log_in_memory_keeps_what_it_was_given() -> None:
    log = MemoryLog()
    kept = record(0, MessageReceived("w0", OfferUpdate("w0#1", 80, (), 0.5, 0, (0,))))
    log.write(kept)
    assert log.records == [kept]
