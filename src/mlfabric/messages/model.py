"""A job's model: publishing it, who leads and follows its shards, and how leads move."""

from __future__ import annotations

from mlfabric.messages.words import AppliedIds, ArraySpec, JobSettings, Message, RuleSpec, ShardRange, Version


class PublishWanted(Message, frozen=True):
    arrays: tuple[ArraySpec, ...]
    rule: RuleSpec
    settings: JobSettings
    elements: int
    dtype: str
    state_vectors: int = 0  # optimizer vectors that come along, when a checkpoint is resumed
    version: int = 0
    parts: tuple[ArraySpec, ...] = ()  # what the arrays consist of, where workers compare that too


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
    parts: tuple[ArraySpec, ...] = ()


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
    orderly: bool = False  # the leader has yielded: nothing it applied is lacking


class YieldLead(Message, frozen=True):
    """To a leader: apply nothing more, bring your replica level, optimizer state included, and say so; it
    leads then."""

    shard: int
    reason: str
    replica: str | None = None  # it follows from now on; None: the one it has


class LeadYielded(Message, frozen=True):
    shard: int
    epoch: int
    version: int


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
    orderly: bool = False  # nothing is lost by it: what was on its way is granted anew, the rest goes on


class JobFailed(Message, frozen=True):
    reason: str


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
