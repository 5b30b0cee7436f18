"""What members of a fabric tell each other: small typed records, and the headers of bulk transfers.

Control messages are msgspec structs with a tag, never pickles. Bulk bytes follow a `TransferHeader` and go
from buffer to buffer; their header says what they are about. Names used throughout:

- node: one process of the fabric, unique by name; host: the machine it runs on, owner of links;
- update: "w0#12", the twelfth update of worker w0; number: its place in the job's order of application;
- shard: a contiguous range of the model's elements with one leader (a server) and perhaps a replica;
- version: (epoch, count), count the updates applied, epoch raised by every fail-over of the shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

# What a member may be used for.
MEMBER_ROLES: Final = ("worker", "aggregator", "server", "replica")
# Stands for whoever schedules now; each node knows who that is, and only its member role asks.
SCHEDULER: Final = "@scheduler"


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What every record on the wire derives from; its tag is the class name."""


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    epoch: int
    count: int

    def __str__(self) -> str:
        return str(self.count) if self.epoch == 0 else f"{self.epoch}:{self.count}"


def count_at(base: Version, fail_overs: Iterable[Version]) -> int:
    """The count an update was computed from; what a later fail-over undid counts as where it began."""
    return min((base.count, *(start.count for start in fail_overs if start.epoch > base.epoch)))


class ShardRange(msgspec.Struct, frozen=True):
    """One shard as workers see it: which elements, who leads, since which epoch."""

    index: int
    start: int  # first element
    count: int  # elements
    leader: str  # node
    epoch: int = 0
    replica: str | None = None  # node


class JobSettings(msgspec.Struct, frozen=True):
    """How a job wants its updates treated; the publisher's count for everybody."""

    max_delay: int | None = None  # None: chosen from the number of workers ("auto")
    unbounded: bool = False  # no delay bound at all
    divergence: float | None = None  # None: no replica
    shards: int = 1
    in_flight: int = 1
    aggregate: bool = True
    weigh: bool = True  # updates that are very late count less
    policy: str = "mlfabric"
    codec: str = "float32"  # how updates travel from workers


class ArraySpec(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str


class RulePiece(msgspec.Struct, frozen=True):
    """The rule of some elements of a model."""

    start: int
    stop: int
    name: str
    settings: dict[str, bool | int | float] = {}


class RuleSpec(msgspec.Struct, frozen=True):
    """The rule a server applies updates by: a name of `mlfabric.rules` and plain settings."""

    name: str
    settings: dict[str, bool | int | float] = {}
    pieces: tuple[RulePiece, ...] = ()  # of the rule "Pieces"


# --- membership -------------------------------------------------------------------------------------------


class MemberInfo(msgspec.Struct, frozen=True):
    node: str
    host: str
    address: str  # "ip:port", empty in the simulator
    roles: tuple[str, ...]  # of MEMBER_ROLES
    up_bytes_per_s: float
    down_bytes_per_s: float
    job: str = "job"
    rack: str | None = None
    rates_guessed: bool = False  # nobody said how fast its links are


class Join(Message, frozen=True):
    member: MemberInfo
    expected: int = 0  # nodes the job is known to have; 0: unknown


class JoinAccepted(Message, frozen=True):
    label: str  # the worker's name in update ids; a second life of a name gets another one
    scheduler: str
    lease_s: float = 3.0


class JoinRefused(Message, frozen=True):
    reason: str


class Members(Message, frozen=True):
    """Everybody there is in the job, after a change, in the order in which they would come to schedule."""

    members: tuple[MemberInfo, ...]
    term: int = 0  # of the scheduler who says so
    serial: int = 0  # rises with every change


class Leave(Message, frozen=True):
    node: str


class Heartbeat(Message, frozen=True):
    sent_s: float  # sender's clock
    attempt: int = 0  # how often the sender has registered so far


class HeartbeatSeen(Message, frozen=True):
    """The sender counts as alive for `lease_s` from then on, and may count on the scheduler as long."""

    sent_s: float
    seen_s: float  # scheduler's clock
    term: int = 0
    lease_s: float = 3.0


class RatesLearned(Message, frozen=True):
    """A host's rates as its own transfers showed them, in payload bytes per second."""

    up_bytes_per_s: float | None  # None: nothing was learned of it
    down_bytes_per_s: float | None


class FlowRate(msgspec.Struct, frozen=True, array_like=True):
    node: str  # it goes to
    bytes_per_s: float | None  # payload; zero: it has ended; None: it has just begun
    limited: bool  # by the network


class FlowsSeen(Message, frozen=True):
    """How fast the sender's bulk transfers go, for the scheduler to find out which links hold them back."""

    flows: tuple[FlowRate, ...]


# Why a node is gone that said good-bye; its connections end by themselves, after what they still carry.
LEFT = "it left"


class NodeLost(Message, frozen=True):
    """The scheduler's word that a node is gone, for those without a connection to it."""

    node: str
    reason: str


# --- succession of the scheduler --------------------------------------------------------------------------


class VoteWanted(Message, frozen=True):
    """A member that hears no scheduler offers itself for this term."""

    term: int
    serial: int  # of the last change of members it has heard of


class VoteGiven(Message, frozen=True):
    term: int
    granted: bool
    reason: str
    known_term: int  # whom the voter follows, so that who missed an election hears of it
    scheduler: str
    highest: int  # the highest term it follows or has voted in


class NewTerm(Message, frozen=True):
    """A majority has voted: this node schedules from now on."""

    term: int
    scheduler: str


class Register(Message, frozen=True):
    """To a new scheduler, or one that had given us up: a member with a label already. Its roles tell what
    they hold; `Reported` ends that."""

    member: MemberInfo
    label: str
    attempt: int
    expected: int = 0


class Reported(Message, frozen=True):
    term: int


class Rejoin(Message, frozen=True):
    """To a node that counts itself a member and is none: register again, unless it has since."""

    attempt: int  # the last the scheduler has heard of
    reason: str


class DrainBegun(Message, frozen=True):
    """To a member: take on nothing new; you leave once nothing needs you."""

    reason: str


class StepDown(Message, frozen=True):
    """To a member: this role of yours has passed to somebody else."""

    role: str
    reason: str


# --- asked by people --------------------------------------------------------------------------------------


class StatusWanted(Message, frozen=True):
    pass


class MemberStatus(msgspec.Struct, frozen=True):
    node: str
    host: str
    address: str
    job: str
    roles: tuple[str, ...]  # what it may be used for
    leads: tuple[int, ...]  # shards
    follows: tuple[int, ...]
    up_bytes_per_s: float  # as the planner sees its host
    down_bytes_per_s: float
    lease_s: float
    silent_s: float
    draining: str  # why, while it is


class ShardStatus(msgspec.Struct, frozen=True):
    index: int
    leader: str
    epoch: int
    version: int
    replica: str | None
    replica_filled: bool
    undurable: int  # updates applied and not yet at the replica


class JobStatus(msgspec.Struct, frozen=True):
    name: str
    members: int
    ready: bool
    failed: str | None
    shards: tuple[ShardStatus, ...]
    waiting: int  # updates offered
    granted: int  # and on their way
    applied: int  # in all
    dropped: int
    applied_per_s: float  # over the last ten seconds


class StatusReport(Message, frozen=True):
    scheduler: str
    term: int
    now_s: float  # the scheduler's clock
    undecided: bool  # it waits for reports
    members: tuple[MemberStatus, ...]
    jobs: tuple[JobStatus, ...]


class DrainWanted(Message, frozen=True):
    target: str  # a host or a node
    job: str | None = None  # of this job only


class DrainAnswered(Message, frozen=True):
    nodes: tuple[str, ...]
    error: str = ""


# --- the model --------------------------------------------------------------------------------------------


class PublishWanted(Message, frozen=True):
    arrays: tuple[ArraySpec, ...]
    rule: RuleSpec
    settings: JobSettings
    elements: int
    dtype: str
    state_vectors: int = 0  # optimizer vectors that come along, when a checkpoint is resumed
    version: int = 0


class PublishFirst(Message, frozen=True):
    """To the first caller: send the initial values of these shards to their leaders."""

    shards: tuple[ShardRange, ...]


class PublishRefused(Message, frozen=True):
    reason: str


class JobReady(Message, frozen=True):
    """The model is in place; training may begin."""

    shards: tuple[ShardRange, ...]
    arrays: tuple[ArraySpec, ...]
    rule: RuleSpec
    settings: JobSettings
    dtype: str  # of the model as one vector
    version: int = 0  # of the values that were published


class JobKnown(Message, frozen=True):
    """A worker to a new scheduler: the job as it has heard of it."""

    ready: JobReady


class LeadShard(Message, frozen=True):
    """To a node: be the server of this shard; its values follow, or are there already after a promotion."""

    shard: ShardRange
    rule: RuleSpec
    settings: JobSettings
    dtype: str
    scheduler: str


class FollowShard(Message, frozen=True):
    """To a node: be the replica of this shard."""

    shard: ShardRange
    rule: RuleSpec
    settings: JobSettings
    dtype: str
    scheduler: str


class ReplicaAssigned(Message, frozen=True):
    """To a leader: this node follows from now on; None: the replica is gone."""

    shard: int
    replica: str | None
    reason: str = ""
    orderly: bool = False  # it left by itself


class ShardReady(Message, frozen=True):
    shard: int
    epoch: int
    replica_filled: bool


class Promote(Message, frozen=True):
    shard: int
    epoch: int
    reason: str


class YieldLead(Message, frozen=True):
    """To a leader: bring your replica level, optimizer state included, and say so; it leads then."""

    shard: int
    reason: str


class LeadYielded(Message, frozen=True):
    shard: int
    epoch: int
    version: int


class AppliedIds(msgspec.Struct, frozen=True):
    """Per worker: all below `floor` are settled; of those above, exactly the listed are applied."""

    floor: dict[str, int] = {}
    above: dict[str, tuple[int, ...]] = {}


class Promoted(Message, frozen=True):
    shard: int
    epoch: int
    version: int
    applied: AppliedIds
    state_version: int


class ShardReport(Message, frozen=True):
    """A leader to a new scheduler. What had been granted and not applied is forgotten here."""

    shard: ShardRange
    version: int
    applied: AppliedIds
    fail_overs: tuple[Version, ...]
    replica: str | None
    replica_version: int | None


class ReplicaReport(Message, frozen=True):
    shard: int
    epoch: int
    version: int  # -1: not filled
    state_version: int


class LeaderChanged(Message, frozen=True):
    """To all: the shard has a new leader. `applied` tells each worker which of its updates survived."""

    shard: ShardRange
    version: int
    applied: AppliedIds
    reason: str


class JobFailed(Message, frozen=True):
    reason: str


# --- updates ----------------------------------------------------------------------------------------------


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


class Replicate(Message, frozen=True):
    """To a server: spare capacity, bring the replica up to date now."""

    shard: int
    rate_bytes_per_s: float
    reason: str


class ReplicaHas(Message, frozen=True):
    shard: int
    epoch: int
    version: int
    state_version: int


class DurableWanted(Message, frozen=True):
    update: str
    shard: int


class UpdateDurable(Message, frozen=True):
    update: str
    shard: int


# --- pulls ------------------------------------------------------------------------------------------------


class PullWanted(Message, frozen=True):
    pull: str
    with_state: bool = False


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


# --- groups -----------------------------------------------------------------------------------------------


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


# --- bulk transfers ---------------------------------------------------------------------------------------


class UpdatePart(Message, frozen=True):
    update: str
    shard: int
    epoch: int
    weight: float
    group: str | None = None
    term: int = 0


class Aggregate(Message, frozen=True):
    group: str
    shard: int
    epoch: int
    members: tuple[MemberUpdate, ...]
    weight: float  # sum of the members' weights
    term: int = 0


class ModelPart(Message, frozen=True):
    pull: str
    shard: int
    version: Version
    with_state: bool = False


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


ControlMessage = (
    Join | JoinAccepted | JoinRefused | Members | Leave | Heartbeat | HeartbeatSeen | NodeLost
    | RatesLearned
    | FlowsSeen
    | VoteWanted | VoteGiven | NewTerm | Register | Reported | Rejoin | StepDown
    | DrainBegun | YieldLead | LeadYielded | StatusWanted | StatusReport | DrainWanted | DrainAnswered
    | JobKnown | ShardReport | ReplicaReport
    | PublishWanted | PublishFirst | PublishRefused | JobReady | LeadShard | FollowShard | ReplicaAssigned
    | ShardReady | Promote | Promoted | LeaderChanged | JobFailed
    | TransferRefused | OfferUpdate | Grant | DropUpdate | OfferAgain | Sequence
    | GatherGroup | LeaveOut | LeftOut
    | JudgeUpdate | NotApplied
    | UpdateApplied | UpdateRefused | AppliedReport | SlotLate | WithdrawSlot | SlotWithdrawn | SettleSlot
    | Replicate | ReplicaHas | DurableWanted | UpdateDurable
    | PullWanted | ServePull | PullServed | PullFailed
    | GroupWanted | GroupFormed | GroupPending | GroupFailed | GroupHeld | SharesPlanned
)  # fmt: skip


# What only the scheduler says. A node takes it from the scheduler it follows and from nobody else.
ORDERS: Final = (
    JoinAccepted, JoinRefused, Members, HeartbeatSeen, NodeLost, Rejoin, StepDown,
    DrainBegun, YieldLead,
    PublishFirst, PublishRefused, JobReady, LeadShard, FollowShard, ReplicaAssigned, Promote, LeaderChanged,
    JobFailed, Grant, JudgeUpdate, DropUpdate, OfferAgain, Sequence, GatherGroup, LeaveOut, WithdrawSlot,
    SettleSlot, Replicate, ServePull, PullFailed, GroupFormed, GroupPending, GroupFailed, SharesPlanned,
)  # fmt: skip


def update_id(label: str, number: int) -> str:
    return f"{label}#{number}"


def split_update_id(update: str) -> tuple[str, int]:
    label, _, number = update.rpartition("#")
    return label, int(number)
