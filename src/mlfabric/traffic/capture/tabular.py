"""Traces from tables: CSV or Parquet with time_s (or time_ns), bytes and, if there is one, flow.

Decimal times become integers without passing through floats. A Parquet column of floats is taken as it is,
with a warning where its own rounding is coarser than a nanosecond.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.capture.notes import Notes
from mlfabric.traffic.capture.source import ByteSource
from mlfabric.traffic.trace import NS_PER_S, Origin, Trace

_PARQUET_ENDINGS: Final = (".parquet", ".pq")


def decimal_ns(written: str) -> int:
    """Nanoseconds of a decimal number of seconds, rounded half up beyond the ninth place; no float
    involved."""
    whole, point, fraction = written.strip().partition(".")
    digits = whole[1:] if whole[:1] in "+-" else whole
    if digits.isascii() and digits.isdigit() and (not point or not fraction or fraction.isdigit()):
        value = int(digits) * NS_PER_S + int(fraction[:9].ljust(9, "0") or 0)
        value += len(fraction) > 9 and fraction[9] >= "5"
        return -value if whole[0] == "-" else value
    try:
        return round(Decimal(written.strip()) * NS_PER_S)
    except (InvalidOperation, ValueError, OverflowError):
        raise ValueError(f"{written!r} is not a time in seconds") from None


def read_tables(paths: Sequence[str | Path], vantage: str) -> Trace:
    """One trace of all rows of these tables."""
    notes = Notes()
    times, sizes, names = [], [], []
    formats = set()
    for path in paths:
        parquet = str(path).lower().endswith(_PARQUET_ENDINGS)
        formats.add("parquet" if parquet else "csv")
        time_ns, size, flow = _parquet(path, notes) if parquet else _csv(path, notes)
        times.append(time_ns)
        sizes.append(size)
        names.append(flow)
    origin = Origin(
        files=tuple(str(path) for path in paths),
        format="+".join(sorted(formats)),
        layer="as in the table",
        vantage=vantage,
        warnings=tuple(notes.sentences),
        damaged=notes.damaged,
    )
    time_ns, size = np.concatenate(times), np.concatenate(sizes)
    if any(flow is None for flow in names):
        return Trace.from_arrays(time_ns, size, origin=origin)
    return Trace.of_named_flows(time_ns, size, np.concatenate([cast(Any, flow) for flow in names]), origin)


_Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.str_] | None]


def _csv(path: str | Path, notes: Notes) -> _Columns:
    with ByteSource(path, notes) as source:
        text = bytearray()
        block = bytearray(1 << 20)
        while count := source.read_into(memoryview(block)):
            text += block[:count]
    rows = csv.reader(io.StringIO(text.decode("utf-8-sig", "replace")))
    header = next(rows, None)
    if not header:
        raise FabricError(f"{path} is empty; a table starts with a line time_s,bytes")
    columns = {name.strip().lower(): index for index, name in enumerate(header)}
    in_ns = "time_ns" in columns
    if ("time_s" not in columns and not in_ns) or "bytes" not in columns:
        raise FabricError(
            f"{path} has the columns {', '.join(header)}; it needs time_s (or time_ns) and bytes"
        )
    time_at, size_at = columns["time_ns" if in_ns else "time_s"], columns["bytes"]
    flow_at = columns.get("flow")
    times, sizes, flows = [], [], []
    for row in rows:
        if not row:
            continue
        try:
            times.append(int(row[time_at]) if in_ns else decimal_ns(row[time_at]))
            sizes.append(_whole(row[size_at]))
            if flow_at is not None:
                flows.append(row[flow_at])
        except (ValueError, IndexError) as error:
            raise FabricError(f"{path}, line {rows.line_num}: {error}") from None
    names = np.array(flows) if flow_at is not None else None
    return np.array(times, np.int64), np.array(sizes, np.int64), names


def _whole(written: str) -> int:
    try:
        value = int(written)
    except ValueError:
        raise ValueError(f"{written!r} is not a whole number of bytes") from None
    if value < 0:
        raise ValueError(f"{written} bytes is negative")
    return value


def _parquet(path: str | Path, notes: Notes) -> _Columns:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise FabricError(f"{path} is Parquet; install mlfabric[traffic] to read it") from None
    if not Path(path).is_file():
        raise FabricError(f"{path} does not exist")
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise FabricError(f"{path} can't be read as Parquet: {str(error).splitlines()[0]}") from None
    names = set(table.column_names)
    time_name = "time_ns" if "time_ns" in names else "time_s"
    if time_name not in names or "bytes" not in names:
        shown = ", ".join(table.column_names)
        raise FabricError(f"{path} has the columns {shown}; it needs time_s (or time_ns) and bytes")
    time_ns = _times_of(table.column(time_name), time_name == "time_ns", str(path), notes)
    size = np.asarray(table.column("bytes").to_numpy(), np.int64)
    if len(size) and size.min() < 0:
        raise FabricError(f"{path} has negative numbers of bytes")
    flow = np.array([str(each) for each in table.column("flow").to_pylist()]) if "flow" in names else None
    return time_ns, size, flow


def _times_of(column: Any, in_ns: bool, path: str, notes: Notes) -> NDArray[np.int64]:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_timestamp(kind) or pyarrow.types.is_duration(kind):
        unit = {"s": NS_PER_S, "ms": 1_000_000, "us": 1000, "ns": 1}[kind.unit]
        return np.asarray(column.cast(pyarrow.int64()).to_numpy(), np.int64) * unit
    if pyarrow.types.is_integer(kind):
        return np.asarray(column.to_numpy(), np.int64) * (1 if in_ns else NS_PER_S)
    if pyarrow.types.is_floating(kind):
        seconds = np.asarray(column.to_numpy(), np.float64)
        if len(seconds) and np.abs(seconds).max() * NS_PER_S > 2**53:
            notes.say(
                f"{path} holds its times as floats, which this far from zero are coarser than a nanosecond"
            )
        return np.rint(seconds * (1 if in_ns else NS_PER_S)).astype(np.int64)
    return np.array(list(_decimal_column(column.to_pylist(), path)), np.int64)


def _decimal_column(values: Iterable[Any], path: str) -> Iterable[int]:
    for value in values:
        try:
            yield decimal_ns(str(value))
        except ValueError as error:
            raise FabricError(f"{path}: {error}") from None
