"""Chains by speed class: hosts of like speed hand the growing sum on, chunk by chunk.

A slow member slows its whole chain, so a chain holds hosts of one class, fast classes first. Within a class
hosts of one rack stand side by side, so a rack's uplink is crossed once. Several chains share a server best
when each is so much longer than the one before that it arrives as that one ends: by size / chunk hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from mlfabric.plan.forest import Cargo, Chain, Node
from mlfabric.plan.reservation import Ledger

# Hosts whose rates differ by less than this factor are of like speed.
CLASS_FACTOR: Final = 2.0
# Chains of one class that are tried.
MOST_CHAINS: Final = 4


def chain_plans(ledger: Ledger, cargo: Cargo, few: bool = False) -> Iterator[list[Node]]:
    """Ways to chain all updates: by class or in two halves or all together, in one chain or several each."""
    if cargo.chunk_bytes is None:
        return
    order, speeds = _by_speed(ledger, cargo)
    if len(order) < 2:
        return
    divisions = [_classes(order, speeds, CLASS_FACTOR)]
    if not few:
        divisions += [_classes(order, speeds, CLASS_FACTOR**2), [order]]
    seen = []
    outside = [i for i in range(len(cargo.hosts)) if i not in speeds]
    for classes in divisions:
        if classes in seen:
            continue
        seen.append(classes)
        for chains in (1, 2) if few else range(1, MOST_CHAINS + 1):
            nodes: list[Node] = list(outside)
            for members in classes:
                nodes += _stagger(cargo, members, chains)
            yield nodes


def _by_speed(ledger: Ledger, cargo: Cargo) -> tuple[list[int], dict[int, float]]:
    """Updates whose hosts may sum: fast first, then by rack, then in order; and their speeds."""
    hosts = ledger.network.hosts
    servers = min(hosts[server].down_bytes_per_s for server in cargo.servers)
    speeds = {}
    for index, name in enumerate(cargo.hosts):
        if name in cargo.aggregators:
            host = hosts[name]
            speed = min(host.up_bytes_per_s, host.down_bytes_per_s, servers)
            if speed > 0:
                speeds[index] = speed
    grade = {index: round(math.log2(speed), 6) for index, speed in speeds.items()}
    return sorted(speeds, key=lambda i: (-grade[i], hosts[cargo.hosts[i]].rack or "", i)), speeds


def _classes(order: Sequence[int], speeds: dict[int, float], factor: float) -> list[list[int]]:
    """Runs of the order in which no host is slower than the first by the factor."""
    classes: list[list[int]] = []
    for index in order:
        if classes and speeds[index] * factor > speeds[classes[-1][0]] * (1 + 1e-9):
            classes[-1].append(index)
        else:
            classes.append([index])
    return classes


def _stagger(cargo: Cargo, members: Sequence[int], chains: int) -> list[Node]:
    """The members as so many chains, each longer than the one before by size / chunk."""
    assert cargo.chunk_bytes is not None
    size = max(max(cargo.parts[index]) for index in members)
    step = min(size // cargo.chunk_bytes, len(members))
    shortest = (len(members) - step * chains * (chains - 1) // 2) // chains
    lengths = [shortest + step * k for k in range(chains)]
    if shortest < 1:
        lengths = [len(members) // chains] * chains
    lengths[-1] = len(members) - sum(lengths[:-1])
    nodes: list[Node] = []
    begin = 0
    for length in lengths:
        run = members[begin : begin + length]
        begin += length
        if len(run) == 1:
            nodes.append(run[0])
        elif run:
            nodes.append(make_chain(cargo, run))
    return nodes


def make_chain(cargo: Cargo, members: Sequence[int]) -> Chain:
    """A chain over the members; each shard begins elsewhere, so that no host is the last one for all."""
    count = len(members)
    shards = len(cargo.servers)
    turns = [shard * count // shards for shard in range(shards)]
    return Chain(tuple((*members[turn:], *members[:turn]) for turn in turns))
