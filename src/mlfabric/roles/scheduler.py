"""The scheduler: sees offers, deliveries and who is there; decides order, routes and leaders. No bytes.

Membership, publishing, fail-over, pulls and groups are here; the order of one job's updates is in
`roles.orderbook`, how long members count as alive in `roles.leases`, what a later scheduler gathers before it
begins in `roles.rebuild`. One scheduler serves several jobs over one view of the network.

It decides for a job only while it hears at least half of the job's members: `roles.succession` says why.
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
    DrainAnswered,
    DrainBegun,
    DrainWanted,
    FlowsSeen,
    FollowShard,
    GroupHeld,
    GroupWanted,
    Heartbeat,
    HeartbeatSeen,
    JobFailed,
    JobKnown,
    JobReady,
    Join,
    JoinAccepted,
    JoinRefused,
    LeaderChanged,
    LeadShard,
    LeadYielded,
    Leave,
    LeftOut,
    MemberInfo,
    Members,
    NewTerm,
    NodeLost,
    NotApplied,
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
    Register,
    Rejoin,
    ReplicaAssigned,
    ReplicaReport,
    Replicate,
    Reported,
    ServePull,
    ShardRange,
    ShardReady,
    ShardReport,
    SlotLate,
    SlotWithdrawn,
    StatusReport,
    StepDown,
    UpdateRefused,
    Version,
    YieldLead,
)
from mlfabric.plan.values import Reserved
from mlfabric.roles.actions import Action, Note, SchedulerSettings, Send
from mlfabric.roles.applied import AppliedSet
from mlfabric.roles.bandwidth import BandwidthView
from mlfabric.roles.groups import Groups
from mlfabric.roles.leases import CEILING_S, Leases
from mlfabric.roles.orderbook import OrderBook, ShardBook
from mlfabric.roles.rebuild import JobReports, Rebuilding
from mlfabric.roles.release import MAX_RATE, remainder
from mlfabric.roles.status import job_status, member_status

# A replica is brought up to date in spare time once it has used up this share of its bound.
SPARE_SHARE = 0.5
# A silent leader that nobody can replace is waited for so much longer: giving it up ends the job.
IRREPLACEABLE_S = 10.0
# How soon a scheduler that hears too few members looks again, and for how long it need not count them.
LOOK_AGAIN_S = 0.25
# A lead moves to a replica whose link is so many times better, and not again before so long.
BETTER_LINK = 2.0
SETTLED_S = 10.0
COUNTED_S = 0.05


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
    changes: dict[int, LeaderChanged] = field(default_factory=dict)  # the last per shard
    failed: str | None = None
    moving: dict[int, tuple[str, bool]] = field(default_factory=dict)  # shard -> (why, leader was told)
    moved_at: dict[int, float] = field(default_factory=dict)  # for the sake of a better link
    alone: bool = False  # too few members are heard to decide anything
    enough: tuple[float, bool] = (-1.0, False)  # until when it is known whether enough are heard
    given_up: dict[str, float] = field(default_factory=dict)  # of late and on suspicion only: until when


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
        self._labels: dict[str, str] = {}  # by node
        self._attempts: dict[str, int] = {}  # by node: how often it has registered
        self._leases = Leases(settings.least_lease_s)
        self._look_at = 0.0
        self._serial = settings.serial
        self._lives: dict[tuple[str, str], int] = {}  # (job, name) -> how often it joined
        self._moved: dict[str, NewTerm] = {}  # job -> who schedules it now
        self._draining: dict[str, str] = {}  # node -> why
        self._doubtful: set[str] = set()  # a connection to them broke; what it carried may be lost
        self._rebuilding = Rebuilding(settings.awaited, settings.wait_s) if settings.term else None
        self._jobs: dict[str, _Job] = {}
        self._view = BandwidthView()
        self._network = self._view.network()
        self._fail_overs = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, MessageReceived):
            self._leases.heard(event.sender, now, beat=isinstance(event.message, Heartbeat))
        if self._rebuilding is not None:
            return self._rebuild(self._rebuilding, event, now)
        match event:
            case MessageReceived(sender=sender) if sender in self._doubtful:
                why = f"the connection with {sender} broke and is back"
                return [*self._gather_again(sender, why), *self.handle(event, now)]
            case MessageReceived(sender=sender, message=message):
                return [*self._on_message(sender, message, now), *self._plan_due(now)]
            case PeerLost(node=node, reason=reason, proved=True):
                return [*self._lost(node, reason, now, proved=True), *self._plan_due(now)]
            case PeerLost(node=node):
                if node in self._members:
                    self._doubtful.add(node)  # its silence will tell, or its next word
            case DeadlinePassed():
                return [*self._silent(now), *self._look_after_groups(now), *self._plan_due(now)]
        return []

    def _on_message(self, sender: str, message: ControlMessage, now: float) -> list[Action]:
        match message:
            case Join():
                return self._join(message, now)
            case Register():
                return self._register(message, now)
            case Leave():
                return [Send(sender, "member", NodeLost(sender, LEFT)), *self._lost(sender, LEFT, now)]
            case Heartbeat():
                return self._beat(sender, message, now)
            case NewTerm():
                return self._succeeded(sender, message)
            case RatesLearned() | FlowsSeen():
                self._learn_rates(sender, message, now)
                return self._better_links(sender, now)
            case DrainWanted():
                answer, actions = self._drain(message)
                alone = answer.error and sender == message.target
                # Who wants to leave by itself and can hand nothing on leaves all the same.
                return (
                    [Send(sender, "member", NodeLost(sender, LEFT)), *self._lost(sender, LEFT, now)]
                    if (alone)
                    else actions
                )
        job = self._job_of(sender)
        if job is None:
            return []
        if isinstance(message, JobKnown | ShardReport | ReplicaReport):
            return self._reported(job, sender, message)
        if isinstance(message, PublishWanted):
            return self._publish(job, sender, message)
        if isinstance(message, GroupHeld):
            job.groups.held(sender, message, {node: member.host for node, member in self._members.items()})
            return []
        if isinstance(message, GroupWanted):
            known = job.groups.welcome(sender, message)
            if known:
                return known
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
            case NotApplied(shard=shard, update=update):
                book.not_applied(shard, update, now)
            case SlotWithdrawn():
                return book.withdrawn(message, now)
            case PullServed(pull=pull, shard=shard):
                self._pull_served(job, pull, shard)
            case ShardReady():
                return self._shard_ready(job, message, now)
            case Promoted():
                return self._promoted(job, sender, message)
            case LeadYielded():
                return self._lead_yielded(job, sender, message)
        return []

    # --- membership -------------------------------------------------------------------------------------

    def _join(self, message: Join, now: float) -> list[Action]:
        member = message.member
        name = member.node
        other = self._members.get(name)
        if other is not None:
            reason = f"the name {name} is taken by a living member of job {other.job}; choose another"
            return [Send(name, "member", JoinRefused(reason))]
        if member.job in self._moved:
            reason = f"job {member.job} is scheduled by {self._moved[member.job].scheduler} now; join there"
            return [Send(name, "member", JoinRefused(reason))]
        label = self._label(member.job, name)
        job = self._admit(member, label, message.expected, now)
        return [
            *self._announce(job),
            Send(name, "member", JoinAccepted(label, self._settings.node, self._leases.length_s(name))),
            Note("joined", f"{name} on {member.host} joined job {member.job}"),
            *([Send(name, "worker", self._ready_message(job))] if job.ready else []),
            *self._begin_model(job),
            *self._find_replicas(job),
        ]

    def _label(self, job: str, name: str) -> str:
        """Ids of updates begin with it, so no two lives of a name may share one, whoever schedules."""
        life = self._lives.get((job, name), 0) + 1
        self._lives[job, name] = life
        if self._settings.term:
            return f"{name}~{self._settings.term}.{life}"
        return name if life == 1 else f"{name}~{life}"

    def _admit(self, member: MemberInfo, label: str, expected: int, now: float, attempt: int = 0) -> _Job:
        if member.job not in self._jobs:
            self._jobs[member.job] = _Job(member.job, groups=Groups(self._settings.term))
        job = self._jobs[member.job]
        job.expected = max(job.expected, expected)
        job.enough = (-1.0, False)
        self._members[member.node] = member
        self._labels[member.node] = label
        self._attempts[member.node] = attempt
        self._leases.begin(member.node, now)
        self._view.add(member)
        self._network = self._view.network()
        return job

    def _register(self, message: Register, now: float) -> list[Action]:
        """A member that had been given up, or comes after we began, is back with what it holds."""
        name = message.member.node
        if message.member.job in self._moved:
            return [Send(name, "member", self._moved[message.member.job])]
        if name in self._members:
            if self._labels[name] != message.label:
                reason = f"the name {name} is taken by another process that joined since"
                return [Send(name, "member", JoinRefused(reason))]
            if message.attempt <= self._attempts[name]:
                return []
            return self._gather_again(name, f"{name} registered a second time")
        job = self._admit(message.member, message.label, 0, now, message.attempt)
        return [
            *self._announce(job),
            Note("registered", f"{name} on {message.member.host} is back in job {job.name}", loud=True),
            *self._begin_model(job),
            *self._find_replicas(job),
        ]

    def _reported(
        self, job: _Job, sender: str, message: JobKnown | ShardReport | ReplicaReport
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

    def _beat(self, sender: str, beat: Heartbeat, now: float) -> list[Action]:
        job = self._job_of(sender)
        if job is None:
            why = f"{self._settings.node} had given {sender} up"
            return [Send(sender, "member", Rejoin(beat.attempt, why))]
        if not self._hears_enough(job, now):
            return []
        lease = self._leases.length_s(sender)
        return [Send(sender, "member", HeartbeatSeen(beat.sent_s, now, self._settings.term, lease))]

    def _succeeded(self, sender: str, message: NewTerm) -> list[Action]:
        """A job has found another scheduler: here it is over."""
        job = self._job_of(sender)
        if job is None or message.term <= self._settings.term:
            return []
        for name in self._members_of(job):
            self._forget(name)
        del self._jobs[job.name]
        self._moved[job.name] = message
        return [Note("succeeded", f"job {job.name} is scheduled by {message.scheduler} now", loud=True)]

    def _learn_rates(self, sender: str, learned: RatesLearned | FlowsSeen, now: float) -> None:
        """Plan with what a host's transfers showed; nonsense is not believed."""
        if self._view.learn(sender, learned, now):
            self._network = self._view.network()
            for job in self._jobs.values():
                job.groups.rates_changed(now)
                if job.book is not None:
                    job.book.rates_changed(now)

    def _announce(self, job: _Job) -> list[Action]:
        """Tell all members of the job who is there; those that only watch succeed last."""
        self._serial += 1
        members = sorted(self._members_of(job).values(), key=lambda m: (not m.roles, m.node))
        everybody = Members(tuple(members), self._settings.term, self._serial)
        return [Send(member.node, "member", everybody) for member in members]

    def _job_of(self, node: str) -> _Job | None:
        member = self._members.get(node)
        return self._jobs.get(member.job) if member else None

    def _members_of(self, job: _Job) -> dict[str, MemberInfo]:
        return {name: member for name, member in self._members.items() if member.job == job.name}

    def _silent(self, now: float) -> list[Action]:
        self._look_at = now + LOOK_AGAIN_S
        actions: list[Action] = []
        for name in sorted(self._members):
            if name in self._members and not self._leases.alive(name, now) and self._may_give_up(name, now):
                silent = self._leases.silent_s(name, now)
                actions += self._lost(name, f"silent for {silent:.1f} s", now)
        for job in self._jobs.values():
            actions += self._check_company(job, now)
        return actions

    def _may_give_up(self, node: str, now: float) -> bool:
        """Whether enough others are heard, and its loss would not end the job for a moment's silence."""
        job = self._job_of(node)
        if job is None:
            return True
        if self._is_irreplaceable(job, node) and self._leases.silent_s(node, now) < IRREPLACEABLE_S:
            return False
        members = self._members_of(job)
        fresh = sum(1 for name in members if self._leases.fresh(name, now))
        # Where most have just fallen silent together, it is us who can't hear.
        return self._hears_enough(job, now) and 2 * fresh >= len(members) + self._given_up(job, now)

    def _given_up(self, job: _Job, now: float) -> int:
        """Those given up a moment ago still count, or a cut would let us give up one half after the other."""
        job.given_up = {name: until for name, until in job.given_up.items() if now < until}
        return len(job.given_up.keys() - self._members.keys())

    def _hears_enough(self, job: _Job, now: float) -> bool:
        """At least half of the job's members: then no other scheduler can have more than half."""
        if now < job.enough[0]:
            return job.enough[1]
        members = self._members_of(job)
        heard = sum(1 for name in members if self._leases.alive(name, now))
        enough = 2 * heard >= len(members) + self._given_up(job, now)
        job.enough = (now + COUNTED_S, enough)
        return enough

    def _is_irreplaceable(self, job: _Job, node: str) -> bool:
        if job.book is None or not job.ready or job.failed is not None:
            return False
        return any(
            shard.range.leader == node and not (shard.replica_filled and shard.range.replica in self._members)
            for shard in job.book.shards.values()
        )

    def _check_company(self, job: _Job, now: float) -> list[Action]:
        alone = not self._hears_enough(job, now)
        if alone == job.alone:
            return []
        job.alone = alone
        count = len(self._members_of(job))
        if not alone:
            return [Note("decides-again", f"at least half of the {count} members are heard", loud=True)]
        reason = f"fewer than half of the {count} members of job {job.name} are heard; nothing is decided"
        return [Note("undecided", reason, loud=True)]

    def _forget(self, node: str) -> MemberInfo | None:
        member = self._members.pop(node, None)
        if member is None:
            return None
        self._jobs[member.job].enough = (-1.0, False)
        del self._labels[node], self._attempts[node]
        self._leases.end(node)
        self._doubtful.discard(node)
        self._draining.pop(node, None)
        self._view.remove(node)
        self._network = self._view.network()
        return member

    def _lost(self, node: str, reason: str, now: float, proved: bool = False) -> list[Action]:
        member = self._forget(node)
        if member is None:
            return []
        job = self._jobs[member.job]
        if not proved and reason != LEFT:
            job.given_up[node] = now + CEILING_S
        actions: list[Action] = [
            Note("node-lost", f"{node}: {reason}", loud=reason != LEFT),
            *(Send(name, "member", NodeLost(node, reason)) for name in sorted(self._members_of(job))),
            *self._announce(job),
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
        gone = job.publisher not in self._members or job.publisher == sender
        if job.published is None or (not job.ready and gone):
            # Who had published it and is gone, or comes again, has its values still to send.
            job.published, job.publisher = message, sender
            job.placed, job.book = False, None
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
        leaders = _by_suitability(self._usable(job), "server")
        if not leaders:
            return []
        job.placed, job.expected = True, 0
        book = OrderBook(job.name, wanted.settings, wanted.elements, self._settings.term)
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
        if job.published.settings.divergence is None and range_.leader not in self._draining:
            return None
        members = self._usable(job)
        leader = self._members[range_.leader]
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
            job.moving.clear()
            return [
                Note("placing-again", f"server {node} lost: {reason}", loud=True),
                *self._begin_model(job),
            ]
        job.book.leader_lost(index)
        job.moving.pop(index, None)
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
        shard = job.book.shards[message.shard]
        before = shard.range.leader
        moved = before in self._members  # it yielded the lead; else it was lost
        if not moved:
            self._fail_overs += 1
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
                "lead-moved" if moved else "failed-over",
                f"shard {message.shard} is led by {sender} from version {message.version}, "
                f"optimizer state {message.version - message.state_version} versions older: {expected[1]}",
                loud=True,
                value=float(message.version),
            )
        ]
        if moved:
            why = f"shard {message.shard} is led by {sender} now"
            actions.append(Send(before, "member", StepDown(f"server.{message.shard}", why)))
        if lost:
            actions.append(Note("lost", f"committed, but not in {sender} when it took over", lost, loud=True))
        replica_actions = self._find_replicas(job)
        change = LeaderChanged(shard.range, message.version, message.applied, expected[1])
        job.changes[message.shard] = change
        for name in sorted(self._members_of(job)):
            actions += [Send(name, role, change) for role in ("worker", "aggregator")]
        return [*actions, *replica_actions]

    def _replica_lost(self, job: _Job, index: int, node: str, reason: str, now: float) -> list[Action]:
        assert job.book is not None
        shard = job.book.shards[index]
        shard.range = msgspec.structs.replace(shard.range, replica=None)
        shard.replica_filled = False
        job.moving.pop(index, None)
        if index in job.promoting and shard.range.leader not in self._members:
            return self._fail(job, f"server and replica {node} of shard {index} were both lost")
        job.promoting.pop(index, None)
        gone = ReplicaAssigned(index, None, f"replica {node} lost: {reason}", orderly=reason == LEFT)
        actions: list[Action] = [Send(shard.range.leader, f"server.{index}", gone), *self._find_replicas(job)]
        return [*actions, *self._check_ready(job, now)]

    # --- leads that move, hosts that leave --------------------------------------------------------------

    def _usable(self, job: _Job) -> dict[str, MemberInfo]:
        """Members that may be given something new."""
        return {n: member for n, member in self._members_of(job).items() if n not in self._draining}

    def _move_lead(self, job: _Job, index: int, why: str) -> list[Action]:
        """Let what is on its way arrive, then have the replica take over: nothing is lost by it."""
        assert job.book is not None
        shard = job.book.shards[index]
        ready = shard.replica_filled and shard.range.replica in self._usable(job)
        if not ready or index in job.promoting or index in job.moving:
            return []
        job.moving[index] = (why, False)
        note = Note("moving-lead", f"shard {index} from {shard.range.leader} to {shard.range.replica}: {why}")
        return [note, *self._ask_to_yield(job)]

    def _ask_to_yield(self, job: _Job) -> list[Action]:
        assert job.book is not None
        actions: list[Action] = []
        for index, (why, told) in job.moving.items():
            if not told and job.book.is_idle(index):
                job.moving[index] = (why, True)
                leader = job.book.shards[index].range.leader
                actions.append(Send(leader, f"server.{index}", YieldLead(index, why)))
        return actions

    def _lead_yielded(self, job: _Job, sender: str, message: LeadYielded) -> list[Action]:
        assert job.book is not None
        range_ = job.book.shards[message.shard].range
        if message.shard not in job.moving or (sender, message.epoch) != (range_.leader, range_.epoch):
            return []
        why, _ = job.moving.pop(message.shard)
        assert range_.replica is not None
        job.promoting[message.shard] = (range_.replica, why)
        promote = Promote(message.shard, range_.epoch + 1, why)
        return [Send(range_.replica, f"replica.{message.shard}", promote)]

    def _better_links(self, node: str, now: float) -> list[Action]:
        """After news of a host's rates: a lead moves where its replica is much better linked."""
        job = self._job_of(node)
        if job is None or job.book is None or not job.ready:
            return []
        actions: list[Action] = []
        for index, shard in job.book.shards.items():
            replica = self._members.get(shard.range.replica or "")
            leader = self._members.get(shard.range.leader)
            if replica is None or leader is None or now < job.moved_at.get(index, -SETTLED_S) + SETTLED_S:
                continue
            here, there = (self._network.hosts[member.host] for member in (leader, replica))
            rate = min(here.up_bytes_per_s, here.down_bytes_per_s)
            other = min(there.up_bytes_per_s, there.down_bytes_per_s)
            if other >= BETTER_LINK * rate:
                why = f"the link of {there.name} carries {other / rate:.1f} times as much"
                moves = self._move_lead(job, index, why)
                if moves:
                    job.moved_at[index] = now
                actions += moves
        return actions

    def drain(self, target: str, only: str | None = None) -> DrainAnswered:
        """What `DrainWanted` will do, for whoever asks; `only`: members of this job."""
        return self._drain(DrainWanted(target, only), ask=True)[0]

    def _drain(self, wanted: DrainWanted, ask: bool = False) -> tuple[DrainAnswered, list[Action]]:
        """Have a node, or all nodes of a host, leave once nothing needs them."""
        target = wanted.target
        named = {n: m for n, m in self._members.items() if target in (n, m.host)}
        nodes = tuple(sorted(n for n, m in named.items() if wanted.job in (None, m.job)))
        if not nodes:
            return DrainAnswered((), f"no member is called {target} and none runs on a host of that name"), []
        for node in nodes:
            error = self._undrainable(node, nodes)
            if error:
                return DrainAnswered((), error), []
        if ask:
            return DrainAnswered(nodes), []
        actions: list[Action] = []
        for node in nodes:
            if node not in self._draining:
                self._draining[node] = f"{node} is being drained"
                actions.append(Send(node, "member", DrainBegun(self._draining[node])))
        return DrainAnswered(nodes), actions

    def _undrainable(self, node: str, leaving: tuple[str, ...]) -> str:
        job = self._job_of(node)
        if job is None or job.book is None or job.failed is not None:
            return ""
        led = [index for index, shard in job.book.shards.items() if shard.range.leader == node]
        stay = {n: m for n, m in self._usable(job).items() if n not in leaving}
        if led and not _by_suitability(stay, "replica"):
            return f"nobody else can lead shard {led[0]} of job {job.name}; add a member that can first"
        return ""

    def _drain_on(self, job: _Job, now: float) -> list[Action]:
        """One more step for those who leave: their leads, then what they follow, then they themselves."""
        actions: list[Action] = []
        for node in [n for n in self._draining if self._members[n].job == job.name]:
            steps = self._hand_on(job, node) if job.book is not None and job.ready else []
            actions += steps
            if not self._is_needed(job, node):
                actions += [Send(node, "member", NodeLost(node, LEFT)), *self._lost(node, LEFT, now)]
        return actions

    def _hand_on(self, job: _Job, node: str) -> list[Action]:
        assert job.book is not None
        actions: list[Action] = []
        for index, shard in job.book.shards.items():
            range_ = shard.range
            if range_.replica == node and index not in job.promoting:
                other = self._choose_replica(job, range_)
                if other is not None:
                    shard.range = msgspec.structs.replace(range_, replica=other)
                    shard.replica_filled = False
                    actions += self._assign_replica(job, shard.range)
            elif range_.leader == node and range_.replica is None:
                actions += self._find_replicas(job)
            elif range_.leader == node:
                actions += self._move_lead(job, index, self._draining[node])
        return actions

    def _is_needed(self, job: _Job, node: str) -> bool:
        if job.book is None or not job.ready or job.failed is not None:
            return False
        ranges = [shard.range for shard in job.book.shards.values()]
        return job.book.has_open(node) or any(
            range_.leader == node
            or (range_.replica == node and self._choose_replica(job, range_) is not None)
            for range_ in ranges
        )

    # --- after a succession, or where messages may be lost ----------------------------------------------

    def _gather_again(self, node: str, why: str) -> list[Action]:
        """Have all members of the job report once more: what was sent to or by this one may be lost."""
        job = self._job_of(node)
        if job is None:
            return []
        names = sorted(self._members_of(job))
        self._doubtful.difference_update(names)
        self._rebuilding = Rebuilding(names, CEILING_S)
        return [
            Note("gathering-again", why, loud=True),
            *(Send(name, "member", Rejoin(self._attempts[name], why)) for name in names),
        ]

    def _rebuild(self, rebuilding: Rebuilding, event: Event, now: float) -> list[Action]:
        """Gather what members report; begin once all have, or when the rest has had its time."""
        rebuilding.begin(now)
        actions: list[Action] = []
        match event:
            case MessageReceived(message=Register() as register):
                name = register.member.node
                job = self._admit(register.member, register.label, register.expected, now, register.attempt)
                rebuilding.reports(job.name).forget(name)
            case MessageReceived(sender=sender, message=Heartbeat(sent_s=sent)) if sender in self._members:
                if rebuilding.answers():
                    lease = self._leases.length_s(sender)
                    seen = HeartbeatSeen(sent, now, self._settings.term, lease)
                    actions.append(Send(sender, "member", seen))
            case MessageReceived(message=Heartbeat()):
                pass  # it has not heard of us, or its report is on its way
            case MessageReceived(sender=sender, message=JobKnown() | ShardReport() | ReplicaReport() as told):
                if sender in self._members:
                    rebuilding.reports(self._members[sender].job).note(sender, told)
            case MessageReceived(sender=sender, message=Reported()):
                rebuilding.awaited.discard(sender)
            case PeerLost(node=node, proved=proved):
                if proved:
                    rebuilding.awaited.discard(node)
                rebuilding.later.append(event)
            case MessageReceived():
                rebuilding.later.append(event)
        return [*actions, *self._begin_again(rebuilding, now)] if rebuilding.complete(now) else actions

    def _begin_again(self, rebuilding: Rebuilding, now: float) -> list[Action]:
        self._rebuilding = None
        missing = sorted(rebuilding.awaited)
        term = self._settings.term
        silent = f", not {', '.join(missing)}" if missing else ""
        why = f"term {term}: {len(self._members)} members have reported{silent}"
        actions: list[Action] = [Note("rebuilt", why, loud=True)]
        lost = f"it did not report to {self._settings.node} in term {term}"
        for name in missing:
            self._forget(name)
            actions += [Send(each, "member", NodeLost(name, lost)) for each in sorted(self._members)]
        for job in [job for job in self._jobs.values() if job.name in rebuilding.jobs]:
            if len(self._settings.awaited) + 1 >= job.expected:
                job.expected = 0  # all had come before
            actions += self._announce(job)
            reports = rebuilding.reports(job.name)
            actions += self._resume(job, reports) if reports.ready is not None else self._begin_model(job)
        # Groups that exist are known before anybody's wish for one is looked at.
        later = sorted(rebuilding.later, key=lambda event: not _tells_of_group(event))
        return [*actions, *(action for event in later for action in self.handle(event, now))]

    def _resume(self, job: _Job, reports: JobReports) -> list[Action]:
        """Go on with a job whose model is in place: shards as their leaders report them."""
        assert reports.ready is not None
        job.published, job.placed, job.ready = reports.publication(), True, True
        wanted = job.published
        first = job.book.next_number() if job.book is not None else 0
        job.book = OrderBook(job.name, wanted.settings, wanted.elements, self._settings.term, first)
        job.promoting.clear()
        job.moving.clear()
        job.pulls.clear()
        actions: list[Action] = []
        for range_ in reports.ready.shards:
            job.book.shards[range_.index] = reports.shard(range_)
        for index, shard in sorted(job.book.shards.items()):
            if reports.is_led(index):
                actions += self._keep_leader(job, reports, shard)
            else:
                actions += self._leader_lost(job, index, shard.range.leader, "it did not report")
            kept = (shard.range.leader, shard.range.replica)
            for role, told in (("server", reports.servers), ("replica", reports.replicas)):
                for name, _ in told.get(index, []):
                    if name not in kept:
                        why = f"shard {index} is led by {kept[0]} and followed by {kept[1] or 'nobody'}"
                        actions.append(Send(name, "member", StepDown(f"{role}.{index}", why)))
        return [*actions, *self._find_replicas(job)]

    def _keep_leader(self, job: _Job, reports: JobReports, shard: ShardBook) -> list[Action]:
        """Tell those who have not heard of this leader's epoch, and the leader if its replica is gone."""
        index, range_ = shard.range.index, shard.range
        report = reports.leader_report(shard)
        actions: list[Action] = []
        if report.replica is not None and range_.replica is None:
            gone = ReplicaAssigned(index, None, f"replica {report.replica} did not report")
            actions.append(Send(range_.leader, f"server.{index}", gone))
        if range_.epoch == 0:
            return actions
        why = "the leader changed with the scheduler"
        change = LeaderChanged(range_, report.version, report.applied, why)
        job.changes[index] = change
        for name, epochs in sorted(reports.epochs.items()):
            if epochs.get(index, range_.epoch) < range_.epoch:
                actions += [Send(name, role, change) for role in ("worker", "aggregator")]
        return actions

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
            if self._draining:
                actions += self._drain_on(job, now)
            if job.moving and book is not None:
                actions += self._ask_to_yield(job)
            if book is None or not job.ready or self._is_moving(job):
                continue
            if book.plan_at is None or now < book.plan_at:
                continue
            if not self._hears_enough(job, now):
                book.plan_at = now + LOOK_AGAIN_S
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
            actions += book.plan(self._network, others, self._planned_with(job), now)
        return actions

    def _is_moving(self, job: _Job) -> bool:
        return bool(job.promoting or job.moving)

    def _planned_with(self, job: _Job) -> dict[str, MemberInfo]:
        """Members as the planner may use them: those who leave sum for nobody."""
        return {
            name: msgspec.structs.replace(member, roles=tuple(r for r in member.roles if r != "aggregator"))
            if name in self._draining
            else member
            for name, member in self._members_of(job).items()
        }

    def next_deadline(self) -> float | None:
        if self._rebuilding is not None:
            return self._rebuilding.until
        times = [max(self._leases.until_s(name), self._look_at) for name in self._members]
        for job in self._jobs.values():
            if (
                job.book is not None
                and job.book.plan_at is not None
                and job.ready
                and not self._is_moving(job)
            ):
                times.append(job.book.plan_at)
            times += job.groups.deadlines()
        return min(times, default=None)

    def status(self, now: float, only: str | None = None) -> StatusReport:
        """Everything worth showing to whoever asks, of one job or of all."""
        leases = {record.node: record for record in self._leases.records(now)}
        return StatusReport(
            scheduler=self._settings.node,
            term=self._settings.term,
            now_s=now,
            undecided=self._rebuilding is not None or any(job.alone for job in self._jobs.values()),
            members=tuple(
                member_status(
                    member,
                    leases[name],
                    self._network,
                    self._jobs[member.job].book,
                    self._draining.get(name, ""),
                )
                for name, member in sorted(self._members.items())
                if only in (None, member.job)
            ),
            jobs=tuple(
                job_status(name, self._members_of(job), job.book, job.ready, job.failed, now)
                for name, job in sorted(self._jobs.items())
                if only in (None, name)
            ),
        )

    def statistics(self) -> SchedulerStatistics:
        totals = {"offers": 0, "granted": 0, "dropped": 0, "dropped_late": 0, "grouped": 0, "again": 0}
        for job in self._jobs.values():
            if job.book is not None:
                totals = {key: totals[key] + job.book.counts[key] for key in totals}
        return SchedulerStatistics(
            members=len(self._members), jobs=len(self._jobs), fail_overs=self._fail_overs, **totals
        )

    def validate(self) -> None:
        assert self._leases.nodes() == self._members.keys(), "every member is watched"
        assert self._labels.keys() == self._members.keys(), "every member has a label"
        for job in self._jobs.values():
            if job.book is not None:
                job.book.validate()


def _tells_of_group(event: Event) -> bool:
    return isinstance(event, MessageReceived) and isinstance(event.message, GroupHeld)


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
