"""The replica: follows whole messages, takes over from exactly what it holds."""

from __future__ import annotations

import msgspec

from mlfabric.events import TransferArriving, TransferFailed, TransferFinished, TransferSent
from mlfabric.messages import (
    AppliedIds,
    ModelPart,
    Promote,
    Promoted,
    PullServed,
    ReplicaHas,
    ReplicaPart,
    ServePull,
    UpdatePart,
    Version,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    CreateShard,
    FillShard,
    FreeBuffer,
    RefuseTransfer,
    ReplicaSettings,
    ServerSettings,
    StartRole,
    StartTransfer,
)
from mlfabric.roles.replica import Replica
from mlfabric.roles.server import Server
from tests.roles.feeding import RULE, SETTINGS, Fed, notes, of, one, said, shard

APPLIED = AppliedIds(floor={"w0": 2}, above={"w0": (3,)})


def replica(epoch: int = 0) -> Fed:
    return Fed(Replica(ReplicaSettings(shard(epoch=epoch), RULE, SETTINGS, "sched", "float32")))


def part(version: int, epoch: int = 0, state: bool = True, state_version: int | None = None) -> ReplicaPart:
    held = version if state_version is None else state_version
    return ReplicaPart(0, epoch, version, APPLIED, state, held)


def follow(role: Fed, version: int, epoch: int = 0, state: bool = True) -> list[Action]:
    name = f"t{version}"
    about = part(version, epoch, state, None if state else 0)
    one(AcceptTransfer, role(TransferArriving(name, "s0", 40, about)))
    return role(TransferFinished(name))


def test_a_replica_changes_all_at_once_and_tells_its_leader() -> None:
    role = replica()
    actions = follow(role, 4)
    fill = one(FillShard, actions)
    assert (fill.version, fill.with_state) == (4, True)
    assert of(FreeBuffer, actions)
    assert said(ReplicaHas, actions, "s0") == ReplicaHas(0, 0, 4, 4)
    assert said(ReplicaHas, follow(role, 6, state=False), "s0") == ReplicaHas(0, 0, 6, 4)


def test_a_replica_never_goes_back() -> None:
    role = replica()
    follow(role, 4)
    assert of(RefuseTransfer, role(TransferArriving("old", "s0", 40, part(3))))
    role(TransferArriving("slow", "s0", 40, part(5)))
    follow(role, 6)
    late = role(TransferFinished("slow"))
    assert not of(FillShard, late)
    assert of(FreeBuffer, late)


def test_a_message_that_breaks_off_changes_nothing() -> None:
    role = replica()
    follow(role, 4)
    role(TransferArriving("t", "s0", 40, part(5)))
    actions = role(TransferFailed("t", "cut"))
    assert one(FreeBuffer, actions).buffer == "replica/t"
    assert said(Promoted, role.tell(Promote(0, 1, "s0 lost"))).version == 4


def test_a_promoted_replica_leads_from_what_it_holds() -> None:
    role = replica()
    follow(role, 4)
    role(TransferArriving("half", "s0", 40, part(5)))
    actions = role.tell(Promote(0, 1, "s0 lost"))
    assert said(Promoted, actions, "sched") == Promoted(0, 1, 4, APPLIED, 4)
    started = one(StartRole, actions)
    assert started.role == "server.0"
    settings = started.settings
    assert isinstance(settings, ServerSettings)
    assert (settings.version, settings.applied, settings.promoted) == (4, APPLIED, True)
    assert settings.fail_overs == (Version(1, 4),)
    assert (settings.shard.epoch, settings.shard.replica) == (1, None)
    assert one(FreeBuffer, actions).buffer == "replica/half"
    assert not of(CreateShard, Server(settings).begin()), "its values are there already"
    assert of(RefuseTransfer, role(TransferArriving("late", "s0", 40, part(6))))
    assert not role.tell(Promote(0, 2, "again"))


def test_a_replica_sends_what_it_holds_to_who_is_nearest_to_it() -> None:
    role = replica()
    follow(role, 4)
    actions = role.tell(ServePull("w2/p0", "w2", 0, 1e6, False))
    start = one(StartTransfer, actions)
    assert (start.node, start.role, start.about) == ("w2", "worker", ModelPart("w2/p0", 0, Version(0, 4)))
    done = role(TransferSent(start.transfer))
    assert said(PullServed, done, "sched") == PullServed("w2/p0", 0)
    assert one(FreeBuffer, done).buffer == start.buffer


def test_a_replica_that_was_never_filled_says_so_and_does_not_lead() -> None:
    role = replica()
    actions = role.tell(Promote(0, 1, "s0 lost"))
    assert said(Promoted, actions).version == -1
    assert not of(StartRole, actions)
    assert notes("not-promoted", actions)[0].loud


def test_a_promotion_to_an_epoch_it_has_seen_is_ignored() -> None:
    role = replica(epoch=1)
    follow(role, 4, epoch=1)
    assert not role.tell(Promote(0, 1, "an old message"))


def test_a_second_fail_over_remembers_where_the_first_began() -> None:
    """The base of an update of epoch 0 counts as the least of all counts at which later epochs began."""
    role = replica(epoch=1)
    about = msgspec.structs.replace(part(12, 1, True, None), fail_overs=(Version(1, 9),))
    role(TransferArriving("t", "s0", 40, about))
    role(TransferFinished("t"))
    settings = one(StartRole, role.tell(Promote(0, 2, "r0 lost"))).settings
    assert settings.fail_overs == (Version(1, 9), Version(2, 12))


def test_a_replica_takes_nothing_but_its_leaders_messages() -> None:
    assert of(RefuseTransfer, replica()(TransferArriving("t", "w0", 40, UpdatePart("w0#0", 0, 0, 1.0))))


def test_a_replica_makes_its_shard_when_it_begins() -> None:
    role = replica().role
    assert isinstance(role, Replica)
    assert one(CreateShard, role.begin()).shard == msgspec.structs.replace(shard())
