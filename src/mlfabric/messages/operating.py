"""What people ask of a running fabric, and its answers."""

from __future__ import annotations

import msgspec

from mlfabric.messages.words import Message


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
    limit_bytes_per_s: float | None = None  # what it may send, of its host's and its job's limits


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
    max_rate_bytes_per_s: float | None = None  # that it may send from any one host


class LimitWanted(Message, frozen=True):
    """Let a host, or a job on each host, send no more than this; None: as much as the links carry."""

    target: str
    bytes_per_s: float | None  # payload
    kind: str = ""  # host or job, where the name alone does not say


class LimitAnswered(Message, frozen=True):
    kind: str  # what the target is
    error: str = ""


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
