"""An update from its offer to its outcome."""

from __future__ import annotations

import msgspec

from mlfabric.messages.words import Message, Version


class OfferUpdate(Message, frozen=True):
    update: str
    size_bytes: int
    bases: tuple[Version, ...]  # per shard, of the model it was computed from
    norm: float
    floor: int  # this worker's updates below are settled and durable
    shards: tuple[int, ...]  # parts still wanted: all, or those a fail-over left open
    again: str = ""  # why it is offered again


class PartRoute(msgspec.Struct, frozen=True):
    shard: int
    node: str
    role: str
    rate_bytes_per_s: float
    start_in_s: float
    epoch: int
    group: str | None = None
    term: int = 0  # of the scheduler who granted it


class Grant(Message, frozen=True):
    update: str
    number: int
    weight: float
    parts: tuple[PartRoute, ...]
    reason: str


class TransferRefused(Message, frozen=True):
    """To whoever sends bulk bytes: they are not wanted, stop."""

    transfer: str
    reason: str


class DropUpdate(Message, frozen=True):
    update: str
    reason: str
    late: bool = False  # after its grant


class OfferAgain(Message, frozen=True):
    update: str
    shards: tuple[int, ...]
    reason: str


class MemberUpdate(msgspec.Struct, frozen=True):
    """One update inside a slot or an aggregate."""

    update: str
    worker: str  # node to answer
    base: Version  # for the shard in question
    floor: int


class Slot(msgspec.Struct, frozen=True):
    """A place in the order of application: one update, or a group that arrives as one."""

    number: int  # of the first member; members have consecutive numbers
    members: tuple[MemberUpdate, ...]
    group: str | None
    lease_s: float  # how long it may stay away, from when the server hears of it


class Sequence(Message, frozen=True):
    """To a server: apply in this order."""

    shard: int
    epoch: int
    slots: tuple[Slot, ...]
    max_delay: int | None


class GatherGroup(Message, frozen=True):
    """To an aggregator: sum these updates and forward the sum."""

    group: str
    shard: int
    epoch: int
    members: tuple[MemberUpdate, ...]
    server: str  # node
    rate_bytes_per_s: float
    forward_in_s: float  # at the latest, with what is there
    reason: str
    term: int = 0


class LeaveOut(Message, frozen=True):
    """To an aggregator: this member will not come."""

    group: str
    update: str
    reason: str


class LeftOut(Message, frozen=True):
    """From an aggregator: forwarded (or given up) without these."""

    group: str
    shard: int
    updates: tuple[str, ...]
    reason: str


class JudgeUpdate(Message, frozen=True):
    """To a server: is this update, which was offered again and would be dropped, in the model already?"""

    shard: int
    member: MemberUpdate


class NotApplied(Message, frozen=True):
    """A server's answer; where it is applied, its worker and the scheduler hear that instead."""

    shard: int
    update: str


class UpdateApplied(Message, frozen=True):
    """A server's acknowledgement to a worker."""

    update: str
    shard: int
    version: Version
    delay_updates: int
    durable: Version | None  # what the replica holds; None: there is no replica


class UpdateRefused(Message, frozen=True):
    """A server's word that it will not apply what it was sent."""

    update: str
    shard: int
    reason: str


class AppliedReport(Message, frozen=True):
    """A server's account to the scheduler after each message it applied."""

    shard: int
    epoch: int
    version: int
    updates: tuple[str, ...]
    divergence: float  # relative, after this step
    replica_version: int | None


class SlotLate(Message, frozen=True):
    shard: int
    number: int
    silent_s: float


class WithdrawSlot(Message, frozen=True):
    """To a server: give up this number unless it is complete or applied."""

    number: int
    reason: str


class SlotWithdrawn(Message, frozen=True):
    shard: int
    epoch: int
    number: int
    withdrawn: bool
    waiting: bool = False  # not given up: it is complete and its turn will come


class SettleSlot(Message, frozen=True):
    """To a server, after a withdrawal was asked: give the number up or keep it. `final`: its updates are
    dropped for good, so that bytes of theirs that still come are refused."""

    number: int
    dropped: bool
    final: bool = False


class DurableWanted(Message, frozen=True):
    update: str
    shard: int


class UpdateDurable(Message, frozen=True):
    update: str
    shard: int
