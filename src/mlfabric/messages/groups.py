"""Groups of workers and the standing plans of their collective operations."""

from __future__ import annotations

from mlfabric.messages.words import Message


class GroupWanted(Message, frozen=True):
    """A node wants to be in a group; no nodes: of all workers of its job."""

    name: str
    nodes: tuple[str, ...] = ()  # in rank order


class GroupFormed(Message, frozen=True):
    number: int
    name: str
    nodes: tuple[str, ...]  # in rank order


class GroupPending(Message, frozen=True):
    """To those who wait: who has not come yet."""

    name: str
    missing: tuple[str, ...]


class GroupFailed(Message, frozen=True):
    name: str
    reason: str


class SharesPlanned(Message, frozen=True):
    """Who sums and distributes which share of a group's operations, from the first that all have it for."""

    group: int
    plan: int
    reduces: tuple[float, ...]  # by rank
    broadcasts: tuple[float, ...]
    gathers: tuple[float, ...]
    domains: tuple[tuple[int, ...], ...]
    chunk_bytes: int
    predicted_s: float
    reason: str


class GroupHeld(Message, frozen=True):
    """To a new scheduler: a group this node is in, and the newest shares it has of it."""

    number: int
    name: str
    nodes: tuple[str, ...]
    shares: SharesPlanned
