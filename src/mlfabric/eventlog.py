"""The event log: writes every event and action as one line of JSON, and reads such logs back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from mlfabric.errors import FabricError
from mlfabric.events import LogRecord


class LogSink(Protocol):
    def write(self, record: LogRecord) -> None: ...


class NoLog:
    """Keeps nothing."""

    def write(self, record: LogRecord) -> None:
        pass


class MemoryLog:
    """Keeps the records, for tests and the simulator."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []

    def write(self, record: LogRecord) -> None:
        self.records.append(record)


class FileLog:
    """Appends one line per record; several processes may share a file, each line is one write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("ab", buffering=0)
        except OSError as error:
            raise FabricError(f"can't write the event log {path}: {error.strerror}") from None
        self._encoder = msgspec.json.Encoder()

    def write(self, record: LogRecord) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_log(path: str | Path) -> list[LogRecord]:
    """All records of a log, a cut last line left out."""
    return list(_lines(Path(path)))


def _lines(path: Path) -> Iterator[LogRecord]:
    decoder = msgspec.json.Decoder(LogRecord)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # a process was killed while it wrote
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    raise FabricError(f"{path}:{number}: not a line of an event log") from None
    except OSError as error:
        raise FabricError(f"can't read the event log {path}: {error.strerror}") from None


def to_plain(record: msgspec.Struct) -> Any:
    """A record as plain data, exactly as it stands in a log."""
    return msgspec.json.decode(msgspec.json.encode(record))
