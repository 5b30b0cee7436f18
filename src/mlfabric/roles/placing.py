"""Who leads and who follows each shard of a job's model, from its publication until it is in place."""

from __future__ import annotations

import msgspec

from mlfabric.messages import (
    ArraySpec,
    FollowShard,
    JobReady,
    LeadShard,
    MemberInfo,
    PublishFirst,
    PublishRefused,
    PublishWanted,
    ReplicaAssigned,
    ShardRange,
    ShardReady,
)
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.domain import Domain, Job
from mlfabric.roles.entries import ShardBook
from mlfabric.roles.leads import Leads
from mlfabric.roles.orderbook import OrderBook
from mlfabric.roles.pulls import Pulls


class Placing:
    def __init__(self, domain: Domain, pulls: Pulls, leads: Leads) -> None:
        self._domain = domain
        self._pulls = pulls
        self._leads = leads

    def publish(self, job: Job, sender: str, message: PublishWanted) -> list[Action]:
        if job.failed is not None:
            return [Send(sender, "worker", PublishRefused(job.failed))]
        other = job.other_way(sender, message.settings.way) if message.settings.way else ""
        if other:
            return [Send(sender, "worker", PublishRefused(other))]
        gone = job.publisher not in self._domain.members or job.publisher == sender
        if job.published is None or (not job.ready and gone):
            # Who had published it and is gone, or comes again, has its values still to send.
            job.published, job.publisher = message, sender
            job.placed, job.book = False, None
            return self.begin_model(job)
        ours = job.published
        difference = (
            _difference(ours.parts, message.parts)
            or _difference(ours.arrays, message.arrays)
            or _other_order(ours.parts, message.parts)
        )
        if difference:
            reason = f"{sender} publishes another model than {job.publisher} did: {difference}"
            return [Send(sender, "worker", PublishRefused(reason))]
        if job.ready:
            return [Send(sender, "worker", self.ready_message(job))]
        return []  # everybody hears when the model is in place

    def begin_model(self, job: Job) -> list[Action]:
        """Choose leaders and replicas once the model is known and everybody expected is there."""
        members = self._domain.members_of(job)
        if job.published is None or job.placed or len(members) < job.expected:
            return []
        wanted = job.published
        if not self._leads.places(job):
            return []
        job.placed, job.expected = True, 0
        book = OrderBook(job.name, wanted.settings, wanted.elements, self._domain.settings.term)
        job.book = book
        count = self._leads.count(job, wanted)
        cuts = [wanted.elements * i // count for i in range(count + 1)]
        actions: list[Action] = []
        for index, leader in enumerate(self._leads.first(job, wanted, count)):
            range_ = ShardRange(index, cuts[index], cuts[index + 1] - cuts[index], leader)
            book.shards[index] = ShardBook(range_, version=wanted.version)
        for shard in book.shards.values():
            replica = self.choose_replica(job, shard.range)
            shard.range = msgspec.structs.replace(shard.range, replica=replica)
            actions += self._appoint(job, shard.range)
        actions += self._warn_of_bound(job)
        ranges = tuple(shard.range for shard in book.shards.values())
        return [*actions, Send(job.publisher, "worker", PublishFirst(ranges))]

    def _appoint(self, job: Job, range_: ShardRange) -> list[Action]:
        assert job.published is not None
        about = (job.published.rule, job.published.settings, job.published.dtype, self._domain.settings.node)
        why = f"shard {range_.index}: led by {range_.leader}, followed by {range_.replica or 'nobody'}"
        actions: list[Action] = [
            Note("appointed", why),
            Send(range_.leader, "member", LeadShard(range_, *about)),
        ]
        if range_.replica is not None:
            actions += self.assign_replica(job, range_)
        return actions

    def assign_replica(self, job: Job, range_: ShardRange) -> list[Action]:
        assert range_.replica is not None
        return [
            self.follow_order(job, range_),
            Send(range_.leader, f"server.{range_.index}", ReplicaAssigned(range_.index, range_.replica)),
        ]

    def follow_order(self, job: Job, range_: ShardRange) -> Send:
        assert job.published is not None
        assert range_.replica is not None
        about = (job.published.rule, job.published.settings, job.published.dtype, self._domain.settings.node)
        return Send(range_.replica, "member", FollowShard(range_, *about))

    def choose_replica(self, job: Job, range_: ShardRange) -> str | None:
        assert job.published is not None
        if job.published.settings.divergence is None and range_.leader not in self._domain.draining:
            return None
        members = self._domain.usable(job)
        leader = self._domain.members[range_.leader]
        able = [name for name in by_suitability(members, "replica") if name != range_.leader]
        duties = dict.fromkeys(able, 0)
        for shard in job.book.shards.values() if job.book is not None else ():
            for name in (shard.range.leader, shard.range.replica):
                if name in duties:
                    duties[name] += 1

        def unfit(name: str) -> tuple[bool, bool, bool, int, float]:
            """Another host comes first, another rack, who does not work, who has few shards already, and of
            those who is well linked."""
            member = members[name]
            host = self._domain.network.hosts[member.host]
            same_host, same_rack = member.host == leader.host, member.rack == leader.rack
            rate = min(host.up_bytes_per_s, host.down_bytes_per_s)
            return same_host, same_rack, "worker" in member.roles, duties[name], -rate

        return min(able, key=unfit, default=None)

    def find_replicas(self, job: Job) -> list[Action]:
        """Give every shard that lacks one a new replica, where somebody can be one."""
        if job.book is None or job.published is None or job.failed is not None:
            return []
        actions: list[Action] = []
        for index, shard in sorted(job.book.shards.items()):
            if shard.range.replica is not None or shard.range.leader not in self._domain.members:
                continue
            replica = self.choose_replica(job, shard.range)
            if replica is None:
                continue
            shard.range = msgspec.structs.replace(shard.range, replica=replica)
            actions.append(Note("appointed", f"shard {index}: now followed by {replica}"))
            actions += self.assign_replica(job, shard.range)
        return actions

    def _warn_of_bound(self, job: Job) -> list[Action]:
        assert job.book is not None
        workers = sum(1 for member in self._domain.members_of(job).values() if "worker" in member.roles)
        bound = job.book.entries.max_delay(workers)
        if bound is None or bound >= workers - 1 or job.book.entries.settings.wait_for:
            return []
        reason = (
            f"a delay bound of {bound} with {workers} workers forces drops; the mean delay is {workers - 1}"
        )
        return [Note("bound-tight", reason, loud=True)]

    def shard_ready(self, job: Job, message: ShardReady, now: float) -> list[Action]:
        assert job.book is not None
        shard = job.book.shards[message.shard]
        if message.epoch != shard.range.epoch:
            return []
        shard.ready = True
        shard.replica_filled = shard.replica_filled or message.replica_filled
        return self.check_ready(job, now)

    def check_ready(self, job: Job, now: float) -> list[Action]:
        """Once every shard and its replica hold the initial values, training may begin."""
        assert job.book is not None
        done = all(
            s.ready and (s.replica_filled or s.range.replica is None) for s in job.book.shards.values()
        )
        if job.ready or not done:
            return []
        job.ready = True
        ready = self.ready_message(job)
        actions: list[Action] = [Note("job-ready", f"the model of job {job.name} is in place")]
        actions += [Send(name, "worker", ready) for name in sorted(self._domain.members_of(job))]
        early, job.early_pulls = job.early_pulls, []
        return [
            *actions,
            *(action for node, pull in early for action in self._pulls.pull(job, node, pull, now)),
        ]

    def ready_message(self, job: Job) -> JobReady:
        assert job.published is not None
        assert job.book is not None
        ranges = tuple(shard.range for _, shard in sorted(job.book.shards.items()))
        wanted = job.published
        about = (wanted.arrays, wanted.rule, wanted.settings, wanted.dtype, wanted.version, wanted.parts)
        return JobReady(ranges, *about)


def by_suitability(members: dict[str, MemberInfo], role: str) -> list[str]:
    """Who can take a role: those without a worker first, then the better linked, then by name."""
    able = [member for member in members.values() if role in member.roles]
    able.sort(key=lambda m: ("worker" in m.roles, -min(m.up_bytes_per_s, m.down_bytes_per_s), m.node))
    return [member.node for member in able]


def _difference(ours: tuple[ArraySpec, ...], theirs: tuple[ArraySpec, ...]) -> str:
    mine = {array.name: array for array in ours}
    yours = {array.name: array for array in theirs}
    for name in (*mine, *yours):
        if name not in yours:
            return f"it lacks array {name!r}"
        if name not in mine:
            return f"array {name!r} is unknown"
        if mine[name] != yours[name]:
            return (
                f"array {name!r} is {list(mine[name].shape)} of {mine[name].dtype} there and "
                f"{list(yours[name].shape)} of {yours[name].dtype} here"
            )
    return ""


def _other_order(ours: tuple[ArraySpec, ...], theirs: tuple[ArraySpec, ...]) -> str:
    moved = (b.name for a, b in zip(ours, theirs, strict=True) if a != b)
    return next((f"array {name!r} comes at another place" for name in moved), "")
