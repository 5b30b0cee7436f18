"""What the scheduler knows of everybody: members, jobs, leases, and the network between the hosts.

Its parts (`roles.admission`, `placing`, `failover`, `handover`, `pulls`, `resuming`) share one of these.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from mlfabric.messages import (
    FlowsSeen,
    LeaderChanged,
    LimitWanted,
    MemberInfo,
    Members,
    PublishWanted,
    PullWanted,
    RatesLearned,
    SlotLate,
)
from mlfabric.plan.values import Reserved
from mlfabric.roles.actions import Action, SchedulerSettings, Send
from mlfabric.roles.bandwidth import BandwidthView
from mlfabric.roles.demand import Demand
from mlfabric.roles.groups import Groups
from mlfabric.roles.leases import Leases
from mlfabric.roles.limits import Limits
from mlfabric.roles.orderbook import OrderBook
from mlfabric.roles.pace import Pace
from mlfabric.roles.roster import StepRoster
from mlfabric.topology import Network
from mlfabric.ways import different_mode

# Links rarely change alone: news of one is acted upon when there was time for news of the others.
HEAR_OTHERS_S = 0.1


@dataclass(slots=True)
class Fetch:
    """A pull under way: whose, from whom each shard is still to come, and what that takes of the links. What
    is passed on comes `through` another pull."""

    node: str
    sources: dict[int, str]  # shard -> node
    reserved: dict[int, tuple[Reserved, float]]  # shard -> (transfer, when it should end)
    with_state: bool = False
    held: set[int] = field(default_factory=set)  # shards that change hands; they are served then
    through: dict[int, str] = field(default_factory=dict)  # shard -> pull that it is passed on from
    relayed: dict[int, tuple[float, float]] = field(default_factory=dict)  # shard -> (since, until when)
    broken: Counter[int] = field(default_factory=Counter)  # shard -> how often it did not come
    attempts: dict[int, int] = field(default_factory=dict)  # shard -> number of the last


@dataclass(slots=True)
class Move:
    """A lead that changes hands while its leader lives."""

    target: str  # node
    why: str
    told: bool = False  # the leader was


@dataclass(slots=True)
class Job:
    """A job: its members, its model once published, its order."""

    name: str
    expected: int = 0
    published: PublishWanted | None = None
    publisher: str = ""
    placed: bool = False
    book: OrderBook | None = None
    ready: bool = False
    pulls: dict[str, Fetch] = field(default_factory=dict)
    early_pulls: list[tuple[str, PullWanted]] = field(default_factory=list)
    gathering: dict[str, tuple[str, PullWanted]] = field(default_factory=dict)  # pulls to be served together
    gather_until: tuple[float, float] | None = None  # for company; until those before them have been sent to
    together: int = 0  # pulls that were under way at once, the last time; 0: nobody has asked yet
    attempts: int = 0  # parts of models that were sent or are to be
    groups: Groups = field(default_factory=Groups)
    promoting: dict[int, tuple[str, str]] = field(default_factory=dict)  # shard -> (replica, reason)
    changes: dict[int, LeaderChanged] = field(default_factory=dict)  # the last per shard
    failed: str | None = None
    ending: float | None = None  # a leader left whom nobody could follow: when that is a failure
    moving: dict[int, Move] = field(default_factory=dict)  # by shard
    late: list[SlotLate] = field(default_factory=list)  # complaints that wait until leads have moved
    demand: Demand = field(default_factory=Demand)
    look_at: float | None = None  # when to look whether other hosts should lead
    settled_at: float = 0.0  # leads that have moved stay until then
    alone: bool = False  # too few members are heard to decide anything
    enough: tuple[float, bool] = (-1.0, False)  # until when it is known whether enough are heard
    given_up: dict[str, float] = field(default_factory=dict)  # of late and on suspicion only: until when
    pace: Pace | None = None  # of the model's steps, where they are bound to each other
    roster: StepRoster | None = None  # where steps are called
    ways: dict[str, str] = field(default_factory=dict)  # in which workers train without servers, by name

    def taking_over(self) -> dict[int, str]:
        """Shards that are changing hands just now, and the node that gets each."""
        told = {index: move.target for index, move in self.moving.items() if move.told}
        return told | {index: heir for index, (heir, _) in self.promoting.items()}

    def other_way(self, node: str, way: str) -> str:
        """A sentence, if those who train without servers do it in another way; who does itself is free."""
        ways = [] if node in self.ways else [*self.ways.values()]
        return different_mode(way, ways[0]) if ways else ""

    def look_soon(self, at: float) -> None:
        self.look_at = at if self.look_at is None else min(self.look_at, at)


class Domain:
    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.members: dict[str, MemberInfo] = {}
        self.labels: dict[str, str] = {}  # by node
        self.attempts: dict[str, int] = {}  # by node: how often it has registered
        self.leases = Leases(settings.least_lease_s)
        self.draining: dict[str, str] = {}  # node -> why
        self.deserted = False  # the member in this scheduler's process has left: nobody counts on us now
        self.doubtful: set[str] = set()  # a connection to them broke; what it carried may be lost
        self.jobs: dict[str, Job] = {}
        self._serial = settings.serial
        self._view = BandwidthView()
        self.limits = Limits()
        self.network = self._view.network()  # as far as hosts may use it

    def admit(self, member: MemberInfo, label: str, expected: int, now: float, attempt: int = 0) -> Job:
        if member.job not in self.jobs:
            self.jobs[member.job] = Job(member.job, groups=Groups(self.settings.term))
        job = self.jobs[member.job]
        job.expected = max(job.expected, expected)
        job.enough = (-1.0, False)
        self.members[member.node] = member
        self.labels[member.node] = label
        self.attempts[member.node] = attempt
        self.leases.begin(member.node, now)
        self._view.add(member)
        self.limits.joined(member)
        self.see_network()
        return job

    def forget(self, node: str) -> MemberInfo | None:
        member = self.members.pop(node, None)
        if member is None:
            return None
        self.jobs[member.job].enough = (-1.0, False)
        del self.labels[node], self.attempts[node]
        self.leases.end(node)
        self.doubtful.discard(node)
        self.draining.pop(node, None)
        self._view.remove(node)
        self.limits.left(node)
        self.see_network()
        return member

    def announce(self, job: Job) -> list[Action]:
        """Tell all members of the job who is there; those that only watch succeed last."""
        self._serial += 1
        members = sorted(self.members_of(job).values(), key=lambda m: (not m.roles, m.node))
        everybody = Members(tuple(members), self.settings.term, self._serial)
        return [Send(member.node, "member", everybody) for member in members]

    def learn_rates(self, sender: str, learned: RatesLearned | FlowsSeen, now: float) -> None:
        """Plan with what a host's transfers showed; nonsense is not believed."""
        if self._view.learn(sender, learned, now):
            self._rates_changed(now)

    def see_network(self) -> None:
        self.network = self.limits.limit_hosts(self._view.network())

    def network_of(self, job: Job) -> Network:
        """The network as far as a job may use it."""
        return self.network.sending_at_most(self.limits.jobs.get(job.name))

    def limit(self, wanted: LimitWanted, now: float) -> None:
        if self.limits.set(wanted, self.members):
            self._rates_changed(now)

    def _rates_changed(self, now: float) -> None:
        self.see_network()
        for job in self.jobs.values():
            job.groups.rates_changed(now)
            job.look_soon(now + HEAR_OTHERS_S)
            if job.book is not None:
                job.book.rates_changed(now)

    def job_of(self, node: str) -> Job | None:
        member = self.members.get(node)
        return self.jobs.get(member.job) if member else None

    def members_of(self, job: Job) -> dict[str, MemberInfo]:
        return {name: member for name, member in self.members.items() if member.job == job.name}

    def usable(self, job: Job) -> dict[str, MemberInfo]:
        """Members that may be given something new."""
        return {n: member for n, member in self.members_of(job).items() if n not in self.draining}

    def workers(self, job: Job) -> list[str]:
        return sorted(n for n, member in self.members_of(job).items() if "worker" in member.roles)

    def absent(self, job: Job) -> int:
        """Members the job is known to have that have not joined yet."""
        return max(job.expected - len(self.members_of(job)), 0)

    def planned_with(self, job: Job) -> dict[str, MemberInfo]:
        """Members as the planner may use them: those who leave sum for nobody."""
        return {
            name: msgspec.structs.replace(member, roles=tuple(r for r in member.roles if r != "aggregator"))
            if name in self.draining
            else member
            for name, member in self.members_of(job).items()
        }
