"""Hosts, racks and the links between them, as plain data.

A host has an uplink and a downlink; a rack may have an uplink and a downlink of its own that all traffic
leaving or entering the rack shares; the core is free. Nothing here knows how a network is realised: the
planner, the simulator and the lab read the same records. Rates are payload bytes per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple


class Link(NamedTuple):
    """One direction of one attachment: ("w3", "up"). A rack's link is named after the rack."""

    owner: str
    direction: str  # "up": out of the owner, "down": into it

    def __str__(self) -> str:
        return f"{self.owner}.{self.direction}"


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class Rack:
    name: str
    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """Who is where, and how fast each link is believed to be; `with_host` gives a changed copy."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    racks: Mapping[str, Rack] = field(default_factory=dict)

    @classmethod
    def of(cls, hosts: Iterable[Host], racks: Iterable[Rack] = ()) -> Network:
        return cls(
            MappingProxyType({host.name: host for host in hosts}),
            MappingProxyType({rack.name: rack for rack in racks}),
        )

    def with_host(self, host: Host) -> Network:
        return replace(self, hosts=MappingProxyType({**self.hosts, host.name: host}))

    def sending_at_most(self, limit_bytes_per_s: float | None) -> Network:
        """A copy in which no host sends faster than this; None: as fast as it can."""
        if limit_bytes_per_s is None:
            return self
        hosts = {
            name: replace(host, up_bytes_per_s=min(host.up_bytes_per_s, limit_bytes_per_s))
            for name, host in self.hosts.items()
        }
        return replace(self, hosts=MappingProxyType(hosts))

    def without_host(self, name: str) -> Network:
        return replace(self, hosts=MappingProxyType({k: v for k, v in self.hosts.items() if k != name}))

    def capacity(self, link: Link) -> float:
        owner = self.hosts.get(link.owner) or self.racks[link.owner]
        return owner.up_bytes_per_s if link.direction == "up" else owner.down_bytes_per_s

    def links(self) -> list[Link]:
        return [Link(owner, way) for owner in (*self.hosts, *self.racks) for way in ("up", "down")]

    def path(self, source: str, target: str) -> tuple[Link, ...]:
        """The links a transfer crosses, in order; empty inside one host. A rack of unknown rate has none."""
        if source == target:
            return ()
        here, there = self.hosts[source], self.hosts[target]
        crossing: tuple[Link, ...] = ()
        if here.rack != there.rack:
            if here.rack is not None and here.rack in self.racks:
                crossing += (Link(here.rack, "up"),)
            if there.rack is not None and there.rack in self.racks:
                crossing += (Link(there.rack, "down"),)
        return (Link(source, "up"), *crossing, Link(target, "down"))

    def rate(self, source: str, target: str) -> float:
        """The most a lone transfer can get; infinite inside one host."""
        return min((self.capacity(link) for link in self.path(source, target)), default=float("inf"))
