"""The member: every node's standing in the fabric. Joins, shows it is alive, takes up roles it is given.

It carries no updates; worker, aggregator, server and replica do.
"""

from __future__ import annotations

import msgspec

from mlfabric.events import (
    DeadlinePassed,
    Event,
    JoinRequested,
    LeaveRequested,
    MessageReceived,
    PeerLost,
    RatesMeasured,
)
from mlfabric.messages import (
    FollowShard,
    Heartbeat,
    Join,
    JoinAccepted,
    JoinRefused,
    LeadShard,
    Leave,
    RatesLearned,
)
from mlfabric.roles.actions import (
    Action,
    FailJob,
    MemberSettings,
    Note,
    ReplicaSettings,
    ResolveJoin,
    Send,
    ServerSettings,
    StartRole,
    WorkerSettings,
)


class MemberStatistics(msgspec.Struct, frozen=True):
    joined: bool
    roles_taken: int


class Member:
    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings
        self._joined = False
        self._left = False
        self._taken = 0
        self._beat_at: float | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        me = self._settings.member.node
        match event:
            case JoinRequested():
                return [self._tell(Join(self._settings.member, self._settings.expected))]
            case MessageReceived(message=JoinAccepted(label=label, scheduler=scheduler)):
                self._joined = True
                self._beat_at = now + self._settings.heartbeat_s
                settings = WorkerSettings(node=me, label=label, scheduler=scheduler)
                return [
                    *(StartRole(role, settings) for role in ("worker", "aggregator", "participant")),
                    ResolveJoin(label),
                ]
            case MessageReceived(message=JoinRefused(reason=reason)):
                return [ResolveJoin("", reason)]
            case MessageReceived(message=LeadShard() as lead):
                self._taken += 1
                server = ServerSettings(lead.shard, lead.rule, lead.settings, lead.scheduler, lead.dtype)
                return [StartRole(f"server.{lead.shard.index}", server)]
            case MessageReceived(message=FollowShard() as follow):
                self._taken += 1
                replica = ReplicaSettings(
                    follow.shard, follow.rule, follow.settings, follow.scheduler, follow.dtype
                )
                return [StartRole(f"replica.{follow.shard.index}", replica)]
            case DeadlinePassed() if self._beat_at is not None and now >= self._beat_at:
                self._beat_at = now + self._settings.heartbeat_s
                return [self._tell(Heartbeat(now))]
            case RatesMeasured(up_bytes_per_s=up, down_bytes_per_s=down) if self._joined:
                return [self._tell(RatesLearned(up, down))]
            case LeaveRequested():
                self._left, self._beat_at = True, None
                return [self._tell(Leave(me))]
            case PeerLost(node=node, reason=reason) if node == self._settings.scheduler and not self._left:
                self._beat_at = None
                sentence = f"the scheduler {node} was lost ({reason})"
                return [Note("scheduler-lost", sentence, loud=True), FailJob(sentence)]
        return []

    def _tell(self, message: Join | Heartbeat | Leave | RatesLearned) -> Send:
        return Send(self._settings.scheduler, "scheduler", message)

    def next_deadline(self) -> float | None:
        return self._beat_at

    def statistics(self) -> MemberStatistics:
        return MemberStatistics(self._joined, self._taken)

    def validate(self) -> None:
        assert self._beat_at is None or self._joined, "a node that has not joined shows no sign of life"
