"""Succession: who votes for whom, who takes over, what a new scheduler learns and from whom."""

from __future__ import annotations

import pytest

from mlfabric.events import (
    DeadlinePassed,
    DrainRequested,
    GroupRequested,
    MessageReceived,
    PeerLost,
    SchedulerChanged,
)
from mlfabric.messages import (
    LEFT,
    SCHEDULER,
    AppliedIds,
    ArraySpec,
    DrainBegun,
    DrainWanted,
    Grant,
    GroupFormed,
    GroupHeld,
    GroupWanted,
    Heartbeat,
    HeartbeatSeen,
    JobFailed,
    JobKnown,
    JobReady,
    JobSettings,
    Join,
    JoinAccepted,
    LeaderChanged,
    Leave,
    MemberInfo,
    Members,
    NewTerm,
    NodeLost,
    OfferUpdate,
    Promote,
    Register,
    Rejoin,
    ReplicaReport,
    Reported,
    RuleSpec,
    ShardRange,
    ShardReport,
    SharesPlanned,
    StepDown,
    Version,
    VoteGiven,
    VoteWanted,
)
from mlfabric.roles.actions import (
    Action,
    FollowScheduler,
    MemberSettings,
    Note,
    RenewLease,
    SchedulerSettings,
    Send,
    StartRole,
    StopRole,
    WorkerSettings,
)
from mlfabric.roles.failover import ENDING_S
from mlfabric.roles.leases import CEILING_S, FLOOR_S, Leases
from mlfabric.roles.member import Member
from mlfabric.roles.participant import Participant
from mlfabric.roles.scheduler import Scheduler
from mlfabric.roles.succession import STEP_S
from tests.roles.feeding import Fed, notes, of, one, said, sent

LINE = ("w0", "w1", "w2", "w3", "w4")


def info(name: str, roles: tuple[str, ...] = ("worker", "server", "replica")) -> MemberInfo:
    return MemberInfo(name, name, "", roles, 1e6, 1e6)


def joined(name: str, scheduler: str = "w0", line: tuple[str, ...] = LINE) -> Fed:
    """A member that hears its scheduler."""
    fed = Fed(Member(MemberSettings(info(name), scheduler)))
    fed.tell(JoinAccepted(name, scheduler, 1.0), scheduler)
    fed.tell(Members(tuple(info(each) for each in line), 0, 1), scheduler)
    fed.tell(HeartbeatSeen(0.0, 0.0, 0, 1.0), scheduler)
    return fed


def orphaned(name: str, scheduler: str = "w0") -> Fed:
    fed = joined(name, scheduler)
    fed(PeerLost(scheduler, "connection refused", True))
    return fed


# --- votes --------------------------------------------------------------------------------------------------


def test_the_first_in_the_line_asks_at_once_and_the_next_a_moment_later() -> None:
    first, second = joined("w1"), joined("w2")
    gone = PeerLost("w0", "connection refused", True)
    assert {action.node for action in of(Send, first(gone))} == {"w2", "w3", "w4"}
    assert not sent(VoteWanted, second(gone))
    assert not sent(VoteWanted, second.wait(STEP_S * 0.9))
    assert sent(VoteWanted, second.wait(STEP_S * 0.2))


def test_a_silent_scheduler_is_given_up_when_its_lease_ends_and_not_before() -> None:
    fed = joined("w1")
    assert not sent(VoteWanted, fed.wait(0.9))
    assert sent(VoteWanted, fed.wait(0.2))


def test_a_wish_to_leave_is_told_to_the_next_scheduler_too() -> None:
    for wish in (DrainRequested(), MessageReceived("w0", DrainBegun("w1 is being drained"))):
        fed = joined("w1")
        fed(wish)
        told = fed(SchedulerChanged("w2", 1))
        assert [type(action.message) for action in of(Send, told)] == [Reported, DrainWanted]
    assert not sent(DrainWanted, joined("w1")(SchedulerChanged("w2", 1)))


def test_a_connection_that_merely_broke_proves_nothing() -> None:
    assert not sent(VoteWanted, joined("w1")(PeerLost("w0", "connection reset")))


def test_a_member_that_hears_the_scheduler_votes_for_nobody() -> None:
    answer = said(VoteGiven, joined("w2").tell(VoteWanted(1, 1), "w1"))
    assert not answer.granted
    assert "still heard" in answer.reason


def test_one_vote_per_term() -> None:
    fed = orphaned("w3")
    assert said(VoteGiven, fed.tell(VoteWanted(1, 1), "w1")).granted
    assert said(VoteGiven, fed.tell(VoteWanted(1, 1), "w1")).granted  # asked again, the same answer
    assert not said(VoteGiven, fed.tell(VoteWanted(1, 1), "w2")).granted
    assert said(VoteGiven, fed.tell(VoteWanted(2, 1), "w2")).granted


def test_a_candidate_that_missed_a_change_of_members_gets_no_vote() -> None:
    assert not said(VoteGiven, orphaned("w3").tell(VoteWanted(1, 0), "w1")).granted


def test_a_majority_makes_a_scheduler_and_less_does_not() -> None:
    fed = joined("w1")
    fed.wait(1.05)  # w0 is silent, so it still counts: three of five are needed
    assert not of(StartRole, fed.tell(VoteGiven(1, True, "", 0, "w0", 1), "w2"))
    won = fed.tell(VoteGiven(1, True, "", 0, "w0", 1), "w3")
    begins = one(StartRole, won)
    assert begins.role == "scheduler"
    assert begins.settings == SchedulerSettings("w1", 1, 1, LINE[1:], 1.0, silent=("w0",))
    assert {action.node for action in of(Send, won) if isinstance(action.message, NewTerm)} == set(LINE)


def test_a_host_that_says_its_process_is_gone_does_not_count() -> None:
    two = joined("w1", line=("w0", "w1"))
    assert one(StartRole, two(PeerLost("w0", "connection refused", True))).role == "scheduler"
    silent = joined("w1", line=("w0", "w1"))
    assert not of(StartRole, silent.wait(5.0))


def test_a_new_term_is_followed_and_an_old_one_is_corrected() -> None:
    fed = joined("w3")
    actions = fed.tell(NewTerm(2, "w1"), "w1")
    assert said(Register, actions, "w1").label == "w3"
    assert one(FollowScheduler, actions) == FollowScheduler("w1", 2)
    assert said(NewTerm, fed.tell(NewTerm(1, "w2"), "w2"), "w2") == NewTerm(2, "w1")


def test_a_scheduler_that_was_succeeded_ends_and_registers_with_the_next() -> None:
    fed = joined("w0")
    actions = fed.tell(NewTerm(1, "w1"), "w1")
    assert one(StopRole, actions).role == "scheduler"
    assert said(Register, actions, "w1")


def test_who_slept_through_an_election_hears_of_it_from_a_voter() -> None:
    fed = joined("w2")
    fed.wait(2.0)
    actions = fed.tell(VoteGiven(1, False, "w1 schedules in term 1", 1, "w1", 1), "w3")
    assert one(FollowScheduler, actions) == FollowScheduler("w1", 1)


def test_an_answered_heartbeat_extends_the_lease_from_when_it_was_sent() -> None:
    fed = joined("w1")
    fed.now = 0.7
    assert one(RenewLease, fed.tell(HeartbeatSeen(0.5, 0.6, 0, 1.0), "w0")).until_s == 1.5
    fed.now = 1.4
    assert not notes("scheduler-lost", fed(DeadlinePassed()))
    fed.now = 1.5
    assert notes("scheduler-lost", fed(DeadlinePassed()))


def test_who_may_count_on_the_scheduler_for_less_than_a_lease_does_not_count_on_it_longer() -> None:
    fed = joined("w0")
    fed.now = 0.8
    assert one(RenewLease, fed.tell(HeartbeatSeen(0.8, 0.8, 0, 1.0, 0.3), "w0")).until_s == pytest.approx(1.1)


def test_a_scheduler_that_leaves_is_succeeded_without_alarm() -> None:
    fed = joined("w1")
    lost = notes("scheduler-lost", fed.tell(NodeLost("w0", LEFT), "w0"))
    assert not lost[0].loud
    for voter in ("w2", "w3"):
        votes = fed.tell(VoteGiven(1, True, "", 0, "w0", 1), voter)
    settings = one(StartRole, votes).settings
    assert isinstance(settings, SchedulerSettings)
    assert settings.orderly


def test_a_member_registers_once_however_often_it_is_asked() -> None:
    fed = joined("w1")
    assert said(Register, fed.tell(Rejoin(0, "given up"), "w0")).attempt == 1
    assert not sent(Register, fed.tell(Rejoin(0, "given up"), "w0"))
    assert said(Register, fed.tell(Rejoin(1, "given up"), "w0")).attempt == 2
    assert said(Heartbeat, fed.wait(0.01), SCHEDULER).attempt == 2


# --- leases -------------------------------------------------------------------------------------------------


def test_a_lease_is_learned_from_the_gaps_between_heartbeats() -> None:
    leases = Leases()
    leases.begin("a", 0.0)
    for beat in range(8):
        leases.heard("a", 0.25 * beat, 0.25 * beat)
    assert leases.length_s("a") == FLOOR_S
    leases.heard("a", 2.25, 2.25)  # half a second late
    assert leases.length_s("a") == 1.5
    leases.heard("a", 12.25, 12.25)
    assert leases.length_s("a") == CEILING_S
    for beat in range(200):
        leases.heard("a", 12.5 + 0.25 * beat, 12.5 + 0.25 * beat)
    assert leases.length_s("a") == FLOOR_S


def test_heartbeats_that_were_kept_by_a_cut_say_nothing_of_the_present() -> None:
    leases = Leases()
    leases.begin("a", 0.0)
    for beat in range(8):
        leases.heard("a", 100 + 0.25 * beat, 0.25 * beat)  # its clock is another
    for beat in range(8, 12):
        leases.heard("a", 100 + 0.25 * beat, 9.0)  # sent before the cable was plugged in again
    assert not leases.alive("a", 9.0)
    assert leases.silent_s("a", 9.0) == pytest.approx(9 - 0.25 * 11, abs=0.05)
    leases.heard("a", 109.0, 9.01)
    assert leases.alive("a", 9.01)


def test_leases_of_many_members_are_longer() -> None:
    leases = Leases()
    for index in range(1000):
        leases.begin(f"n{index}", 0.0)
    assert leases.length_s("n0") == 4 * FLOOR_S


# --- a new scheduler ----------------------------------------------------------------------------------------

RANGE = ShardRange(0, 0, 100, "s0", 0, "r0")
SETTINGS = JobSettings(max_delay=4, divergence=0.5)
READY = JobReady((RANGE,), (ArraySpec("w", (100,), "float32"),), RuleSpec("Sum"), SETTINGS, "float32")


class Successor(Fed):
    """A scheduler of term 1 that waits for w0, w1, s0 and r0; s0 led, r0 followed."""

    def __init__(self, awaited: tuple[str, ...] = ("w0", "w1", "s0", "r0"), orderly: bool = False) -> None:
        super().__init__(Scheduler(SchedulerSettings("w0", 1, 5, awaited, 1.0, orderly=orderly)))

    def reports(self, name: str, *told: JobKnown | ShardReport | ReplicaReport) -> list[Action]:
        roles = {"w": ("worker",), "s": ("server", "replica"), "r": ("replica",)}[name[0]]
        actions = self.tell(Register(info(name, roles), name, 1), name)
        for message in told:
            actions += self.tell(message, name)
        return [*actions, *self.tell(Reported(1), name)]

    def leader(self, epoch: int = 0, version: int = 7) -> ShardReport:
        held = ShardRange(0, 0, 100, "s0", epoch, "r0")
        applied = AppliedIds(above={"w1": (0, 1)})
        return ShardReport(held, version, applied, (), "r0", version)


def test_a_new_scheduler_decides_once_all_have_reported() -> None:
    fed = Successor()
    fed.reports("w0", JobKnown(READY))
    fed.reports("w1", JobKnown(READY))
    offer = OfferUpdate("w1#2", 400, (Version(0, 7),), 1.0, 0, (0,), "the scheduler changed")
    assert not sent(Grant, [*fed.tell(offer, "w1"), *fed.wait(0.5)])
    fed.reports("s0", fed.leader())
    rebuilt = fed.reports("r0", ReplicaReport(0, 0, 7, 7))
    assert notes("rebuilt", rebuilt)
    assert not sent(LeaderChanged, rebuilt)
    assert not sent(StepDown, rebuilt)
    grant = said(Grant, [*rebuilt, *fed.wait(0.1)], "w1")
    assert grant.parts[0].term == 1
    assert grant.number >= 2**40


def test_a_leader_that_does_not_report_in_time_is_succeeded_by_its_replica() -> None:
    fed = Successor()
    for name in ("w0", "w1"):
        fed.reports(name, JobKnown(READY))
    fed.reports("r0", ReplicaReport(0, 0, 6, 6))
    assert not sent(Promote, fed.wait(0.9))
    assert said(Promote, fed.wait(0.2), "r0").epoch == 1


def test_those_whose_scheduler_and_leaders_left_have_time_to_leave_too() -> None:
    fed = Successor(("w0", "w1"), orderly=True)
    fed.reports("w0", JobKnown(READY))
    actions = [*fed.reports("w1", JobKnown(READY)), *fed.wait(0.3)]
    assert notes("rebuilt", actions)
    assert not notes("job-failed", actions)
    for name in ("w1", "w0"):
        actions += fed.tell(Leave(name), name)
    actions += fed.wait(2 * ENDING_S)
    assert not notes("job-failed", actions)
    assert not [note for note in of(Note, actions) if note.loud]


def test_who_stays_without_leaders_hears_that_the_job_has_failed() -> None:
    fed = Successor(("w0", "w1"), orderly=True)
    fed.reports("w0", JobKnown(READY))
    assert not sent(JobFailed, fed.reports("w1", JobKnown(READY)))
    failed: list[JobFailed] = []
    while not failed and fed.now < 2 * ENDING_S:
        for name in ("w0", "w1"):
            fed.tell(Heartbeat(fed.now, 1), name)
        failed = sent(JobFailed, fed.wait(ENDING_S / 4), "w1")
    assert fed.now >= ENDING_S
    assert "s0 of shard 0 was lost (it left)" in failed[0].reason


def test_leaders_that_are_gone_with_a_scheduler_that_died_are_a_failure_at_once() -> None:
    fed = Successor(("w0", "w1"))
    fed.reports("w0", JobKnown(READY))
    assert sent(JobFailed, fed.reports("w1", JobKnown(READY)))


def test_a_host_that_says_the_leader_is_gone_saves_the_wait() -> None:
    fed = Successor()
    for name in ("w0", "w1"):
        fed.reports(name, JobKnown(READY))
    fed.reports("r0", ReplicaReport(0, 0, 6, 6))
    assert said(Promote, fed(PeerLost("s0", "connection refused", True)), "r0").epoch == 1


def test_of_two_leaders_the_one_of_the_higher_epoch_stays_and_workers_hear_of_it() -> None:
    fed = Successor()
    fed.reports("w0", JobKnown(READY))
    fed.reports("w1", JobKnown(READY))
    fed.reports("r0", fed.leader(epoch=1, version=6))  # promoted just before the old scheduler died
    actions = fed.reports("s0", fed.leader(epoch=0))
    assert said(StepDown, actions, "s0").role == "server.0"
    change = sent(LeaderChanged, actions, "w1")[0]
    assert (change.shard.leader, change.shard.epoch, change.version) == ("r0", 1, 6)
    assert change.applied == AppliedIds(above={"w1": (0, 1)})


def test_a_scheduler_that_hears_fewer_than_half_decides_nothing_and_answers_nobody() -> None:
    fed = Fed(Scheduler(SchedulerSettings("w0", 1, 5, ("w0", "w1", "w2", "w3"), 1.0)))
    for name in ("w0", "w1", "w2", "w3"):
        fed.tell(Register(info(name), name, 1), name)
        fed.tell(Reported(1), name)
    assert sent(HeartbeatSeen, fed.tell(Heartbeat(0.0, 1), "w0"))
    fed.now = 1.5  # all others are silent, all at once
    assert not sent(HeartbeatSeen, fed.tell(Heartbeat(1.5, 1), "w0"))
    silent = fed(DeadlinePassed())
    assert notes("undecided", silent)
    assert not sent(NodeLost, silent)


def test_a_server_beside_the_scheduler_counts_on_it_no_longer_than_the_others_do() -> None:
    fed = Fed(Scheduler(SchedulerSettings("w0")))
    for name in ("w0", "w1", "w2", "w3"):
        fed.tell(Join(info(name)), name)
    for beat in range(4):
        fed.now = 0.25 * beat
        for name in ("w0", "w1", "w2", "w3"):
            fed.tell(Heartbeat(fed.now), name)
    leases = []
    for beat in range(4, 7):  # the cable is out
        fed.now = 0.25 * beat
        leases.append(said(HeartbeatSeen, fed.tell(Heartbeat(fed.now), "w0"), "w0").relied_s)
    assert leases == pytest.approx([0.75, 0.5, 0.25])  # the others choose another from 1.75 on
    assert not sent(HeartbeatSeen, [*fed.wait(0.3), *fed.tell(Heartbeat(fed.now), "w0")])


def test_the_old_scheduler_is_not_waited_for_and_everybody_hears_that_it_is_gone() -> None:
    fed = Fed(Scheduler(SchedulerSettings("w1", 1, 5, ("w1", "w2"), 1.0, silent=("w0",))))
    for name in ("w1", "w2"):
        fed.tell(Register(info(name), name, 1), name)
    fed.tell(Reported(1), "w1")
    rebuilt = fed.tell(Reported(1), "w2")
    assert notes("rebuilt", rebuilt)
    assert {message.node for message in sent(NodeLost, rebuilt, "w2")} == {"w0"}


def test_messages_that_may_be_lost_are_gathered_again() -> None:
    fed = Successor()
    for name in ("w0", "w1"):
        fed.reports(name, JobKnown(READY))
    fed.reports("s0", fed.leader())
    fed.reports("r0", ReplicaReport(0, 0, 7, 7))
    assert not fed(PeerLost("w1", "connection reset"))
    actions = fed.tell(Heartbeat(0.0, 1), "w1")
    assert {action.node for action in of(Send, actions) if isinstance(action.message, Rejoin)} == {
        "w0", "w1", "s0", "r0",
    }  # fmt: skip


def test_a_scheduler_that_waits_in_vain_for_most_members_answers_nobody() -> None:
    fed = Successor()
    fed.reports("w0", JobKnown(READY))
    assert sent(HeartbeatSeen, fed.tell(Heartbeat(0.0, 1), "w0"))
    fed.wait(1.1)
    assert not sent(HeartbeatSeen, fed.tell(Heartbeat(1.1, 1), "w0"))  # so w0 looks for another
    for name in ("w1", "s0"):
        fed.reports(name, JobKnown(READY))
    assert notes("rebuilt", fed.wait(1.1))


HELD_SHARES = SharesPlanned(7, 3, (0.5, 0.5), (0.5, 0.5), (), (), 1024, 1.0, "equal")


def test_groups_outlive_their_scheduler_and_who_missed_one_hears_of_it() -> None:
    fed = Fed(Scheduler(SchedulerSettings("w0", 1, 5, ("w0", "w1"), 1.0)))
    for name in ("w0", "w1"):
        fed.tell(Register(info(name), name, 1), name)
    fed.tell(GroupWanted(""), "w1")  # it died before it told w1 that the group was formed
    fed.tell(GroupHeld(7, "", ("w0", "w1"), HELD_SHARES), "w0")
    fed.tell(Reported(1), "w0")
    actions = fed.tell(Reported(1), "w1")
    assert said(GroupFormed, actions, "w1") == GroupFormed(7, "", ("w0", "w1"))
    assert said(SharesPlanned, actions, "w1").plan > 3
    assert not sent(GroupFormed, actions, "w0")


def test_a_participant_tells_a_new_scheduler_of_its_groups() -> None:
    fed = Fed(Participant(WorkerSettings("w0", "w0", SCHEDULER)))
    fed(GroupRequested("", ()))
    fed.tell(GroupFormed(7, "", ("w0", "w1")))
    fed.tell(HELD_SHARES)
    fed(GroupRequested("pair", ("w0", "w1")))
    told = [action.message for action in of(Send, fed(SchedulerChanged("w1", 1)))]
    assert told == [GroupHeld(7, "", ("w0", "w1"), HELD_SHARES), GroupWanted("pair", ("w0", "w1"))]
