"""The member: every node's standing in the fabric. Joins, shows it is alive, takes up roles it is given,
follows the scheduler and takes part in finding another one (`roles.succession`).

It carries no updates; worker, aggregator, server and replica do.
"""

from __future__ import annotations

import msgspec

from mlfabric.events import (
    DeadlinePassed,
    DrainRequested,
    Event,
    FlowsMeasured,
    JoinRequested,
    LeaveRequested,
    MessageReceived,
    PeerLost,
    RatesMeasured,
    SchedulerChanged,
)
from mlfabric.messages import (
    SCHEDULER,
    ControlMessage,
    DrainBegun,
    DrainWanted,
    FlowRate,
    FlowsSeen,
    FollowShard,
    Heartbeat,
    HeartbeatSeen,
    Join,
    JoinAccepted,
    JoinRefused,
    LeadShard,
    Leave,
    LimitRate,
    Members,
    NewTerm,
    NodeLost,
    RatesLearned,
    Register,
    Rejoin,
    Reported,
    StepDown,
    VoteGiven,
    VoteWanted,
)
from mlfabric.roles.actions import (
    Action,
    FailJob,
    FollowScheduler,
    LimitSending,
    MemberSettings,
    Note,
    RefuseNew,
    ReplicaSettings,
    ResolveJoin,
    Send,
    ServerSettings,
    StartRole,
    StopRole,
    WorkerSettings,
)
from mlfabric.roles.succession import Succession

# Several heartbeats per lease: losing one to a moment's delay must not look like a death.
BEATS_PER_LEASE = 4


class MemberStatistics(msgspec.Struct, frozen=True):
    joined: bool
    roles_taken: int
    scheduler: str
    term: int
    lease_s: float
    orphaned: bool  # no scheduler is heard


class Member:
    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings
        self._succession = Succession(settings.member.node, settings.scheduler)
        self._label: str | None = None
        self._left = False
        self._drains = False  # wants to leave once nothing needs it
        self._attempt = 0
        self._taken = 0
        self._beat_at: float | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case JoinRequested():
                return [self._tell(Join(self._settings.member, self._settings.expected))]
            case MessageReceived(sender=sender, message=message) if not self._left:
                return self._on_message(sender, message, now)
            case SchedulerChanged(term=term):
                again = [self._tell(DrainWanted(self._settings.member.node))] if self._drains else []
                return [self._tell(Reported(term)), *again]
            case PeerLost(node=node, reason=reason, proved=proved) if not self._left:
                return self._succession.lost(node, reason, proved, now)
            case DeadlinePassed() if not self._left:
                return [*self._beat(now), *self._succession.passed(now)]
            case DrainRequested():
                self._drains = True
                return [self._tell(DrainWanted(self._settings.member.node))]
            case RatesMeasured(up_bytes_per_s=up, down_bytes_per_s=down) if self._label is not None:
                return [self._tell(RatesLearned(up, down))]
            case FlowsMeasured(flows=flows, up_bytes_per_s=up, down_bytes_per_s=down) if (
                self._label is not None
            ):
                return [self._tell(FlowsSeen(tuple(FlowRate(*flow) for flow in flows), up, down))]
            case LeaveRequested():
                self._left, self._beat_at = True, None
                return [self._tell(Leave(self._settings.member.node))]
        return []

    def _on_message(self, sender: str, message: ControlMessage, now: float) -> list[Action]:
        succession = self._succession
        match message:
            case JoinAccepted():
                return self._joined(message, now)
            case JoinRefused(reason=reason) if self._label is None:
                return [ResolveJoin("", reason)]
            case JoinRefused(reason=reason):
                return [FailJob(f"{self._settings.member.node} is no member any more: {reason}")]
            case Members():
                succession.members_changed(message)
            case HeartbeatSeen():
                return succession.seen(message, now)
            case NodeLost(node=node) if node == self._settings.member.node:
                self._left, self._beat_at = True, None
                return [FailJob(f"{node} has left the fabric: it was drained")]
            case NodeLost(node=node, reason=reason):
                return succession.lost(node, reason, False, now)
            case DrainBegun(reason=reason):
                self._drains = True
                return [Note("draining", reason, loud=True), RefuseNew(reason)]
            case VoteWanted():
                return succession.asked(sender, message, now)
            case VoteGiven():
                answer = succession.answered(sender, message, now)
                return (
                    self._follow(answer.term, answer.scheduler, now)
                    if isinstance(answer, NewTerm)
                    else answer
                )
            case NewTerm(term=term, scheduler=scheduler):
                return self._new_term(sender, term, scheduler, now)
            case Rejoin(reason=reason, attempt=attempt) if self._label is not None:
                if attempt < self._attempt:
                    return []  # we have, since that was said
                again = Note("registering-again", reason, loud=True)
                return [again, *self._follow(succession.term, succession.scheduler, now)]
            case LimitRate():
                # Whoever schedules next hears of it from us.
                member = msgspec.structs.replace(
                    self._settings.member,
                    max_rate_bytes_per_s=message.host_bytes_per_s,
                    job_max_rate_bytes_per_s=message.job_bytes_per_s,
                )
                self._settings = msgspec.structs.replace(self._settings, member=member)
                return [LimitSending(message.bytes_per_s)]
            case LeadShard() | FollowShard() | StepDown():
                return self._take(message)
        return []

    def _joined(self, message: JoinAccepted, now: float) -> list[Action]:
        self._label = message.label
        self._beat_at = now
        self._succession.joined(message.lease_s, now)
        settings = WorkerSettings(self._settings.member.node, message.label, SCHEDULER)
        return [
            *(StartRole(role, settings) for role in ("worker", "aggregator", "participant", "stepper")),
            ResolveJoin(message.label),
        ]

    def _take(self, message: LeadShard | FollowShard | StepDown) -> list[Action]:
        """Roles come and go as the scheduler says."""
        if isinstance(message, StepDown):
            return [
                Note("stepped-down", f"{message.role}: {message.reason}", loud=not message.orderly),
                StopRole(message.role),
            ]
        self._taken += 1
        about = (message.shard, message.rule, message.settings, SCHEDULER, message.dtype)
        if isinstance(message, LeadShard):
            return [StartRole(f"server.{message.shard.index}", ServerSettings(*about))]
        return [StartRole(f"replica.{message.shard.index}", ReplicaSettings(*about))]

    # --- the scheduler ----------------------------------------------------------------------------------

    def _new_term(self, sender: str, term: int, scheduler: str, now: float) -> list[Action]:
        known = self._succession.term
        if term > known:
            return self._follow(term, scheduler, now)
        if term < known:
            return [Send(sender, "member", NewTerm(known, self._succession.scheduler))]
        return []

    def _follow(self, term: int, scheduler: str, now: float) -> list[Action]:
        if self._label is None:
            return []  # who has not joined yet asks by itself
        ends = self._succession.followed(term, scheduler, now)
        self._beat_at = now
        self._attempt += 1
        register = Register(self._settings.member, self._label, self._attempt, self._settings.expected)
        return [*ends, Send(scheduler, "scheduler", register), FollowScheduler(scheduler, term)]

    def _beat(self, now: float) -> list[Action]:
        if self._beat_at is None or now < self._beat_at:
            return []
        self._beat_at = now + self._succession.lease_s / BEATS_PER_LEASE
        return (
            [self._tell(Heartbeat(now, self._attempt))] if self._succession.speaks_to_scheduler(now) else []
        )

    def _tell(
        self, message: Join | Heartbeat | Leave | Reported | DrainWanted | RatesLearned | FlowsSeen
    ) -> Send:
        return Send(SCHEDULER, "scheduler", message)

    def next_deadline(self) -> float | None:
        if self._left:
            return None
        times = [at for at in (self._beat_at, self._succession.next_deadline()) if at is not None]
        return min(times, default=None)

    def statistics(self) -> MemberStatistics:
        follows = self._succession
        return MemberStatistics(
            joined=self._label is not None,
            roles_taken=self._taken,
            scheduler=follows.scheduler,
            term=follows.term,
            lease_s=follows.lease_s,
            orphaned=follows.orphaned,
        )

    def validate(self) -> None:
        assert self._beat_at is None or self._label is not None, (
            "a node that has not joined shows no sign of life"
        )
