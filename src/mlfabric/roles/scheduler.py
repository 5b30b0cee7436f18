"""The scheduler: sees offers, deliveries and who is there; decides order, routes and leaders. No bytes.

It takes every event to the part that decides about it: `roles.admission` who is a member, `company` whether
enough are heard, `placing` who leads a model, `failover` who takes over, `handover` how leads move,
`pulls` who sends the model, `resuming` what a later scheduler gathers first. The order of one job's updates
is in `roles.orderbook`, how long members count as alive in `roles.leases`. One scheduler serves several jobs
over one view of the network.

It decides for a job only while it hears at least half of the job's members: `roles.succession` says why.
"""

from __future__ import annotations

import msgspec

from mlfabric.events import DeadlinePassed, Event, MessageReceived, PeerLost
from mlfabric.messages import (
    LEFT,
    AppliedReport,
    ControlMessage,
    DrainAnswered,
    DrainWanted,
    FlowsSeen,
    GroupHeld,
    GroupWanted,
    Heartbeat,
    JobKnown,
    Join,
    LeadYielded,
    Leave,
    LeftOut,
    LimitAnswered,
    LimitWanted,
    NewTerm,
    NodeLost,
    NotApplied,
    OfferUpdate,
    Promoted,
    PublishWanted,
    PullServed,
    PullWanted,
    RatesLearned,
    Register,
    ReplicaReport,
    ShardReady,
    ShardReport,
    SlotLate,
    SlotWithdrawn,
    StatusReport,
    StepEnded,
    StepReady,
    StepsOver,
    TrainsIn,
    UpdateRefused,
    WayRefused,
)
from mlfabric.roles.actions import Action, SchedulerSettings, Send
from mlfabric.roles.admission import Admission
from mlfabric.roles.company import Company
from mlfabric.roles.domain import Domain, Job
from mlfabric.roles.failover import FailOver
from mlfabric.roles.handover import Handover
from mlfabric.roles.leads import Leads
from mlfabric.roles.placing import Placing
from mlfabric.roles.pulls import Pulls
from mlfabric.roles.release import remainder
from mlfabric.roles.replacing import Replacing
from mlfabric.roles.resuming import Resuming
from mlfabric.roles.roster import StepRoster
from mlfabric.roles.status import job_status, member_status
from mlfabric.ways import FASTEST, ROLLING

# How soon a scheduler that hears too few members looks again.
LOOK_AGAIN_S = 0.25


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
        self._domain = Domain(settings)
        self._company = Company(self._domain)
        self._pulls = Pulls(self._domain)
        leads = Leads(self._domain)
        self._placing = Placing(self._domain, self._pulls, leads)
        self._failover = FailOver(self._domain, self._placing, self._pulls)
        self._handover = Handover(self._domain, self._placing, self._failover)
        self._replacing = Replacing(self._domain, leads, self._handover)
        self._resuming = Resuming(self._domain, self._placing, self._failover)
        self._admission = Admission(self._domain, self._company, self._placing, self._resuming)
        self._look_at = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, MessageReceived) and isinstance(event.message, Heartbeat):
            self._domain.leases.heard(event.sender, event.message.sent_s, now)
        if self._resuming.rebuilding is not None:
            actions, later = self._resuming.rebuild(self._resuming.rebuilding, event, now)
            return [*actions, *(action for each in later for action in self.handle(each, now))]
        match event:
            case MessageReceived(sender=sender) if sender in self._domain.doubtful:
                why = f"the connection with {sender} broke and is back"
                return [*self._resuming.gather_again(sender, why), *self.handle(event, now)]
            case MessageReceived(sender=sender, message=message):
                return [*self._on_message(sender, message, now), *self._plan_due(now)]
            case PeerLost(node=node, reason=reason, proved=True):
                return [*self._failover.lost(node, reason, now, proved=True), *self._plan_due(now)]
            case PeerLost(node=node):
                if node in self._domain.members:
                    self._domain.doubtful.add(node)  # its silence will tell, or its next word
            case DeadlinePassed():
                ends = self._failover.end_jobs(now)
                return [*self._silent(now), *ends, *self._look_after_groups(now), *self._plan_due(now)]
        return []

    def _on_message(self, sender: str, message: ControlMessage, now: float) -> list[Action]:
        match message:
            case Join():
                return self._admission.join(message, now)
            case Register():
                return self._admission.register(message, now)
            case Leave():
                return [
                    Send(sender, "member", NodeLost(sender, LEFT)),
                    *self._failover.lost(sender, LEFT, now),
                ]
            case Heartbeat():
                return self._admission.beat(sender, message, now)
            case NewTerm():
                return self._admission.succeeded(sender, message)
            case RatesLearned() | FlowsSeen():
                self._domain.learn_rates(sender, message, now)
                return []
            case LimitWanted():
                self._domain.limit(message, now)
                return []
            case DrainWanted() if self._domain.deserted:
                return []  # it would begin what only our successor can end, who is asked as well
            case DrainWanted():
                own = sender == message.target
                answer, actions = self._handover.drain(message, own=own)
                # Who is no member any more need not wait for anything.
                return [Send(sender, "member", NodeLost(sender, LEFT))] if own and answer.error else actions
        job = self._domain.job_of(sender)
        if job is None:
            return []
        if isinstance(message, JobKnown | ShardReport | ReplicaReport):
            return self._admission.reported(job, sender, message)
        if isinstance(message, PublishWanted):
            return self._placing.publish(job, sender, message)
        if isinstance(message, GroupHeld):
            job.groups.held(
                sender, message, {node: member.host for node, member in self._domain.members.items()}
            )
            return []
        if isinstance(message, GroupWanted):
            known = job.groups.welcome(sender, message)
            if known:
                return known
            job.groups.want(sender, message, now)
            return self._form(job, message.name)
        if isinstance(message, TrainsIn):
            return self._let_in(job, sender, message.way, message.again)[1]
        if isinstance(message, StepReady):
            way = ROLLING if message.parts else FASTEST
            inside, refused = self._let_in(job, sender, way, message.holds >= 0)
            if not inside:
                return refused
        if isinstance(message, StepReady | StepEnded | StepsOver):
            if job.roster is None:
                job.roster = StepRoster(self._domain.settings.term, now)
            return job.roster.heard(sender, message, now)
        if isinstance(message, PullWanted):
            return self._pulls.pull(job, sender, message, now)
        book = job.book
        if book is None:
            return []
        match message:
            case OfferUpdate():
                job.demand.offered(sender, now)
                return book.offered(message, sender, now)
            case AppliedReport():
                for worker in book.applied(message, now):
                    job.demand.waits_no_more(worker, now)
                return self._pulls.spare_replication(job, message)
            case UpdateRefused(update=update):
                book.refused(update)
            case LeftOut():
                return book.withdrawing.left_out(message, now)
            case SlotLate() if job.taking_over():
                job.late.append(message)
            case SlotLate():
                return book.withdrawing.slot_late(message)
            case NotApplied(shard=shard, update=update):
                book.not_applied(shard, update, now)
            case SlotWithdrawn():
                return book.withdrawing.withdrawn(message, now)
            case PullServed():
                return self._pulls.pull_served(job, sender, message, now)
            case ShardReady():
                return self._placing.shard_ready(job, message, now)
            case Promoted():
                return self._failover.promoted(job, sender, message, now)
            case LeadYielded():
                return self._handover.lead_yielded(job, sender, message)
        return []

    def _let_in(self, job: Job, sender: str, way: str, known: bool) -> tuple[bool, list[Action]]:
        """Whether a worker may train in this way, as it does already where it is `known`."""
        why = "" if known else job.other_way(sender, way)
        if why:
            return False, [Send(sender, "stepper", WayRefused(why))]
        if job.published is not None and sender not in job.ways and not known:
            return False, []  # it finds out by what it hears of the model
        job.ways[sender] = way
        return True, []

    def _silent(self, now: float) -> list[Action]:
        self._look_at = now + LOOK_AGAIN_S
        actions: list[Action] = []
        for name in sorted(self._domain.members):
            if (
                name in self._domain.members
                and not self._domain.leases.alive(name, now)
                and self._company.may_give_up(name, now)
            ):
                silent = self._domain.leases.silent_s(name, now)
                actions += self._failover.lost(name, f"silent for {silent:.1f} s", now)
        for job in self._domain.jobs.values():
            actions += self._company.check_company(job, now)
        return actions

    def _form(self, job: Job, name: str) -> list[Action]:
        hosts = {node: member.host for node, member in self._domain.members.items()}
        return job.groups.check(
            name, self._domain.workers(job), self._domain.absent(job), hosts, self._domain.network_of(job)
        )

    def _look_after_groups(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self._domain.jobs.values():
            actions += job.groups.tell_pending(self._domain.workers(job), self._domain.absent(job), now)
            actions += job.groups.replan(self._domain.network_of(job), now)
        return actions

    def _plan_due(self, now: float) -> list[Action]:
        actions = self._domain.limits.news(self._domain.members)
        for job in self._domain.jobs.values():
            book = job.book
            if self._domain.draining:
                actions += self._drain_on(job, now)
            if job.look_at is not None and now >= job.look_at:
                enough = self._company.hears_enough(job, now)
                job.look_at = None if enough else now + LOOK_AGAIN_S
                actions += self._replacing.look(job, now) if enough else []
            if job.moving and book is not None:
                actions += self._handover.ask_to_yield(job)
            if job.late and book is not None and not job.taking_over():
                late, job.late = job.late, []
                actions += [action for each in late for action in book.withdrawing.slot_late(each)]
            actions += self._pulls.serve_due(job, now)
            actions += self._call_step(job, now)
            if book is None or not self._goes_on(job):
                continue
            if book.entries.plan_at is None or now < book.entries.plan_at:
                continue
            if not self._company.hears_enough(job, now):
                book.entries.plan_at = now + LOOK_AGAIN_S
                continue
            others = [
                remainder(reserved, finish_s, now)
                for each in self._domain.jobs.values()
                for pulling in each.pulls.values()
                for reserved, finish_s in pulling.reserved.values()
            ]
            others += [
                reserved
                for each in self._domain.jobs.values()
                if each is not job and each.book is not None
                for reserved in each.book.entries.reserved(now)
            ]
            limit = self._domain.limits.jobs.get(job.name)
            book.entries.taking_over = job.taking_over()
            actions += book.plan(self._domain.network, others, self._domain.planned_with(job), now, limit)
        return actions

    def _call_step(self, job: Job, now: float) -> list[Action]:
        """Have the next step made, where the scheduler says who takes part."""
        roster = job.roster
        if roster is None:
            return []
        if not self._company.hears_enough(job, now):
            roster.look_at = now + LOOK_AGAIN_S
            return []
        workers = {
            name: self._domain.members[name].host
            for name in self._domain.workers(job)
            if name not in self._domain.draining
        }
        actions = roster.look(workers, self._domain.absent(job), self._domain.network_of(job), now)
        job.groups.forget(roster.is_over)
        return actions

    def _goes_on(self, job: Job) -> bool:
        """Whether updates can be granted: every shard is led, or changes hands in good order."""
        over = job.failed is not None or job.ending is not None
        if not job.ready or over or job.book is None:
            return False
        members = self._domain.members
        return all(job.book.shards[index].range.leader in members for index in job.promoting)

    def drain(self, target: str, only: str | None = None) -> DrainAnswered:
        """What `DrainWanted` will do, for whoever asks; `only`: members of this job."""
        return self._handover.drain(DrainWanted(target, only), ask=True)[0]

    def limit(self, wanted: LimitWanted, only: str | None = None) -> LimitAnswered:
        """What `LimitWanted` will do, for whoever asks; `only`: a wish of this job's people."""
        return self._domain.limits.answer(wanted, self._domain.members, only)

    def _drain_on(self, job: Job, now: float) -> list[Action]:
        """One more step for those who leave: their leads, then what they follow, then they themselves."""
        actions: list[Action] = []
        leaving = [n for n in self._domain.draining if self._domain.members[n].job == job.name]
        for node in sorted(leaving, key=lambda name: name == self._domain.settings.node):
            steps = self._handover.hand_on(job, node, now) if job.book is not None and job.ready else []
            actions += steps
            if not self._handover.is_needed(job, node):
                actions += [Send(node, "member", NodeLost(node, LEFT)), *self._failover.lost(node, LEFT, now)]
        return actions

    def next_deadline(self) -> float | None:
        if self._resuming.rebuilding is not None:
            return self._resuming.rebuilding.until
        times = [max(self._domain.leases.until_s(name), self._look_at) for name in self._domain.members]
        for job in self._domain.jobs.values():
            if job.book is not None and job.book.entries.plan_at is not None and self._goes_on(job):
                times.append(job.book.entries.plan_at)
            if job.ending is not None:
                times.append(job.ending)
            times += [*job.groups.deadlines(), *self._pulls.deadlines(job)]
            if job.look_at is not None:
                times.append(job.look_at)
            if job.roster is not None and job.roster.look_at is not None:
                times.append(job.roster.look_at)
        return min(times, default=None)

    def status(self, now: float, only: str | None = None) -> StatusReport:
        """Everything worth showing to whoever asks, of one job or of all."""
        leases = {record.node: record for record in self._domain.leases.records(now)}
        return StatusReport(
            scheduler=self._domain.settings.node,
            term=self._domain.settings.term,
            now_s=now,
            undecided=self._resuming.rebuilding is not None
            or any(job.alone for job in self._domain.jobs.values()),
            members=tuple(
                member_status(
                    member,
                    leases[name],
                    self._domain.network,
                    self._domain.jobs[member.job].book,
                    self._domain.draining.get(name, ""),
                    self._domain.limits.of(name, self._domain.members).bytes_per_s,
                )
                for name, member in sorted(self._domain.members.items())
                if only in (None, member.job)
            ),
            jobs=tuple(
                job_status(
                    name,
                    self._domain.members_of(job),
                    job.book,
                    job.ready,
                    job.failed,
                    now,
                    self._domain.limits.jobs.get(name),
                )
                for name, job in sorted(self._domain.jobs.items())
                if only in (None, name)
            ),
        )

    def statistics(self) -> SchedulerStatistics:
        totals = {"offers": 0, "granted": 0, "dropped": 0, "dropped_late": 0, "grouped": 0, "again": 0}
        for job in self._domain.jobs.values():
            if job.book is not None:
                totals = {key: totals[key] + job.book.entries.counts[key] for key in totals}
        return SchedulerStatistics(
            members=len(self._domain.members),
            jobs=len(self._domain.jobs),
            fail_overs=self._failover.fail_overs,
            **totals,
        )

    def validate(self) -> None:
        assert self._domain.leases.nodes() == self._domain.members.keys(), "every member is watched"
        assert self._domain.labels.keys() == self._domain.members.keys(), "every member has a label"
        for job in self._domain.jobs.values():
            if job.book is not None:
                job.book.entries.validate()
