"""The same packets in several captures: how far their clocks are apart, and which packets to count once.

A packet is known again by what no hop changes: addresses, protocol, ports, IP id, TCP numbers. Seen at both
ends it bounds the clocks' difference: packets of one direction from above, by their quickest, those of the
other from below. The estimate is the middle of what is left, half of that its error, fitted as a line where
the capture is long enough to show drift. Of several sightings the earliest counts: it is the one nearest to
the sender.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic.capture.frames import Frames
from mlfabric.traffic.capture.headers import PacketBytes, network_start
from mlfabric.traffic.flows import MULTIPLIERS

Prints = NDArray[np.uint64]
Times = NDArray[np.int64]

_TCP, _UDP = 6, 17
_LEAST_SHARED: Final = 8  # packets in common below which nothing is concluded
_SEGMENTS: Final = 16  # of a capture, to see whether the clocks drift
_LEAST_SEGMENTS: Final = 4  # with packets both ways, for a line through them


@dataclass(frozen=True)
class Sightings:
    """The packets of one capture, in file order. A print of zero: not one that could be known again."""

    time_ns: Times
    packet: Prints
    pair: Prints  # sender and receiver; reversed for the other way
    reverse: Prints

    @classmethod
    def of(cls, batches: Iterable[Frames]) -> Sightings:
        columns: list[tuple[Times, Prints, Prints, Prints]] = []
        for frames in batches:
            links = {frames.link} if isinstance(frames.link, int) else {int(link) for link in frames.link}
            rows = _prints(frames, links.pop()) if len(links) == 1 else _nothing(len(frames))
            columns.append((frames.time_ns.copy(), *rows))
        if not columns:
            none = np.zeros(0, np.uint64)
            return cls(np.zeros(0, np.int64), none, none, none)
        times, packet, pair, reverse = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        return cls(times, packet, pair, reverse)

    def alone(self) -> NDArray[np.intp]:
        """Positions of packets whose print occurs once, by ascending print."""
        order = np.argsort(self.packet, kind="stable")
        ordered = self.packet[order]
        fresh = np.append(True, ordered[1:] != ordered[:-1]) if len(ordered) else np.zeros(0, bool)
        single = fresh & np.append(fresh[1:], True)
        found: NDArray[np.intp] = order[single & (ordered != 0)]
        return found


@dataclass(frozen=True)
class Clock:
    """What to add to a capture's times to get the first one's: a line over its own time."""

    offset_ns: float = 0.0
    slope: float = 0.0
    since_ns: int = 0
    error_ns: float = 0.0
    shared: int = 0
    both_ways: bool = True

    def correct(self, time_ns: Times) -> Times:
        if not self.offset_ns and not self.slope:
            return time_ns
        shift = self.offset_ns + self.slope * (time_ns - self.since_ns)
        corrected: Times = time_ns + np.rint(shift).astype(np.int64)
        return corrected


@dataclass(frozen=True)
class Alignment:
    """One capture's clock and which of its packets count; None: this capture shares nothing with the rest."""

    path: str
    clock: Clock | None
    counted: NDArray[np.bool_]

    def applied(self, frames: Frames, first: int) -> Frames:
        """These frames, of which the first is the capture's `first`, on the common clock, less those counted
        elsewhere."""
        if self.clock is not None:
            frames = replace(frames, time_ns=self.clock.correct(frames.time_ns))
        counted = self.counted[first : first + len(frames)]
        return frames if counted.all() else frames.take(counted)

    @property
    def sentence(self) -> str:
        """What was concluded, for people."""
        if self.clock is None:
            return f"{self.path} shares too few packets with the others: its clock was taken as it is"
        clock, again = self.clock, int(len(self.counted) - np.count_nonzero(self.counted))
        drift = f", drifting by {clock.slope * 1e6:.3g} us a second" if clock.slope else ""
        one_way = "" if clock.both_ways else "; they all went one way, so their delay is in it"
        return (
            f"{self.path}: its clock was moved by {clock.offset_ns / 1000:,.3f} us{drift}, from "
            f"{clock.shared:,} packets seen in two captures, good to {clock.error_ns / 1000:,.3f} us{one_way}"
            f"; {again:,} packets had been seen earlier elsewhere and count there"
        )


def align(paths: Sequence[str | Path], captures: Sequence[Sightings]) -> list[Alignment]:
    """Clocks on the first capture's time, nearest relatives first, and every packet counted once."""
    singles = [capture.alone() for capture in captures]
    clocks: list[Clock | None] = [Clock(), *[None] * (len(captures) - 1)]
    left = set(range(1, len(captures)))
    while left:
        known = [number for number, clock in enumerate(clocks) if clock is not None]
        common = {
            (number, other): _common(captures[number], singles[number], captures[other], singles[other])
            for number in left
            for other in known
        }
        number, other = max(common, key=lambda pair: (len(common[pair][0]), -pair[0], -pair[1]))
        mine, theirs = common[number, other]
        found = _clock(captures[number], mine, captures[other], theirs, clocks[other])
        if found is None:
            break
        clocks[number] = found
        left.discard(number)
    corrected = [
        capture.time_ns if clock is None else clock.correct(capture.time_ns)
        for capture, clock in zip(captures, clocks, strict=True)
    ]
    counted = _counted_once(captures, singles, corrected)
    return [
        Alignment(str(path), clock, mask) for path, clock, mask in zip(paths, clocks, counted, strict=True)
    ]


def _common(
    one: Sightings, singles: NDArray[np.intp], other: Sightings, others: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions of the same packets in both."""
    _, here, there = np.intersect1d(
        one.packet[singles], other.packet[others], assume_unique=True, return_indices=True
    )
    return singles[here], others[there]


def _clock(
    mine: Sightings,
    at: NDArray[np.intp],
    theirs: Sightings,
    there: NDArray[np.intp],
    reference: Clock | None,
) -> Clock | None:
    """The clock that brings these packets' times to the reference's."""
    if len(at) < _LEAST_SHARED or reference is None:
        return None
    own = mine.time_ns[at]
    ahead = reference.correct(theirs.time_ns[there]) - own
    begin, span = int(own.min()), int(own.max() - own.min())
    way = _ways(mine.pair[at], mine.reverse[at], ahead)
    segment = (own - begin) * _SEGMENTS // max(span + 1, 1)
    bounds = [_bounds(ahead[segment == each], way[segment == each]) for each in range(_SEGMENTS)]
    middles = [
        (begin + span * (2 * each + 1) / (2 * _SEGMENTS), (low + high) / 2, (high - low) / 2)
        for each, (low, high) in enumerate(bounds)
        if np.isfinite(low) and np.isfinite(high)
    ]
    if len(middles) >= _LEAST_SEGMENTS:
        when, middle, half = (np.array(column) for column in zip(*middles, strict=True))
        typical = float(np.median(np.abs(half)))
        slope, start = (float(each) for each in np.polyfit(when - begin, middle, 1))
        if abs(slope) * span <= typical:
            # What the line rises by is less than any of its points is known to.
            slope, start = 0.0, float(middle.mean())
        residual = float(np.abs(middle - start - slope * (when - begin)).max())
        return Clock(start, slope, begin, residual + typical + reference.error_ns, len(at))
    low, high = _bounds(ahead, way)
    if np.isfinite(low) and np.isfinite(high):
        return Clock((low + high) / 2, 0.0, begin, abs(high - low) / 2 + reference.error_ns, len(at))
    return _one_way(ahead, begin, reference)


def _one_way(ahead: Times, begin: int, reference: Clock) -> Clock:
    """From packets that went one way only: delays crowd at their least, so the crowded edge is taken for no
    delay at all; what it really was can't be known."""
    low, middle, high = (float(each) for each in (ahead.min(), np.median(ahead), ahead.max()))
    edge = low if middle - low <= high - middle else high
    return Clock(edge, 0.0, begin, abs(middle - edge) + reference.error_ns, len(ahead), both_ways=False)


def _ways(pair: Prints, reverse: Prints, ahead: Times) -> NDArray[np.int8]:
    """1: the packet came to this capture first; -1: to the other; 0: no packet between these two hosts went
    the other way, so nothing tells. Of two directions the one whose times differ more came here first."""
    distinct, number = np.unique(pair, return_inverse=True)
    middle = np.array([np.median(ahead[number == each]) for each in range(len(distinct))])
    place = np.minimum(np.searchsorted(distinct, reverse), len(distinct) - 1)
    way = np.where(middle[number] > middle[place], 1, -1)
    return np.where(distinct[place] == reverse, way, 0).astype(np.int8)


def _bounds(ahead: Times, way: NDArray[np.int8]) -> tuple[float, float]:
    """What the packets say the clocks differ by, at least and at most."""
    low = float(ahead[way < 0].max()) if (way < 0).any() else -np.inf
    high = float(ahead[way > 0].min()) if (way > 0).any() else np.inf
    return low, high


def _counted_once(
    captures: Sequence[Sightings], singles: Sequence[NDArray[np.intp]], times: Sequence[Times]
) -> list[NDArray[np.bool_]]:
    """Per capture, which packets were not seen earlier in another one."""
    counted = [np.ones(len(capture.packet), bool) for capture in captures]
    prints = np.concatenate([capture.packet[at] for capture, at in zip(captures, singles, strict=True)])
    when = np.concatenate([time[at] for time, at in zip(times, singles, strict=True)])
    owner = np.repeat(np.arange(len(captures)), [len(at) for at in singles])
    place = np.concatenate([np.asarray(at) for at in singles])
    order = np.lexsort((owner, when, prints))
    again = np.append(False, prints[order][1:] == prints[order][:-1]) if len(order) else np.zeros(0, bool)
    for number, mask in enumerate(counted):
        late = order[again & (owner[order] == number)]
        mask[place[late]] = False
    return counted


def _nothing(count: int) -> tuple[Prints, Prints, Prints]:
    return (np.zeros(count, np.uint64),) * 3


def _prints(frames: Frames, link: int) -> tuple[Prints, Prints, Prints]:
    """Prints of packet, pair and reversed pair of each frame; zero where headers are cut off."""
    at = PacketBytes(frames.data)
    start, captured = frames.offset, frames.captured.astype(np.int64)
    network, ethertype = network_start(at, start, captured, link, np.zeros(16, np.int64))
    packet, pair, reverse = (np.zeros(len(frames), np.uint64) for _ in range(3))
    for version, kind, least in ((4, 0x0800, 20), (6, 0x86DD, 40)):
        chosen = np.flatnonzero((ethertype == kind) & (captured >= network + least + 20))
        if not len(chosen):
            continue
        here = start[chosen] + network[chosen]
        header = (at.u1.take(here) & 15).astype(np.int64) * 4 if version == 4 else np.full(len(here), 40)
        protocol = at.u1.take(here + (9 if version == 4 else 6)).astype(np.uint64)
        source, target = _addresses(at, here, version)
        transport = here + header
        known = (captured[chosen] >= network[chosen] + header + 20) & (
            (protocol == _TCP) | (protocol == _UDP)
        )
        if version == 4:
            known &= (at.u2[here + 6] & 0x1FFF) == 0
        # TCP: sequence and acknowledgement. UDP: the payload's first bytes (a checksum may come late).
        numbers = np.where(protocol == _TCP, at.u8[transport + 4], at.u8[transport + 8])
        identity = at.u2[here + 4].astype(np.uint64) if version == 4 else np.zeros(len(here), np.uint64)
        ports = at.u4[transport].astype(np.uint64)
        mixed = _mix(_mix(source, target), _mix(numbers, identity | protocol << np.uint64(16)))
        packet[chosen] = np.where(known, _mix(mixed, ports) | np.uint64(1), 0)
        pair[chosen], reverse[chosen] = _mix(source, target), _mix(target, source)
    return packet, pair, reverse


def _addresses(at: PacketBytes, here: NDArray[np.int64], version: int) -> tuple[Prints, Prints]:
    if version == 4:
        return at.u4[here + 12].astype(np.uint64), at.u4[here + 16].astype(np.uint64)
    source = _mix(at.u8[here + 8].astype(np.uint64), at.u8[here + 16].astype(np.uint64))
    return source, _mix(at.u8[here + 24].astype(np.uint64), at.u8[here + 32].astype(np.uint64))


def _mix(one: Prints, other: Prints) -> Prints:
    """A number that depends on both and on their order."""
    result = one * MULTIPLIERS[0] + MULTIPLIERS[3]
    result ^= result >> np.uint64(29)
    result = (result + other) * MULTIPLIERS[1]
    result ^= result >> np.uint64(32)
    result *= MULTIPLIERS[2]
    result ^= result >> np.uint64(29)
    return result
