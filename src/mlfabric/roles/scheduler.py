"""The scheduler: sees offers, deliveries and who is there; decides order, routes and leaders. No bytes.

Membership, publishing, fail-over, pulls and all-reduce plans are here; the order of one job's updates is in
`roles.orderbook`. One scheduler serves several jobs over one view of the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mlfabric.events import DeadlinePassed, Event, MessageReceived, PeerLost
from mlfabric.messages import (
    LEFT,
    AppliedReport,
    ArraySpec,
    ControlMessage,
    FollowShard,
    GroupWanted,
    Heartbeat,
    HeartbeatSeen,
    JobFailed,
    JobReady,
    Join,
    JoinAccepted,
    JoinRefused,
    LeaderChanged,
    LeadShard,
    Leave,
    LeftOut,
    MemberInfo,
    Members,
    NodeLost,
    OfferUpdate,
    Promote,
    Promoted,
    PublishFirst,
    PublishRefused,
    PublishWanted,
    PullFailed,
    PullServed,
    PullWanted,
    RatesLearned,
    ReplicaAssigned,
    Replicate,
    ServePull,
    ShardRange,
    ShardReady,
    SlotLate,
    SlotWithdrawn,
    UpdateRefused,
    Version,
)
from mlfabric.plan.values import Reserved
from mlfabric.roles.actions import Action, Note, SchedulerSettings, Send
from mlfabric.roles.applied import AppliedSet
from mlfabric.roles.bandwidth import BandwidthView
from mlfabric.roles.groups import Groups
from mlfabric.roles.orderbook import OrderBook, ShardBook
from mlfabric.roles.release import MAX_RATE, remainder

# A replica is brought up to date in spare time once it has used up this share of its bound.
SPARE_SHARE = 0.5


@dataclass(slots=True)
class _Pulling:
    node: str
    shards: set[int]
    reserved: dict[int, tuple[Reserved, float]]  # shard -> (transfer, when it should end)


@dataclass(slots=True)
class _Job:
    """A job: its members, its model once published, its order."""

    name: str
    expected: int = 0
    published: PublishWanted | None = None
    publisher: str = ""
    placed: bool = False
    book: OrderBook | None = None
    ready: bool = False
    pulls: dict[str, _Pulling] = field(default_factory=dict)
    early_pulls: list[tuple[str, PullWanted]] = field(default_factory=list)
    groups: Groups = field(default_factory=Groups)
    promoting: dict[int, tuple[str, str]] = field(default_factory=dict)  # shard -> (replica, reason)
    failed: str | None = None


class SchedulerStatistics(msgspec.Struct, frozen=True):
    members: int
    jobs: int
    offers: int
    granted: int
    dropped: int
    dropped_late: int
    grouped: int
    again: int
    fail_overs: int


class Scheduler:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._members: dict[str, MemberInfo] = {}
        self._seen: dict[str, float] = {}
        self._lives: dict[tuple[str, str], int] = {}  # (job, name) -> how often it joined
        self._jobs: dict[str, _Job] = {}
        self._view = BandwidthView()
        self._network = self._view.network()
        self._fail_overs = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case MessageReceived(sender=sender, message=message):
                if sender in self._seen:
                    self._seen[sender] = now
                return [*self._on_message(sender, message, now), *self._plan_due(now)]
            case PeerLost(node=node, reason=reason):
                return [*self._lost(node, reason, now), *self._plan_due(now)]
            case DeadlinePassed():
                return [*self._silent(now), *self._look_after_groups(now), *self._plan_due(now)]
        return []

    def _on_message(self, sender: str, message: ControlMessage, now: float) -> list[Action]:
        match message:
            case Join():
                return self._join(message, now)
            case Leave():
                return [Send(sender, "member", NodeLost(sender, LEFT)), *self._lost(sender, LEFT, now)]
            case Heartbeat(sent_s=sent):
                return [Send(sender, "member", HeartbeatSeen(sent, now))]
            case RatesLearned():
                self._learn_rates(sender, message, now)
                return []
        job = self._job_of(sender)
        if job is None:
            return []
        if isinstance(message, PublishWanted):
            return self._publish(job, sender, message)
        if isinstance(message, GroupWanted):
            job.groups.want(sender, message, now)
            return self._form(job, message.name)
        if isinstance(message, PullWanted):
            return self._pull(job, sender, message, now)
        book = job.book
        if book is None:
            return []
        match message:
            case OfferUpdate():
                return book.offered(message, sender, now)
            case AppliedReport():
                return [*book.applied(message, now), *self._spare_replication(job, message)]
            case UpdateRefused(update=update):
                book.refused(update)
            case LeftOut():
                return book.left_out(message, now)
            case SlotLate():
                return book.slot_late(message)
            case SlotWithdrawn():
                return book.withdrawn(message, now)
            case PullServed(pull=pull, shard=shard):
                self._pull_served(job, pull, shard)
            case ShardReady():
                return self._shard_ready(job, message, now)
            case Promoted():
                return self._promoted(job, sender, message)
        return []

    # --- membership -------------------------------------------------------------------------------------

    def _join(self, message: Join, now: float) -> list[Action]:
        member = message.member
        name = member.node
        other = self._members.get(name)
        if other is not None:
            reason = f"the name {name} is taken by a living member of job {other.job}; choose another"
            return [Send(name, "member", JoinRefused(reason))]
        job = self._jobs.setdefault(member.job, _Job(member.job))
        job.expected = max(job.expected, message.expected)
        self._members[name] = member
        self._seen[name] = now
        self._view.add(member)
        self._network = self._view.network()
        life = self._lives.get((member.job, name), 0) + 1
        self._lives[member.job, name] = life
        label = name if life == 1 else f"{name}~{life}"
        return [
            *self._announce(),
            Send(name, "member", JoinAccepted(label, self._settings.node)),
            Note("joined", f"{name} on {member.host} joined job {member.job}"),
            *self._begin_model(job),
            *self._find_replicas(job),
        ]

    def _learn_rates(self, sender: str, learned: RatesLearned, now: float) -> None:
        """Plan with what a host's transfers showed; nonsense is not believed."""
        if self._view.learn(sender, learned):
            self._network = self._view.network()
            for job in self._jobs.values():
                job.groups.rates_changed(now)

    def _announce(self) -> list[Action]:
        everybody = Members(tuple(self._members[name] for name in sorted(self._members)))
        return [Send(name, "member", everybody) for name in sorted(self._members)]

    def _job_of(self, node: str) -> _Job | None:
        member = self._members.get(node)
        return self._jobs.get(member.job) if member else None

    def _members_of(self, job: _Job) -> dict[str, MemberInfo]:
        return {name: member for name, member in self._members.items() if member.job == job.name}

    def _silent(self, now: float) -> list[Action]:
        quiet = [name for name, seen in self._seen.items() if now >= seen + self._settings.silence_s]
        return [
            action
            for name in quiet
            for action in self._lost(name, f"silent for {now - self._seen[name]:.1f} s", now)
        ]

    def _lost(self, node: str, reason: str, now: float) -> list[Action]:
        member = self._members.pop(node, None)
        if member is None:
            return []
        del self._seen[node]
        self._view.remove(node)
        self._network = self._view.network()
        job = self._jobs[member.job]
        actions: list[Action] = [
            Note("node-lost", f"{node}: {reason}", loud=reason != LEFT),
            *(Send(name, "member", NodeLost(node, reason)) for name in sorted(self._members)),
            *self._announce(),
        ]
        for pull in [name for name, pulling in job.pulls.items() if pulling.node == node]:
            del job.pulls[pull]
        actions += job.groups.lost(node, f"was lost ({reason})" if reason != LEFT else "left")
        if job.book is None:
            return actions
        actions += job.book.node_lost(node, reason)
        for index, shard in sorted(job.book.shards.items()):
            if shard.range.leader == node:
                actions += self._leader_lost(job, index, node, reason)
                if job.book is None or not job.ready:
                    break
            elif shard.range.replica == node:
                actions += self._replica_lost(job, index, node, reason, now)
        return actions

    # --- the model --------------------------------------------------------------------------------------

    def _publish(self, job: _Job, sender: str, message: PublishWanted) -> list[Action]:
        if job.failed is not None:
            return [Send(sender, "worker", PublishRefused(job.failed))]
        if job.published is None:
            job.published, job.publisher = message, sender
            return self._begin_model(job)
        difference = _difference(job.published.arrays, message.arrays)
        if difference:
            reason = f"{sender} publishes another model than {job.publisher} did: {difference}"
            return [Send(sender, "worker", PublishRefused(reason))]
        if job.ready:
            return [Send(sender, "worker", self._ready_message(job))]
        return []  # everybody hears when the model is in place

    def _begin_model(self, job: _Job) -> list[Action]:
        """Choose leaders and replicas once the model is known and everybody expected is there."""
        members = self._members_of(job)
        if job.published is None or job.placed or len(members) < job.expected:
            return []
        wanted = job.published
        leaders = _by_suitability(members, "server")
        if not leaders:
            return []
        job.placed, job.expected = True, 0
        book = OrderBook(job.name, wanted.settings, wanted.elements)
        job.book = book
        count = min(wanted.settings.shards, wanted.elements)
        cuts = [wanted.elements * i // count for i in range(count + 1)]
        actions: list[Action] = []
        for index in range(count):
            leader = leaders[index % len(leaders)]
            range_ = ShardRange(index, cuts[index], cuts[index + 1] - cuts[index], leader)
            replica = self._choose_replica(job, range_)
            range_ = msgspec.structs.replace(range_, replica=replica)
            book.shards[index] = ShardBook(range_, version=wanted.version)
            actions += self._appoint(job, range_)
        actions += self._warn_of_bound(job)
        ranges = tuple(shard.range for shard in book.shards.values())
        return [*actions, Send(job.publisher, "worker", PublishFirst(ranges))]

    def _appoint(self, job: _Job, range_: ShardRange) -> list[Action]:
        assert job.published is not None
        about = (job.published.rule, job.published.settings, job.published.dtype, self._settings.node)
        why = f"shard {range_.index}: led by {range_.leader}, followed by {range_.replica or 'nobody'}"
        actions: list[Action] = [
            Note("appointed", why),
            Send(range_.leader, "member", LeadShard(range_, *about)),
        ]
        if range_.replica is not None:
            actions += self._assign_replica(job, range_)
        return actions

    def _assign_replica(self, job: _Job, range_: ShardRange) -> list[Action]:
        assert job.published is not None
        assert range_.replica is not None
        about = (job.published.rule, job.published.settings, job.published.dtype, self._settings.node)
        return [
            Send(range_.replica, "member", FollowShard(range_, *about)),
            Send(range_.leader, f"server.{range_.index}", ReplicaAssigned(range_.index, range_.replica)),
        ]

    def _choose_replica(self, job: _Job, range_: ShardRange) -> str | None:
        assert job.published is not None
        if job.published.settings.divergence is None:
            return None
        members = self._members_of(job)
        leader = members[range_.leader]
        able = [name for name in _by_suitability(members, "replica") if name != range_.leader]
        duties = dict.fromkeys(able, 0)
        for shard in job.book.shards.values() if job.book is not None else ():
            for name in (shard.range.leader, shard.range.replica):
                if name in duties:
                    duties[name] += 1

        def unfit(name: str) -> tuple[bool, bool, bool, int]:
            """Another host comes first, another rack, who does not work, who has few shards already."""
            member = members[name]
            same_host, same_rack = member.host == leader.host, member.rack == leader.rack
            return same_host, same_rack, "worker" in member.roles, duties[name]

        return min(able, key=unfit, default=None)

    def _warn_of_bound(self, job: _Job) -> list[Action]:
        assert job.book is not None
        workers = sum(1 for member in self._members_of(job).values() if "worker" in member.roles)
        bound = job.book.max_delay(workers)
        if bound is None or bound >= workers - 1:
            return []
        reason = (
            f"a delay bound of {bound} with {workers} workers forces drops; the mean delay is {workers - 1}"
        )
        return [Note("bound-tight", reason, loud=True)]

    def _shard_ready(self, job: _Job, message: ShardReady, now: float) -> list[Action]:
        assert job.book is not None
        shard = job.book.shards[message.shard]
        if message.epoch != shard.range.epoch:
            return []
        shard.ready = True
        shard.replica_filled = shard.replica_filled or message.replica_filled
        return self._check_ready(job, now)

    def _check_ready(self, job: _Job, now: float) -> list[Action]:
        """Once every shard and its replica hold the initial values, training may begin."""
        assert job.book is not None
        done = all(
            s.ready and (s.replica_filled or s.range.replica is None) for s in job.book.shards.values()
        )
        if job.ready or not done:
            return []
        job.ready = True
        ready = self._ready_message(job)
        actions: list[Action] = [Note("job-ready", f"the model of job {job.name} is in place")]
        actions += [Send(name, "worker", ready) for name in sorted(self._members_of(job))]
        early, job.early_pulls = job.early_pulls, []
        return [*actions, *(action for node, pull in early for action in self._pull(job, node, pull, now))]

    def _ready_message(self, job: _Job) -> JobReady:
        assert job.published is not None
        assert job.book is not None
        ranges = tuple(shard.range for _, shard in sorted(job.book.shards.items()))
        wanted = job.published
        return JobReady(ranges, wanted.arrays, wanted.rule, wanted.settings, wanted.dtype, wanted.version)

    # --- fail-over --------------------------------------------------------------------------------------

    def _leader_lost(self, job: _Job, index: int, node: str, reason: str) -> list[Action]:
        assert job.book is not None
        shard = job.book.shards[index]
        if not job.ready:
            # Nothing has been trained yet, and the publisher still has the values: begin anew.
            job.placed, job.book = False, None
            return [
                Note("placing-again", f"server {node} lost: {reason}", loud=True),
                *self._begin_model(job),
            ]
        job.book.leader_lost(index)
        replica = shard.range.replica
        why = f"server {node} lost: {reason}"
        if replica is None or replica not in self._members:
            return self._fail(job, f"server {node} of shard {index} was lost ({reason}) and had no replica")
        job.promoting[index] = (replica, why)
        epoch = shard.range.epoch + 1
        return [
            Note("failing-over", f"shard {index} from {node} to {replica}: {reason}", loud=True),
            Send(replica, f"replica.{index}", Promote(index, epoch, why)),
        ]

    def _promoted(self, job: _Job, sender: str, message: Promoted) -> list[Action]:
        assert job.book is not None
        expected = job.promoting.pop(message.shard, None)
        if expected is None or expected[0] != sender:
            return []
        if message.version < 0:
            return self._fail(job, f"the replica {sender} of shard {message.shard} had never been filled")
        self._fail_overs += 1
        shard = job.book.shards[message.shard]
        shard.range = msgspec.structs.replace(shard.range, leader=sender, epoch=message.epoch, replica=None)
        shard.version = message.version
        shard.replica_filled = False
        survived = AppliedSet(message.applied)
        lost = tuple(sorted(update for update in shard.undurable if update not in survived))
        shard.undurable.clear()
        shard.fail_overs.append(Version(message.epoch, message.version))
        job.pulls.clear()  # workers ask again when they hear of the new leader
        actions: list[Action] = [
            Note(
                "failed-over",
                f"shard {message.shard} is led by {sender} from version {message.version}, "
                f"optimizer state {message.version - message.state_version} versions older: {expected[1]}",
                loud=True,
                value=float(message.version),
            )
        ]
        if lost:
            actions.append(Note("lost", f"committed, but not in {sender} when it took over", lost, loud=True))
        replica_actions = self._find_replicas(job)
        change = LeaderChanged(shard.range, message.version, message.applied, expected[1])
        for name in sorted(self._members_of(job)):
            actions += [Send(name, role, change) for role in ("worker", "aggregator")]
        return [*actions, *replica_actions]

    def _replica_lost(self, job: _Job, index: int, node: str, reason: str, now: float) -> list[Action]:
        assert job.book is not None
        shard = job.book.shards[index]
        shard.range = msgspec.structs.replace(shard.range, replica=None)
        shard.replica_filled = False
        if index in job.promoting:
            return self._fail(job, f"server and replica {node} of shard {index} were both lost")
        gone = ReplicaAssigned(index, None, f"replica {node} lost: {reason}", orderly=reason == LEFT)
        actions: list[Action] = [Send(shard.range.leader, f"server.{index}", gone), *self._find_replicas(job)]
        return [*actions, *self._check_ready(job, now)]

    def _find_replicas(self, job: _Job) -> list[Action]:
        """Give every shard that lacks one a new replica, where somebody can be one."""
        if job.book is None or job.published is None or job.failed is not None:
            return []
        actions: list[Action] = []
        for index, shard in sorted(job.book.shards.items()):
            if shard.range.replica is not None or shard.range.leader not in self._members:
                continue
            replica = self._choose_replica(job, shard.range)
            if replica is None:
                continue
            shard.range = msgspec.structs.replace(shard.range, replica=replica)
            actions.append(Note("appointed", f"shard {index}: now followed by {replica}"))
            actions += self._assign_replica(job, shard.range)
        return actions

    def _fail(self, job: _Job, reason: str) -> list[Action]:
        job.failed = reason
        names = sorted(self._members_of(job))
        return [
            Note("job-failed", reason, loud=any("worker" in self._members[name].roles for name in names)),
            *(Send(name, role, JobFailed(reason)) for name in names for role in ("worker", "participant")),
        ]

    def _spare_replication(self, job: _Job, report: AppliedReport) -> list[Action]:
        """Use a moment's spare capacity before the bound makes the server wait."""
        assert job.book is not None
        assert job.published is not None
        bound = job.published.settings.divergence
        shard = job.book.shards[report.shard]
        replica = shard.range.replica
        if not bound or replica not in self._members or report.replica_version is None:
            return []
        if report.replica_version >= report.version or report.divergence < SPARE_SHARE * bound:
            return []
        rate = self._spare_rate(shard.range.leader, replica)
        why = f"divergence {report.divergence:.3g} of {bound:.3g}"
        return [Send(shard.range.leader, f"server.{report.shard}", Replicate(report.shard, rate, why))]

    # --- pulls ------------------------------------------------------------------------------------------

    def _pull(self, job: _Job, sender: str, message: PullWanted, now: float) -> list[Action]:
        if job.failed is not None:
            return [Send(sender, "worker", PullFailed(message.pull, job.failed))]
        if job.book is None or not job.ready:
            job.early_pulls.append((sender, message))
            return []
        if job.promoting:
            return []  # the new leader's announcement makes the worker ask again
        actions: list[Action] = []
        reserved: dict[int, tuple[Reserved, float]] = {}
        after = job.book.last_number() if message.with_state else None
        for index, shard in sorted(job.book.shards.items()):
            leader = shard.range.leader
            rate = self._spare_rate(leader, sender)
            source, target = self._members[leader].host, self._members[sender].host
            size = float(shard.range.count * 4)
            if source != target:
                reserved[index] = (Reserved(source, target, size, rate), now + size / rate)
            order = ServePull(message.pull, sender, index, rate, message.with_state, after)
            actions.append(Send(leader, f"server.{index}", order))
        job.pulls[message.pull] = _Pulling(sender, set(job.book.shards), reserved)
        return actions

    def _pull_served(self, job: _Job, pull: str, shard: int) -> None:
        pulling = job.pulls.get(pull)
        if pulling is not None:
            pulling.shards.discard(shard)
            pulling.reserved.pop(shard, None)
            if not pulling.shards:
                del job.pulls[pull]

    def _spare_rate(self, source: str, target: str) -> float:
        """What the path has left beside other pulls; never less than a fair part of it."""
        here, there = self._members[source].host, self._members[target].host
        if here == there:
            return MAX_RATE
        path = self._network.path(here, there)
        rate = float("inf")
        for link in path:
            users = 1
            for job in self._jobs.values():
                for pulling in job.pulls.values():
                    users += sum(
                        link in self._network.path(r.source, r.target) for r, _ in pulling.reserved.values()
                    )
            rate = min(rate, self._network.capacity(link) / users)
        return rate

    # --- groups -----------------------------------------------------------------------------------------

    def _workers(self, job: _Job) -> list[str]:
        return sorted(n for n, member in self._members_of(job).items() if "worker" in member.roles)

    def _absent(self, job: _Job) -> int:
        """Members the job is known to have that have not joined yet."""
        return max(job.expected - len(self._members_of(job)), 0)

    def _form(self, job: _Job, name: str) -> list[Action]:
        hosts = {node: member.host for node, member in self._members.items()}
        return job.groups.check(name, self._workers(job), self._absent(job), hosts, self._network)

    def _look_after_groups(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self._jobs.values():
            actions += job.groups.tell_pending(self._workers(job), self._absent(job), now)
            actions += job.groups.replan(self._network, now)
        return actions

    # --- time and state ---------------------------------------------------------------------------------

    def _plan_due(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self._jobs.values():
            book = job.book
            if book is None or not job.ready or job.promoting or book.plan_at is None or now < book.plan_at:
                continue
            others = [
                remainder(reserved, finish_s, now)
                for each in self._jobs.values()
                for pulling in each.pulls.values()
                for reserved, finish_s in pulling.reserved.values()
            ]
            others += [
                reserved
                for each in self._jobs.values()
                if each is not job and each.book is not None
                for reserved in each.book.reserved(now)
            ]
            actions += book.plan(self._network, others, self._members_of(job), now)
        return actions

    def next_deadline(self) -> float | None:
        times = [seen + self._settings.silence_s for seen in self._seen.values()]
        for job in self._jobs.values():
            if job.book is not None and job.book.plan_at is not None and job.ready and not job.promoting:
                times.append(job.book.plan_at)
            times += job.groups.deadlines()
        return min(times, default=None)

    def statistics(self) -> SchedulerStatistics:
        totals = {"offers": 0, "granted": 0, "dropped": 0, "dropped_late": 0, "grouped": 0, "again": 0}
        for job in self._jobs.values():
            if job.book is not None:
                totals = {key: totals[key] + job.book.counts[key] for key in totals}
        return SchedulerStatistics(
            members=len(self._members), jobs=len(self._jobs), fail_overs=self._fail_overs, **totals
        )

    def validate(self) -> None:
        assert self._seen.keys() == self._members.keys(), "every member is watched"
        for job in self._jobs.values():
            if job.book is not None:
                job.book.validate()


def _by_suitability(members: dict[str, MemberInfo], role: str) -> list[str]:
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
