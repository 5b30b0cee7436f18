"""What a training process and its engine's process say to each other. Bulk bytes are named by region."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from mlfabric.config import Settings
from mlfabric.events import (
    DrainRequested,
    DurabilityRequested,
    JoinRequested,
    PublishRequested,
    PullRequested,
    StepCarriedOut,
    TrainingBegun,
    TrainingEnded,
    TrainingReported,
    UpdateSubmitted,
)
from mlfabric.roles.actions import (
    CarryOutStep,
    FailJob,
    GiveUpStep,
    JobBecameReady,
    RefuseNew,
    ResolveDurable,
    ResolveJoin,
    ResolvePublish,
    ResolvePull,
    ResolveUpdate,
)
from mlfabric.runtime.arena import Region

# What the application tells its node, and what it hears from it.
Told = (
    JoinRequested
    | DrainRequested
    | PublishRequested
    | UpdateSubmitted
    | PullRequested
    | DurabilityRequested
    | TrainingBegun
    | TrainingReported
    | StepCarriedOut
    | TrainingEnded
)
Heard = (
    ResolveJoin
    | JobBecameReady
    | ResolvePublish
    | ResolveUpdate
    | ResolveDurable
    | ResolvePull
    | CarryOutStep
    | GiveUpStep
    | RefuseNew
    | FailJob
)


class Record(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What every record derives from."""


def to_plain(settings: Settings) -> dict[str, object]:
    """Settings as values that msgspec knows."""
    fields = dataclasses.asdict(settings)
    return {key: str(value) if isinstance(value, Path) else value for key, value in fields.items()}


def from_plain(plain: dict[str, object]) -> Settings:
    return msgspec.convert(plain, Settings, dec_hook=lambda kind, value: kind(value))


# --- both ways --------------------------------------------------------------------------------------------


class SegmentMade(Record, frozen=True):
    """The sender's arena has grown; the descriptor comes along."""

    number: int
    size_bytes: int


class LoansReturned(Record, frozen=True):
    loans: tuple[int, ...]


# --- to the engine ----------------------------------------------------------------------------------------


class Begin(Record, frozen=True):
    """The first word: who to be. Settings are those of `mlfabric.config`, as plain values."""

    settings: dict[str, object]
    roles: tuple[str, ...]
    timeout_s: float
    log_level: int
    parent: int  # its process
    from_main_thread: bool


class Tell(Record, frozen=True):
    """An event for a role, and the vector it needs, if any."""

    role: str
    event: Told
    buffer: str = ""
    region: Region | None = None
    dtype: str = ""


class Leave(Record, frozen=True):
    pass


class BlockSpec(msgspec.Struct, frozen=True, array_like=True):
    region: Region
    read: bool
    written: bool
    rank: int


class RunCollective(Record, frozen=True):
    number: int
    group: str
    nodes: tuple[str, ...]
    form_again: bool
    operation: str
    dtype: str
    itemsize: int
    combine: str
    root: int
    blocks: tuple[BlockSpec, ...]
    counts: tuple[int, ...] = ()
    mistake: str = ""
    follows: bool = False


class RunSend(Record, frozen=True):
    number: int
    group: str
    nodes: tuple[str, ...]
    to: int
    tag: int
    region: Region


class RunReceive(Record, frozen=True):
    number: int
    group: str
    nodes: tuple[str, ...]
    source: int
    tag: int
    region: Region


class WantGroup(Record, frozen=True):
    number: int
    name: str
    nodes: tuple[str, ...]


class AskWhy(Record, frozen=True):
    """What does call `number` wait for?"""

    question: int
    number: int


class GiveUp(Record, frozen=True):
    number: int
    reason: str


class BreakGroup(Record, frozen=True):
    name: str
    reason: str


class LeaveGroup(Record, frozen=True):
    name: str


class OutliveJob(Record, frozen=True):
    pass


class AskCounts(Record, frozen=True):
    question: int


class Stop(Record, frozen=True):
    linger_s: float


ToEngine = (
    SegmentMade
    | LoansReturned
    | Begin
    | Tell
    | Leave
    | RunCollective
    | RunSend
    | RunReceive
    | WantGroup
    | AskWhy
    | GiveUp
    | BreakGroup
    | LeaveGroup
    | OutliveJob
    | AskCounts
    | Stop
)


# --- to the application -----------------------------------------------------------------------------------


class Begun(Record, frozen=True):
    host: str
    port: int
    leader: str


class NotBegun(Record, frozen=True):
    kind: str  # the name of the error
    reason: str


class Answered(Record, frozen=True):
    """The node's word for the application, with the vectors of a pull."""

    action: Heard
    regions: tuple[Region, ...] = ()
    dtypes: tuple[str, ...] = ()


class CallEnded(Record, frozen=True):
    """A call in a group is over; with what other ranks sent, where nobody knew how much that would be."""

    number: int
    error: str | None = None
    value: int | None = None
    rooms: tuple[tuple[int, Region], ...] = ()


class GroupReady(Record, frozen=True):
    number: int
    group: int
    name: str
    nodes: tuple[str, ...]
    rank: int


class Why(Record, frozen=True):
    question: int
    words: str


class Counts(Record, frozen=True):
    question: int
    sent: dict[str, int]
    received: dict[str, int]
    noticed_s: list[float]
    workers: tuple[str, ...]


class Logged(Record, frozen=True):
    level: int
    text: str


ToApplication = (
    SegmentMade | LoansReturned | Begun | NotBegun | Answered | CallEnded | GroupReady | Why | Counts | Logged
)
