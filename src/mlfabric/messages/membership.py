"""Who is there: joining, leaving, signs of life, what hosts learned of their links."""

from __future__ import annotations

import msgspec

from mlfabric.messages.words import Message


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
    max_rate_bytes_per_s: float | None = None  # its host may send no more
    job_max_rate_bytes_per_s: float | None = None  # nor its job from any one host


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
    relied_s: float | None = None  # it may count on the scheduler for so long only


class RatesLearned(Message, frozen=True):
    """A host's rates as its own transfers showed them, in payload bytes per second."""

    up_bytes_per_s: float | None  # None: nothing was learned of it
    down_bytes_per_s: float | None


class LimitRate(Message, frozen=True):
    """To a member: send no more than this; None: there is no limit. Part of what its host and its job may."""

    bytes_per_s: float | None
    host_bytes_per_s: float | None
    job_bytes_per_s: float | None


class FlowRate(msgspec.Struct, frozen=True, array_like=True):
    node: str  # it goes to
    bytes_per_s: float | None  # payload; zero: it has ended; None: it has just begun
    limited: bool  # by the network


class FlowsSeen(Message, frozen=True):
    """How fast the sender's bulk transfers go, for the scheduler to find out which links hold them back; and
    what it sends and receives in bulk altogether, where that is known."""

    flows: tuple[FlowRate, ...]
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


# Why a node is gone that said good-bye; its connections end by themselves, after what they still carry.
LEFT = "it left"


class NodeLost(Message, frozen=True):
    """The scheduler's word that a node is gone, for those without a connection to it."""

    node: str
    reason: str


class DrainBegun(Message, frozen=True):
    """To a member: take on nothing new; you leave once nothing needs you."""

    reason: str


class StepDown(Message, frozen=True):
    """To a member: this role of yours has passed to somebody else."""

    role: str
    reason: str
    orderly: bool = False  # others were told to take over; nothing went wrong
