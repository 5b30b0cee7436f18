"""A worker fetches the model."""

from __future__ import annotations

import msgspec

from mlfabric.messages.words import Message


class PullWanted(Message, frozen=True):
    pull: str
    with_state: bool = False
    first: bool = False  # it has no model yet and has offered nothing; a replica's, a little older, will do
    clock: int = -1  # updates of the worker that have an outcome; -1: it takes no part in the steps
    after: int = 0  # the version that the model must have reached for the next step
    shards: tuple[int, ...] = ()  # only these; none: all


class Hop(msgspec.Struct, frozen=True):
    """Somebody who gets the same bytes from a receiver, as they come."""

    pull: str
    node: str
    rate_bytes_per_s: float
    depth: int = 0  # 0: from the receiver itself; else from the nearest hop before it that is one less deep
    attempt: int = 0


class ServePull(Message, frozen=True):
    pull: str
    node: str
    shard: int
    rate_bytes_per_s: float
    with_state: bool
    after_number: int | None = None  # a checkpoint: exactly the state after this number
    onward: tuple[Hop, ...] = ()  # who gets it from there
    chunk_bytes: int = 0  # to cut it into where it is passed on
    attempt: int = 0  # its number, for whoever hears how it went


class PullServed(Message, frozen=True):
    """Whoever sent these bytes to the scheduler: they are on their way no more."""

    pull: str
    shard: int
    failed: bool = False  # and will not arrive
    attempt: int = 0


class PullFailed(Message, frozen=True):
    pull: str
    reason: str


def split_onward(onward: tuple[Hop, ...]) -> list[tuple[Hop, tuple[Hop, ...]]]:
    """Those that a receiver sends to, each with who gets it from there."""
    branches: list[tuple[Hop, list[Hop]]] = []
    for hop in onward:
        if hop.depth == 0:
            branches.append((hop, []))
        elif branches:
            branches[-1][1].append(msgspec.structs.replace(hop, depth=hop.depth - 1))
    return [(hop, tuple(below)) for hop, below in branches]
