"""The server: the order, the delay bound, exactly once, and the divergence bound."""

from __future__ import annotations

import pytest

from mlfabric.events import (
    LeaseRenewed,
    SchedulerChanged,
    StepMeasured,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    TransferSent,
)
from mlfabric.messages import (
    Aggregate,
    AppliedIds,
    AppliedReport,
    DurableWanted,
    InitialPart,
    JobSettings,
    JudgeUpdate,
    LeadYielded,
    LeftOut,
    MemberUpdate,
    ModelPart,
    NotApplied,
    PullServed,
    ReplicaAssigned,
    ReplicaHas,
    ReplicaPart,
    Replicate,
    Sequence,
    ServePull,
    SettleSlot,
    ShardReady,
    ShardReport,
    Slot,
    SlotLate,
    SlotWithdrawn,
    UpdateApplied,
    UpdateDurable,
    UpdatePart,
    UpdateRefused,
    Version,
    WithdrawSlot,
    YieldLead,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    CancelTransfer,
    CommitStep,
    FillShard,
    FreeBuffer,
    MarkReplicaImage,
    MeasureStep,
    RefuseTransfer,
    ServerSettings,
    SnapshotShard,
    StartTransfer,
)
from mlfabric.roles.replication import STATE_EVERY
from mlfabric.roles.server import Server
from tests.roles.feeding import (
    RULE,
    Fed,
    member,
    notes,
    of,
    one,
    said,
    sent,
    shard,
)

LEASE_S = 1.0


def server(divergence: float | None = None, epoch: int = 0, version: int = 0) -> Fed:
    """A leader whose shard is filled; with a bound, its replica r0 holds all there is."""
    settings = JobSettings(max_delay=4, divergence=divergence)
    role = Fed(Server(ServerSettings(shard(epoch=epoch), RULE, settings, "sched", "float32")))
    role(TransferArriving("init", "w0", 40, InitialPart(0, version)))
    if divergence is not None:
        role.tell(ReplicaAssigned(0, "r0"))
    out = role(TransferFinished("init"))
    assert said(ShardReady, out) == ShardReady(0, epoch, False)
    if divergence is not None:
        first = one(StartTransfer, out)
        assert isinstance(first.about, ReplicaPart)
        ready = role.tell(ReplicaHas(0, epoch, version, version), "r0")
        assert said(ShardReady, ready).replica_filled
    return role


def slots(*updates: str, first: int = 0, base: int = 0) -> Sequence:
    placed = tuple(Slot(first + i, (member(u, base),), None, LEASE_S) for i, u in enumerate(updates))
    return Sequence(0, 0, placed, 4)


def group_slot(number: int, *members: MemberUpdate, group: str = "g") -> Sequence:
    return Sequence(0, 0, (Slot(number, members, group, LEASE_S),), 4)


def bring(role: Fed, update: str, epoch: int = 0) -> list[Action]:
    """All bytes of an update come."""
    about = UpdatePart(update, 0, epoch, 1.0)
    one(AcceptTransfer, role(TransferArriving(f"t/{update}", update[:2], 40, about)))
    return role(TransferFinished(f"t/{update}"))


def bring_sum(role: Fed, *members: MemberUpdate, group: str = "g") -> list[Action]:
    about = Aggregate(group, 0, 0, members, float(len(members)))
    actions = role(TransferArriving(f"t/{group}", "a0", 40, about))
    if of(AcceptTransfer, actions):
        actions += role(TransferFinished(f"t/{group}"))
    return actions


def measured(role: Fed, divergence: float = 0.0) -> list[Action]:
    return role(StepMeasured(0, 1.0, divergence, 10.0))


def applied(role: Fed, update: str) -> list[Action]:
    """An update comes, is measured and applied."""
    assert of(MeasureStep, bring(role, update))
    actions = measured(role)
    assert of(CommitStep, actions)
    return actions


# --- the order ----------------------------------------------------------------------------------------------


def test_an_update_is_applied_acknowledged_and_reported() -> None:
    role = server()
    role.tell(slots("w0#0"))
    step = one(MeasureStep, bring(role, "w0#0"))
    assert (step.buffer, step.weight, step.members) == ("parcel/t/w0#0", 1.0, 1)
    actions = measured(role)
    assert said(UpdateApplied, actions, "w0") == UpdateApplied("w0#0", 0, Version(0, 1), 0, None)
    assert said(AppliedReport, actions, "sched").updates == ("w0#0",)
    assert one(FreeBuffer, actions).buffer == "parcel/t/w0#0"


def test_bytes_may_come_before_their_place_in_the_order() -> None:
    role = server()
    assert not of(MeasureStep, bring(role, "w0#0"))
    assert of(MeasureStep, role.tell(slots("w0#0")))


def test_updates_wait_for_the_model_to_be_there() -> None:
    role = Fed(Server(ServerSettings(shard(), RULE, JobSettings(), "sched", "float32")))
    role.tell(slots("w0#0"))
    assert not of(MeasureStep, bring(role, "w0#0"))


def test_steps_are_made_one_at_a_time_in_the_given_order() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0", "w2#0"))
    assert of(MeasureStep, bring(role, "w0#0"))
    assert not bring(role, "w1#0"), "a step is being made"
    assert one(MeasureStep, measured(role)).buffer == "parcel/t/w1#0"


def test_a_complete_update_overtakes_while_the_waiting_have_slack_and_no_further() -> None:
    role = server()
    late, others = "w0#0", [f"w{i}#0" for i in range(1, 6)]
    role.tell(slots(late, *others))
    delays = []
    for update in others[:4]:
        assert of(MeasureStep, bring(role, update)), f"{update} should overtake"
        actions = measured(role)
        delays.append(said(UpdateApplied, actions).delay_updates)
    assert delays == [0, 1, 2, 3]
    assert not of(MeasureStep, bring(role, others[4])), "it would make w0#0 older than its bound"
    assert one(MeasureStep, bring(role, late)).buffer == f"parcel/t/{late}"
    assert said(UpdateApplied, measured(role), "w0").delay_updates == 4


def test_every_waiting_one_counts_when_somebody_wants_to_overtake() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0", "w2#0", "w3#0", "w4#0"))
    # After w4, w0 to w3 would have delays 1 to 4: within the bound of 4.
    assert of(MeasureStep, bring(role, "w4#0"))
    measured(role)
    role.tell(slots("w5#0", first=5, base=1))
    assert not of(MeasureStep, bring(role, "w5#0")), "w3 would have delay 5"


def test_an_update_that_is_granted_again_keeps_its_place() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0", "w2#0", "w3#0", "w4#0"))
    role.tell(slots("w5#0", first=5, base=3))
    for name in ("w1#0", "w2#0", "w3#0", "w4#0"):
        applied(role, name)
    assert not of(MeasureStep, bring(role, "w5#0")), "w0#0 would be too old"
    role.wait(LEASE_S / 2)
    assert not of(MeasureStep, role.tell(slots("w0#0")))
    assert not sent(SlotLate, role.wait(LEASE_S * 0.9)), "it has its time once more"
    assert of(MeasureStep, bring(role, "w0#0"))
    assert of(MeasureStep, measured(role)), "who waited for it goes on"
    assert of(CommitStep, measured(role))


def test_an_update_that_is_granted_again_while_its_step_is_made_is_applied_once() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0"))
    assert of(MeasureStep, bring(role, "w0#0"))
    role.tell(slots("w0#0"))
    assert of(CommitStep, measured(role))
    refused = role(TransferArriving("t/second", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0)))
    assert one(RefuseTransfer, refused)
    assert of(CommitStep, applied(role, "w1#0"))
    assert "applied=2" in str(role.role.statistics())


def test_a_place_that_comes_late_stands_by_its_number() -> None:
    role = server()
    role.tell(slots("w1#0", "w2#0", first=1))
    role.tell(slots("w0#0", first=0))
    assert of(MeasureStep, bring(role, "w2#0"))
    measured(role)
    for name in ("w0#0", "w1#0"):
        applied(role, name)


def test_overtaking_is_told_with_its_reason() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0"))
    note = notes("overtook", bring(role, "w1#0"))[0]
    assert note.updates == ("w1#0",)
    assert "w0#0" in note.reason


def test_a_place_that_blocks_others_is_complained_of_once_its_lease_is_over() -> None:
    role = server()
    role.tell(slots("w0#0", base=0))
    role.tell(
        Sequence(0, 0, (Slot(1, (member("w1#0"),), None, LEASE_S),), 0)
    )  # a bound of zero: no overtaking
    assert not bring(role, "w1#0")
    assert not sent(SlotLate, role.wait(LEASE_S * 0.9))
    late = said(SlotLate, role.wait(LEASE_S * 0.2), "sched")
    assert (late.shard, late.number) == (0, 0)
    assert late.silent_s >= LEASE_S
    assert not sent(SlotLate, role.wait(5.0)), "once is enough"


def test_a_late_place_that_blocks_nobody_is_left_in_peace() -> None:
    role = server()
    role.tell(slots("w0#0"))
    assert not role.wait(10.0)


def too_old() -> tuple[Fed, list[Action]]:
    """w0 is at its turn, six versions old with a bound of four; w1 is complete behind it."""
    role = server(version=6)
    role.tell(Sequence(0, 0, (Slot(0, (member("w0#0", base=0),), None, LEASE_S),), 4))
    role.tell(Sequence(0, 0, (Slot(1, (member("w1#0", base=6),), None, LEASE_S),), 4))
    assert not of(MeasureStep, bring(role, "w1#0"))
    return role, bring(role, "w0#0")


def test_an_update_that_is_too_old_at_its_turn_is_refused_to_worker_and_scheduler() -> None:
    _, actions = too_old()
    assert "older than the bound of 4" in said(UpdateRefused, actions, "w0").reason
    assert said(UpdateRefused, actions, "sched").update == "w0#0"
    assert of(FreeBuffer, actions)
    assert not of(CommitStep, actions)


def test_the_next_complete_update_goes_on_after_one_was_refused() -> None:
    _, actions = too_old()
    assert one(MeasureStep, actions).buffer == "parcel/t/w1#0"


def test_the_base_of_an_earlier_epoch_counts_as_where_the_fail_over_began() -> None:
    settings = ServerSettings(
        shard(epoch=1),
        RULE,
        JobSettings(max_delay=4),
        "sched",
        "float32",
        version=5,
        fail_overs=(Version(1, 5),),
        promoted=True,
    )
    role = Fed(Server(settings))
    role.tell(Sequence(0, 1, (Slot(0, (member("w0#0", base=9, epoch=0),), None, LEASE_S),), 4))
    assert of(MeasureStep, bring(role, "w0#0", epoch=1))
    assert said(UpdateApplied, measured(role), "w0").delay_updates == 0


# --- exactly once -------------------------------------------------------------------------------------------


def test_bytes_of_an_applied_update_are_refused_and_a_second_place_is_acknowledged_again() -> None:
    role = server()
    role.tell(slots("w0#0"))
    applied(role, "w0#0")
    again = role(TransferArriving("t2", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0)))
    assert "already applied" in one(RefuseTransfer, again).reason
    actions = role.tell(slots("w0#0", first=7))
    assert said(UpdateApplied, actions, "w0").update == "w0#0"
    assert said(AppliedReport, actions).updates == ("w0#0",)
    assert not of(MeasureStep, actions)


def test_an_aggregate_with_a_member_that_is_in_is_refused_naming_the_others() -> None:
    role = server()
    role.tell(slots("w0#0"))
    applied(role, "w0#0")
    members = (member("w0#0"), member("w1#0"), member("w2#0"))
    role.tell(group_slot(1, *members))
    actions = bring_sum(role, *members)
    assert of(RefuseTransfer, actions)
    left = said(LeftOut, actions, "sched")
    assert (left.group, left.updates) == ("g", ("w1#0", "w2#0"))
    assert said(UpdateApplied, actions, "w0").update == "w0#0"
    assert not of(MeasureStep, actions)


def test_an_aggregate_whose_member_came_in_meanwhile_is_refused_at_its_turn() -> None:
    role = server()
    members = (member("w1#0"), member("w2#0"))
    role.tell(slots("w0#0", "w1#0"))
    role.tell(group_slot(2, *members))
    assert of(MeasureStep, bring(role, "w1#0"))
    bring_sum(role, *members)
    actions = measured(role)
    assert said(LeftOut, actions).updates == ("w2#0",)
    assert not of(MeasureStep, actions)
    freed = {free.buffer for free in of(FreeBuffer, actions)}
    assert freed == {"parcel/t/w1#0", "parcel/t/g"}


def test_an_aggregate_makes_one_step_and_its_members_one_version_each() -> None:
    role = server()
    members = (member("w0#0"), member("w1#0"), member("w2#0"))
    role.tell(group_slot(0, *members))
    step = one(MeasureStep, bring_sum(role, *members))
    assert (step.weight, step.members) == (3.0, 3)
    actions = measured(role)
    acks = sent(UpdateApplied, actions)
    assert [(ack.update, ack.version.count, ack.delay_updates) for ack in acks] == [
        ("w0#0", 1, 0),
        ("w1#0", 2, 1),
        ("w2#0", 3, 2),
    ]
    assert len(of(CommitStep, actions)) == 1


def test_a_sum_that_came_without_some_applies_those_that_are_in_it() -> None:
    role = server()
    role.tell(group_slot(0, member("w0#0"), member("w1#0")))
    assert one(MeasureStep, bring_sum(role, member("w0#0"))).members == 1
    assert [ack.update for ack in sent(UpdateApplied, measured(role))] == ["w0#0"]


def test_transfers_of_another_epoch_and_of_other_kinds_are_refused() -> None:
    role = server()
    for about in (
        UpdatePart("w0#0", 0, 1, 1.0),
        Aggregate("g", 0, 1, (), 1.0),
        ModelPart("p", 0, Version(0, 0)),
    ):
        assert of(RefuseTransfer, role(TransferArriving("t", "w0", 40, about)))
    assert not role.tell(Sequence(0, 1, slots("w0#0").slots, 4))


def test_a_transfer_that_breaks_off_may_come_again() -> None:
    role = server()
    role.tell(slots("w0#0"))
    role(TransferArriving("t1", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0)))
    assert one(FreeBuffer, role(TransferFailed("t1", "cut"))).buffer == "parcel/t1"
    assert of(MeasureStep, bring(role, "w0#0"))


# --- giving up ----------------------------------------------------------------------------------------------


def test_a_place_is_given_up_unless_its_bytes_are_there() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0"))
    assert said(SlotWithdrawn, role.tell(WithdrawSlot(0, "late"))) == SlotWithdrawn(0, 0, 0, True)
    bring(role, "w0#0")
    assert not role.wait(0.5), "frozen until it is settled"
    role.tell(SettleSlot(0, dropped=True, final=True))
    refused = role(TransferArriving("t2", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0)))
    assert "given up" in one(RefuseTransfer, refused).reason
    assert of(MeasureStep, bring(role, "w1#0"))


def test_a_place_that_is_kept_after_all_is_applied() -> None:
    role = server()
    role.tell(slots("w0#0"))
    role.tell(WithdrawSlot(0, "late"))
    bring(role, "w0#0")
    assert of(MeasureStep, role.tell(SettleSlot(0, dropped=False)))


def test_a_complete_or_applied_place_is_not_given_up() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0"))
    bring(role, "w0#0")  # its step is being made
    bring(role, "w1#0")  # complete, waits for its turn
    for number in (0, 1):
        answer = said(SlotWithdrawn, role.tell(WithdrawSlot(number, "late")))
        assert (answer.withdrawn, answer.waiting) == (False, True)
    measured(role)
    answer = said(SlotWithdrawn, role.tell(WithdrawSlot(0, "late")))
    assert (answer.withdrawn, answer.waiting) == (False, False)


# --- the replica --------------------------------------------------------------------------------------------


def test_a_step_within_the_bound_is_visible_at_once() -> None:
    role = server(divergence=0.5)
    role.tell(slots("w0#0"))
    bring(role, "w0#0")
    actions = measured(role, 0.5)
    assert said(UpdateApplied, actions).durable == Version(0, 0)
    assert not of(StartTransfer, actions)


def test_a_step_beyond_the_bound_is_withheld_until_the_replica_has_caught_up() -> None:
    role = server(divergence=0.5)
    role.tell(slots("w0#0", "w1#0"))
    applied(role, "w0#0")
    bring(role, "w1#0")
    actions = measured(role, 0.6)
    assert not of(CommitStep, actions)
    assert not sent(UpdateApplied, actions)
    assert notes("withheld", actions)[0].updates == ("w1#0",)
    snapshot = one(SnapshotShard, actions)
    assert not snapshot.with_staged
    assert snapshot.for_replica
    about = one(StartTransfer, actions).about
    assert isinstance(about, ReplicaPart)
    assert (about.version, about.applied) == (1, AppliedIds(above={"w0": (0,)}))
    actions = role.tell(ReplicaHas(0, 0, 1, 0), "r0")
    assert of(MarkReplicaImage, actions)
    assert one(MeasureStep, actions).buffer == "", "the staged step is measured again"
    acked = said(UpdateApplied, measured(role, 0.3))
    assert (acked.update, acked.durable) == ("w1#0", Version(0, 1))


@pytest.mark.parametrize("bound", [0.0, 0.5])
def test_a_single_step_beyond_the_bound_goes_to_the_replica_first(bound: float) -> None:
    role = server(divergence=bound)
    role.tell(slots("w0#0"))
    bring(role, "w0#0")
    actions = measured(role, 0.9)
    assert not of(CommitStep, actions)
    assert one(SnapshotShard, actions).with_staged
    about = one(StartTransfer, actions).about
    assert isinstance(about, ReplicaPart)
    assert (about.version, about.with_state) == (1, True)
    assert about.applied == AppliedIds(above={"w0": (0,)})
    actions = role.tell(ReplicaHas(0, 0, 1, 1), "r0")
    assert of(CommitStep, actions)
    assert said(UpdateApplied, actions).durable == Version(0, 1)


def test_a_replication_that_breaks_off_is_tried_again() -> None:
    role = server(divergence=0.0)
    role.tell(slots("w0#0"))
    bring(role, "w0#0")
    first = one(StartTransfer, measured(role, 0.9))
    role(TransferFailed(first.transfer, "cut"))
    second = one(StartTransfer, role.wait(1.0))
    assert second.transfer != first.transfer
    assert second.about == first.about
    assert of(CommitStep, role.tell(ReplicaHas(0, 0, 1, 1), "r0"))


def test_a_lost_replica_suspends_the_bound_loudly_and_stops_nothing() -> None:
    role = server(divergence=0.5)
    role.tell(slots("w0#0", "w1#0"))
    bring(role, "w0#0")
    measured(role, 0.9)
    actions = role.tell(ReplicaAssigned(0, None, "replica r0 lost: silent"))
    assert notes("bound-suspended", actions)[0].loud
    assert said(UpdateApplied, actions).durable is None
    bring(role, "w1#0")
    assert of(CommitStep, measured(role, 5.0))
    filling = one(StartTransfer, role.tell(ReplicaAssigned(0, "r1")))
    assert filling.node == "r1"
    assert isinstance(filling.about, ReplicaPart)
    assert (filling.about.version, filling.about.with_state) == (2, True)


def test_the_word_of_a_former_replica_does_not_count_for_the_new_one() -> None:
    role = server(divergence=0.5)
    role.tell(ReplicaAssigned(0, None, "replica r0 lost: silent"))
    role.tell(ReplicaAssigned(0, "r1"))
    late = role.tell(ReplicaHas(0, 0, 0, 0), "r0")
    assert not sent(ShardReady, late), "r1 holds nothing yet"


def test_spare_capacity_carries_the_optimizer_state_too_but_not_each_time() -> None:
    role = server(divergence=0.5)
    with_state, state_version = [], 0
    for number in range(2 * STATE_EVERY):
        role.tell(slots(f"w0#{number}", first=number, base=number))
        applied(role, f"w0#{number}")
        start = one(StartTransfer, role.tell(Replicate(0, 5e5, "spare")))
        assert start.rate_bytes_per_s == 5e5
        assert isinstance(start.about, ReplicaPart)
        assert not role.tell(Replicate(0, 5e5, "spare")), "one message at a time"
        with_state.append(start.about.with_state)
        state_version = number + 1 if start.about.with_state else state_version
        assert start.about.state_version == state_version
        role.tell(ReplicaHas(0, 0, number + 1, state_version), "r0")
    assert with_state == 2 * [*[False] * (STATE_EVERY - 1), True]


def test_a_worker_that_waits_for_durability_is_answered_once_the_replica_has_it() -> None:
    role = server(divergence=0.5)
    role.tell(slots("w0#0"))
    applied(role, "w0#0")
    assert of(StartTransfer, role.tell(DurableWanted("w0#0", 0), "w0"))
    assert said(UpdateDurable, role.tell(ReplicaHas(0, 0, 1, 1), "r0"), "w0").update == "w0#0"
    assert said(UpdateDurable, role.tell(DurableWanted("w0#0", 0), "w0"), "w0").update == "w0#0"


# --- pulls --------------------------------------------------------------------------------------------------


def test_pulls_of_one_version_share_a_snapshot_which_is_freed_with_the_last() -> None:
    role = server()
    first = role.tell(ServePull("p0", "w0", 0, 1e6, False))
    second = role.tell(ServePull("p1", "w1", 0, 1e6, False))
    assert len(of(SnapshotShard, first)) == 1
    assert not of(SnapshotShard, second)
    starts = [one(StartTransfer, actions) for actions in (first, second)]
    assert starts[0].buffer == starts[1].buffer
    assert starts[0].about == ModelPart("p0", 0, Version(0, 0))
    assert not of(FreeBuffer, role(TransferSent(starts[0].transfer)))
    done = role(TransferFailed(starts[1].transfer, "w1 lost"))
    assert one(FreeBuffer, done).buffer == starts[0].buffer
    assert said(PullServed, done).pull == "p1"


def test_a_checkpoint_is_exactly_the_state_after_its_number() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0", "w2#0"))
    bring(role, "w2#0")
    measured(role)  # overtook: it is in, and belongs to the state after number 2 only
    assert not role.tell(ServePull("p", "w0", 0, 1e6, True, after_number=1))
    applied(role, "w0#0")
    role.tell(slots("w3#0", first=3))
    assert not of(MeasureStep, bring(role, "w3#0")), "numbers beyond the checkpoint wait for it"
    assert of(MeasureStep, bring(role, "w1#0"))
    actions = measured(role)
    start = one(StartTransfer, actions)
    assert start.about == ModelPart("p", 0, Version(0, 3), True)
    assert of(MeasureStep, actions), "then the order goes on"


def test_initial_values_fill_the_shard_at_their_version() -> None:
    role = Fed(Server(ServerSettings(shard(), RULE, JobSettings(), "sched", "float32")))
    accepted = one(AcceptTransfer, role(TransferArriving("i", "w0", 40, InitialPart(0, 9, True))))
    actions = role(TransferFinished("i"))
    assert one(FillShard, actions) == FillShard(0, accepted.buffer, True, 9)
    assert one(FreeBuffer, actions).buffer == accepted.buffer


# --- the scheduler ------------------------------------------------------------------------------------------


def test_a_leader_that_hears_no_scheduler_acknowledges_nothing_until_it_does() -> None:
    role = server()
    role(LeaseRenewed(1.0))
    role.tell(slots("w0#0"))
    bring(role, "w0#0")
    role.now = 1.0
    held = measured(role)
    assert notes("fenced", held)
    assert not of(CommitStep, held)
    assert not sent(UpdateApplied, held)
    role.now = 1.2
    again = one(MeasureStep, role(LeaseRenewed(2.0)))
    assert again.buffer == ""  # the staged step
    assert said(UpdateApplied, measured(role), "w0").update == "w0#0"


def test_what_an_earlier_scheduler_granted_is_forgotten_and_refused() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0"))
    bring(role, "w0#0")  # its step is being made
    bring(role, "w1#0")  # complete, and waits
    report = role(SchedulerChanged("w1", 3))
    assert one(FreeBuffer, report).buffer == "parcel/t/w1#0"
    assert said(ShardReport, report).version == 0
    stale = role(TransferArriving("t2", "w1", 40, UpdatePart("w1#0", 0, 0, 1.0, None, 2)))
    assert "term 2" in one(RefuseTransfer, stale).reason
    assert one(AcceptTransfer, role(TransferArriving("t3", "w1", 40, UpdatePart("w1#0", 0, 0, 1.0, None, 3))))
    assert said(UpdateApplied, measured(role), "w0").update == "w0#0"


def test_a_server_says_whether_an_update_that_was_offered_again_is_in() -> None:
    role = server()
    role.tell(slots("w0#0"))
    applied(role, "w0#0")
    assert said(UpdateApplied, role.tell(JudgeUpdate(0, member("w0#0"))), "w0").update == "w0#0"
    assert said(NotApplied, role.tell(JudgeUpdate(0, member("w1#0")))).update == "w1#0"


def test_a_leader_that_yields_applies_nothing_more_and_brings_its_heir_level_at_once() -> None:
    role = server()
    role.tell(slots("w0#0", "w1#0"))
    applied(role, "w0#0")
    serving = one(StartTransfer, role.tell(ServePull("p", "w0", 0, 1e6, False)))
    actions = role.tell(YieldLead(0, "a better link", "s1"))
    assert one(CancelTransfer, actions).transfer == serving.transfer  # the heir will serve it
    state = one(StartTransfer, actions)
    assert (state.node, one(SnapshotShard, actions).with_state) == ("s1", True)
    assert not of(MeasureStep, bring(role, "w1#0"))
    assert said(LeadYielded, role.tell(ReplicaHas(0, 0, 1, 1), "s1")).version == 1
    assert not role.wait(5.0)


def test_a_staged_step_is_made_before_the_lead_is_yielded() -> None:
    role = server()
    role.tell(slots("w0#0"))
    assert of(MeasureStep, bring(role, "w0#0"))
    assert not of(StartTransfer, role.tell(YieldLead(0, "a better link", "s1")))
    actions = measured(role)
    assert of(CommitStep, actions)
    about = one(StartTransfer, actions).about
    assert isinstance(about, ReplicaPart)
    assert about.version == 1
    assert said(LeadYielded, role.tell(ReplicaHas(0, 0, 1, 1), "s1")).version == 1


def test_a_leader_whose_heir_is_lost_goes_on() -> None:
    role = server()
    role.tell(slots("w0#0"))
    role.tell(YieldLead(0, "a better link", "s1"))
    assert not of(MeasureStep, bring(role, "w0#0"))
    assert of(MeasureStep, role.tell(ReplicaAssigned(0, None, "s1 lost")))
