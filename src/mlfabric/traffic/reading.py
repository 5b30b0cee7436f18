"""One call for every input: captures, CSV, Parquet, event logs; one file or several of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from mlfabric.errors import FabricError
from mlfabric.traffic.capture.reader import ReadOptions, read_packets
from mlfabric.traffic.trace import Trace

InputKind = Literal["capture", "table", "event log"]
_AN: Final = {"table": "a table", "event log": "an event log"}
_TABLE_ENDINGS: Final = (".csv", ".csv.gz", ".csv.zst", ".csv.xz", ".parquet", ".pq")
_LOG_ENDING: Final = ".jsonl"
_LOG_BEGINNING: Final = b'{"id":'


def read(paths: str | Path | Sequence[str | Path], options: ReadOptions | None = None) -> Trace:
    """One trace of everything in these files, merged by time. All must be of one kind."""
    options = options or ReadOptions()
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise FabricError("name at least one capture file")
    kinds = {input_kind(path) for path in files}
    if len(kinds) > 1:
        raise FabricError(
            "captures, tables and event logs can't be merged into one trace; analyse them apart"
        )
    kind = kinds.pop()
    if kind == "capture":
        return read_packets(files, options)
    if options.layer != "l2":
        raise FabricError(f"{_AN[kind]} has one number of bytes per row, so --layer does not apply to it")
    if kind == "table":
        from mlfabric.traffic.capture.tabular import read_tables

        return read_tables(files, options.vantage).select(options.selection)
    from mlfabric.traffic.capture.transfers import read_transfers

    return read_transfers(files, options.vantage).select(options.selection)


def input_kind(path: str | Path) -> InputKind:
    """What a file is, by its name, else by its first bytes."""
    name = str(path).lower()
    if name.endswith(_TABLE_ENDINGS):
        return "table"
    return "event log" if name.endswith(_LOG_ENDING) or _begins_like_a_log(path) else "capture"


def _begins_like_a_log(path: str | Path) -> bool:
    file = Path(path)
    if str(path) == "-" or not file.is_file():
        return False
    try:
        with file.open("rb") as opened:
            return opened.read(len(_LOG_BEGINNING)) == _LOG_BEGINNING
    except OSError:
        return False  # the reader will say why
