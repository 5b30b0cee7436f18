"""How the model travels to those who asked for it: pulls of one version share transfers, receivers relay.

Everybody who wants the same shard at the same version gets it down one tree. A host that has it passes it on,
so the number of sources doubles with every transfer time instead of all queueing at the server's uplink. Who
relays is decided by who could: fast uplinks are served first. One copy enters a rack, the others come from
inside. With chunks forwarded as they come, the tree is a chain that costs little more than one transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mlfabric.plan.reservation import Ledger
from mlfabric.plan.staircase import INF, Path, snap_rate
from mlfabric.units import format_time

# Sources looked at for each receiver: those that are ready first.
SOURCES_TRIED: Final = 6


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
    """Each host passes every chunk on as it comes: fast ones first, side by side within a rack.

    A host can't pass on faster than it gets, so rates only fall along the chain.
    """
    hosts = ledger.network.hosts
    speed = {t: min(hosts[t].up_bytes_per_s, hosts[t].down_bytes_per_s) for t in targets}
    order = sorted(targets, key=lambda t: (-speed[t], hosts[t].rack or "", t))
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
