"""How a scheduler comes to know a job that runs already: after a succession, or where messages may be lost.

What members report is kept in `roles.rebuild` until all have reported or have had their time.
"""

from __future__ import annotations

from mlfabric.events import Event, MessageReceived, PeerLost
from mlfabric.messages import (
    GroupHeld,
    Heartbeat,
    HeartbeatSeen,
    JobKnown,
    LeaderChanged,
    NodeLost,
    Register,
    Rejoin,
    ReplicaAssigned,
    ReplicaReport,
    Reported,
    ShardReport,
    StepDown,
)
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.domain import Domain, Job
from mlfabric.roles.entries import ShardBook
from mlfabric.roles.failover import FailOver
from mlfabric.roles.leases import CEILING_S
from mlfabric.roles.orderbook import OrderBook
from mlfabric.roles.placing import Placing
from mlfabric.roles.rebuild import JobReports, Rebuilding


class Resuming:
    def __init__(self, domain: Domain, placing: Placing, failover: FailOver) -> None:
        self._domain = domain
        self._placing = placing
        self._failover = failover
        settings = domain.settings
        self._silent = set(settings.silent)
        self._orderly = settings.orderly
        self.rebuilding = Rebuilding(settings.awaited, settings.wait_s) if settings.term else None

    def gather_again(self, node: str, why: str) -> list[Action]:
        """Have all members of the job report once more: what was sent to or by this one may be lost."""
        job = self._domain.job_of(node)
        if job is None:
            return []
        names = sorted(self._domain.members_of(job))
        self._domain.doubtful.difference_update(names)
        self.rebuilding = Rebuilding(names, CEILING_S)
        return [
            Note("gathering-again", why, loud=True),
            *(Send(name, "member", Rejoin(self._domain.attempts[name], why)) for name in names),
        ]

    def rebuild(self, rebuilding: Rebuilding, event: Event, now: float) -> tuple[list[Action], list[Event]]:
        """Gather what members report; begin once all have, or when the rest has had its time. What came
        meanwhile and concerns others is given back then, in the order in which to handle it."""
        rebuilding.begin(now)
        actions: list[Action] = []
        match event:
            case MessageReceived(message=Register() as register):
                name = register.member.node
                job = self._domain.admit(
                    register.member, register.label, register.expected, now, register.attempt
                )
                rebuilding.reports(job.name).forget(name)
            case MessageReceived(sender=sender, message=Heartbeat(sent_s=sent)) if (
                sender in self._domain.members
            ):
                if rebuilding.answers():
                    lease = self._domain.leases.length_s(sender)
                    seen = HeartbeatSeen(sent, now, self._domain.settings.term, lease)
                    actions.append(Send(sender, "member", seen))
            case MessageReceived(message=Heartbeat()):
                pass  # it has not heard of us, or its report is on its way
            case MessageReceived(sender=sender, message=JobKnown() | ShardReport() | ReplicaReport() as told):
                if sender in self._domain.members:
                    rebuilding.reports(self._domain.members[sender].job).note(sender, told)
            case MessageReceived(sender=sender, message=Reported()):
                rebuilding.awaited.discard(sender)
            case PeerLost(node=node, proved=proved):
                if proved:
                    rebuilding.awaited.discard(node)
                rebuilding.later.append(event)
            case MessageReceived():
                rebuilding.later.append(event)
        if not rebuilding.complete(now):
            return actions, []
        # Groups that exist are known before anybody's wish for one is looked at.
        later = sorted(rebuilding.later, key=lambda event: not _tells_of_group(event))
        return [*actions, *self._begin_again(rebuilding, now)], later

    def _begin_again(self, rebuilding: Rebuilding, now: float) -> list[Action]:
        self.rebuilding = None
        missing = sorted(rebuilding.awaited | (self._silent - self._domain.members.keys()))
        self._silent = set()
        term = self._domain.settings.term
        silent = f", not {', '.join(missing)}" if missing else ""
        why = f"term {term}: {len(self._domain.members)} members have reported{silent}"
        actions: list[Action] = [Note("rebuilt", why, loud=not self._orderly)]
        lost = f"it did not report to {self._domain.settings.node} in term {term}"
        for name in missing:
            self._domain.forget(name)
            actions += [Send(each, "member", NodeLost(name, lost)) for each in sorted(self._domain.members)]
        for job in [job for job in self._domain.jobs.values() if job.name in rebuilding.jobs]:
            if len(self._domain.settings.awaited) + 1 >= job.expected:
                job.expected = 0  # all had come before
            actions += self._domain.announce(job)
            reports = rebuilding.reports(job.name)
            actions += (
                self._resume(job, reports, now)
                if reports.ready is not None
                else self._placing.begin_model(job)
            )
        self._orderly = False
        return actions

    def _resume(self, job: Job, reports: JobReports, now: float) -> list[Action]:
        """Go on with a job whose model is in place: shards as their leaders report them."""
        assert reports.ready is not None
        job.published, job.placed, job.ready = reports.publication(), True, True
        wanted = job.published
        first = job.book.entries.next_number if job.book is not None else 0
        job.book = OrderBook(job.name, wanted.settings, wanted.elements, self._domain.settings.term, first)
        job.promoting.clear()
        job.moving.clear()
        job.late.clear()
        job.pulls.clear()
        job.gathering.clear()
        job.gather_until = None
        job.pace = None
        actions: list[Action] = []
        for range_ in reports.ready.shards:
            job.book.shards[range_.index] = reports.shard(range_)
        for index, shard in sorted(job.book.shards.items()):
            if reports.is_led(index):
                actions += self._keep_leader(job, reports, shard)
            elif not (self._orderly and self._failover.leader_left(job, index, now)):
                actions += self._failover.leader_lost(job, index, shard.range.leader, "it did not report")
            kept = (shard.range.leader, shard.range.replica)
            for role, told in (("server", reports.servers), ("replica", reports.replicas)):
                for name, _ in told.get(index, []):
                    if name not in kept:
                        why = f"shard {index} is led by {kept[0]} and followed by {kept[1] or 'nobody'}"
                        order = StepDown(f"{role}.{index}", why, orderly=self._orderly)
                        actions.append(Send(name, "member", order))
        return [*actions, *self._placing.find_replicas(job)]

    def _keep_leader(self, job: Job, reports: JobReports, shard: ShardBook) -> list[Action]:
        """Tell those who have not heard of this leader's epoch, and the leader if its replica is gone."""
        index, range_ = shard.range.index, shard.range
        report = reports.leader_report(shard)
        actions: list[Action] = []
        if report.replica is not None and range_.replica is None:
            why = f"replica {report.replica} did not report"
            gone = ReplicaAssigned(index, None, why, orderly=self._orderly)
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


def _tells_of_group(event: Event) -> bool:
    return isinstance(event, MessageReceived) and isinstance(event.message, GroupHeld)
