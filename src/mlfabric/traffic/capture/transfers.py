"""Traces from the product's own event logs: the bytes of every transfer that arrived, spread over its time.

A log knows when a transfer's header came and when its last byte was in, at the receiver; in between its bytes
are spread evenly, in grains. So windows shorter than a transfer say nothing of the wire's timing, which a
warning repeats. Times are the scheduler's: each record carries its host's offset to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from mlfabric.errors import FabricError
from mlfabric.traffic.trace import NS_PER_S, Origin, Trace

if TYPE_CHECKING:
    from mlfabric.events import LogRecord

_GRAIN_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class _Transfer:
    """Who sent how much to whom, from when to when (nanoseconds)."""

    sender: str
    receiver: str
    size_bytes: int
    start_ns: int
    end_ns: int


def read_transfers(paths: Sequence[str | Path], vantage: str) -> Trace:
    """One trace of all transfers that these logs saw to their end."""
    from mlfabric.eventlog import read_log

    records = [record for path in paths for record in read_log(path)]
    begun: dict[tuple[str, str, str], LogRecord] = {}
    found = list(_finished(records, begun))
    if not found:
        named = ", ".join(str(path) for path in paths)
        raise FabricError(f"{named} tells of no transfer that arrived whole, so there is no traffic in it")
    return _trace(found, _origin(paths, vantage, found, len(begun), records))


def _finished(
    records: Sequence[LogRecord], begun: dict[tuple[str, str, str], LogRecord]
) -> Iterator[_Transfer]:
    """Transfers whose beginning and end are in the log; what is left in `begun` never ended."""
    for record in records:
        if record.kind != "event" or record.type not in _CHANGES:
            continue
        key = (record.node, record.role, record.record["transfer"])
        if record.type == "TransferArriving":
            begun[key] = record
        elif record.type == "TransferFinished" and key in begun:
            first = begun.pop(key)
            sender, size = first.record["sender"], int(first.record["size_bytes"])
            start_ns = _ns(first)
            yield _Transfer(sender, record.node, size, start_ns, max(start_ns, _ns(record)))


_CHANGES: Final = frozenset({"TransferArriving", "TransferFinished"})


def _ns(record: LogRecord) -> int:
    return round((record.at_s + record.offset_s) * NS_PER_S)


def _trace(transfers: Sequence[_Transfer], origin: Origin) -> Trace:
    times, sizes, names = [], [], []
    for each in transfers:
        grains = max(1, -(-each.size_bytes // _GRAIN_BYTES))
        times.append(each.start_ns + (each.end_ns - each.start_ns) * np.arange(1, grains + 1) // grains)
        sizes.append(np.diff(np.arange(grains + 1) * each.size_bytes // grains))
        names.append(np.full(grains, f"{each.sender} > {each.receiver}"))
    return Trace.of_named_flows(np.concatenate(times), np.concatenate(sizes), np.concatenate(names), origin)


def _origin(
    paths: Sequence[str | Path],
    vantage: str,
    found: Sequence[_Transfer],
    unfinished: int,
    records: Sequence[LogRecord],
) -> Origin:
    typical = float(np.median([each.end_ns - each.start_ns for each in found])) / NS_PER_S
    warnings = [
        "an event log knows when a transfer began and ended, not its packets: windows well below a "
        f"transfer's time (half last {typical * 1000:.3g} ms or more) are not the wire's timing"
    ]
    if unfinished:
        warnings.append(f"{unfinished:,} transfers that began but did not arrive whole were left out")
    doubt = max((record.uncertainty_s for record in records), default=0.0)
    if doubt > 0:
        warnings.append(
            f"clocks of different hosts agree to {doubt * 1e6:,.0f} us; finer results that join hosts mean "
            "nothing"
        )
    return Origin(
        files=tuple(str(path) for path in paths),
        format="event log",
        layer="payload",
        vantage="receivers" if vantage == "not stated" else vantage,
        warnings=tuple(warnings),
        facts={"transfers": len(found), "transfers left out": unfinished},
    )
