"""Whole training runs at the level of flows: virtual time, processes, and streams that share links.

With `grain_s` above zero rates are worked out again, and streams end, at most that often, which bounds the
cost of large clusters. Nothing here knows what a stream carries or who decided that it starts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from typing import Any, Final

import numpy as np

from mlfabric.sim.streams import Floats, Path, Signal, Stream, Table, fill_rates
from mlfabric.topology import Link, Network

FIRST_SLOTS: Final = 64
# Bundles kept before those that nobody uses any more are looked for.
MOST_BUNDLES: Final = 32
# Links that fill within this of each other stop together where rates are worked out now and then only.
COARSE: Final = 0.02

# A process yields seconds to sleep, or signals of which all must have fired.
Process = Generator[float | Signal | tuple[Signal, ...], Any, None]


class Fluid:
    """The world at flow level: a clock, links, streams and processes."""

    def __init__(self, network: Network, grain_s: float = 0.0) -> None:
        self.now = 0.0
        self.links: list[Link] = network.links()
        self.index = {link: number for number, link in enumerate(self.links)}
        self.capacity: Floats = np.array([network.capacity(link) for link in self.links])
        self.used: Floats = np.zeros(len(self.links))  # bytes per second right now
        self.carried: Floats = np.zeros(len(self.links))  # bytes so far
        self.grain_s = grain_s
        self._tolerance = 1e-9 if grain_s == 0 else COARSE
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        # Streams live in slots of these columns; a slot that is free has rate 0.
        self._table = Table(FIRST_SLOTS, len(self.links))
        self._streams: list[Stream | None] = [None] * FIRST_SLOTS
        self._free = list(range(FIRST_SLOTS - 1, -1, -1))
        self._rates: Floats = np.zeros(FIRST_SLOTS)
        self._remaining: Floats = np.zeros(FIRST_SLOTS)
        self._crumbs: Floats = np.zeros(FIRST_SLOTS)
        self._moving = np.zeros(FIRST_SLOTS, dtype=bool)  # in the slot is a stream that may move
        self._stale = False
        self._shared_at = -math.inf
        self._flowed_at = 0.0
        self._due = math.inf

    # --- what processes ask for -------------------------------------------------------------------------

    def add_link(self, link: Link, bytes_per_s: float) -> int:
        """One more link, before anything runs: a limit that no device has."""
        self.index[link] = len(self.links)
        self.links.append(link)
        self.capacity = np.append(self.capacity, bytes_per_s)
        self.used = np.append(self.used, 0.0)
        self.carried = np.append(self.carried, 0.0)
        self._table = Table(FIRST_SLOTS, len(self.links))
        return self.index[link]

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

    def send(self, path: Path, size_bytes: float, pace: float = math.inf, priority: float = 1.0) -> Stream:
        """Start a stream now. One that crosses no link is there at once."""
        stream = Stream(path, size_bytes, pace, priority)
        if path.empty or size_bytes <= 0:
            self.at(self.now + path.latency_s, stream.done.fire)
            return stream
        if not self._free:
            self._grow()
        slot = stream.slot = self._free.pop()
        self._flow()
        self._streams[slot] = stream
        self._remaining[slot], self._crumbs[slot] = size_bytes, stream.crumb_bytes
        self._moving[slot] = True
        self._table.write(slot, stream)
        self._stale = True
        return stream

    def _grow(self) -> None:
        rows = len(self._streams)
        self._table.grow(2 * rows)
        self._streams += [None] * rows
        self._free = list(range(2 * rows - 1, rows - 1, -1))
        for name in ("_rates", "_remaining", "_crumbs", "_moving"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(rows, dtype=column.dtype)]))

    def rate(self, stream: Stream) -> float:
        """Bytes per second of a stream right now."""
        return float(self._rates[stream.slot]) if stream.slot >= 0 else 0.0

    def left_bytes(self, stream: Stream) -> float:
        """What a stream still has to move."""
        if stream.slot < 0:
            return 0.0
        self._flow()
        return max(float(self._remaining[stream.slot]), 0.0)

    def set_pace(self, stream: Stream, pace: float) -> None:
        if stream.slot >= 0 and abs(stream.pace - pace) > 1e-3 * pace:
            stream.pace = pace
            self._table.pace[stream.slot] = pace / stream.priority
            self._stale = True

    def stall(self, stream: Stream, stalled: bool) -> None:
        if stream.slot >= 0 and stream.stalled != stalled:
            stream.stalled = stalled
            self._flow()
            self._moving[stream.slot] = not stalled
            self._rates[stream.slot] = 0.0
            self._stale = True

    def reroute(self, stream: Stream, path: Path, more_bytes: float = 0.0) -> None:
        """The rest of a stream takes another way; what has to be sent once more is added."""
        if path.empty:
            self.cancel(stream)
            self.at(self.now, stream.done.fire)
            return
        self._flow()
        self._rates[stream.slot] = 0.0  # what it used of its old way counts as used until the next sharing
        stream.path = path
        self._remaining[stream.slot] += more_bytes
        self._table.write(stream.slot, stream)
        self._stale = True

    def cancel(self, stream: Stream) -> None:
        """Nothing more moves, and nobody is told."""
        if stream.slot >= 0:
            self._flow()
            self._leave(stream)

    def set_capacity(self, number: int, bytes_per_s: float) -> None:
        if self.capacity[number] != bytes_per_s:
            self.capacity[number] = bytes_per_s
            self._stale = True

    # --- time -------------------------------------------------------------------------------------------

    def run(self, until_s: float) -> None:
        while True:
            if self._stale and self.now >= self._shared_at + self.grain_s:
                self._share()
            at = min(self._heap[0][0] if self._heap else math.inf, self._due)
            if self._stale:
                at = min(at, self._shared_at + self.grain_s)
            if at > until_s:
                self.now = until_s
                self._flow()
                return
            self.now = max(at, self.now)
            if self.now >= self._due:
                self._finish()
            while self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()

    def _flow(self) -> None:
        """Bytes move up to now; rates are constant between two sharings."""
        passed = self.now - self._flowed_at
        self._flowed_at = self.now
        if passed > 0:
            self._remaining -= self._rates * passed
            self.carried += self.used * passed

    def _finish(self) -> None:
        """Streams that are through leave; whoever waits for them goes on now."""
        self._flow()
        # What would take less than the clock can tell is through as well.
        instant = self._rates * (4 * math.ulp(self.now))
        for slot in np.flatnonzero(self._moving & (self._remaining <= self._crumbs + instant)).tolist():
            stream = self._streams[slot]
            assert stream is not None
            self._leave(stream)
            if stream.path.latency_s > 0:
                self.at(self.now + stream.path.latency_s, stream.done.fire)
            else:
                stream.done.fire()
        np.maximum(self.used, 0.0, out=self.used)
        self._find_due()

    def _leave(self, stream: Stream) -> None:
        slot = stream.slot
        self._stop(slot)
        self._moving[slot] = False
        self._streams[slot] = None
        self._free.append(slot)
        stream.slot = -1
        self._stale = True

    def _stop(self, slot: int) -> None:
        """What the stream in this slot used is free from now on."""
        stream, rate = self._streams[slot], self._rates[slot]
        assert stream is not None
        path = stream.path
        self.used[path.links] -= path.weights * rate
        if path.bundle is not None:
            self.used[path.bundle.links] -= path.bundle.weights * rate
        self._rates[slot] = 0.0

    def _find_due(self) -> None:
        moving = np.flatnonzero(self._rates > 0)
        self._due = math.inf
        if len(moving):
            left = np.maximum(self._remaining[moving] - 0.5 * self._crumbs[moving], 0.0)
            first = self._flowed_at + float((left / self._rates[moving]).min())
            self._due = max(first, self._shared_at + self.grain_s)

    def _share(self) -> None:
        """Work out everybody's rate."""
        self._flow()
        rows = np.flatnonzero(self._moving)
        if len(self._table.bundles) > MOST_BUNDLES:
            self._table.forget_bundles(np.array([n for n, s in enumerate(self._streams) if s], dtype=np.intp))
        self._rates[:] = 0.0
        self._rates[rows], self.used = fill_rates(self._table, rows, self.capacity, self._tolerance)
        self._stale = False
        self._shared_at = self.now
        self._find_due()
