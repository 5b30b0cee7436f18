"""The worker: one outcome per update, through grants, drops, broken transfers and fail-overs."""

from __future__ import annotations

from mlfabric.events import (
    DurabilityRequested,
    PublishRequested,
    PullRequested,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    UpdateSubmitted,
)
from mlfabric.messages import (
    AppliedIds,
    ArraySpec,
    DropUpdate,
    DurableWanted,
    Grant,
    InitialPart,
    JobFailed,
    JobReady,
    LeaderChanged,
    ModelPart,
    OfferAgain,
    OfferUpdate,
    PartRoute,
    PublishFirst,
    PublishRefused,
    PullWanted,
    UpdateApplied,
    UpdateDurable,
    UpdatePart,
    UpdateRefused,
    Version,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    CancelTransfer,
    FailJob,
    FreeBuffer,
    JobBecameReady,
    RefuseTransfer,
    ResolveDurable,
    ResolvePublish,
    ResolvePull,
    ResolveUpdate,
    StartTransfer,
    WorkerSettings,
)
from mlfabric.roles.publication import AGAIN_S
from mlfabric.roles.worker import RETRY_S, Worker
from tests.roles.feeding import RULE, SETTINGS, Fed, notes, of, one, said, sent, shard

ARRAYS = (ArraySpec("w", (20,), "float32"),)


def ready(shards: int = 1, replica: str | None = "r0") -> Fed:
    worker = Fed(Worker(WorkerSettings("w0", "w0", "sched")))
    ranges = tuple(shard(index, replica=replica) for index in range(shards))
    worker.tell(JobReady(ranges, ARRAYS, RULE, SETTINGS, "float32"))
    return worker


def submit(worker: Fed, number: int = 0) -> OfferUpdate:
    update = f"w0#{number}"
    return said(OfferUpdate, worker(UpdateSubmitted(update, f"update/{update}", 80, 1.0)), "sched")


def grant(update: str = "w0#0", shards: int = 1, epoch: int = 0, start_in_s: float = 0.0) -> Grant:
    parts = tuple(PartRoute(i, "s0", f"server.{i}", 1e6, start_in_s, epoch) for i in range(shards))
    return Grant(update, 0, 0.5, parts, "its turn")


def ack(update: str = "w0#0", index: int = 0, count: int = 1, durable: int | None = None) -> UpdateApplied:
    held = None if durable is None else Version(0, durable)
    return UpdateApplied(update, index, Version(0, count), 2 + index, held)


def changed(applied: AppliedIds, version: int = 5, epoch: int = 1, index: int = 0) -> LeaderChanged:
    return LeaderChanged(shard(index, epoch=epoch, leader="r0", replica=None), version, applied, "s0 lost")


def pulled(worker: Fed, count: int = 7, shards: int = 1) -> None:
    worker(PullRequested("p"))
    for index in range(shards):
        about = ModelPart("p", index, Version(0, count))
        worker(TransferArriving(f"m{index}", "s0", 40, about))
        worker(TransferFinished(f"m{index}"))


def test_an_update_is_offered_from_the_version_that_was_pulled() -> None:
    worker = ready(shards=2)
    assert submit(worker, 0).bases == (Version(0, 0), Version(0, 0))
    pulled(worker, 7, shards=2)
    offer = submit(worker, 1)
    assert offer.bases == (Version(0, 7), Version(0, 7))
    assert offer.shards == (0, 1)
    assert offer.floor == 0  # w0#0 is still open


def test_a_granted_update_is_sent_in_parts_multiplied_by_its_weight() -> None:
    worker = ready(shards=2)
    submit(worker)
    starts = of(StartTransfer, worker.tell(grant(shards=2)))
    assert [start.ranges for start in starts] == [((0, 10),), ((10, 10),)]
    assert {start.scale for start in starts} == {0.5}
    assert starts[1].about == UpdatePart("w0#0", 1, 0, 0.5)


def test_a_part_that_starts_later_waits_for_its_time() -> None:
    worker = ready()
    submit(worker)
    assert not of(StartTransfer, worker.tell(grant(start_in_s=0.4)))
    assert not worker.wait(0.39)
    assert one(StartTransfer, worker.wait(0.02)).node == "s0"


def test_an_update_is_committed_once_all_shards_have_it_with_the_largest_delay() -> None:
    worker = ready(shards=2)
    submit(worker)
    worker.tell(grant(shards=2))
    assert not worker.tell(ack(index=1, count=4), "s0")
    actions = worker.tell(ack(index=0, count=3), "s0")
    outcome = one(ResolveUpdate, actions)
    assert outcome.committed
    assert (outcome.version, outcome.delay_updates) == (Version(0, 4), 3)
    assert one(FreeBuffer, actions).buffer == "update/w0#0"


def test_an_update_has_one_outcome_whatever_comes_after_it() -> None:
    worker = ready()
    submit(worker)
    worker.tell(grant())
    assert of(ResolveUpdate, worker.tell(ack(), "s0"))
    for message in (ack(), DropUpdate("w0#0", "late", True), UpdateRefused("w0#0", 0, "old"), grant()):
        assert not worker.tell(message)
    assert not worker.tell(OfferAgain("w0#0", (0,), "again"))


def test_a_dropped_update_is_told_with_its_reason_and_stops_sending() -> None:
    worker = ready()
    submit(worker)
    started = one(StartTransfer, worker.tell(grant()))
    actions = worker.tell(DropUpdate("w0#0", "overtaken", True))
    assert one(CancelTransfer, actions).transfer == started.transfer
    outcome = one(ResolveUpdate, actions)
    assert (outcome.committed, outcome.reason, outcome.late) == (False, "overtaken", True)
    assert not worker.tell(ack(), "s0")


def test_an_update_that_a_shard_applied_before_it_was_dropped_is_told_loudly() -> None:
    worker = ready(shards=2)
    submit(worker)
    worker.tell(grant(shards=2))
    worker.tell(ack(index=1), "s0")
    actions = worker.tell(DropUpdate("w0#0", "overtaken", True))
    (note,) = notes("partly-applied", actions)
    assert (note.loud, note.shards) == (True, (1,))
    assert one(ResolveUpdate, actions).reason == "overtaken; shard 1 had applied it"
    (later,) = notes("partly-applied", worker.tell(ack(index=0), "s0"))
    assert (later.loud, later.shards) == (True, (0,))


def test_a_broken_transfer_is_offered_again_after_a_while_with_another_name() -> None:
    worker = ready()
    submit(worker)
    first = one(StartTransfer, worker.tell(grant()))
    assert not worker(TransferFailed(first.transfer, "cut"))
    assert not worker.wait(RETRY_S * 0.9)
    assert said(OfferUpdate, worker.wait(RETRY_S * 0.2)).again == "its transfer broke off"
    second = one(StartTransfer, worker.tell(grant()))
    assert second.transfer != first.transfer


def test_only_the_shards_that_lack_it_are_asked_for_again() -> None:
    worker = ready(shards=2)
    submit(worker)
    worker.tell(grant(shards=2))
    worker.tell(ack(index=0), "s0")
    actions = worker.tell(OfferAgain("w0#0", (1,), "group g1 silent"))
    assert len(of(CancelTransfer, actions)) > 0
    again = said(OfferUpdate, actions)
    assert (again.shards, again.again) == ((1,), "group g1 silent")


def test_nothing_can_be_pushed_before_a_model_is_published() -> None:
    worker = Fed(Worker(WorkerSettings("w0", "w0", "sched")))
    outcome = one(ResolveUpdate, worker(UpdateSubmitted("w0#0", "b", 80, 1.0)))
    assert not outcome.committed
    assert "published" in outcome.reason


# --- fail-over ----------------------------------------------------------------------------------------------


def test_an_open_update_that_survived_a_fail_over_is_committed() -> None:
    worker = ready()
    submit(worker)
    worker.tell(grant())
    actions = worker.tell(changed(AppliedIds(above={"w0": (0,)})))
    outcome = one(ResolveUpdate, actions)
    assert outcome.committed
    assert not outcome.lost
    assert not sent(OfferUpdate, actions)


def test_an_open_update_that_did_not_survive_is_offered_again() -> None:
    worker = ready()
    submit(worker)
    worker.tell(grant())
    actions = worker.tell(changed(AppliedIds()))
    assert said(OfferUpdate, actions).again == "s0 lost"
    assert not of(ResolveUpdate, actions)
    assert not worker.tell(grant(epoch=0)), "a grant of the old epoch leads to a dead leader"
    assert not worker.tell(ack(), "s0"), "the word of a leader that has been replaced"
    assert one(StartTransfer, worker.tell(grant(epoch=1)))


def test_a_committed_update_that_did_not_survive_is_lost_and_said_so_once() -> None:
    worker = ready()
    submit(worker)
    worker.tell(grant())
    assert one(ResolveUpdate, worker.tell(ack(count=6, durable=5), "s0")).committed
    actions = worker.tell(changed(AppliedIds()))
    assert one(ResolveUpdate, actions).lost
    assert notes("lost", actions)[0].loud
    assert not worker.tell(changed(AppliedIds(), epoch=2))


def test_an_update_lost_by_two_shards_is_told_once_and_noted_for_each() -> None:
    worker = ready(shards=3)
    submit(worker)
    worker.tell(grant(shards=3))
    for index, durable in ((0, 5), (1, 6), (2, 5)):
        worker.tell(ack(index=index, count=6, durable=durable), "s0")
    first = worker.tell(changed(AppliedIds(), index=2))
    assert one(ResolveUpdate, first).lost
    assert notes("lost", first)[0].shards == (2,)
    second = worker.tell(changed(AppliedIds(), index=0))
    assert not of(ResolveUpdate, second)
    assert notes("lost", second)[0].shards == (0,)
    assert not notes("lost", worker.tell(changed(AppliedIds(), index=1)))
    assert "lost=1" in str(worker.role.statistics())


def test_a_committed_update_that_survived_is_neither_lost_nor_offered() -> None:
    worker = ready()
    submit(worker)
    worker.tell(grant())
    worker.tell(ack(count=6, durable=5), "s0")
    assert not worker.tell(changed(AppliedIds(above={"w0": (0,)})))


def test_what_the_replica_had_cannot_be_lost() -> None:
    worker = ready()
    for number, durable in ((0, 0), (1, 1)):
        submit(worker, number)
        worker.tell(grant(f"w0#{number}"))
        worker.tell(ack(f"w0#{number}", count=number + 1, durable=durable), "s0")
    lost = one(ResolveUpdate, worker.tell(changed(AppliedIds(), version=1)))
    assert lost.update == "w0#1"


def test_a_pull_under_way_is_asked_for_again_from_the_new_leader() -> None:
    worker = ready()
    worker(PullRequested("p"))
    worker(TransferArriving("m0", "s0", 40, ModelPart("p", 0, Version(0, 6))))
    assert said(PullWanted, worker.tell(changed(AppliedIds()))).pull == "p"
    assert not worker(TransferFinished("m0")), "bytes of the old leader complete nothing"
    old = worker(TransferArriving("m1", "s0", 40, ModelPart("p", 0, Version(0, 6))))
    assert of(RefuseTransfer, old)
    worker(TransferArriving("m2", "r0", 40, ModelPart("p", 0, Version(1, 5))))
    assert one(ResolvePull, worker(TransferFinished("m2"))).versions == (Version(1, 5),)


# --- pulls, durability, publishing --------------------------------------------------------------------------


def test_a_pull_is_complete_with_one_version_of_every_shard() -> None:
    worker = ready(shards=2)
    assert said(PullWanted, worker(PullRequested("p", with_state=True))).with_state
    for index in (1, 0):
        about = ModelPart("p", index, Version(0, 3 + index))
        accepted = one(AcceptTransfer, worker(TransferArriving(f"m{index}", "s0", 40, about)))
        assert accepted.buffer == f"pull/p/{index}"
    assert not worker(TransferFinished("m1"))
    assert one(ResolvePull, worker(TransferFinished("m0"))).versions == (Version(0, 3), Version(0, 4))


def test_a_model_nobody_asked_for_is_refused() -> None:
    worker = ready()
    assert of(RefuseTransfer, worker(TransferArriving("m", "s0", 40, ModelPart("x", 0, Version(0, 1)))))
    assert of(RefuseTransfer, worker(TransferArriving("m", "s0", 40, InitialPart(0, 0))))


def test_durability_is_answered_when_the_replica_has_the_update() -> None:
    worker = ready()
    submit(worker)
    assert "not committed yet" in str(one(ResolveDurable, worker(DurabilityRequested("w0#0"))).error)
    worker.tell(grant())
    worker.tell(ack(count=6, durable=5), "s0")
    assert said(DurableWanted, worker(DurabilityRequested("w0#0")), "s0").update == "w0#0"
    assert one(ResolveDurable, worker.tell(UpdateDurable("w0#0", 0), "s0")).error is None
    assert one(ResolveDurable, worker(DurabilityRequested("w0#0"))).error is None


def test_a_wait_for_durability_ends_when_the_update_is_lost() -> None:
    worker = ready()
    submit(worker)
    worker.tell(grant())
    worker.tell(ack(count=6, durable=5), "s0")
    worker(DurabilityRequested("w0#0"))
    assert "lost" in str(one(ResolveDurable, worker.tell(changed(AppliedIds()))).error)


def test_durability_without_a_replica_is_an_error_that_says_what_to_do() -> None:
    worker = ready(replica=None)
    submit(worker)
    worker.tell(grant())
    worker.tell(ack(), "s0")
    assert "divergence=" in str(one(ResolveDurable, worker(DurabilityRequested("w0#0"))).error)


def test_the_first_publisher_sends_each_shard_its_part_with_optimizer_state() -> None:
    worker = Fed(Worker(WorkerSettings("w0", "w0", "sched")))
    worker(PublishRequested("publish", ARRAYS, RULE, SETTINGS, 20, "float32", state_vectors=1, version=9))
    starts = of(StartTransfer, worker.tell(PublishFirst((shard(0), shard(1)))))
    assert starts[1].ranges == ((10, 10), (30, 10))
    assert starts[1].about == InitialPart(1, 9, True)
    actions = worker.tell(JobReady((shard(0), shard(1)), ARRAYS, RULE, SETTINGS, "float32"))
    assert one(ResolvePublish, actions).error is None
    assert of(JobBecameReady, actions)
    assert one(FreeBuffer, actions).buffer == "publish"


def test_a_part_of_the_first_model_that_came_before_its_server_is_sent_again() -> None:
    worker = Fed(Worker(WorkerSettings("w0", "w0", "sched")))
    worker(PublishRequested("publish", ARRAYS, RULE, SETTINGS, 20, "float32"))
    starts = of(StartTransfer, worker.tell(PublishFirst((shard(0), shard(1)))))
    assert not worker(TransferFailed(starts[1].transfer, "refused by s0: s0 is no server.1"))
    assert of(StartTransfer, worker.wait(AGAIN_S)) == [starts[1]]


def test_a_refused_publication_and_a_failed_job_are_told_in_their_words() -> None:
    worker = Fed(Worker(WorkerSettings("w0", "w0", "sched")))
    worker(PublishRequested("publish", ARRAYS, RULE, SETTINGS, 20, "float32"))
    assert one(ResolvePublish, worker.tell(PublishRefused("another model"))).error == "another model"
    assert one(FailJob, worker.tell(JobFailed("no replica"))).reason == "no replica"


def moved(applied: AppliedIds) -> LeaderChanged:
    range_ = shard(epoch=1, leader="s1", replica=None)
    return LeaderChanged(range_, 5, applied, "a better link", orderly=True)


def test_where_a_lead_moves_only_that_part_is_stopped_and_sent_again_when_granted() -> None:
    worker = ready(shards=2, replica=None)
    submit(worker)
    starts = of(StartTransfer, worker.tell(grant(shards=2)))
    actions = worker.tell(moved(AppliedIds()))
    assert one(CancelTransfer, actions).transfer == starts[0].transfer
    assert not sent(OfferUpdate, actions)
    anew = Grant("w0#0", 0, 0.5, (PartRoute(0, "s1", "server.0", 1e6, 0.0, 1),), "shard 0 is led by s1 now")
    again = one(StartTransfer, worker.tell(anew))
    assert (again.node, again.ranges, again.scale) == ("s1", ((0, 10),), 0.5)
    assert again.transfer != starts[0].transfer
    assert not sent(OfferUpdate, worker.wait(2 * RETRY_S))


def test_where_a_lead_moves_what_had_been_applied_is_known_and_what_waits_is_not_offered_again() -> None:
    worker = ready(replica=None)
    submit(worker, 0)
    submit(worker, 1)
    worker.tell(grant())
    actions = worker.tell(moved(AppliedIds(above={"w0": (0,)})))
    assert one(ResolveUpdate, actions).update == "w0#0"
    assert not sent(OfferUpdate, actions)


def test_where_a_lead_moves_a_pull_asks_the_new_leader_for_what_is_not_on_its_way() -> None:
    worker = ready(shards=2, replica=None)
    worker(PullRequested("p"))
    worker(TransferArriving("m1", "s0", 40, ModelPart("p", 1, Version(0, 7))))
    assert said(PullWanted, worker.tell(moved(AppliedIds()))).shards == (0,)
    worker(TransferFinished("m1"))
    worker(TransferArriving("m0", "s1", 40, ModelPart("p", 0, Version(1, 7))))
    assert one(ResolvePull, worker(TransferFinished("m0"))).versions == (Version(1, 7), Version(0, 7))


def test_a_pull_that_the_former_leader_breaks_off_is_asked_for_at_once() -> None:
    worker = ready(replica=None)
    worker(PullRequested("p"))
    worker(TransferArriving("m0", "s0", 40, ModelPart("p", 0, Version(0, 7))))
    assert not sent(PullWanted, worker.tell(moved(AppliedIds())))
    worker(TransferFailed("m0", "cancelled"))
    assert said(PullWanted, worker.wait(0.01)).shards == (0,)
