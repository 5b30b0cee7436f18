"""One call for every input: captures, CSV, Parquet; one file or several of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlfabric.errors import FabricError
from mlfabric.traffic.capture.reader import ReadOptions, read_packets
from mlfabric.traffic.capture.tabular import is_table, read_tables
from mlfabric.traffic.trace import Trace


def read(paths: str | Path | Sequence[str | Path], options: ReadOptions | None = None) -> Trace:
    """One trace of everything in these files, merged by time. Captures and tables can't be mixed."""
    options = options or ReadOptions()
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise FabricError("name at least one capture file")
    tables = [is_table(path) for path in files]
    if not any(tables):
        return read_packets(files, options)
    if not all(tables):
        raise FabricError("captures and tables can't be merged into one trace; analyse them apart")
    if options.layer != "l2":
        raise FabricError("a table has one number of bytes per row, so --layer does not apply to it")
    trace = read_tables(files, options.vantage)
    return trace.select(options.selection) if options.selection else replace(trace)
