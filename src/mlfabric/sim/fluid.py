"""Whole training runs at the level of flows: virtual time, processes, and streams that share links.

A stream may cross many links at once with a weight on each: a push to sixteen shards uses its sender's uplink
with weight 1 and each server's downlink with the shard's share. Rates are max-min fair, by progressive
filling over all streams at once (NumPy); `sim.flows.share_rates` is the plain form of the same rule and
serves as its oracle. With `grain_s` above zero rates are worked out again at most that often, which bounds
the cost of large clusters; a stream then waits at most that long for its first rate.

Nothing here knows what a stream carries or who decided that it starts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlfabric.topology import Link, Network

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

# Bytes that rounding may leave of a stream, as a share of what it had.
CRUMB: Final = 1e-9


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


# A process yields seconds to sleep, or signals of which all must have fired.
Process = Generator[float | Signal | tuple[Signal, ...], Any, None]


class Stream:
    """Bytes on their way over links, each with the part of the stream's rate that crosses it."""

    __slots__ = ("crumb_bytes", "done", "links", "pace", "rate", "size_bytes", "weights")

    def __init__(self, links: Ints, weights: Floats, size_bytes: float, pace: float) -> None:
        self.links = links
        self.weights = weights
        self.size_bytes = size_bytes
        self.crumb_bytes = max(CRUMB * size_bytes, 1e-6)
        self.pace = pace
        self.rate = 0.0
        self.done = Signal()


class Fluid:
    """The world at flow level: a clock, links, streams and processes."""

    def __init__(self, network: Network, grain_s: float = 0.0) -> None:
        self.now = 0.0
        self.links: list[Link] = network.links()
        self.index = {link: number for number, link in enumerate(self.links)}
        self.capacity: Floats = np.array([network.capacity(link) for link in self.links])
        self.used: Floats = np.zeros(len(self.links))  # bytes per second right now
        self.carried: Floats = np.zeros(len(self.links))  # bytes so far
        self.offered: Floats = np.zeros(len(self.links))  # bytes the links could have carried so far
        self.events = 0
        self._tolerance = 1e-9 if grain_s == 0 else 0.01
        self._grain_s = grain_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._streams: list[Stream] = []
        self._joining: list[Stream] = []
        self._rates: Floats = np.zeros(0)
        self._remaining: Floats = np.zeros(0)
        self._crumbs: Floats = np.zeros(0)
        self._moving = np.zeros(0, dtype=bool)
        self._stale = False
        self._shared_at = -math.inf
        self._due = math.inf

    # --- what processes ask for -------------------------------------------------------------------------

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(at_s, self.now), self._sequence, call))

    def spawn(self, process: Process) -> None:
        """Run a process from now on; what it yields is slept or waited for."""

        def resume() -> None:
            try:
                wanted = process.send(None)
            except StopIteration:
                return
            if isinstance(wanted, Signal):
                wanted.then(resume)
            elif isinstance(wanted, tuple):
                self._await_all(wanted, resume)
            else:
                self.at(self.now + wanted, resume)

        self.at(self.now, resume)

    def _await_all(self, signals: tuple[Signal, ...], call: Callable[[], None]) -> None:
        open_ = [signal for signal in signals if not signal.fired]
        if not open_:
            call()
            return
        left = len(open_)

        def one_fired() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                call()

        for signal in open_:
            signal.then(one_fired)

    def send(self, links: Ints, weights: Floats, size_bytes: float, pace: float = math.inf) -> Stream:
        """Start a stream now. One that crosses no link is there at once."""
        stream = Stream(links, weights, size_bytes, pace)
        if len(links) == 0 or size_bytes <= 0:
            self.at(self.now, stream.done.fire)
        else:
            self._joining.append(stream)
            self._stale = True
        return stream

    def set_pace(self, stream: Stream, pace: float) -> None:
        if abs(stream.pace - pace) > 1e-3 * pace:
            stream.pace = pace
            self._stale = True

    def set_capacity(self, link: Link, bytes_per_s: float) -> None:
        number = self.index[link]
        if self.capacity[number] != bytes_per_s:
            self.capacity[number] = bytes_per_s
            self._stale = True

    # --- time -------------------------------------------------------------------------------------------

    def run(self, until_s: float) -> None:
        while True:
            if self._stale and self.now >= self._shared_at + self._grain_s:
                self._share()
            at = min(self._heap[0][0] if self._heap else math.inf, self._due)
            if self._stale:
                at = min(at, self._shared_at + self._grain_s)
            if at > until_s:
                self._advance(until_s)
                return
            self._advance(at)
            if at >= self._due:
                self._finish()
            while self._heap and self._heap[0][0] <= self.now:
                self.events += 1
                heapq.heappop(self._heap)[2]()

    def _advance(self, at_s: float) -> None:
        passed = at_s - self.now
        self.now = at_s
        if passed <= 0:
            return
        self._remaining -= self._rates * passed
        self.carried += self.used * passed
        self.offered += self.capacity * passed

    def _finish(self) -> None:
        """Streams that are through leave at the next sharing; whoever waits for them goes on now."""
        through = self._moving & (self._remaining <= self._crumbs)
        for number in np.flatnonzero(through):
            stream = self._streams[number]
            self.events += 1
            self.used[stream.links] -= stream.weights * self._rates[number]
            self._rates[number] = 0.0
            self._moving[number] = False
            stream.done.fire()
        np.maximum(self.used, 0.0, out=self.used)
        self._stale = True
        self._find_due()

    def _find_due(self) -> None:
        moving = self._moving & (self._rates > 0)
        if not moving.any():
            self._due = math.inf
            return
        left = np.maximum(self._remaining[moving] - 0.5 * self._crumbs[moving], 0.0)
        self._due = self.now + float((left / self._rates[moving]).min())

    def _share(self) -> None:
        """Take new streams in, let finished ones go, and work out everybody's rate."""
        keep = np.flatnonzero(self._moving)
        joining, self._joining = self._joining, []
        self._streams = [self._streams[number] for number in keep] + joining
        fresh = np.array([stream.size_bytes for stream in joining])
        self._remaining = np.concatenate([self._remaining[keep], fresh])
        self._crumbs = np.array([stream.crumb_bytes for stream in self._streams])
        self._moving = np.ones(len(self._streams), dtype=bool)
        self._rates, self.used = fill_rates(self._streams, self.capacity, self._tolerance)
        for stream, rate in zip(self._streams, self._rates.tolist(), strict=True):
            stream.rate = rate
        self._stale = False
        self._shared_at = self.now
        self._find_due()


def fill_rates(streams: Sequence[Stream], capacity: Floats, tolerance: float = 1e-9) -> tuple[Floats, Floats]:
    """Max-min fair rates and what they use of each link: raise all alike, stop those whose pace or link is
    full. Links that fill within `tolerance` of each other stop together."""
    count = len(streams)
    if count == 0:
        return np.zeros(0), np.zeros(len(capacity))
    lengths = np.array([len(stream.links) for stream in streams])
    links = np.concatenate([stream.links for stream in streams])
    weights = np.concatenate([stream.weights for stream in streams])
    owner = np.repeat(np.arange(count), lengths)
    pace = np.array([stream.pace for stream in streams])
    rates = np.zeros(count)
    frozen = np.zeros(len(capacity))
    growing = np.ones(count, dtype=bool)
    while len(links):
        load = np.bincount(links, weights, len(capacity))
        with np.errstate(divide="ignore", invalid="ignore"):
            level_of = np.where(load > 0, np.maximum(capacity - frozen, 0.0) / load, np.inf)
        level = min(float(level_of.min()), float(pace[growing].min()))
        edge = level * (1 + tolerance)
        stops = growing & (pace <= edge)
        stops[owner[(level_of <= edge)[links]]] = True
        stops &= growing
        rates[stops] = level
        growing &= ~stops
        stopped = stops[owner]
        frozen += np.bincount(links[stopped], weights[stopped] * level, len(capacity))
        left = ~stopped
        links, weights, owner = links[left], weights[left], owner[left]
    return rates, frozen
