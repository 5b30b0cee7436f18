"""Streams over links, and the rates they get: max-min fair by priority, by progressive filling (NumPy).

A stream may cross many links at once with a weight on each: a push to sixteen shards uses its sender's uplink
with weight 1 and each server's downlink with the shard's share. What many streams have in common, such as the
servers' links, is written down once as a `Bundle`, so that a thousand workers and two hundred servers cost
1,200 numbers and not 200,000; an entry of the stream itself may take away what the bundle counts for it.
`sim.flows.share_rates` is the plain form of the same rule and serves as its oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

# Bytes that rounding may leave of a stream, as a share of what it had.
CRUMB: Final = 1e-9
# Loads below this are what rounding leaves where an entry takes away what its bundle counts.
NO_LOAD: Final = 1e-12
# Links that a stream may name for itself; what crosses more has a bundle of its own.
MOST_OWN: Final = 6
NO_LINKS: Final[Ints] = np.zeros(0, dtype=np.intp)
NO_WEIGHTS: Final[Floats] = np.zeros(0)


class Signal:
    """Something that happens once; processes wait for it."""

    __slots__ = ("_waiting", "fired", "value")

    def __init__(self) -> None:
        self.fired = False
        self.value: Any = None
        self._waiting: list[Callable[[], None]] = []

    def fire(self, value: Any = None) -> None:
        if self.fired:
            return
        self.fired, self.value = True, value
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def then(self, call: Callable[[], None]) -> None:
        if self.fired:
            call()
        else:
            self._waiting.append(call)


class Bundle:
    """Links with weights that many streams cross alike; each link once."""

    __slots__ = ("links", "weights")

    def __init__(self, links: Ints, weights: Floats) -> None:
        self.links = links
        self.weights = weights


class Path:
    """What a stream crosses: a few links of its own with weights, and a bundle that may be others' too."""

    __slots__ = ("bundle", "latency_s", "links", "weights")

    def __init__(
        self, links: Ints, weights: Floats, bundle: Bundle | None = None, latency_s: float = 0.0
    ) -> None:
        if len(links) > MOST_OWN:
            if bundle is not None:
                raise ValueError(f"{len(links)} links beside a bundle; {MOST_OWN} are the most")
            links, weights, bundle = NO_LINKS, NO_WEIGHTS, Bundle(links, weights)
        self.links = links
        self.weights = weights
        self.bundle = bundle
        self.latency_s = latency_s

    @property
    def empty(self) -> bool:
        return len(self.links) == 0 and self.bundle is None


class Stream:
    """Bytes on their way over a path. The world that carries it keeps its rate and what is left of it."""

    __slots__ = ("crumb_bytes", "done", "pace", "path", "priority", "size_bytes", "slot", "stalled")

    def __init__(self, path: Path, size_bytes: float, pace: float = math.inf, priority: float = 1.0) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.crumb_bytes = max(CRUMB * size_bytes, 1e-6)
        self.pace = pace
        self.priority = priority  # its weight where streams share a link
        self.stalled = False  # something on the way carries nothing
        self.slot = -1  # where the world keeps it; -1: it is not under way
        self.done = Signal()


class Table:
    """What filling needs to know of many streams, as columns; a stream is a row."""

    def __init__(self, rows: int, links: int) -> None:
        self.no_link = links  # of entries a stream does not use: a link that is never full
        self.links: Ints = np.full((rows, MOST_OWN), links, dtype=np.intp)
        self.weights: Floats = np.zeros((rows, MOST_OWN))
        self.pace: Floats = np.full(rows, np.inf)
        self.priority: Floats = np.ones(rows)
        self.belongs: Ints = np.zeros(rows, dtype=np.intp)  # to which bundle; 0: to none
        self.bundles: dict[int, Bundle] = {}
        self._numbers: dict[Bundle, int] = {}
        self._bundled = 0

    def write(self, row: int, stream: Stream) -> None:
        path = stream.path
        count = len(path.links)
        self.links[row, :count] = path.links
        self.links[row, count:] = self.no_link
        self.weights[row, :count] = path.weights * stream.priority
        self.weights[row, count:] = 0.0
        self.pace[row] = stream.pace / stream.priority
        self.priority[row] = stream.priority
        self.belongs[row] = self._number(path.bundle)

    def _number(self, bundle: Bundle | None) -> int:
        if bundle is None:
            return 0
        if bundle not in self._numbers:
            self._bundled += 1
            self._numbers[bundle] = self._bundled
            self.bundles[self._bundled] = bundle
        return self._numbers[bundle]

    def forget_bundles(self, rows: Ints) -> None:
        """Keep only the bundles that these rows use."""
        used = set(self.belongs[rows].tolist())
        for number in [number for number in self.bundles if number not in used]:
            del self._numbers[self.bundles.pop(number)]

    def grow(self, rows: int) -> None:
        more = Table(rows - len(self.pace), self.no_link)
        for name in ("links", "weights", "pace", "priority", "belongs"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(more, name)]))


def fill_rates(table: Table, rows: Ints, capacity: Floats, tolerance: float = 1e-9) -> tuple[Floats, Floats]:
    """Fair rates of these rows and what they use of each link: raise all by their priority, stop those whose
    pace or link is full. Links that fill within `tolerance` of each other stop together."""
    count = len(rows)
    rates, frozen = np.zeros(count), np.zeros(len(capacity) + 1)
    room = np.append(capacity, np.inf)
    numbers, belongs = np.unique(table.belongs[rows], return_inverse=True)
    bundles = [table.bundles.get(number) for number in numbers.tolist()]
    pace, priority = table.pace[rows], table.priority[rows]
    links, weights = table.links[rows], table.weights[rows]
    growing = np.arange(count)
    while len(growing):
        load = np.bincount(links.ravel(), weights.ravel(), len(room))
        pulls = np.bincount(belongs[growing], priority[growing], len(bundles)).tolist()
        for bundle, pull in zip(bundles, pulls, strict=True):
            if bundle is not None and pull > 0:
                load[bundle.links] += bundle.weights * pull
        busy = np.flatnonzero(load > NO_LOAD)
        level_of = np.maximum(room[busy] - frozen[busy], 0.0) / load[busy]
        level = min(float(level_of.min(initial=np.inf)), float(pace[growing].min()))
        edge = level * (1 + tolerance)
        full = np.zeros(len(room), dtype=bool)
        full[busy[level_of <= edge]] = True
        in_bundle = np.array([0 if b is None else np.count_nonzero(full[b.links]) for b in bundles])
        hit = full[links]
        stops = (hit & (weights > 0)).any(axis=1) | (pace[growing] <= edge)
        # A link that its bundle counts for a stream in vain does not stop it.
        stops |= in_bundle[belongs[growing]] > (hit & (weights < 0)).sum(axis=1)
        if not stops.any():  # only rounding can bring this about
            stops[:] = True
        stopped = growing[stops]
        rates[stopped] = level * priority[stopped]
        frozen += np.bincount(links[stops].ravel(), weights[stops].ravel() * level, len(room))
        pulls = np.bincount(belongs[stopped], priority[stopped], len(bundles)).tolist()
        for bundle, pull in zip(bundles, pulls, strict=True):
            if bundle is not None and pull > 0:
                frozen[bundle.links] += bundle.weights * (pull * level)
        growing, links, weights = growing[~stops], links[~stops], weights[~stops]
    return rates, np.maximum(frozen[:-1], 0.0)
