"""A worker fetches the model."""

from __future__ import annotations

from mlfabric.messages.words import Message


class PullWanted(Message, frozen=True):
    pull: str
    with_state: bool = False
    shards: tuple[int, ...] = ()  # only these; none: all


class ServePull(Message, frozen=True):
    pull: str
    node: str
    shard: int
    rate_bytes_per_s: float
    with_state: bool
    after_number: int | None = None  # a checkpoint: exactly the state after this number


class PullServed(Message, frozen=True):
    """A server to the scheduler: these bytes are on their way no more."""

    pull: str
    shard: int


class PullFailed(Message, frozen=True):
    pull: str
    reason: str
