"""Headers of bulk transfers: what the bytes that follow are about."""

from __future__ import annotations

import msgspec

from mlfabric.messages.pulls import Hop
from mlfabric.messages.updates import MemberUpdate
from mlfabric.messages.words import AppliedIds, Message, StepSettings, Version


class UpdatePart(Message, frozen=True):
    update: str
    shard: int
    epoch: int
    weight: float
    group: str | None = None
    term: int = 0
    settings: StepSettings | None = None  # None: as published


class Aggregate(Message, frozen=True):
    group: str
    shard: int
    epoch: int
    members: tuple[MemberUpdate, ...]
    weight: float  # sum of the members' weights
    term: int = 0
    settings: StepSettings | None = None  # the newest of its members'


class ModelPart(Message, frozen=True):
    pull: str
    shard: int
    version: Version
    with_state: bool = False
    onward: tuple[Hop, ...] = ()  # to whom the receiver passes it on
    chunk_bytes: int = 0


class InitialPart(Message, frozen=True):
    shard: int
    version: int
    with_state: bool = False


class ReplicaPart(Message, frozen=True):
    shard: int
    epoch: int
    version: int
    applied: AppliedIds
    with_state: bool
    state_version: int
    fail_overs: tuple[Version, ...] = ()  # where each epoch began


TransferAbout = UpdatePart | Aggregate | ModelPart | InitialPart | ReplicaPart


class TransferHeader(msgspec.Struct, frozen=True):
    """Announces bulk bytes: what they are about, how many, for which role."""

    transfer: str
    role: str
    size_bytes: int
    dtype: str
    about: TransferAbout
    cause: str = ""
