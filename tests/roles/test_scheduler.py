"""The scheduler: who is there, who leads, what happens to offers, and what each is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from mlfabric.events import PeerLost
from mlfabric.messages import (
    LEFT,
    AppliedIds,
    AppliedReport,
    ArraySpec,
    DrainBegun,
    DrainWanted,
    DropUpdate,
    FollowShard,
    GatherGroup,
    Grant,
    GroupFailed,
    GroupFormed,
    GroupPending,
    GroupWanted,
    Heartbeat,
    HeartbeatSeen,
    JobFailed,
    JobReady,
    JobSettings,
    Join,
    JoinAccepted,
    JoinRefused,
    LeaderChanged,
    LeadShard,
    LeadYielded,
    Leave,
    LeaveOut,
    LeftOut,
    MemberInfo,
    Members,
    MemberUpdate,
    NodeLost,
    OfferAgain,
    OfferUpdate,
    Promote,
    Promoted,
    PublishFirst,
    PublishRefused,
    PublishWanted,
    PullServed,
    PullWanted,
    RatesLearned,
    ReplicaAssigned,
    Replicate,
    RuleSpec,
    Sequence,
    ServePull,
    SettleSlot,
    ShardReady,
    SharesPlanned,
    SlotLate,
    SlotWithdrawn,
    StepCalled,
    StepDown,
    StepEnded,
    StepReady,
    StepsOver,
    TrainsIn,
    Version,
    WayRefused,
    WithdrawSlot,
    YieldLead,
)
from mlfabric.roles.actions import Action, Note, SchedulerSettings, Send
from mlfabric.roles.failover import ENDING_S
from mlfabric.roles.groups import GATHER_S, PENDING_S
from mlfabric.roles.scheduler import Scheduler
from tests.roles.feeding import Fed, notes, of, said, sent

ARRAYS = (ArraySpec("w", (1000,), "float32"),)
ROLES = {"w": ("worker", "aggregator"), "s": ("server", "replica"), "r": ("replica",)}


class Fabric(Fed):
    """A scheduler with members called w0, s0, r0, ...; the first letter says what they can be."""

    def __init__(self, *names: str, expected: int = 0, job: str = "job") -> None:
        super().__init__(Scheduler(SchedulerSettings("sched")))
        self.job = job
        self.names = names
        self.silent: set[str] = set()
        for name in names:
            self.join(name, expected)

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass while the members show that they are alive."""
        until, actions = self.now + seconds, []
        while self.now < until:
            for name in self.names:
                if name not in self.silent:
                    actions += self.tell(Heartbeat(self.now), name)
            actions += super().wait(min(until - self.now, 0.25))
        return actions

    def join(self, name: str, expected: int = 0, host: str = "", rack: str | None = None) -> list[Action]:
        info = MemberInfo(name, host or name, "", ROLES[name[0]], 1e6, 1e6, self.job, rack)
        return self.tell(Join(info, expected), name)

    def publish(self, sender: str = "w0", **settings: Any) -> list[Action]:
        wanted = JobSettings(**{"max_delay": 4, **settings})
        return self.tell(PublishWanted(ARRAYS, RuleSpec("Sum"), wanted, 1000, "float32"), sender)

    def ready(self, **settings: Any) -> Fabric:
        for lead in sent(LeadShard, self.publish(**settings)):
            shard = lead.shard
            self.tell(ShardReady(shard.index, 0, shard.replica is not None), shard.leader)
        return self

    def offer(self, update: str, base: int = 0, again: str = "", size: int = 4000) -> list[Action]:
        offer = OfferUpdate(update, size, (Version(0, base),), 1.0, 0, (0,), again)
        return self.tell(offer, update.split("#")[0])

    def granted(self, *updates: str) -> list[Action]:
        """Offer these together and let the scheduler plan."""
        actions = [action for update in updates for action in self.offer(update)]
        return [*actions, *self.wait(0.01)]

    def report(
        self, *updates: str, version: int, divergence: float = 0.0, held: int | None = None
    ) -> list[Action]:
        return self.tell(AppliedReport(0, 0, version, updates, divergence, held), "s0")


# --- membership ---------------------------------------------------------------------------------------------


def test_a_member_is_accepted_and_everybody_hears_of_it() -> None:
    fabric = Fabric("w0")
    actions = fabric.join("w1")
    assert said(JoinAccepted, actions, "w1") == JoinAccepted("w1", "sched", 1.0)
    assert {m.node for m in said(Members, actions, "w0").members} == {"w0", "w1"}


def test_a_publisher_that_comes_back_before_training_sends_its_values_again() -> None:
    fabric = Fabric("w0", "w1", "s0")
    assert sent(PublishFirst, fabric.publish("w0"), "w0")
    assert not sent(PublishFirst, fabric.publish("w1"))
    assert sent(PublishFirst, fabric.publish("w0"), "w0")
    fabric(PeerLost("w0", "closed", True))
    assert sent(PublishFirst, fabric.publish("w1"), "w1")


def test_a_name_that_is_taken_is_refused_with_a_sentence() -> None:
    fabric = Fabric("w0")
    actions = fabric.join("w0", host="elsewhere")
    assert "w0 is taken" in said(JoinRefused, actions).reason
    assert not sent(Members, actions)


def test_the_second_life_of_a_name_has_another_label() -> None:
    fabric = Fabric("w0")
    fabric.tell(Leave("w0"), "w0")
    assert said(JoinAccepted, fabric.join("w0")).label == "w0~2"


def test_a_silent_member_is_lost_and_a_heard_one_is_not() -> None:
    fabric = Fabric("w0", "w1")
    assert said(HeartbeatSeen, fabric.tell(Heartbeat(-0.1), "w0"), "w0") == HeartbeatSeen(-0.1, 0.0, 0, 1.0)
    fabric.silent = {"w1"}
    assert not sent(NodeLost, fabric.wait(0.9))
    lost = said(NodeLost, fabric.wait(0.2), "w0")
    assert lost.node == "w1"
    assert "silent for" in lost.reason
    assert said(NodeLost, Fabric("w0", "w1")(PeerLost("w1", "closed", True)), "w0").reason == "closed"


# --- the model ----------------------------------------------------------------------------------------------


def test_a_model_is_placed_once_everybody_expected_is_there() -> None:
    fabric = Fabric("w0", "s0", expected=3)
    assert not sent(LeadShard, fabric.publish())
    actions = fabric.join("r0", 3)
    assert said(LeadShard, actions, "s0").shard.leader == "s0"
    assert said(PublishFirst, actions, "w0").shards[0].count == 1000


def test_training_begins_when_leader_and_replica_hold_the_model() -> None:
    fabric = Fabric("w0", "w1", "s0", "r0")
    actions = fabric.publish(divergence=0.1)
    assert said(FollowShard, actions, "r0").shard.leader == "s0"
    assert said(ReplicaAssigned, actions, "s0").replica == "r0"
    assert not sent(JobReady, fabric.tell(ShardReady(0, 0, False), "s0"))
    actions = fabric.tell(ShardReady(0, 0, True), "s0")
    assert sent(JobReady, actions, "w0")
    assert sent(JobReady, actions, "w1")


def test_another_model_than_the_published_is_refused_naming_the_difference() -> None:
    fabric = Fabric("w0", "w1", "s0").ready()
    for arrays, words in (
        ((ArraySpec("w", (10, 100), "float32"),), "array 'w' is [1000] of float32 there and [10, 100]"),
        ((ArraySpec("w", (1000,), "float64"),), "float64"),
        ((*ARRAYS, ArraySpec("b", (1,), "float32")), "array 'b' is unknown"),
        ((), "lacks array 'w'"),
    ):
        wanted = PublishWanted(arrays, RuleSpec("Sum"), JobSettings(), 1000, "float32")
        reason = said(PublishRefused, fabric.tell(wanted, "w1"), "w1").reason
        assert words in reason
        assert "w0" in reason
    assert said(JobReady, fabric.publish("w1"), "w1").arrays == ARRAYS


def test_a_replica_is_put_on_another_host_and_another_rack_where_there_is_one() -> None:
    fabric = Fabric()
    for name, place in (("w0", "h0 A"), ("s0", "h1 A"), ("r0", "h1 A"), ("r1", "h2 A"), ("r2", "h3 B")):
        fabric.join(name, host=place[:2], rack=place[-1])
    assert said(ReplicaAssigned, fabric.publish(divergence=0.1)).replica == "r2"


def test_a_bound_below_the_mean_delay_is_warned_of() -> None:
    fabric = Fabric("w0", "w1", "w2", "w3", "s0")
    warning = notes("bound-tight", fabric.publish(max_delay=2))[0]
    assert warning.loud
    assert "4 workers" in warning.reason


# --- offers -------------------------------------------------------------------------------------------------


def test_offers_are_planned_together_and_granted_with_numbers_and_reasons() -> None:
    fabric = Fabric("w0", "w1", "s0").ready(aggregate=False)
    assert not sent(Grant, fabric.offer("w0#0"))
    actions = [*fabric.offer("w1#0"), *fabric.wait(1.0)]
    grants = sent(Grant, actions)
    assert sorted(grant.number for grant in grants) == [0, 1]
    assert all(len(grant.reason.split()) > 3 for grant in grants)
    placed = [slot.members[0].update for sequence in sent(Sequence, actions, "s0") for slot in sequence.slots]
    assert placed == [grant.update for grant in sorted(grants, key=lambda grant: grant.number)]


def test_an_update_too_old_for_any_place_is_dropped_before_a_byte_is_sent() -> None:
    fabric = Fabric("w0", "w1", "s0").ready(max_delay=2)
    fabric.report(version=7)
    actions = [*fabric.offer("w0#0", base=0), *fabric.wait(0.01)]
    drop = said(DropUpdate, actions, "w0")
    assert not drop.late
    assert "bound 2" in drop.reason
    assert not sent(Grant, actions)
    assert said(Grant, [*fabric.offer("w1#0", base=6), *fabric.wait(0.01)], "w1")


def test_a_late_update_is_withdrawn_from_all_shards_and_dropped_with_the_reason() -> None:
    fabric = Fabric("w0", "w1", "s0").ready(aggregate=False)
    grant = said(Grant, fabric.granted("w0#0"))
    actions = fabric.tell(SlotLate(0, grant.number, 1.25), "s0")
    assert said(WithdrawSlot, actions, "s0").number == grant.number
    assert not sent(DropUpdate, actions), "the server has the last word"
    actions = fabric.tell(SlotWithdrawn(0, 0, grant.number, True), "s0")
    drop = said(DropUpdate, actions, "w0")
    assert drop.late
    assert drop.reason == "overtaken, host w0 silent 1.2 s"
    settled = said(SettleSlot, actions, "s0")
    assert (settled.dropped, settled.final) == (True, True)


def test_a_late_update_that_came_after_all_is_kept() -> None:
    fabric = Fabric("w0", "w1", "s0").ready(aggregate=False)
    grant = said(Grant, fabric.granted("w0#0"))
    fabric.tell(SlotLate(0, grant.number, 1.25), "s0")
    actions = fabric.tell(SlotWithdrawn(0, 0, grant.number, False, True), "s0")
    assert not sent(DropUpdate, actions)
    assert not said(SettleSlot, actions).dropped
    assert notes("kept", actions)


@dataclass
class Gathered:
    """Eight offers at once over equal links: some are summed on the way."""

    fabric: Fabric
    order: GatherGroup
    aggregator: str
    number: int  # of the slot

    def other(self) -> MemberUpdate:
        """A member that does not live with the aggregator."""
        return next(each for each in self.order.members if each.worker != self.aggregator)


def gathered() -> Gathered:
    workers = [f"w{i}" for i in range(8)]
    fabric = Fabric(*workers, "s0").ready(max_delay=50)
    actions = [*fabric.granted(*(f"{worker}#0" for worker in workers)), *fabric.wait(1.0)]
    order = max(sent(GatherGroup, actions), key=lambda order: len(order.members))
    assert len(order.members) > 1, "nothing was grouped"
    places = [slot for message in sent(Sequence, actions) for slot in message.slots]
    slot = next(slot for slot in places if slot.group == order.group)
    node = next(a.node for a in actions if isinstance(a, Send) and a.message == order)
    return Gathered(fabric, order, node, slot.number)


def test_members_of_a_group_are_sent_to_its_aggregator_and_share_a_slot() -> None:
    fabric = Fabric(*(f"w{i}" for i in range(8)), "s0").ready(max_delay=50)
    actions = [*fabric.granted(*(f"w{i}#0" for i in range(8))), *fabric.wait(1.0)]
    orders = {order.group: order for order in sent(GatherGroup, actions)}
    assert orders
    slots = {slot.group: slot for message in sent(Sequence, actions) for slot in message.slots if slot.group}
    for grant in sent(Grant, actions):
        group = grant.parts[0].group
        if group is not None:
            assert grant.update in {member.update for member in orders[group].members}
            assert slots[group].members == orders[group].members
            assert slots[group].number <= grant.number < slots[group].number + len(slots[group].members)


def test_a_member_left_out_is_asked_to_offer_again_with_the_reason() -> None:
    group = gathered()
    left, why = group.other(), "the time to wait was up"
    actions = group.fabric.tell(LeftOut(group.order.group, 0, (left.update,), why), group.aggregator)
    again = said(OfferAgain, actions, left.worker)
    assert (again.update, again.reason) == (left.update, why)
    actions = [*group.fabric.offer(left.update, again=why), *group.fabric.wait(1.0)]
    assert sent(Grant, actions, left.worker)


def test_a_dead_aggregators_members_offer_again_and_its_slot_is_withdrawn() -> None:
    group = gathered()
    actions = group.fabric(PeerLost(group.aggregator, "closed", True))
    again = {message.update for message in sent(OfferAgain, actions)}
    assert {each.update for each in group.order.members if each.worker != group.aggregator} <= again
    assert group.number in {message.number for message in sent(WithdrawSlot, actions, "s0")}


def test_an_update_is_decided_again_only_when_its_first_way_is_closed() -> None:
    group = gathered()
    group.fabric(PeerLost(group.aggregator, "closed", True))
    member = group.other()
    actions = [*group.fabric.offer(member.update, again="aggregator lost"), *group.fabric.wait(0.5)]
    assert not sent(Grant, actions, member.worker), "the sum may be at the server already"
    actions = group.fabric.tell(SlotWithdrawn(0, 0, group.number, True), "s0")
    assert sent(Grant, [*actions, *group.fabric.wait(1.0)], member.worker)


def test_a_sum_that_waits_and_is_then_refused_sets_its_members_free() -> None:
    group = gathered()
    group.fabric(PeerLost(group.aggregator, "closed", True))
    member = group.other()
    group.fabric.offer(member.update, again="aggregator lost")
    group.fabric.tell(SlotWithdrawn(0, 0, group.number, False, waiting=True), "s0")
    refused = LeftOut(group.order.group, 0, (member.update,), "another member is already applied")
    actions = [*group.fabric.tell(refused, "s0"), *group.fabric.wait(2.0)]
    assert sent(Grant, actions, member.worker)


def test_a_member_offered_again_is_not_dropped_while_its_sum_may_be_applied() -> None:
    group = gathered()
    member = group.other()
    actions = group.fabric.offer(member.update, again="its transfer broke off")
    assert said(LeaveOut, actions, group.aggregator).update == member.update
    actions += group.fabric.report(version=70)  # too late for any other way
    actions += group.fabric.wait(1.0)
    assert not sent(DropUpdate, actions, member.worker), "nobody has said that the sum left without it"


def test_an_update_offered_again_that_came_by_its_first_way_needs_nothing_more() -> None:
    fabric = Fabric("w0", "w1", "s0").ready(aggregate=False)
    grant = said(Grant, fabric.granted("w0#0"))
    actions = fabric.offer("w0#0", again="its transfer broke off")
    assert said(WithdrawSlot, actions, "s0").number == grant.number
    fabric.tell(SlotWithdrawn(0, 0, grant.number, False, waiting=True), "s0")
    fabric.report("w0#0", version=1)
    assert not sent(Grant, fabric.wait(2.0))


def test_of_updates_that_some_shards_have_applied_the_oldest_goes_first() -> None:
    """Else a younger one could make it too old at its turn, and it can't be dropped any more."""
    fabric = Fabric("w0", "w1", "w2", "s0", "s1").ready(shards=2)
    for index, leader in enumerate(("s0", "s1")):
        fabric.tell(AppliedReport(index, 0, 4, (), 0.0, None), leader)
    actions: list[Action] = []
    for worker, base in (("w0", 3), ("w1", 0), ("w2", 2)):
        bases = (Version(0, 4), Version(0, base))
        again = OfferUpdate(f"{worker}#0", 4000, bases, 1.0, 0, (1,), "the scheduler changed")
        actions += fabric.tell(again, worker)
    actions += fabric.wait(0.01)
    numbers = {worker: said(Grant, actions, worker).number for worker in ("w0", "w1", "w2")}
    assert sorted(numbers, key=lambda worker: numbers[worker]) == ["w1", "w2", "w0"]


def test_what_some_shards_have_applied_is_sent_again_in_its_place_once() -> None:
    fabric = Fabric("w0", "w1", "s0", "s1").ready(shards=2)
    both = (Version(0, 0), Version(0, 0))
    fabric.tell(OfferUpdate("w0#0", 4000, both, 1.0, 0, (0, 1)), "w0")
    first = said(Grant, fabric.wait(0.1), "w0")
    leaders = {part.shard: part.node for part in first.parts}
    fabric.tell(AppliedReport(0, 0, 1, ("w0#0",), 0.0, None), leaders[0])
    again = OfferUpdate("w0#0", 4000, both, 1.0, 0, (1,), "its transfer broke off")
    actions = [*fabric.tell(again, "w0"), *fabric.wait(0.01)]
    assert not sent(WithdrawSlot, actions)
    grant = said(Grant, actions, "w0")
    assert (grant.number, grant.weight, [part.shard for part in grant.parts]) == (
        first.number,
        first.weight,
        [1],
    )
    (slot,) = said(Sequence, actions, leaders[1]).slots
    assert (slot.number, slot.members[0].update) == (first.number, "w0#0")
    # A path that breaks every time must not hold up the others for ever.
    assert said(WithdrawSlot, fabric.tell(again, "w0"), leaders[1]).number == first.number


def test_what_no_shard_has_applied_is_placed_anew_when_it_is_offered_again() -> None:
    fabric = Fabric("w0", "w1", "s0", "s1").ready(shards=2)
    offer = OfferUpdate("w0#0", 4000, (Version(0, 0), Version(0, 0)), 1.0, 0, (0, 1), "broke off")
    fabric.tell(offer, "w0")
    fabric.wait(0.1)
    assert len(sent(WithdrawSlot, fabric.tell(offer, "w0"))) == 2


def test_a_dead_workers_offers_go_with_it() -> None:
    fabric = Fabric("w0", "w1", "s0").ready()
    fabric.offer("w1#0")
    assert notes("abandoned", fabric(PeerLost("w1", "closed", True)))[0].updates == ("w1#0",)
    assert not sent(Grant, fabric.wait(0.01))


def test_two_shards_that_complain_of_the_same_empty_place_are_both_set_free() -> None:
    """A server complains once; what it is not answered blocks its order for good."""
    fabric = Fabric("w0", "w1", "s0", "s1").ready(shards=2, aggregate=False)
    actions = [*fabric.tell(SlotLate(0, 5, 1.0), "s0"), *fabric.tell(SlotLate(1, 5, 1.0), "s1")]
    actions += fabric.tell(SlotWithdrawn(0, 0, 5, True), "s0")
    assert sent(WithdrawSlot, actions, "s0")
    assert sent(WithdrawSlot, actions, "s1")


# --- fail-over ----------------------------------------------------------------------------------------------


def replicated() -> Fabric:
    return Fabric("w0", "w1", "s0", "r0", "r1").ready(divergence=0.1)


def test_a_dead_leader_is_replaced_by_its_replica_and_everybody_hears_what_survived() -> None:
    fabric = replicated()
    fabric.granted("w0#0", "w1#0")
    fabric.report("w0#0", version=1, held=1)
    fabric.report("w1#0", version=2, held=1)
    actions = fabric(PeerLost("s0", "closed", True))
    assert said(Promote, actions, "r0") == Promote(0, 1, "server s0 lost: closed")
    assert not sent(LeaderChanged, actions), "not before the replica says what it holds"
    survived = AppliedIds(above={"w0": (0,)})
    actions = fabric.tell(Promoted(0, 1, 1, survived, 1), "r0")
    change = sent(LeaderChanged, actions, "w0")[0]
    assert (change.shard.leader, change.shard.epoch, change.version) == ("r0", 1, 1)
    assert change.applied == survived
    (lost,) = notes("lost", actions)
    assert (lost.updates, lost.shards) == (("w1#0",), (0,))
    assert notes("failed-over", actions)[0].loud
    assert said(ReplicaAssigned, actions, "r0").replica == "r1"


def test_nothing_is_granted_between_two_leaders() -> None:
    fabric = replicated()
    fabric(PeerLost("s0", "closed", True))
    assert not sent(Grant, [*fabric.offer("w0#0"), *fabric.wait(0.5)])
    assert not fabric.tell(PullWanted("p"), "w0")
    grant = said(Grant, fabric.tell(Promoted(0, 1, 0, AppliedIds(), 0), "r0"), "w0")
    assert (grant.parts[0].node, grant.parts[0].epoch) == ("r0", 1)


def test_the_word_of_somebody_who_was_not_promoted_is_ignored() -> None:
    fabric = replicated()
    fabric(PeerLost("s0", "closed", True))
    assert not sent(LeaderChanged, fabric.tell(Promoted(0, 1, 5, AppliedIds(), 5), "r1"))


def test_a_leader_lost_without_a_replica_fails_the_job_in_one_sentence() -> None:
    fabric = Fabric("w0", "w1", "s0").ready()
    actions = fabric(PeerLost("s0", "closed", True))
    reason = sent(JobFailed, actions, "w0")[0].reason
    assert "s0" in reason
    assert "had no replica" in reason
    assert said(PublishRefused, fabric.publish("w1"), "w1").reason == reason


def test_a_job_ends_in_peace_when_its_leader_leaves_first_and_the_others_soon_after() -> None:
    fabric = Fabric("w0", "w1", "s0").ready()
    left = fabric.tell(Leave("s0"), "s0")
    fabric.offer("w0#0")  # crossed it
    fabric.silent = {"s0"}
    left += fabric.wait(ENDING_S / 2)
    for name in ("w0", "w1"):
        left += fabric.tell(Leave(name), name)
    fabric.silent = {"s0", "w0", "w1"}
    left += fabric.wait(2 * ENDING_S)
    assert not sent(JobFailed, left)
    assert not [note for note in of(Note, left) if note.loud]


def test_leader_and_replica_may_leave_first_too() -> None:
    fabric = replicated()
    left = fabric.tell(Leave("s0"), "s0")
    assert sent(Promote, left, "r0")
    for name in ("r0", "r1", "w0", "w1"):
        left += fabric.tell(Leave(name), name)
    fabric.silent = set(fabric.names)
    left += fabric.wait(2 * ENDING_S)
    assert not sent(JobFailed, left)
    assert not notes("job-failed", left)


def test_a_job_that_goes_on_without_its_leader_fails_a_moment_after_it_left() -> None:
    fabric = Fabric("w0", "w1", "s0").ready()
    fabric.silent = {"s0"}
    assert not sent(JobFailed, fabric.tell(Leave("s0"), "s0"))
    reason = sent(JobFailed, fabric.wait(ENDING_S + 0.1), "w0")[0].reason
    assert reason == "server s0 of shard 0 was lost (it left) and had no replica"


def test_a_scheduler_that_was_cut_off_does_not_count_on_old_heartbeats() -> None:
    fabric = Fabric("w0", "w1", "s0").ready()
    fabric.wait(1.0)
    Fed.wait(fabric, 6.0)  # nothing comes
    for sent_s in (1.25, 1.5, 1.75):
        for name in fabric.names:
            assert not fabric.tell(Heartbeat(sent_s), name), "kept by TCP while the cable was out"
    fabric.now += 0.1
    fabric.tell(Heartbeat(fabric.now), "w0")
    fabric.now += 0.1
    assert said(HeartbeatSeen, fabric.tell(Heartbeat(fabric.now), "w1"), "w1")


def test_an_empty_replica_cannot_take_over() -> None:
    fabric = replicated()
    fabric(PeerLost("s0", "closed", True))
    assert (
        "never been filled"
        in sent(JobFailed, fabric.tell(Promoted(0, 1, -1, AppliedIds(), -1), "r0"))[0].reason
    )


def test_a_leader_lost_before_training_is_replaced_by_placing_again() -> None:
    fabric = Fabric("w0", "s0", "s1")
    fabric.publish()
    actions = fabric(PeerLost("s0", "closed", True))
    assert said(LeadShard, actions).shard.leader == "s1"
    assert said(PublishFirst, actions, "w0").shards[0].leader == "s1"


def test_a_dead_replica_is_replaced_where_somebody_can_be_one() -> None:
    fabric = replicated()
    actions = fabric(PeerLost("r0", "closed", True))
    assert [message.replica for message in sent(ReplicaAssigned, actions, "s0")] == [None, "r1"]
    assert said(FollowShard, actions, "r1").shard.index == 0
    assert [message.replica for message in sent(ReplicaAssigned, fabric(PeerLost("r1", "closed", True)))] == [
        None
    ]
    assert said(ReplicaAssigned, fabric.join("r2"), "s0").replica == "r2"


def test_a_replica_is_brought_up_to_date_in_spare_time_before_its_bound() -> None:
    fabric = replicated()
    assert not sent(Replicate, fabric.report("w0#0", version=1, divergence=0.04, held=0))
    wanted = said(Replicate, fabric.report("w1#0", version=2, divergence=0.06, held=0), "s0")
    assert wanted.rate_bytes_per_s > 0


def test_replicas_are_spread_over_the_hosts() -> None:
    fabric = Fabric(*(f"s{index}" for index in range(4)), "w0")
    actions = fabric.publish(shards=4, divergence=0.1)
    shards = [message.shard for message in sent(FollowShard, actions)]
    followers = Counter(shard.replica for shard in shards)
    assert {shard.leader for shard in shards} == {"s0"}  # one carries all that one worker sends
    assert sorted(followers.values()) == [1, 1, 2]


# --- pulls and groups -----------------------------------------------------------------------------------


def test_a_pull_before_the_model_is_there_is_served_once_it_is() -> None:
    fabric = Fabric("w0", "s0")
    fabric.publish()
    assert not fabric.tell(PullWanted("p"), "w0")
    assert said(ServePull, fabric.tell(ShardReady(0, 0, False), "s0"), "s0").pull == "p"


def test_a_newcomer_fetches_the_model_from_the_nearest_holder() -> None:
    fabric = replicated()
    fabric.join("w2", host="r0")
    served = said(ServePull, fabric.tell(PullWanted("p0", first=True), "w2"), "r0")
    assert (served.node, served.shard) == ("w2", 0)
    fabric.tell(PullServed("p0", 0), "r0")
    assert sent(ServePull, fabric.tell(PullWanted("p1"), "w2"), "s0"), "later ones are the leader's"
    fabric.join("w3")
    assert sent(ServePull, fabric.tell(PullWanted("p2", first=True), "w3"), "r0"), "s0 sends one already"


def test_a_newcomer_fetches_from_the_leader_while_the_replica_is_far_behind_or_gone() -> None:
    fabric = replicated()
    fabric.join("w2", host="r0")
    fabric.granted("w0#0", "w1#0")
    fabric.tell(PullWanted("p0", first=True), "w2")
    actions = fabric(PeerLost("r0", "closed", True))
    assert said(ServePull, actions, "s0").pull == "p0"
    fabric = replicated()
    fabric.join("w2", host="r0")
    fabric.granted("w1#0")
    fabric.report("w0#0", version=1, held=0)
    assert sent(ServePull, fabric.tell(PullWanted("p0", first=True), "w2"), "r0")
    for number in range(1, 3):
        fabric.report(f"w0#{number}", version=number + 1, held=0)
    assert sent(ServePull, fabric.tell(PullWanted("p1", first=True), "w2"), "s0")


def test_who_comes_when_training_is_over_gets_all_of_it() -> None:
    fabric = replicated()
    fabric.report("w0#0", version=1, held=0)
    fabric.join("w2", host="r0")
    assert sent(ServePull, fabric.tell(PullWanted("p0", first=True), "w2"), "s0")


def test_nothing_is_planned_with_the_links_of_a_leader_that_is_gone() -> None:
    fabric = Fabric("w0", "w1", "s0", "s1", "r0", "r1").ready(divergence=0.1, shards=2)
    fabric.tell(PullWanted("p0"), "w0")
    fabric(PeerLost("s0", "closed", True))
    report = AppliedReport(1, 0, 2, ("w1#0",), 0.09, 0)
    assert sent(Replicate, fabric.tell(report, "s1"), "s1")


def test_a_checkpoint_is_bound_to_the_last_number_granted() -> None:
    fabric = Fabric("w0", "w1", "s0").ready(aggregate=False)
    grant = said(Grant, fabric.granted("w0#0"))
    assert said(ServePull, fabric.tell(PullWanted("p"), "w0")).after_number is None
    assert said(ServePull, fabric.tell(PullWanted("q", True), "w0")).after_number == grant.number


def test_a_group_is_formed_with_its_plan_when_all_workers_have_come() -> None:
    fabric = Fabric("w0", "w1", "w2", "s0")
    for name in ("w2", "w0"):
        assert not fabric.tell(GroupWanted(""), name)
    actions = fabric.tell(GroupWanted(""), "w1")
    assert {formed.nodes for formed in sent(GroupFormed, actions)} == {("w0", "w1", "w2")}
    assert said(SharesPlanned, actions, "w2").reduces == pytest.approx((1 / 3,) * 3)


def test_a_named_group_keeps_the_order_its_members_gave() -> None:
    fabric = Fabric("w0", "w1", "w2")
    fabric.tell(GroupWanted("pair", ("w2", "w0")), "w0")
    actions = fabric.tell(GroupWanted("pair", ("w2", "w0")), "w2")
    assert [formed.nodes for formed in sent(GroupFormed, actions)] == [("w2", "w0")] * 2


def test_members_that_disagree_on_a_group_all_hear_of_it() -> None:
    fabric = Fabric("w0", "w1", "w2")
    fabric.tell(GroupWanted("g", ("w0", "w1")), "w0")
    actions = fabric.tell(GroupWanted("g", ("w1", "w0")), "w1")
    for name in ("w0", "w1"):
        assert "disagree" in said(GroupFailed, actions, name).reason


def test_those_who_wait_hear_who_is_missing() -> None:
    fabric = Fabric("w0", "w1", "w2")
    fabric.tell(GroupWanted(""), "w0")
    assert said(GroupPending, fabric.wait(PENDING_S), "w0").missing == ("w1", "w2")


def test_workers_that_have_not_joined_are_counted_among_the_missing() -> None:
    fabric = Fabric("w0", "w1", expected=4)
    for name in ("w0", "w1"):
        assert not sent(GroupFormed, fabric.tell(GroupWanted(""), name))
    assert said(GroupPending, fabric.wait(PENDING_S), "w0").missing == ("2 workers that have not joined",)


def test_a_group_with_somebody_who_died_fails_naming_them() -> None:
    fabric = Fabric("w0", "w1", "w2")
    fabric.tell(GroupWanted(""), "w0")
    assert "w2 was lost (closed)" in said(GroupFailed, fabric(PeerLost("w2", "closed", True)), "w0").reason


def test_a_slow_link_brings_new_shares_once_and_only_if_worth_it() -> None:
    fabric = Fabric("w0", "w1", "w2", "w3")
    for name in ("w0", "w1", "w2", "w3"):
        fabric.tell(GroupWanted(""), name)
    fabric.tell(RatesLearned(0.99e6, 1e6), "w2")
    assert not sent(SharesPlanned, fabric.wait(GATHER_S))
    fabric.tell(RatesLearned(0.25e6, 0.25e6), "w2")
    shares = said(SharesPlanned, fabric.wait(GATHER_S), "w0")
    assert shares.plan == 2
    assert shares.reduces[2] < 0.05
    fabric.tell(RatesLearned(0.25e6, 0.25e6), "w2")
    assert not sent(SharesPlanned, fabric.wait(GATHER_S))


def called_together(fabric: Fabric) -> StepCalled:
    """The first step, to which everybody is called."""
    actions = [each for name in fabric.names for each in fabric.tell(StepReady(-1, -1, waits=True), name)]
    return sent(StepCalled, actions)[0]


def test_groups_of_steps_that_will_not_be_called_again_are_planned_for_no_more() -> None:
    fabric = Fabric("w0", "w1", "w2", "w3")
    call = called_together(fabric)
    for name in call.nodes:
        fabric.tell(GroupWanted(call.group, call.nodes), name)
    fabric.tell(RatesLearned(0.25e6, 0.25e6), "w2")
    assert said(SharesPlanned, fabric.wait(GATHER_S), "w0")
    for name in call.nodes:
        fabric.tell(StepEnded(call.step, call.step + 1), name)
    fabric.tell(StepsOver(), "w3")
    fabric.tell(RatesLearned(1e6, 1e6), "w2")
    assert not sent(SharesPlanned, fabric.wait(4.0))


def test_who_has_trained_under_another_scheduler_is_not_refused_for_a_newcomer() -> None:
    fabric = Fabric("w0", "w1", "w2", "w3")
    fabric.tell(TrainsIn("sync"), "w0")
    assert not sent(WayRefused, fabric.tell(StepReady(7, 7), "w1"))
    assert not sent(WayRefused, fabric.tell(TrainsIn("sync", again=True), "w2"))
    assert (
        "in mode sync, this one trains in mode fastest"
        in said(WayRefused, fabric.tell(StepReady(-1, -1), "w3"), "w3").reason
    )


def test_workers_may_go_on_in_another_mode_together_and_those_who_left_do_not_count() -> None:
    fabric = Fabric("w0", "w1", "w2")
    for way in ("sync", "other"):
        for name in ("w0", "w1"):
            assert not sent(WayRefused, fabric.tell(TrainsIn(way), name))
    assert sent(PublishRefused, fabric.publish("w2", way="async"))
    for name in ("w0", "w1"):
        fabric.tell(Leave(name), name)
    assert not sent(PublishRefused, fabric.publish("w2", way="async"))


def test_nobody_hears_whom_a_step_that_failed_waits_for() -> None:
    fabric = Fabric("w0", "w1")
    call = called_together(fabric)
    fabric.tell(GroupWanted(call.group, call.nodes), "w0")
    fabric.tell(StepEnded(call.step, call.step, "it failed"), "w1")
    again = said(StepCalled, fabric.tell(StepEnded(call.step, call.step, "it failed"), "w0"), "w0")
    fabric.tell(GroupWanted(call.group, call.nodes), "w1")  # it was on its way
    fabric.tell(GroupWanted(again.group, again.nodes), "w0")
    assert {pending.name for pending in sent(GroupPending, fabric.wait(PENDING_S))} == {again.group}


def test_strangers_are_not_listened_to() -> None:
    fabric = Fabric("w0", "s0").ready()
    for message in (GroupWanted(""), PullWanted("p"), SlotLate(0, 0, 1.0)):
        assert not fabric.tell(message, "nobody")


# --- leads that move, hosts that leave ----------------------------------------------------------------------


def test_a_lead_moves_to_a_replica_on_a_better_link_and_what_is_on_its_way_follows() -> None:
    fabric = Fabric("w0", "s0", "r0").ready(divergence=0.5)
    fabric.granted("w0#0")
    fabric.report("w0#0", version=1, held=1)
    fabric.granted("w0#1")
    fabric.tell(RatesLearned(3e5, 3e5), "s0")
    assert said(YieldLead, fabric.wait(0.2), "s0").replica == "r0"
    assert not sent(Grant, [*fabric.offer("w0#2"), *fabric.wait(0.1)])  # the rest waits
    promote = said(Promote, fabric.tell(LeadYielded(0, 0, 1), "s0"), "r0")
    assert promote.orderly
    moved = fabric.tell(Promoted(0, promote.epoch, 1, AppliedIds(), 1), "r0")
    assert notes("lead-moved", moved)
    assert said(StepDown, moved, "s0").role == "server.0"
    assert sent(LeaderChanged, moved, "w0")[0].shard.leader == "r0"
    assert said(FollowShard, moved, "s0")  # who led follows now
    grants = sent(Grant, moved, "w0")
    assert [(grant.update, grant.number) for grant in grants] == [("w0#1", 1), ("w0#2", 2)]
    assert {(route.node, route.epoch) for grant in grants for route in grant.parts} == {("r0", promote.epoch)}
    assert [slot.number for order in sent(Sequence, moved, "r0") for slot in order.slots] == [1, 2]


def test_a_slightly_better_link_is_not_worth_a_move() -> None:
    fabric = Fabric("w0", "s0", "r0").ready(divergence=0.5)
    fabric.tell(RatesLearned(9.5e5, 9.5e5), "s0")
    assert not sent(YieldLead, fabric.wait(1.0))


def test_a_job_without_replicas_has_one_follow_for_the_move() -> None:
    fabric = Fabric("w0", "s0", "s1").ready(divergence=None)
    fabric.tell(RatesLearned(1e5, 1e5), "s0")
    actions = fabric.wait(0.2)
    assert said(FollowShard, actions, "s1").shard.replica == "s1"
    assert said(YieldLead, actions, "s0").replica == "s1"
    promote = said(Promote, fabric.tell(LeadYielded(0, 0, 0), "s0"), "s1")
    moved = fabric.tell(Promoted(0, promote.epoch, 0, AppliedIds(), 0), "s1")
    assert said(StepDown, moved, "s0").role == "server.0"
    assert not sent(FollowShard, moved)
    assert sent(LeaderChanged, moved, "w0")[0].orderly


def test_a_move_whose_target_is_lost_is_given_up_and_planning_goes_on() -> None:
    fabric = Fabric("w0", "s0", "s1").ready(divergence=None)
    fabric.tell(RatesLearned(1e5, 1e5), "s0")
    assert sent(YieldLead, fabric.wait(0.2))
    lost = fabric(PeerLost("s1", "connection closed", proved=True))
    assert said(ReplicaAssigned, lost, "s0").replica is None
    assert sent(Grant, fabric.granted("w0#0"))


def test_a_host_nobody_can_stand_in_for_is_not_drained() -> None:
    fabric = Fabric("w0", "s0").ready(divergence=None)
    scheduler = fabric.role
    assert isinstance(scheduler, Scheduler)
    assert "nobody else can lead shard 0" in scheduler.drain("s0").error
    assert "no member is called s7" in scheduler.drain("s7").error
    assert not sent(DrainBegun, fabric.tell(DrainWanted("s0"), "operator"))


def test_who_wants_to_leave_and_can_hand_nothing_on_waits_for_those_who_need_it() -> None:
    fabric = Fabric("w0", "s0").ready(divergence=None)
    actions = fabric.tell(DrainWanted("s0"), "s0")
    assert said(DrainBegun, actions, "s0")
    assert not sent(NodeLost, [*actions, *fabric.wait(5.0)])
    assert NodeLost("s0", LEFT) in sent(NodeLost, fabric.tell(Leave("w0"), "w0"), "s0")


def test_who_wants_to_leave_takes_nobody_of_its_host_along() -> None:
    fabric = Fabric("w0", "s0").ready(divergence=None)
    fabric.join("w1", host="w0")
    assert [lost.node for lost in sent(NodeLost, fabric.tell(DrainWanted("w0"), "w0"), "w1")] == ["w0"]


def test_where_all_leave_nobody_waits_for_another_and_open_updates_have_an_outcome_first() -> None:
    fabric = Fabric("w0", "w1", "s0", "s1").ready(divergence=None, shards=2)
    granted = fabric.granted("w1#0")
    assert sent(Grant, granted, "w1")
    actions = [action for name in ("s0", "s1", "w0", "w1") for action in fabric.tell(DrainWanted(name), name)]
    assert {lost.node for lost in sent(NodeLost, actions)} == {"w0"}
    for shard in (0, 1):
        report = AppliedReport(shard, 0, 1, ("w1#0",), 0.0, None)
        actions += fabric.tell(report, f"s{shard}")
    assert {lost.node for lost in sent(NodeLost, actions)} == {"w0", "w1", "s0", "s1"}


def test_the_status_shows_members_shards_and_leases() -> None:
    fabric = Fabric("w0", "s0", "r0").ready(divergence=0.5)
    fabric.granted("w0#0")
    fabric.report("w0#0", version=1, held=0)
    fabric.offer("w0#1", base=1)
    fabric.tell(DrainWanted("w0"), "operator")
    scheduler = fabric.role
    assert isinstance(scheduler, Scheduler)
    report = scheduler.status(fabric.now)
    by_name = {member.node: member for member in report.members}
    assert (by_name["s0"].leads, by_name["s0"].follows) == ((0,), ())
    assert by_name["w0"].lease_s == 1.0
    assert by_name["w0"].draining  # its update is not settled yet
    job = report.jobs[0]
    assert (job.ready, job.applied, job.waiting, job.shards[0].undurable) == (True, 1, 1, 1)
    assert job.applied_per_s == 0.1
    assert scheduler.status(fabric.now, "another").members == ()
