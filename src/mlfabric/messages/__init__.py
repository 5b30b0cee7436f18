"""What members of a fabric tell each other: small typed records, and the headers of bulk transfers.

Control messages are msgspec structs with a tag, never pickles. Bulk bytes follow a `TransferHeader` and go
from buffer to buffer; their header says what they are about. Names used throughout:

- node: one process of the fabric, unique by name; host: the machine it runs on, owner of links;
- update: "w0#12", the twelfth update of worker w0; number: its place in the job's order of application;
- shard: a contiguous range of the model's elements with one leader (a server) and perhaps a replica;
- version: (epoch, count), count the updates applied, epoch raised by every fail-over of the shard.

Each theme has a module; everybody imports from here.
"""

from __future__ import annotations

from typing import Final

from mlfabric.messages.groups import (
    GroupFailed,
    GroupFormed,
    GroupHeld,
    GroupPending,
    GroupWanted,
    SharesPlanned,
)
from mlfabric.messages.membership import (
    LEFT,
    DrainBegun,
    FlowRate,
    FlowsSeen,
    Heartbeat,
    HeartbeatSeen,
    Join,
    JoinAccepted,
    JoinRefused,
    Leave,
    LimitRate,
    MemberInfo,
    Members,
    NodeLost,
    RatesLearned,
    StepDown,
)
from mlfabric.messages.model import (
    FollowShard,
    JobFailed,
    JobKnown,
    JobReady,
    LeaderChanged,
    LeadShard,
    LeadYielded,
    Promote,
    Promoted,
    PublishFirst,
    PublishRefused,
    PublishWanted,
    ReplicaAssigned,
    ReplicaHas,
    ReplicaReport,
    Replicate,
    ShardReady,
    ShardReport,
    YieldLead,
)
from mlfabric.messages.operating import (
    DrainAnswered,
    DrainWanted,
    JobStatus,
    LimitAnswered,
    LimitWanted,
    MemberStatus,
    ShardStatus,
    StatusReport,
    StatusWanted,
)
from mlfabric.messages.pulls import Hop, PullFailed, PullServed, PullWanted, ServePull, split_onward
from mlfabric.messages.steps import (
    StepBroken,
    StepCalled,
    StepEnded,
    StepReady,
    StepsOver,
    StepsWithout,
    TrainsIn,
    WayRefused,
)
from mlfabric.messages.succession import NewTerm, Register, Rejoin, Reported, VoteGiven, VoteWanted
from mlfabric.messages.transfers import (
    Aggregate,
    InitialPart,
    ModelPart,
    ReplicaPart,
    TransferAbout,
    TransferHeader,
    UpdatePart,
)
from mlfabric.messages.updates import (
    AppliedReport,
    DropUpdate,
    DurableWanted,
    GatherGroup,
    Grant,
    JudgeUpdate,
    LeaveOut,
    LeftOut,
    MemberUpdate,
    NotApplied,
    OfferAgain,
    OfferUpdate,
    PartRoute,
    Sequence,
    SettleSlot,
    Slot,
    SlotLate,
    SlotWithdrawn,
    TransferRefused,
    UpdateApplied,
    UpdateDurable,
    UpdateRefused,
    WithdrawSlot,
)
from mlfabric.messages.words import (
    MEMBER_ROLES,
    SCHEDULER,
    AppliedIds,
    ArraySpec,
    JobSettings,
    Message,
    RulePiece,
    RuleSpec,
    ShardRange,
    StepSettings,
    Version,
    count_at,
    split_update_id,
    update_id,
)

ControlMessage = (
    Join | JoinAccepted | JoinRefused | Members | Leave | Heartbeat | HeartbeatSeen | NodeLost
    | RatesLearned
    | FlowsSeen
    | LimitRate
    | LimitWanted
    | LimitAnswered
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
    | StepReady | StepEnded | StepsOver | StepCalled | StepBroken | StepsWithout | TrainsIn | WayRefused
)  # fmt: skip


# What only the scheduler says. A node takes it from the scheduler it follows and from nobody else.
ORDERS: Final = (
    JoinAccepted, JoinRefused, Members, HeartbeatSeen, NodeLost, Rejoin, StepDown,
    DrainBegun, YieldLead, LimitRate,
    PublishFirst, PublishRefused, JobReady, LeadShard, FollowShard, ReplicaAssigned, Promote, LeaderChanged,
    JobFailed, Grant, JudgeUpdate, DropUpdate, OfferAgain, Sequence, GatherGroup, LeaveOut, WithdrawSlot,
    SettleSlot, Replicate, ServePull, PullFailed, GroupFormed, GroupPending, GroupFailed, SharesPlanned,
    StepCalled, StepBroken, StepsWithout, WayRefused,
)  # fmt: skip

__all__ = [
    "Aggregate",
    "AppliedIds",
    "AppliedReport",
    "ArraySpec",
    "ControlMessage",
    "DrainAnswered",
    "DrainBegun",
    "DrainWanted",
    "DropUpdate",
    "DurableWanted",
    "FlowRate",
    "FlowsSeen",
    "FollowShard",
    "GatherGroup",
    "Grant",
    "GroupFailed",
    "GroupFormed",
    "GroupHeld",
    "GroupPending",
    "GroupWanted",
    "Heartbeat",
    "HeartbeatSeen",
    "Hop",
    "InitialPart",
    "JobFailed",
    "JobKnown",
    "JobReady",
    "JobSettings",
    "JobStatus",
    "Join",
    "JoinAccepted",
    "JoinRefused",
    "JudgeUpdate",
    "LEFT",
    "LeadShard",
    "LeadYielded",
    "LeaderChanged",
    "Leave",
    "LeaveOut",
    "LeftOut",
    "MEMBER_ROLES",
    "LimitAnswered",
    "LimitRate",
    "LimitWanted",
    "MemberInfo",
    "MemberStatus",
    "MemberUpdate",
    "Members",
    "Message",
    "ModelPart",
    "NewTerm",
    "NodeLost",
    "NotApplied",
    "ORDERS",
    "OfferAgain",
    "OfferUpdate",
    "PartRoute",
    "Promote",
    "Promoted",
    "PublishFirst",
    "PublishRefused",
    "PublishWanted",
    "PullFailed",
    "PullServed",
    "PullWanted",
    "RatesLearned",
    "Register",
    "Rejoin",
    "ReplicaAssigned",
    "ReplicaHas",
    "ReplicaPart",
    "ReplicaReport",
    "Replicate",
    "Reported",
    "RulePiece",
    "RuleSpec",
    "StepSettings",
    "SCHEDULER",
    "Sequence",
    "ServePull",
    "SettleSlot",
    "ShardRange",
    "ShardReady",
    "ShardReport",
    "ShardStatus",
    "SharesPlanned",
    "Slot",
    "SlotLate",
    "SlotWithdrawn",
    "StatusReport",
    "StatusWanted",
    "StepBroken",
    "StepCalled",
    "StepDown",
    "StepEnded",
    "StepReady",
    "StepsOver",
    "StepsWithout",
    "TrainsIn",
    "TransferAbout",
    "TransferHeader",
    "TransferRefused",
    "UpdateApplied",
    "UpdateDurable",
    "UpdatePart",
    "UpdateRefused",
    "Version",
    "VoteGiven",
    "VoteWanted",
    "WayRefused",
    "WithdrawSlot",
    "YieldLead",
    "count_at",
    "split_onward",
    "split_update_id",
    "update_id",
]
