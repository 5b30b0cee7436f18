"""How nodes become members, come back, say that they live, and find out that another schedules them."""

from __future__ import annotations

from mlfabric.messages import (
    Heartbeat,
    HeartbeatSeen,
    JobKnown,
    Join,
    JoinAccepted,
    JoinRefused,
    NewTerm,
    Register,
    Rejoin,
    ReplicaReport,
    ShardReport,
    StepDown,
)
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.company import Company
from mlfabric.roles.domain import Domain, Job
from mlfabric.roles.placing import Placing
from mlfabric.roles.resuming import Resuming


class Admission:
    def __init__(self, domain: Domain, company: Company, placing: Placing, resuming: Resuming) -> None:
        self._domain = domain
        self._company = company
        self._placing = placing
        self._resuming = resuming
        self._lives: dict[tuple[str, str], int] = {}  # (job, name) -> how often it joined
        self._moved: dict[str, NewTerm] = {}  # job -> who schedules it now

    def join(self, message: Join, now: float) -> list[Action]:
        member = message.member
        name = member.node
        other = self._domain.members.get(name)
        if other is not None:
            reason = f"the name {name} is taken by a living member of job {other.job}; choose another"
            return [Send(name, "member", JoinRefused(reason))]
        if member.job in self._moved:
            reason = f"job {member.job} is scheduled by {self._moved[member.job].scheduler} now; join there"
            return [Send(name, "member", JoinRefused(reason))]
        label = self._label(member.job, name)
        job = self._domain.admit(member, label, message.expected, now)
        return [
            *self._domain.announce(job),
            Send(
                name,
                "member",
                JoinAccepted(label, self._domain.settings.node, self._domain.leases.length_s(name)),
            ),
            Note("joined", f"{name} on {member.host} joined job {member.job}"),
            *([Send(name, "worker", self._placing.ready_message(job))] if job.ready else []),
            *self._placing.begin_model(job),
            *self._placing.find_replicas(job),
        ]

    def _label(self, job: str, name: str) -> str:
        """Ids of updates begin with it, so no two lives of a name may share one, whoever schedules."""
        life = self._lives.get((job, name), 0) + 1
        self._lives[job, name] = life
        if self._domain.settings.term:
            return f"{name}~{self._domain.settings.term}.{life}"
        return name if life == 1 else f"{name}~{life}"

    def register(self, message: Register, now: float) -> list[Action]:
        """A member that had been given up, or comes after we began, is back with what it holds."""
        name = message.member.node
        if message.member.job in self._moved:
            return [Send(name, "member", self._moved[message.member.job])]
        if name in self._domain.members:
            if self._domain.labels[name] != message.label:
                reason = f"the name {name} is taken by another process that joined since"
                return [Send(name, "member", JoinRefused(reason))]
            if message.attempt <= self._domain.attempts[name]:
                return []
            return self._resuming.gather_again(name, f"{name} registered a second time")
        job = self._domain.admit(message.member, message.label, 0, now, message.attempt)
        return [
            *self._domain.announce(job),
            Note("registered", f"{name} on {message.member.host} is back in job {job.name}", loud=True),
            *self._placing.begin_model(job),
            *self._placing.find_replicas(job),
        ]

    def reported(
        self, job: Job, sender: str, message: JobKnown | ShardReport | ReplicaReport
    ) -> list[Action]:
        """What a member that registered late holds: mostly, roles that have passed to others."""
        if job.book is None:
            return []
        match message:
            case JobKnown(ready=ready):
                behind = [s.index for s in ready.shards if s.epoch < job.book.shards[s.index].range.epoch]
                changes = [job.changes[index] for index in behind if index in job.changes]
                return [Send(sender, role, change) for change in changes for role in ("worker", "aggregator")]
            case ShardReport(shard=shard):
                current = job.book.shards[shard.index].range
                if (current.leader, current.epoch) == (sender, shard.epoch) and (
                    shard.index not in job.promoting
                ):
                    return []
                why = f"shard {shard.index} is led by {current.leader} in epoch {current.epoch}"
                return [Send(sender, "member", StepDown(f"server.{shard.index}", why))]
            case ReplicaReport(shard=index):
                current = job.book.shards[index].range
                if current.replica == sender:
                    return []
                why = f"shard {index} is followed by {current.replica or 'nobody'}"
                return [Send(sender, "member", StepDown(f"replica.{index}", why))]

    def beat(self, sender: str, beat: Heartbeat, now: float) -> list[Action]:
        job = self._domain.job_of(sender)
        if job is None:
            why = f"{self._domain.settings.node} had given {sender} up"
            return [Send(sender, "member", Rejoin(beat.attempt, why))]
        if self._domain.deserted or not self._company.hears_enough(job, now):
            return []
        lease, relied = self._domain.leases.length_s(sender), None
        if sender == self._domain.settings.node:
            # A server here must not go on when this scheduler, cut off with it, may have been succeeded.
            relied = min(lease, max(self._company.heard_until(job, now) - now, 0.0))
        seen = HeartbeatSeen(beat.sent_s, now, self._domain.settings.term, lease, relied)
        return [Send(sender, "member", seen)]

    def succeeded(self, sender: str, message: NewTerm) -> list[Action]:
        """A job has found another scheduler: here it is over."""
        job = self._domain.job_of(sender)
        if job is None or message.term <= self._domain.settings.term:
            return []
        for name in self._domain.members_of(job):
            self._domain.forget(name)
        del self._domain.jobs[job.name]
        self._moved[job.name] = message
        return [Note("succeeded", f"job {job.name} is scheduled by {message.scheduler} now", loud=True)]
