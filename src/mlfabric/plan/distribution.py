"""How the model travels to those who asked for it: pulls of one version share transfers, receivers relay.

Everybody who wants the same shard at the same version gets it down one tree. A host that has it passes it on,
so the number of sources doubles with every transfer time instead of all queueing at the server's uplink. Who
relays is decided by who could: fast uplinks are served first. One copy enters a rack, the others come from
inside. With chunks forwarded as they come, the tree is a chain that costs little more than one transfer.

Where many servers share a model their uplinks may carry all copies as soon: `relay_or_not` compares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from mlfabric.plan.reservation import Ledger, open_ledger
from mlfabric.plan.staircase import INF, Path, snap_rate
from mlfabric.plan.values import Reserved
from mlfabric.topology import Link, Network
from mlfabric.units import format_time

# Sources looked at for each receiver: those that are ready first.
SOURCES_TRIED: Final = 6
# A chain is full after this share of a transfer, as far as chunks of these sizes allow.
FILL_SHARE: Final = 0.25
LEAST_CHUNK_BYTES: Final = 16 * 1024
MOST_CHUNK_BYTES: Final = 256 * 1024
# What passing a chunk on takes beside its bytes: two processes have to be woken.
HOP_S: Final = 1e-3
# Relays are worth their trouble where receivers have the model in this share of the time, on the average, and
# the last of them hardly later.
WORTH: Final = 0.8
HARDLY_LATER: Final = 1.1


@dataclass(frozen=True, slots=True)
class Pull:
    """Someone who waits for a shard of the model, no older than a version."""

    worker: str
    host: str
    shard: int
    version: int


@dataclass(frozen=True, slots=True)
class Relay:
    """One copy of a shard from a host that has it, or is getting it, to one that wants it."""

    shard: int
    version: int
    source: str
    target: str
    size_bytes: int
    start_s: float
    finish_s: float
    rate_bytes_per_s: float
    workers: tuple[str, ...]  # whom it serves at the target
    reason: str


def share_pulls(pulls: Iterable[Pull], version: int) -> dict[int, dict[str, tuple[str, ...]]]:
    """For each shard the hosts that want it and the workers there, once each.

    The server's present version serves everybody who wants it or an older one; one copy per host is enough.
    """
    wanted: dict[int, dict[str, set[str]]] = {}
    for pull in pulls:
        if pull.version <= version:
            wanted.setdefault(pull.shard, {}).setdefault(pull.host, set()).add(pull.worker)
    return {
        shard: {host: tuple(sorted(workers)) for host, workers in sorted(hosts.items())}
        for shard, hosts in sorted(wanted.items())
    }


@dataclass(frozen=True, slots=True)
class Wanted:
    """A shard, who holds it, and the hosts that want it with the workers there."""

    shard: int
    version: int
    server: str  # host
    size_bytes: int
    hosts: Mapping[str, tuple[str, ...]]

    def targets(self) -> list[str]:
        return [host for host in self.hosts if host != self.server]

    @property
    def chunk_bytes(self) -> int:
        """The more stages, the smaller the chunks."""
        stages = max(len(self.targets()), 1)
        return int(min(max(FILL_SHARE * self.size_bytes / stages, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES))


def relay_or_not(
    network: Network, reserved: Sequence[Reserved], wanted: Sequence[Wanted]
) -> list[tuple[Relay, ...]]:
    """Relays that bring each of them to everybody; none at all where copies straight from those who hold it
    are there as soon. Times are from now on."""
    if all(len(each.targets()) < 2 for each in wanted):
        return []
    ledger = open_ledger(network, reserved, 0.0)
    plans: list[tuple[Relay, ...]] = []
    straight: list[Relay] = []
    for each in wanted:
        what = (each.shard, each.version)
        plans.append(
            plan_distribution(
                ledger, each.server, *what, each.size_bytes, dict(each.hosts), 0.0, each.chunk_bytes
            )
        )
        for host in each.targets():
            rate = network.rate(each.server, host)
            straight.append(
                Relay(*what, each.server, host, each.size_bytes, 0.0, 0.0, rate, each.hosts[host], "straight")
            )
    relays = [relay for plan in plans for relay in plan]
    if len(relays) < len(straight):
        return []  # somebody can't be reached
    by_relay = expected_times(network, reserved, relays, max(each.chunk_bytes for each in wanted))
    directly = expected_times(network, reserved, straight)
    gains = fmean(by_relay) <= WORTH * fmean(directly) and max(by_relay) <= HARDLY_LATER * max(directly)
    return plans if gains else []


def expected_times(
    network: Network, reserved: Iterable[Reserved], copies: Sequence[Relay], chunk_bytes: int = 0
) -> list[float]:
    """When each copy should be there if all begin now and share the links: when the busiest link on its way
    from the server is done, and a chunk after the copy it is made from. Those come first."""
    load: dict[Link, float] = defaultdict(float)
    for moving in reserved:
        if moving.source in network.hosts and moving.target in network.hosts:
            for link in network.path(moving.source, moving.target):
                load[link] += moving.remaining_bytes
    for copy in copies:
        for link in network.path(copy.source, copy.target):
            load[link] += copy.size_bytes
    times: list[float] = []
    busiest: dict[tuple[int, str], tuple[float, float]] = {}  # (shard, host) -> (link time, time of stages)
    for copy in copies:
        links_s = max(load[link] / network.capacity(link) for link in network.path(copy.source, copy.target))
        stages_s = 0.0
        if (above := busiest.get((copy.shard, copy.source))) is not None:
            links_s = max(links_s, above[0])
            stages_s = above[1] + HOP_S + min(chunk_bytes, copy.size_bytes) / copy.rate_bytes_per_s
        busiest[copy.shard, copy.target] = (links_s, stages_s)
        times.append(links_s + stages_s)
    return times


def plan_distribution(
    ledger: Ledger,
    server: str,
    shard: int,
    version: int,
    size_bytes: int,
    wanted: dict[str, tuple[str, ...]],
    now_s: float,
    chunk_bytes: int | None = None,
) -> tuple[Relay, ...]:
    """Transfers that bring one version of one shard to all hosts that want it, in order of start."""
    hosts = ledger.network.hosts
    targets = sorted(
        (name for name in wanted if name != server and name in hosts),
        key=lambda name: (-min(hosts[name].up_bytes_per_s, hosts[name].down_bytes_per_s), name),
    )
    if chunk_bytes is not None and len(targets) > 1:
        return _relay_in_chain(
            ledger, server, shard, version, size_bytes, wanted, targets, now_s, chunk_bytes
        )
    relays = []
    holders: list[tuple[float, str]] = [(now_s, server)]  # when each has it
    for target in _one_per_rack_first(ledger, server, targets):
        near = [
            h for h in holders if hosts[h[1]].rack == hosts[target].rack and hosts[target].rack is not None
        ]
        tried = sorted(near or holders)[:SOURCES_TRIED]
        finish_s, ready_s, source = min(
            (ledger.finish(ledger.path(source, target), size_bytes, ready_s), ready_s, source)
            for ready_s, source in tried
        )
        if finish_s == INF:
            continue
        booking = ledger.reserve(ledger.path(source, target), size_bytes, ready_s)
        holders.append((booking.finish_s, target))
        who = "the server" if source == server else f"{source}, which has it by then,"
        lasts = booking.finish_s - booking.start_s
        relays.append(
            Relay(
                shard,
                version,
                source,
                target,
                size_bytes,
                booking.start_s,
                booking.finish_s,
                size_bytes / lasts if lasts > 0 else INF,
                wanted[target],
                f"{who} is the first that can bring it, in {format_time(booking.finish_s - now_s)}",
            )
        )
        # A holder's uplink is taken until the copy is out; it is tried again from then on.
        holders[holders.index((ready_s, source))] = (booking.finish_s, source)
    return tuple(sorted(relays, key=lambda relay: (relay.start_s, relay.finish_s, relay.target)))


def _one_per_rack_first(ledger: Ledger, server: str, targets: Sequence[str]) -> list[str]:
    """The fastest of each other rack, then everybody else; order kept."""
    hosts = ledger.network.hosts
    entered = {hosts[server].rack}
    first = []
    for name in targets:
        rack = hosts[name].rack
        if rack is not None and rack not in entered:
            entered.add(rack)
            first.append(name)
    return [*first, *(name for name in targets if name not in set(first))]


def _relay_in_chain(
    ledger: Ledger,
    server: str,
    shard: int,
    version: int,
    size_bytes: int,
    wanted: dict[str, tuple[str, ...]],
    targets: Sequence[str],
    now_s: float,
    chunk_bytes: int,
) -> tuple[Relay, ...]:
    """Each host passes every chunk on as it comes: fast ones first, those of like speed rack by rack.

    A host can't pass on faster than it gets, so rates only fall along the chain.
    """
    hosts = ledger.network.hosts
    speed = {t: min(hosts[t].up_bytes_per_s, hosts[t].down_bytes_per_s) for t in targets}
    fastest = max(speed.values())

    def place(target: str) -> tuple[float, bool, str, float, str]:
        slowness = math.floor(math.log2(fastest / speed[target])) if speed[target] > 0 else INF
        rack = hosts[target].rack
        return slowness, rack != hosts[server].rack, rack or "", -speed[target], target

    order = sorted(targets, key=place)
    relays = []
    source, begin_s, pace = server, now_s, INF
    for target in order:
        path = ledger.path(source, target)
        rate = snap_rate(min([pace, *(stairs.capacity for stairs in path)]))
        if rate <= 0:
            continue
        begin_s, rate = _earliest(ledger, path, rate, size_bytes, begin_s)
        booking = ledger.hold(path, rate, begin_s, begin_s + size_bytes / rate)
        relays.append(
            Relay(
                shard,
                version,
                source,
                target,
                size_bytes,
                booking.start_s,
                booking.finish_s,
                rate,
                wanted[target],
                f"passed on chunk by chunk by {source}, there in {format_time(booking.finish_s - now_s)}",
            )
        )
        source, pace = target, rate
        begin_s += min(chunk_bytes, size_bytes) / rate
    return tuple(relays)


def _earliest(
    ledger: Ledger, path: Path, rate: float, size_bytes: int, start_s: float
) -> tuple[float, float]:
    """The start and rate that finish first, at the full rate or at half of it beside others."""
    options = []
    for slower in (rate, snap_rate(rate / 2)):
        if slower > 0:
            begin_s = ledger.fit(path, [slower] * len(path), size_bytes / slower, start_s)
            options.append((begin_s + size_bytes / slower, begin_s, slower))
    _, begin_s, chosen = min(options)
    return begin_s, chosen
