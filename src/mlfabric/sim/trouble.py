"""What happens to hosts and links while a scenario runs: rates change, hosts die, stand still and come back.

The happenings are the scenario's own (`rate_changes`, `fault_events`), the same that a lab carries out. A
link whose owner is dead or paused, or that is cut, carries nothing; a path that is cut stalls the streams
that need it. What a job does about it is the job's business: it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from mlfabric.scenario import FaultEvent, RateChange, Scenario
from mlfabric.sim.fluid import Fluid, Process
from mlfabric.sim.streams import Signal, Stream
from mlfabric.topology import Link
from mlfabric.units import goodput

Crosses = Callable[[str, str], bool]  # does a stream need the way from this host to that one?
Listener = Callable[[FaultEvent], None]

WAYS: Final = {"out": ("up",), "in": ("down",), "both": ("up", "down")}


class Trouble:
    """Carries out a scenario's happenings in a world, and says who is up."""

    def __init__(self, world: Fluid, scenario: Scenario) -> None:
        self.happened: list[RateChange | FaultEvent] = []
        self.listeners: list[Listener] = []
        self.dead: set[str] = set()
        self._world = world
        self._paused_at: dict[str, float] = {}
        self._paused_s: dict[str, float] = {}  # of pauses that are over
        self._resumed: dict[str, Signal] = {}
        self._rate = {link: float(world.capacity[number]) for link, number in world.index.items()}
        self._cut: set[Link] = set()
        self._cut_paths: set[tuple[str, str]] = set()
        self._watched: list[tuple[Stream, Crosses]] = []
        self._paths_matter = any(fault.between is not None for fault in scenario.faults)
        for change in scenario.rate_changes():
            world.at(change.at_s, partial(self._change_rate, change))
        for fault in scenario.fault_events():
            world.at(fault.at_s, partial(self._strike, fault))

    def up(self, host: str) -> bool:
        """Does the host run and answer?"""
        return host not in self.dead and host not in self._paused_at

    def watch(self, stream: Stream, crosses: Crosses) -> None:
        """Stall the stream while a path it needs is cut."""
        if not self._paths_matter:
            return
        self._watched = [pair for pair in self._watched if not pair[0].done.fired]
        self._watched.append((stream, crosses))
        self._stall(stream, crosses)

    def sleep(self, host: str, seconds: float) -> Process:
        """Time that passes only while the host is not paused."""
        start_s, before_s = self._world.now, self._paused_total(host)
        left_s = seconds
        while left_s > 1e-12 * seconds or host in self._paused_at:
            if host in self._paused_at:
                yield self._resumed[host]
            else:
                yield left_s
            ran_s = self._world.now - start_s - (self._paused_total(host) - before_s)
            left_s = seconds - ran_s

    def _paused_total(self, host: str) -> float:
        now = self._world.now
        return self._paused_s.get(host, 0.0) + (now - self._paused_at.get(host, now))

    def _change_rate(self, change: RateChange) -> None:
        self.happened.append(change)
        self._rate[Link(change.host, "up")] = goodput(change.up_bps)
        self._rate[Link(change.host, "down")] = goodput(change.down_bps)
        self._set_links(change.host)

    def _set_links(self, host: str) -> None:
        for way in ("up", "down"):
            link = Link(host, way)
            carries = self.up(host) and link not in self._cut
            self._world.set_capacity(self._world.index[link], self._rate[link] if carries else 0.0)

    def _strike(self, fault: FaultEvent) -> None:
        self.happened.append(fault)
        if fault.between is not None:
            self._strike_path(fault, *fault.between)
        else:
            self._strike_host(fault, fault.host or "")
        for listener in self.listeners:
            listener(fault)

    def _strike_path(self, fault: FaultEvent, first: str, second: str) -> None:
        ways = {"out": {(first, second)}, "in": {(second, first)}}
        paths = ways.get(fault.direction, {(first, second), (second, first)})
        self._cut_paths = self._cut_paths | paths if fault.do == "cut" else self._cut_paths - paths
        for stream, crosses in self._watched:
            self._stall(stream, crosses)

    def _stall(self, stream: Stream, crosses: Crosses) -> None:
        self._world.stall(stream, any(crosses(*path) for path in self._cut_paths))

    def _strike_host(self, fault: FaultEvent, host: str) -> None:
        now = self._world.now
        links = {Link(host, way) for way in WAYS[fault.direction]}
        if fault.do == "cut":
            self._cut |= links
        elif fault.do == "heal":
            self._cut -= links
        elif fault.do == "pause" and host not in self._paused_at:
            self._paused_at[host] = now
            self._resumed[host] = Signal()
        elif fault.do in ("kill", "drain"):
            self.dead.add(host)
        elif fault.do == "restart":
            self.dead.discard(host)
        if fault.do in ("resume", "kill", "drain", "restart") and host in self._paused_at:
            self._paused_s[host] = self._paused_total(host)
            del self._paused_at[host]
            self._set_links(host)
            self._resumed.pop(host).fire()
        self._set_links(host)
