"""Members that are gone: what the job loses by it, and who takes over."""

from __future__ import annotations

import msgspec

from mlfabric.messages import (
    LEFT,
    JobFailed,
    LeaderChanged,
    NodeLost,
    Promote,
    Promoted,
    ReplicaAssigned,
    StepDown,
    Version,
)
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.applied import AppliedSet
from mlfabric.roles.domain import Domain, Job
from mlfabric.roles.leases import CEILING_S
from mlfabric.roles.placing import Placing
from mlfabric.roles.pulls import Pulls

# A job ends by everybody leaving, its leaders perhaps first: the others have so long to leave too.
ENDING_S = 2.0


class FailOver:
    def __init__(self, domain: Domain, placing: Placing, pulls: Pulls) -> None:
        self._domain = domain
        self._placing = placing
        self._pulls = pulls
        self.fail_overs = 0

    def lost(self, node: str, reason: str, now: float, proved: bool = False) -> list[Action]:
        member = self._domain.forget(node)
        if member is None:
            return []
        job = self._domain.jobs[member.job]
        self._domain.deserted |= node == self._domain.settings.node and reason == LEFT
        if not proved and reason != LEFT:
            job.given_up[node] = now + CEILING_S
        actions: list[Action] = [
            Note("node-lost", f"{node}: {reason}", loud=reason != LEFT and not self._domain.deserted),
            *(Send(name, "member", NodeLost(node, reason)) for name in sorted(self._domain.members_of(job))),
            *self._domain.announce(job),
        ]
        for pull in [name for name, pulling in job.pulls.items() if pulling.node == node]:
            del job.pulls[pull]
        job.demand.forget(node)
        job.ways.pop(node, None)
        rest = self._pulls.source_lost(job, node, now)
        if job.pace is not None:
            job.pace.lost(node)
        actions += job.groups.lost(node, f"was lost ({reason})" if reason != LEFT else "left")
        if job.book is None:
            return actions
        actions += job.book.node_lost(node, reason)
        for index, shard in sorted(job.book.shards.items()):
            if shard.range.leader == node and reason == LEFT and self.leader_left(job, index, now):
                continue
            if shard.range.leader == node:
                actions += self.leader_lost(job, index, node, reason)
                if job.book is None or not job.ready:
                    break
            elif shard.range.replica == node:
                actions += self._replica_lost(job, index, node, reason, now)
        return [*actions, *rest]

    def leader_left(self, job: Job, index: int, now: float) -> bool:
        """Whether a shard whose leader left has no heir: the others have some time to leave too."""
        assert job.book is not None
        shard = job.book.shards[index]
        heir = shard.range.replica in self._domain.members and shard.replica_filled
        if not job.ready or job.failed is not None or heir:
            return False
        job.ending = job.ending or now + ENDING_S
        return True

    def end_jobs(self, now: float) -> list[Action]:
        """A job whose leader left goes on by its replica or has failed, unless all others have left too."""
        actions: list[Action] = []
        for job in self._domain.jobs.values():
            if job.ending is None or now < job.ending:
                continue
            job.ending = None
            if job.book is None or not self._domain.members_of(job):
                continue
            for index, shard in sorted(job.book.shards.items()):
                leader = shard.range.leader
                led = leader in self._domain.members or index in job.promoting
                if not led and job.failed is None:
                    actions += self.leader_lost(job, index, leader, LEFT)
        return actions

    def leader_lost(self, job: Job, index: int, node: str, reason: str) -> list[Action]:
        assert job.book is not None
        shard = job.book.shards[index]
        if not job.ready:
            # Nothing has been trained yet, and the publisher still has the values: begin anew.
            job.placed, job.book = False, None
            job.moving.clear()
            return [
                Note("placing-again", f"server {node} lost: {reason}", loud=True),
                *self._placing.begin_model(job),
            ]
        job.book.withdrawing.leader_lost(index)
        job.moving.pop(index, None)
        replica = shard.range.replica
        why = f"server {node} lost: {reason}"
        if replica is None or replica not in self._domain.members:
            return self._fail(job, f"server {node} of shard {index} was lost ({reason}) and had no replica")
        job.promoting[index] = (replica, why)
        epoch = shard.range.epoch + 1
        return [
            Note("failing-over", f"shard {index} from {node} to {replica}: {reason}", loud=reason != LEFT),
            Send(replica, f"replica.{index}", Promote(index, epoch, why)),
        ]

    def promoted(self, job: Job, sender: str, message: Promoted, now: float) -> list[Action]:
        assert job.book is not None
        expected = job.promoting.pop(message.shard, None)
        if expected is None or expected[0] != sender:
            return []
        if message.version < 0:
            return self._fail(job, f"the replica {sender} of shard {message.shard} had never been filled")
        shard = job.book.shards[message.shard]
        before = shard.range.leader
        moved = before in self._domain.members  # it yielded the lead; else it was lost
        if not moved:
            self.fail_overs += 1
        shard.range = msgspec.structs.replace(shard.range, leader=sender, epoch=message.epoch, replica=None)
        shard.version = message.version
        shard.replica_filled = False
        survived = AppliedSet(message.applied)
        lost = tuple(sorted(update for update in shard.undurable if update not in survived))
        shard.undurable.clear()
        if not moved:
            shard.fail_overs.append(Version(message.epoch, message.version))
            job.pulls.clear()  # workers ask again when they hear of the new leader
        actions: list[Action] = [
            Note(
                "lead-moved" if moved else "failed-over",
                f"shard {message.shard} is led by {sender} from version {message.version}, "
                f"optimizer state {message.version - message.state_version} versions older: {expected[1]}",
                loud=not moved,
                value=float(message.version),
            )
        ]
        if moved:
            why = f"shard {message.shard} is led by {sender} now"
            actions.append(Send(before, "member", StepDown(f"server.{message.shard}", why, orderly=True)))
        if lost:
            why = f"committed, but not in {sender} when it took over"
            actions.append(Note("lost", why, lost, loud=True, shards=(message.shard,)))
        replica_actions = self._placing.find_replicas(job)
        change = LeaderChanged(shard.range, message.version, message.applied, expected[1])
        job.changes[message.shard] = change
        if moved:
            change = msgspec.structs.replace(change, orderly=True)
        for name in sorted(self._domain.members_of(job)):
            actions += [Send(name, role, change) for role in ("worker", "aggregator")]
        return [*actions, *replica_actions, *(self._go_on(job, message.shard, now) if moved else [])]

    def lead_stayed(self, job: Job, shard: int, now: float) -> list[Action]:
        """Who was to take over is gone: what was held back for it goes to the leader there is."""
        assert job.book is not None
        members = self._domain.members_of(job)
        held = job.book.grant_anew(shard, self._domain.network, members, now, moved=False)
        return [*held, *self._pulls.lead_stayed(job, shard, now)]

    def _go_on(self, job: Job, shard: int, now: float) -> list[Action]:
        """The lead has moved and nothing is lost: what was on its way goes to the new leader."""
        assert job.book is not None
        job.late = [late for late in job.late if late.shard != shard]
        self._pulls.lead_moved(job, shard, now)
        members = self._domain.members_of(job)
        return job.book.grant_anew(shard, self._domain.network, members, now, moved=True)

    def _replica_lost(self, job: Job, index: int, node: str, reason: str, now: float) -> list[Action]:
        assert job.book is not None
        shard = job.book.shards[index]
        moving = index in job.taking_over()
        shard.range = msgspec.structs.replace(shard.range, replica=None)
        shard.replica_filled = False
        job.moving.pop(index, None)
        if shard.range.leader not in self._domain.members and reason == LEFT:
            job.promoting.pop(index, None)
            job.ending = job.ending or now + ENDING_S
            return []
        if index in job.promoting and shard.range.leader not in self._domain.members:
            return self._fail(job, f"server and replica {node} of shard {index} were both lost")
        job.promoting.pop(index, None)
        gone = ReplicaAssigned(index, None, f"replica {node} lost: {reason}", orderly=reason == LEFT)
        actions: list[Action] = [
            Send(shard.range.leader, f"server.{index}", gone),
            *self._placing.find_replicas(job),
        ]
        if moving:
            actions += self.lead_stayed(job, index, now)
        return [*actions, *self._placing.check_ready(job, now)]

    def _fail(self, job: Job, reason: str) -> list[Action]:
        job.failed = reason
        names = sorted(self._domain.members_of(job))
        return [
            Note(
                "job-failed", reason, loud=any("worker" in self._domain.members[name].roles for name in names)
            ),
            *(Send(name, role, JobFailed(reason)) for name in names for role in ("worker", "participant")),
        ]
