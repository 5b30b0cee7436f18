"""Captures in, one trace out: the reader that everything else calls.

Several files become one trace on one clock. Backward stamps are counted and sorted, lengths that can't be
right are corrected and counted, and every oddity ends as one sentence in the trace's warnings. Memory stays
near 12 bytes per packet (14 to 16 where flows are kept): files are streamed, columns grow in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic import native
from mlfabric.traffic.capture import headers
from mlfabric.traffic.capture.buffer import SlidingBuffer
from mlfabric.traffic.capture.frames import Frames
from mlfabric.traffic.capture.headers import LAYERS, LINK_NAMES, Layer, Wanted
from mlfabric.traffic.capture.notes import Notes
from mlfabric.traffic.capture.pcap import PcapFile, looks_like_pcap
from mlfabric.traffic.capture.pcapng import SECTION_HEADER, PcapngFile
from mlfabric.traffic.capture.plain import PlainFlows, plain_frames
from mlfabric.traffic.capture.plain import sizes as plain_sizes
from mlfabric.traffic.capture.source import ByteSource
from mlfabric.traffic.flows import FlowIndex, Selection
from mlfabric.traffic.trace import Origin, Trace, sort_in_pieces

if TYPE_CHECKING:
    from mlfabric.traffic.capture.sightings import Alignment

DEFAULT_MTU: Final = 1500
# Room for a first guess at how many packets a file holds; untouched memory costs nothing.
_LEAST_RECORD_BYTES: Final = 76


@dataclass(frozen=True)
class ReadOptions:
    """What to read and how to count it."""

    layer: Layer = "l2"
    flows: bool = True  # keep each packet's flow number; without it only the flows' totals are kept
    decode: bool = True  # look at headers at all; without it there is no table of flows
    interface: int | None = None
    packet_direction: headers.Wanted = field(default_factory=Wanted)
    mtu: int = DEFAULT_MTU
    vantage: str = "not stated"
    selection: Selection = field(default_factory=Selection)
    align: bool = False  # bring the files' clocks together by packets seen in several, and count those once
    progress: Callable[[int, int], None] | None = None


class _Columns:
    """Arrays that grow in place, without ever being held twice."""

    def __init__(self, guess: int, with_flows: bool) -> None:
        room = max(1024, guess)
        self.time_ns = np.empty(room, np.int64)
        self.size = np.empty(room, np.uint32)
        self.flow: NDArray[Any] | None = np.empty(room, np.uint16) if with_flows else None
        self.count = 0

    def append(
        self, time_ns: NDArray[np.int64], size: NDArray[np.uint32], flow: NDArray[np.int32] | None, flows: int
    ) -> None:
        after = self.count + len(time_ns)
        if after > len(self.time_ns):
            room = max(after, len(self.time_ns) * 5 // 4)
            self.time_ns.resize(room, refcheck=False)
            self.size.resize(room, refcheck=False)
            if self.flow is not None:
                self.flow.resize(room, refcheck=False)
        self.time_ns[self.count : after] = time_ns
        self.size[self.count : after] = size
        if self.flow is not None and flow is not None:
            if flows > 1 << 16 and self.flow.dtype == np.uint16:
                wider = np.empty(len(self.flow), np.uint32)
                wider[: self.count] = self.flow[: self.count]
                self.flow = wider
            self.flow[self.count : after] = flow
        self.count = after

    def extent(self, begin: int) -> tuple[int, int] | None:
        """The least and the greatest time from a row on."""
        part = self.time_ns[begin : self.count]
        return (int(part.min()), int(part.max())) if len(part) else None

    def finish(self) -> None:
        self.time_ns.resize(self.count, refcheck=False)
        self.size.resize(self.count, refcheck=False)
        if self.flow is not None:
            self.flow.resize(self.count, refcheck=False)


class _Reading:
    """The state of reading one or more files into one trace."""

    def __init__(self, options: ReadOptions, guess: int) -> None:
        self.options = options
        self.notes = Notes()
        self.index = FlowIndex()
        self.plain = PlainFlows(self.index)
        self.columns = _Columns(guess, options.flows and options.decode)
        self.statistics = np.zeros(len(headers.STATISTICS), np.int64)
        self.seen = np.array([np.iinfo(np.int64).max, -1], np.int64)
        self.links: set[int] = set()
        self.watches_extents = False
        self.extents: list[tuple[int, int] | None] = []  # first and last time of each file
        self.clock_error_ns = 0.0
        self.formats: set[str] = set()
        self.backward = 0
        self.worst_backward_ns = 0
        self.longest = 0
        self.zero_size = 0
        self._last_ns: int | None = None

    def file(self, path: str | Path, alignment: Alignment | None = None) -> None:
        options = self.options
        with ByteSource(path, self.notes, options.progress) as source:
            records = _recognised(
                SlidingBuffer(source), self.notes, source.name, options.interface, self.formats
            )
            self._last_ns = None
            begin, passed = self.columns.count, 0
            for frames in records:
                number = len(frames)
                if alignment is not None:
                    frames = alignment.applied(frames, passed)
                passed += number
                self.batch(frames)
            self.links |= records.links
        if self.watches_extents:
            self.extents.append(self.columns.extent(begin))

    def batch(self, frames: Frames) -> None:
        length = frames.length
        odd = length < frames.captured
        if odd.any():
            self.notes.count("records with an original length below the captured one", int(odd.sum()))
            length = np.maximum(length, frames.captured)
            frames = Frames(frames.data, frames.offset, frames.time_ns, frames.captured, length, frames.link)
        self._watch_time(frames.time_ns)
        options = self.options
        oversize = int((length > options.mtu + 22).sum())
        if oversize:
            self.notes.count("frames longer than the MTU", oversize)
            self.longest = max(self.longest, int(length.max()))
        if not options.decode:
            self.columns.append(frames.time_ns, length, None, 0)
            return
        flow, size = self._decoded(frames)
        time_ns = frames.time_ns
        dropped = flow < 0
        if dropped.any():
            kept = ~dropped
            flow, size, time_ns = flow[kept], size[kept], time_ns[kept]
        if options.layer in ("ip", "payload"):
            empty = size == 0
            if empty.any():
                self.zero_size += int(empty.sum())
                flow, size, time_ns = flow[~empty], size[~empty], time_ns[~empty]
        self.columns.append(time_ns, size, flow, self.index.count)

    def _decoded(self, frames: Frames) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
        options = self.options
        wanted = options.packet_direction
        library = native.library()
        if library is not None:
            return native.decode_frames(
                library,
                frames,
                self.index,
                LAYERS.index(options.layer),
                wanted.interface,
                ("both", "in", "out").index(wanted.direction),
                self.statistics,
                self.seen,
            )
        found = plain_frames(frames, options.layer)
        if found is None:
            return self._decoded_in_general(frames)
        if found.mask is None:
            flow = self.plain.number(found)
            size = plain_sizes(frames, found, options.layer)
            self.index.add_totals(flow, size, frames.time_ns)
            return flow, size
        numbers, strange = self.plain.known(found)
        if len(strange):
            # New flows are numbered in order of appearance, which only one decoder for all can keep.
            flow, size = self._decoded_in_general(frames)
            self.plain.learn(found.first, found.second, flow[found.mask])
            return flow, size
        flow, size = np.empty(len(frames), np.int32), np.empty(len(frames), np.uint32)
        flow[found.mask], size[found.mask] = numbers, plain_sizes(frames, found, options.layer)
        self.index.add_totals(numbers, size[found.mask], frames.time_ns[found.mask])
        flow[~found.mask], size[~found.mask] = self._decoded_in_general(frames.take(~found.mask))
        return flow, size

    def _decoded_in_general(self, frames: Frames) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
        options = self.options
        decoded = headers.decode(frames, options.layer, options.packet_direction, self.statistics)
        if decoded.interfaces:
            self.seen[0] = min(int(self.seen[0]), *decoded.interfaces)
            self.seen[1] = max(int(self.seen[1]), *decoded.interfaces)
        if decoded.kept is None:
            flow = self.index.number(decoded.keys)
            self.index.add_totals(flow, decoded.size, frames.time_ns)
            return flow, decoded.size
        kept = decoded.kept
        first, second, third, fourth, fifth = (column[kept] for column in decoded.keys)
        numbers = self.index.number((first, second, third, fourth, fifth))
        self.index.add_totals(numbers, decoded.size[kept], frames.time_ns[kept])
        flow = np.full(len(frames), -1, np.int32)
        flow[kept] = numbers
        return flow, decoded.size

    def _watch_time(self, time_ns: NDArray[np.int64]) -> None:
        if not len(time_ns):
            return
        before = time_ns[0] if self._last_ns is None else self._last_ns
        if before > time_ns[0] or (time_ns[1:] < time_ns[:-1]).any():
            steps = np.diff(time_ns, prepend=before)
            self.backward += int((steps < 0).sum())
            self.worst_backward_ns = max(self.worst_backward_ns, -int(steps.min()))
        self._last_ns = int(time_ns[-1])

    def trace(self, paths: Sequence[str | Path]) -> Trace:
        columns, options = self.columns, self.options
        columns.finish()
        extra = [columns.size] if columns.flow is None else [columns.size, columns.flow]
        if self.backward or len(paths) > 1:
            library = native.library()
            if library is None or not native.sort_nearby(
                library, columns.time_ns, columns.size, columns.flow
            ):
                sort_in_pieces(columns.time_ns, extra)
        first = int(columns.time_ns[0]) if columns.count else 0
        columns.time_ns -= first
        self._sentences()
        origin = Origin(
            files=tuple(str(path) for path in paths),
            format="+".join(sorted(self.formats)),
            layer=options.layer,
            vantage=options.vantage,
            links=tuple(LINK_NAMES.get(link, f"link type {link}") for link in sorted(self.links)),
            warnings=tuple(self.notes.sentences),
            damaged=self.notes.damaged,
            facts=self._facts(),
            clock_error_ns=self.clock_error_ns,
        )
        flows = self.index.table(first) if options.decode else None
        trace = Trace(columns.time_ns, columns.size, first, columns.flow, flows, origin)
        return trace.select(options.selection)

    def _facts(self) -> dict[str, int]:
        facts = dict(self.notes.counts)
        facts.update(
            {
                name: int(count)
                for name, count in zip(headers.STATISTICS, self.statistics, strict=True)
                if count
            }
        )
        if self.backward:
            facts["backward time steps"] = self.backward
            facts["worst backward step, ns"] = self.worst_backward_ns
        return facts

    def _sentences(self) -> None:
        notes, counts, found = self.notes, self.notes.counts, self.statistics
        if self.backward:
            notes.say(
                f"{self.backward:,} time stamps go backwards, the worst by "
                f"{self.worst_backward_ns / 1000:,.3f} us; "
                f"packets were sorted by time"
            )
        number = counts.get("frames longer than the MTU", 0)
        if number:
            notes.say(
                f"{number:,} frames exceed an MTU of {self.options.mtu} (longest {self.longest:,} bytes): "
                f"segmentation offload or jumbo frames. If offload, results below a millisecond are not the "
                f"wire's timing; if the link's MTU is larger, pass --mtu"
            )
        number = counts.get("records with an original length below the captured one", 0)
        if number:
            notes.say(f"{number:,} records claim fewer bytes than they hold; the captured length was counted")
        number = counts.get("packets without a time", 0)
        if number:
            notes.say(
                f"{number:,} packets ({counts.get('bytes without a time', 0):,} bytes) carry no time "
                "stamp (simple "
                f"packet blocks); they are in no figure"
            )
        number = counts.get("pcapng packets with an impossible length or interface", 0)
        if number:
            notes.say(f"{number:,} packets with an impossible length or interface were left out")
        if found[headers.UNKNOWN_LINK]:
            unknown = ", ".join(str(link) for link in sorted(self.links) if link not in LINK_NAMES)
            notes.say(f"link type {unknown} is not decoded: its frames count, but have no flows")
        if found[headers.CUT_TCP]:
            notes.say(f"{found[headers.CUT_TCP]:,} TCP headers were not captured whole and count as 20 bytes")
        if self.zero_size:
            notes.say(
                f"{self.zero_size:,} frames carry no bytes of layer '{self.options.layer}' and were left out"
            )
        if self.seen[1] > self.seen[0]:
            notes.say(
                "the capture covers several interfaces (Linux cooked v2): a forwarded packet counts "
                "once on each; "
                "choose one with --interface, or one direction with --direction"
            )


def _recognised(
    buffer: SlidingBuffer, notes: Notes, name: str, interface: int | None, formats: set[str]
) -> PcapFile | PcapngFile:
    head = bytes(buffer.data[: min(buffer.end, 12)])
    if not head:
        raise FabricError(f"{name} is empty (0 bytes); it is no capture")
    if looks_like_pcap(head):
        formats.add("pcap")
        return PcapFile(buffer, notes, name)
    if len(head) >= 4 and int.from_bytes(head[:4], "little") == SECTION_HEADER:
        formats.add("pcapng")
        return PcapngFile(buffer, notes, name, interface)
    raise FabricError(
        f"{name} is not a capture: it starts with {head[:4].hex(' ')}, which is neither pcap nor pcapng "
        f"(tables need a name ending in .csv or .parquet)"
    )


def _guess_packets(paths: Sequence[str | Path]) -> int:
    total = 0
    for path in paths:
        file = Path(path)
        if str(path) != "-" and file.is_file():
            total += file.stat().st_size // _LEAST_RECORD_BYTES
    return total


def read_packets(paths: Sequence[str | Path], options: ReadOptions) -> Trace:
    """One trace of all packets of these capture files."""
    reading = _Reading(options, _guess_packets(paths))
    if not options.align or len(paths) < 2:
        reading.watches_extents = len(paths) > 1
        for path in paths:
            reading.file(path)
        if _overlap(reading.extents):
            reading.notes.say(
                "these captures overlap in time and were merged by their own clocks; if they come from "
                "different hosts, --align brings the clocks together and counts packets seen twice once"
            )
        return reading.trace(paths)
    for path, alignment in zip(paths, _alignments(paths, options), strict=True):
        reading.file(path, alignment)
        if alignment.clock is not None:
            reading.clock_error_ns = max(reading.clock_error_ns, alignment.clock.error_ns)
        if path is not paths[0]:
            reading.notes.say(alignment.sentence)
    return reading.trace(paths)


def _alignments(paths: Sequence[str | Path], options: ReadOptions) -> list[Alignment]:
    """Reads every file once for its packets' prints."""
    from mlfabric.traffic.capture.sightings import Sightings, align

    seen = []
    for path in paths:
        if str(path) == "-":
            raise FabricError("--align reads every capture twice, which standard input does not allow")
        with ByteSource(path, Notes()) as source:
            records = _recognised(SlidingBuffer(source), Notes(), source.name, options.interface, set())
            seen.append(Sightings.of(records))
    return align(paths, seen)


def _overlap(extents: Sequence[tuple[int, int] | None]) -> bool:
    """Whether two files hold packets of the same time, more than their ends."""
    known = sorted(extent for extent in extents if extent is not None)
    return any(later[0] < earlier[1] for earlier, later in pairwise(known))
