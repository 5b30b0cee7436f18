"""A worker fetches the model."""

from __future__ import annotations

from mlfabric.messages.words import Message


class PullWanted(Message, frozen=True):
    pull: str
    with_state: bool = False
    first: bool = False  # it has no model yet and has offered nothing; a replica's, a little older, will do
    clock: int = -1  # updates of the worker that have an outcome; -1: it takes no part in the steps
    after: int = 0  # the version that the model must have reached for the next step
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
