"""A trace: when how many bytes passed, and in which flow. The one thing every metric works on.

Times are integers in nanoseconds since the first packet, sorted, ties allowed; sizes are bytes of one layer.
A trace also carries where it comes from, so that every result can state its conventions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.flows import FlowTable, GroupKind, Selection

NS_PER_S: Final = 1_000_000_000
# Work on long traces is done in pieces of this many packets, so that no temporary is as long as the trace.
PIECE: Final = 1 << 20
# Above this a running sum of 8 bytes per packet is too dear.
_MOST_FULL_SUMS: Final = 1 << 22
_BLOCK: Final = 64
_TOGETHER: Final = 4096  # positions summed up at once

Times = NDArray[np.int64]
Sizes = NDArray[Any]  # uint32 from packets, int64 from tables whose rows may be larger


@dataclass(frozen=True)
class Origin:
    """Where a trace comes from and how its numbers are meant."""

    files: tuple[str, ...] = ()
    format: str = "synthetic"
    layer: str = "l2"
    vantage: str = "not stated"
    selection: str = "everything"
    links: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    damaged: bool = False
    facts: dict[str, int] = field(default_factory=dict)
    clock_error_ns: float = 0.0  # how well the clocks of several captures were brought together


class RunningBytes:
    """Bytes of the first k packets, for any k, exactly.

    Long traces keep the sum at every 64th packet only and add up the few sizes from there: an eighth of a
    byte per packet in place of eight.
    """

    def __init__(self, size: Sizes) -> None:
        count = len(size)
        self._size = size
        if count <= _MOST_FULL_SUMS or size.dtype != np.uint32:
            self._full: Times | None = np.zeros(count + 1, np.int64)
            np.cumsum(size, out=self._full[1:], dtype=np.int64)
            return
        self._full = None
        self._exact = np.zeros(count // _BLOCK + 1, np.int64)
        whole = count // _BLOCK * _BLOCK
        for start in range(0, whole, PIECE):
            part = size[start : min(start + PIECE, whole)].reshape(-1, _BLOCK)
            first = start // _BLOCK + 1
            self._exact[first : first + len(part)] = part.sum(axis=1, dtype=np.int64)
        np.cumsum(self._exact, out=self._exact)

    @cached_property
    def largest(self) -> int:
        """The largest packet's bytes."""
        return int(self._size.max()) if len(self._size) else 0

    def __call__(self, count: NDArray[np.integer[Any]]) -> Times:
        if self._full is not None:
            return self._full.take(count)
        return self._exact.take(count // _BLOCK) + self._since_block(count)

    def _since_block(self, count: NDArray[np.integer[Any]]) -> Times:
        """Bytes from the last 64th packet before each position up to it."""
        sums = np.empty(len(count), np.int64)
        last, within = len(self._size) - 1, np.arange(_BLOCK)
        for start in range(0, len(count), _TOGETHER):
            some = count[start : start + _TOGETHER, None]
            packets = some // _BLOCK * _BLOCK + within
            sizes = self._size.take(np.minimum(packets, last))
            sizes[packets >= some] = 0
            sums[start : start + _TOGETHER] = sizes.sum(axis=1, dtype=np.int64)
        return sums

    def columns(self) -> tuple[Times | None, NDArray[np.uint32] | None, Times | None]:
        """Full sums; or, for long traces, the sizes and the sums at every 64th packet."""
        if self._full is not None:
            return self._full, None, None
        return None, np.ascontiguousarray(self._size), self._exact

    def between(self, first: int, last: int) -> Times:
        """Bytes of the first `first`, `first` + 1, ... `last` packets."""
        if self._full is not None:
            return self._full[first : last + 1]
        sums = np.empty(last - first + 1, np.int64)
        sums[0] = self.one(first)
        np.cumsum(self._size[first:last], out=sums[1:], dtype=np.int64)
        sums[1:] += sums[0]
        return sums

    def around(self, packets: NDArray[np.int64]) -> tuple[Times, Times]:
        """Bytes before and after each of these packets, which come in runs of neighbours."""
        if self._full is not None:
            return self._full.take(packets), self._full.take(packets + 1)
        sizes = self._size.take(packets)
        after = np.cumsum(sizes, dtype=np.int64)
        before = after - sizes
        begins = np.flatnonzero(np.diff(packets, prepend=-2) != 1)
        shift = self(packets[begins]) - before[begins]
        shift = np.repeat(shift, np.diff(begins, append=len(packets)))
        return before + shift, after + shift

    def one(self, count: int) -> int:
        return int(self(np.array([count]))[0])


@dataclass(frozen=True)
class Trace:
    """Packets (or other arrivals) in time order."""

    time_ns: Times
    size: Sizes
    origin_ns: int = 0  # when the first packet passed, since 1970
    flow: NDArray[Any] | None = None  # number of each packet's flow
    flows: FlowTable | None = None
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        if len(self.time_ns) != len(self.size):
            raise ValueError("a trace has as many times as sizes")

    @classmethod
    def from_arrays(
        cls,
        time_ns: NDArray[np.integer[Any]] | Sequence[int],
        size: NDArray[np.integer[Any]] | Sequence[int],
        **rest: Any,
    ) -> Trace:
        """A trace of any times (ns) and sizes (bytes): sorted, and counted from the first."""
        times = np.asarray(time_ns, np.int64)
        sizes = np.asarray(size, np.int64)
        if len(times) and (times[1:] < times[:-1]).any():
            order = np.argsort(times, kind="stable")
            times, sizes = times[order], sizes[order]
            if rest.get("flow") is not None:
                rest["flow"] = np.asarray(rest["flow"])[order]
        first = int(times[0]) if len(times) else 0
        if not len(sizes) or (sizes.max() < 2**26 and sizes.min() >= 0):
            sizes = sizes.astype(np.uint32)
        return cls(times - first, sizes, rest.pop("origin_ns", 0) + first, **rest)

    @classmethod
    def of_named_flows(
        cls, time_ns: NDArray[np.int64], size: NDArray[np.int64], names: NDArray[np.str_], origin: Origin
    ) -> Trace:
        """A trace whose flows are known by a name alone."""
        distinct, number = np.unique(names, return_inverse=True)
        table = FlowTable.named([str(name) for name in distinct])
        trace = cls.from_arrays(time_ns, size, flow=number.astype(np.uint32), flows=table, origin=origin)
        assert trace.flow is not None
        # Sorted by time, so that the first and last packet of a flow are its first and last here.
        table.packets[:] = np.bincount(trace.flow, minlength=len(distinct))
        np.add.at(table.bytes, trace.flow, trace.size)
        table.first_ns[trace.flow[::-1]] = trace.time_ns[::-1]
        table.last_ns[trace.flow] = trace.time_ns
        return trace

    def __len__(self) -> int:
        return len(self.time_ns)

    @property
    def span_ns(self) -> int:
        return int(self.time_ns[-1] - self.time_ns[0]) if len(self) else 0

    @cached_property
    def running(self) -> RunningBytes:
        return RunningBytes(self.size)

    @cached_property
    def total_bytes(self) -> int:
        return sum(int(part.sum(dtype=np.int64)) for part in pieces(self.size))

    def needs_packets(self, what: str = "analyse") -> Trace:
        if not len(self):
            raise FabricError(f"there is no packet to {what}; {_where(self.origin)}")
        return self

    def chosen(self, mask: NDArray[np.bool_]) -> Trace:
        """The packets where `mask` holds; time still counts from the whole trace's first packet."""
        return replace(
            self,
            time_ns=self.time_ns[mask],
            size=self.size[mask],
            flow=None if self.flow is None else self.flow[mask],
        )

    def rebased(self) -> Trace:
        """The same trace with time counted from its own first packet."""
        if not len(self) or self.time_ns[0] == 0:
            return self
        first = int(self.time_ns[0])
        flows = self.flows
        if flows is not None:
            flows = replace(flows, first_ns=flows.first_ns - first, last_ns=flows.last_ns - first)
        return replace(self, time_ns=self.time_ns - first, origin_ns=self.origin_ns + first, flows=flows)

    def select(self, selection: Selection) -> Trace:
        """The packets of the flows a selection keeps."""
        if not selection:
            return self
        if self.flow is None or self.flows is None:
            raise FabricError("this input has no flows to select from")
        mask = selection.mask(self.flows)
        part = self.chosen(mask[self.flow])
        origin = replace(self.origin, selection=selection.describe())
        return replace(part, origin=origin, flows=_recounted(part)).rebased()

    def by(self, kind: GroupKind, direction: str = "both") -> Iterator[tuple[str, Trace]]:
        """One trace per flow, pair, host or port, most bytes first; time counts from the whole one's
        start."""
        if self.flow is None or self.flows is None:
            raise FabricError(f"this input has no flows, so it can't be split by {kind}")
        names, member = self.flows.groups(kind, direction)
        of_packet = member[self.flow]
        order = np.argsort(of_packet, kind="stable")
        bounds = np.searchsorted(of_packet[order], np.arange(len(names) + 1))
        parts = [order[bounds[number] : bounds[number + 1]] for number in range(len(names))]
        volume = [int(self.size[part].sum(dtype=np.int64)) for part in parts]
        for number in sorted(range(len(names)), key=lambda each: (-volume[each], names[each])):
            part = parts[number]
            if len(part):
                yield (
                    names[number],
                    replace(self, time_ns=self.time_ns[part], size=self.size[part], flow=self.flow[part]),
                )


def _recounted(trace: Trace) -> FlowTable | None:
    """The flow table with totals of the packets at hand only."""
    if trace.flow is None or trace.flows is None:
        return None
    count = len(trace.flows)
    packets = np.bincount(trace.flow, minlength=count).astype(np.int64)
    sizes = np.bincount(trace.flow, weights=trace.size, minlength=count).astype(np.int64)
    return replace(trace.flows, packets=packets, bytes=sizes)


def _where(origin: Origin) -> str:
    files = ", ".join(origin.files) or "the trace"
    if origin.selection != "everything":
        return f"{files} has none with {origin.selection}"
    return f"{files} holds none"


def pieces(column: NDArray[Any], length: int = PIECE) -> Iterator[NDArray[Any]]:
    for start in range(0, len(column), length):
        yield column[start : start + length]


def sort_in_pieces(time_ns: Times, columns: Sequence[NDArray[Any]]) -> None:
    """Sorts by time in place, stably. Disorder in captures is local: only packets that others must pass are
    touched, and where all are, no more at a time than lie between points that none crosses."""
    for moving in _moving(time_ns):
        order = np.argsort(time_ns[moving], kind="stable")
        for column in (time_ns, *columns):
            column[moving] = column[moving][order]


def _moving(time_ns: Times) -> Iterator[NDArray[np.intp]]:
    """Positions of the packets that are not in their place, in groups that can be sorted alone: at a place
    that nothing crosses, all before is at most, and all after at least, what stands there."""
    starts = list(range(0, len(time_ns), PIECE))
    least_after = np.full(len(starts) + 1, np.iinfo(np.int64).max)
    for number in reversed(range(len(starts))):
        part = time_ns[starts[number] : starts[number] + PIECE]
        least_after[number] = min(least_after[number + 1], int(part.min()))
    greatest = np.iinfo(np.int64).min
    waiting: list[NDArray[np.intp]] = []
    for number, start in enumerate(starts):
        part = time_ns[start : start + PIECE]
        highest = np.maximum.accumulate(part)
        lowest = np.minimum.accumulate(part[::-1])[::-1]
        crossed = (highest != lowest) | (highest < greatest) | (lowest > least_after[number + 1])
        if waiting and not crossed[0]:
            yield np.concatenate(waiting)
            waiting = []
        if crossed.any():
            waiting.append(np.flatnonzero(crossed) + start)
        greatest = max(greatest, int(highest[-1]))
        if waiting and not crossed[-1]:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)
