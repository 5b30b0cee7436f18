"""The aggregator: sums what belongs together, waits no longer than told, tells whom it left out."""

from __future__ import annotations

from mlfabric.events import TransferArriving, TransferFailed, TransferFinished, TransferSent
from mlfabric.messages import (
    Aggregate,
    AppliedIds,
    GatherGroup,
    InitialPart,
    LeaderChanged,
    LeaveOut,
    LeftOut,
    RuleSpec,
    StepSettings,
    UpdatePart,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    AddInto,
    FreeBuffer,
    RefuseTransfer,
    StartTransfer,
    WorkerSettings,
)
from mlfabric.roles.aggregator import ORPHAN_S, Aggregator
from tests.roles.feeding import Fed, member, notes, of, one, said, sent, shard

UPDATES = ("w0#0", "w1#0", "w2#0")


def aggregator() -> Fed:
    return Fed(Aggregator(WorkerSettings("a0", "a0", "sched")))


def order(updates: tuple[str, ...] = UPDATES, wait_s: float = 1.0) -> GatherGroup:
    members = tuple(member(update) for update in updates)
    return GatherGroup("g", 0, 0, members, "s0", 1e6, wait_s, "same rack")


def arrive(role: Fed, update: str, weight: float = 1.0) -> list[Action]:
    return role(TransferArriving(f"t/{update}", update[:2], 40, UpdatePart(update, 0, 0, weight, "g")))


def bring(role: Fed, update: str, weight: float = 1.0) -> list[Action]:
    one(AcceptTransfer, arrive(role, update, weight))
    return role(TransferFinished(f"t/{update}"))


def test_a_complete_group_is_forwarded_at_once_with_its_members_and_weight() -> None:
    role = aggregator()
    role.tell(order())
    assert not of(StartTransfer, bring(role, "w2#0", 0.5))
    assert not of(StartTransfer, bring(role, "w0#0"))
    actions = bring(role, "w1#0")
    assert one(AddInto, actions).target == "sum/g"
    start = one(StartTransfer, actions)
    assert (start.node, start.role, start.buffer) == ("s0", "server.0", "sum/g")
    assert start.about == Aggregate("g", 0, 0, order().members, 2.5)
    assert not sent(LeftOut, actions)
    assert one(FreeBuffer, role(TransferSent(start.transfer))).buffer == "sum/g"


def test_a_late_member_is_left_out_told_of_and_refused_when_it_comes() -> None:
    role = aggregator()
    role.tell(order())
    bring(role, "w0#0")
    bring(role, "w1#0", 0.25)
    assert not role.wait(0.99)
    actions = role.wait(0.02)
    left = said(LeftOut, actions, "sched")
    assert (left.group, left.updates) == ("g", ("w2#0",))
    about = one(StartTransfer, actions).about
    assert isinstance(about, Aggregate)
    assert [m.update for m in about.members] == ["w0#0", "w1#0"]
    assert about.weight == 1.25
    assert "forwarded" in one(RefuseTransfer, arrive(role, "w2#0")).reason


def test_a_member_still_arriving_when_its_group_leaves_is_not_added() -> None:
    role = aggregator()
    role.tell(order(UPDATES[:2]))
    bring(role, "w0#0")
    arrive(role, "w1#0")
    assert said(LeftOut, role.wait(1.0)).updates == ("w1#0",)
    actions = role(TransferFinished("t/w1#0"))
    assert not of(AddInto, actions)
    assert one(FreeBuffer, actions).buffer == "member/t/w1#0"


def test_a_group_nobody_came_to_is_told_and_not_sent() -> None:
    role = aggregator()
    role.tell(order())
    actions = role.wait(1.0)
    assert said(LeftOut, actions).updates == UPDATES
    assert not of(StartTransfer, actions)


def test_a_member_that_is_taken_out_is_not_waited_for() -> None:
    role = aggregator()
    role.tell(order())
    bring(role, "w0#0")
    bring(role, "w1#0")
    actions = role.tell(LeaveOut("g", "w2#0", "w2 lost"))
    about = one(StartTransfer, actions).about
    assert isinstance(about, Aggregate)
    assert len(about.members) == 2


def test_bytes_may_come_before_their_order() -> None:
    role = aggregator()
    for update in UPDATES:
        assert not of(StartTransfer, bring(role, update))
    assert of(StartTransfer, role.tell(order()))


def test_bytes_without_an_order_are_given_up() -> None:
    role = aggregator()
    bring(role, "w0#0")
    actions = role.wait(ORPHAN_S)
    assert one(FreeBuffer, actions).buffer == "sum/g"
    assert notes("gave-up", actions)
    assert not role.tell(order())


def test_an_update_is_added_once() -> None:
    role = aggregator()
    role.tell(order())
    bring(role, "w0#0")
    again = TransferArriving("t2", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0, "g"))
    assert "already" in one(RefuseTransfer, role(again)).reason


def test_a_broken_arrival_frees_its_buffer_and_may_come_again() -> None:
    role = aggregator()
    role.tell(order(("w0#0",)))
    arrive(role, "w0#0")
    assert one(FreeBuffer, role(TransferFailed("t/w0#0", "cut"))).buffer == "member/t/w0#0"
    assert of(StartTransfer, bring(role, "w0#0"))


def test_a_sum_that_cannot_be_forwarded_is_told_with_all_its_members() -> None:
    role = aggregator()
    role.tell(order(UPDATES[:2]))
    bring(role, "w0#0")
    start = one(StartTransfer, bring(role, "w1#0"))
    actions = role(TransferFailed(start.transfer, "refused by s0"))
    assert said(LeftOut, actions).updates == ("w0#0", "w1#0")
    assert one(FreeBuffer, actions).buffer == "sum/g"


def test_a_sum_that_cannot_be_forwarded_names_only_those_in_it() -> None:
    role = aggregator()
    role.tell(order())
    bring(role, "w0#0")
    start = one(StartTransfer, role.wait(1.0))
    assert said(LeftOut, role(TransferFailed(start.transfer, "cut"))).updates == ("w0#0",)


def test_groups_for_a_leader_that_was_replaced_are_thrown_away() -> None:
    role = aggregator()
    role.tell(order())
    bring(role, "w0#0")
    actions = role.tell(LeaderChanged(shard(epoch=1, leader="r0"), 3, AppliedIds(), "s0 lost"))
    assert one(FreeBuffer, actions).buffer == "sum/g"
    assert of(RefuseTransfer, arrive(role, "w1#0"))
    assert role.role.next_deadline() is None


def test_other_transfers_are_refused() -> None:
    role = aggregator()
    assert of(RefuseTransfer, role(TransferArriving("t", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0))))
    assert of(RefuseTransfer, role(TransferArriving("t", "w0", 40, InitialPart(0, 1))))


def test_a_sum_has_the_newest_settings_of_its_members() -> None:
    role = aggregator()
    role.tell(order())
    newest = StepSettings(7, RuleSpec("SGD", {"lr": 0.1}))
    for update, settings in (
        ("w2#0", StepSettings(3, RuleSpec("SGD", {"lr": 0.2}))),
        ("w0#0", newest),
        ("w1#0", None),
    ):
        part = UpdatePart(update, 0, 0, 1.0, "g", settings=settings)
        role(TransferArriving(f"t/{update}", update[:2], 40, part))
        actions = role(TransferFinished(f"t/{update}"))
    about = one(StartTransfer, actions).about
    assert isinstance(about, Aggregate)
    assert about.settings == newest
