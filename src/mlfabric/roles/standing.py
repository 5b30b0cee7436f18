"""How a shard stands at its server: version, epoch, what is applied, the bound; what others hear of it."""

from __future__ import annotations

from mlfabric.messages import (
    AppliedReport,
    ControlMessage,
    MemberUpdate,
    ShardReport,
    UpdateApplied,
    Version,
    count_at,
)
from mlfabric.roles.actions import Send, ServerSettings
from mlfabric.roles.applied import AppliedSet
from mlfabric.roles.replication import ReplicaLink


class Standing:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.shard = settings.shard.index
        self.epoch = settings.shard.epoch
        self.term = 0
        self.version = settings.version
        self.applied = AppliedSet(settings.applied)
        self.filled = settings.promoted
        self.max_delay: int | None = settings.settings.max_delay
        self.divergence = 0.0
        self.link = ReplicaLink(self.shard, self.epoch, settings.settings.divergence, settings.fail_overs)

    def tell(self, message: ControlMessage) -> Send:
        return Send(self.settings.scheduler, "scheduler", message)

    def report(self, updates: tuple[str, ...]) -> AppliedReport:
        return AppliedReport(
            self.shard,
            self.epoch,
            self.version,
            updates,
            self.divergence,
            self.link.acknowledged_version(),
        )

    def shard_report(self) -> ShardReport:
        return ShardReport(
            shard=self.settings.shard,
            version=self.version,
            applied=self.applied.frozen(),
            fail_overs=self.settings.fail_overs,
            replica=self.link.node,
            replica_version=self.link.acknowledged_version(),
        )

    def acknowledgement(self, member: MemberUpdate, delay: int) -> Send:
        version = Version(self.epoch, self.version)
        ack = UpdateApplied(member.update, self.shard, version, delay, self.link.durable_version())
        return Send(member.worker, "worker", ack)

    def base_count(self, member: MemberUpdate) -> int:
        return count_at(member.base, self.settings.fail_overs)

    def too_old(self, members: tuple[MemberUpdate, ...]) -> list[str]:
        """Those that would break the delay bound if they were applied now, one after the other."""
        return [
            member.update
            for offset, member in enumerate(members)
            if self.max_delay is not None and self.version + offset - self.base_count(member) > self.max_delay
        ]
