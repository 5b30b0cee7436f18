"""What a role wants done. Roles decide, the driver acts; bulk bytes are named by buffer, never seen.

`Role` is the interface that both drivers and the replay of logs use.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from mlfabric.events import Event
from mlfabric.messages import (
    AppliedIds,
    ArraySpec,
    ControlMessage,
    JobSettings,
    MemberInfo,
    RuleSpec,
    ShardRange,
    SharesPlanned,
    StepCalled,
    StepSettings,
    TransferAbout,
    Version,
)


class Action(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What every action derives from; actions are named in the imperative."""


class Role(Protocol):
    def handle(self, event: Event, now: float) -> list[Action]: ...

    def next_deadline(self) -> float | None: ...

    def statistics(self) -> msgspec.Struct: ...

    def validate(self) -> None:
        """Raise AssertionError where the role's state contradicts itself."""
        ...


class Send(Action, frozen=True):
    node: str
    role: str
    message: ControlMessage


class StartTransfer(Action, frozen=True):
    """Send these ranges (first element, elements) of a buffer, one after the other, multiplied by `scale`."""

    transfer: str
    node: str
    role: str
    buffer: str
    about: TransferAbout
    rate_bytes_per_s: float | None = None
    ranges: tuple[tuple[int, int], ...] = ()  # none: the whole buffer
    scale: float = 1.0
    codec: str = ""  # of `mlfabric.codecs`; none: as the buffer is
    chunk_bytes: int = 0  # to cut it into, where that matters to whoever gets it; 0: as suits the driver


class CancelTransfer(Action, frozen=True):
    transfer: str
    reason: str


class PassOn(msgspec.Struct, frozen=True):
    """A transfer that sends on what another one brings, chunk by chunk as it comes."""

    transfer: str
    node: str
    role: str
    about: TransferAbout
    rate_bytes_per_s: float
    chunk_bytes: int


class AcceptTransfer(Action, frozen=True):
    """Receive into a new buffer of this name, or in place into an existing one from `start` on."""

    transfer: str
    buffer: str
    start: int | None = None
    onward: tuple[PassOn, ...] = ()


class RefuseTransfer(Action, frozen=True):
    transfer: str
    reason: str


class AddInto(Action, frozen=True):
    """target += source; a missing target becomes the source."""

    target: str
    source: str


class FreeBuffer(Action, frozen=True):
    buffer: str


class CreateShard(Action, frozen=True):
    """Make the store of a shard; its values come from a buffer, or are zero until it is filled."""

    shard: ShardRange
    rule: RuleSpec
    dtype: str


class FillShard(Action, frozen=True):
    """The shard's values (and optimizer state) become the buffer's, at once."""

    shard: int
    buffer: str
    with_state: bool
    version: int


class MeasureStep(Action, frozen=True):
    """Compute the step of this gradient sum and stage it; answered by StepMeasured. An empty buffer name
    measures the staged step again."""

    shard: int
    buffer: str
    weight: float  # W, the sum of the members' weights
    members: int  # k
    settings: StepSettings | None = None  # None: as published


class CommitStep(Action, frozen=True):
    """The staged step becomes visible."""

    shard: int


class SnapshotShard(Action, frozen=True):
    """Copy the shard's values, with the staged step where asked, and optimizer state into a buffer."""

    shard: int
    buffer: str
    with_state: bool
    with_staged: bool = False
    for_replica: bool = False  # divergence is measured against it too while it is on its way


class DumpShard(Action, frozen=True):
    """Keep a copy of the shard's weights under this label, where the node keeps files."""

    shard: int
    label: str


class MarkReplicaImage(Action, frozen=True):
    """The replica now holds what this snapshot holds; None: there is no replica to compare with."""

    shard: int
    buffer: str | None


class StartRole(Action, frozen=True):
    """Begin another role on this node."""

    role: str
    settings: Any


class StopRole(Action, frozen=True):
    """End a role on this node."""

    role: str


class FollowScheduler(Action, frozen=True):
    """From now on this node takes orders from there; its roles tell it what they hold."""

    scheduler: str
    term: int


class RenewLease(Action, frozen=True):
    """The shards led here may acknowledge until then."""

    until_s: float


class ResolveJoin(Action, frozen=True):
    label: str
    error: str | None = None


class ResolvePublish(Action, frozen=True):
    error: str | None = None


class JobBecameReady(Action, frozen=True):
    """Tell the application what it trains: arrays, shards and rule."""

    arrays: tuple[ArraySpec, ...]
    shards: tuple[ShardRange, ...]
    settings: JobSettings
    rule: RuleSpec


class ResolveUpdate(Action, frozen=True):
    """The outcome of an update: committed with version and delay, or dropped with a reason."""

    update: str
    committed: bool
    version: Version | None = None
    delay_updates: int = 0
    reason: str = ""
    lost: bool = False  # a committed update did not survive a fail-over
    late: bool = False


class ResolveDurable(Action, frozen=True):
    update: str
    error: str | None = None


class ResolvePull(Action, frozen=True):
    pull: str
    versions: tuple[Version, ...] = ()
    error: str | None = None
    lent: bool = False  # others still get their bytes from here: who wants to change them makes a copy


class FormGroup(Action, frozen=True):
    """Have a group of nodes and links to all of them."""

    number: int
    name: str
    nodes: tuple[str, ...]


class AdoptShares(Action, frozen=True):
    """Use these shares from the first operation that everybody has them for."""

    shares: SharesPlanned


class ResolveGroup(Action, frozen=True):
    name: str
    number: int
    nodes: tuple[str, ...] = ()
    error: str | None = None


class GroupWaits(Action, frozen=True):
    """Tell the application whom its group waits for."""

    name: str
    missing: tuple[str, ...]


class CarryOutStep(Action, frozen=True):
    """Have the application take part in a step."""

    call: StepCalled


class GiveUpStep(Action, frozen=True):
    """A step that the application may be at will not end."""

    group: str
    reason: str


class ProbeLinks(Action, frozen=True):
    """See how fast this host's links are, with a few bytes to and from these peers; none: not any more."""

    peers: tuple[str, ...]


class LimitSending(Action, frozen=True):
    """Let this process send no more payload bytes per second, over all its connections; None: no limit."""

    bytes_per_s: float | None


class FailJob(Action, frozen=True):
    """Nothing more will come of this job; pending waits end with this sentence."""

    reason: str


class RefuseNew(Action, frozen=True):
    """New calls end with this sentence; what is pending goes on."""

    reason: str


class Note(Action, frozen=True):
    """A decision worth telling, with its reason; it changes nothing outside the log."""

    what: str  # short past-tense name: "placed", "grouped", "withheld", ...
    reason: str
    updates: tuple[str, ...] = ()
    loud: bool = False  # also a warning in the process's log
    value: float | None = None
    shards: tuple[int, ...] = ()  # that it is about: which lost the updates, or had applied them


class ServerSettings(msgspec.Struct, frozen=True):
    """How a server begins; after a promotion with what its replica held."""

    shard: ShardRange
    rule: RuleSpec
    settings: JobSettings
    scheduler: str
    dtype: str
    version: int = 0
    applied: AppliedIds = AppliedIds()
    fail_overs: tuple[Version, ...] = ()  # (epoch, count at which it began)
    promoted: bool = False
    state_version: int = 0


class WorkerSettings(msgspec.Struct, frozen=True):
    node: str
    label: str
    scheduler: str


class MemberSettings(msgspec.Struct, frozen=True):
    member: MemberInfo
    scheduler: str
    expected: int = 0


class SchedulerSettings(msgspec.Struct, frozen=True):
    """How a scheduler begins: the first with nothing, a later one with those it waits to hear from."""

    node: str
    term: int = 0
    serial: int = 0
    awaited: tuple[str, ...] = ()
    wait_s: float = 0.0
    least_lease_s: float = 0.0  # silence shorter than this is never taken for death
    silent: tuple[str, ...] = ()  # given up by the majority that voted; not waited for
    orderly: bool = False  # the one before left by itself: perhaps the job ends, and all leave


class ReplicaSettings(msgspec.Struct, frozen=True):
    shard: ShardRange
    rule: RuleSpec
    settings: JobSettings
    scheduler: str
    dtype: str
