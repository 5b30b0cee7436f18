"""Who passes a model on to whom, by order and by worker."""

from __future__ import annotations

from mlfabric.events import PullRequested, TransferArriving, TransferFailed, TransferFinished, TransferSent
from mlfabric.messages import AppliedIds, Hop, MemberInfo, ModelPart, PullServed, Version, split_onward
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    CancelTransfer,
    FreeBuffer,
    RefuseTransfer,
    ResolvePull,
)
from mlfabric.roles.relaying import PartWanted, relay_copies, serve_orders
from mlfabric.topology import Host, Network
from tests.roles.feeding import Fed, of, one, said
from tests.roles.test_worker import changed, ready

SIZE = 4_000_000
VERSION = Version(0, 6)


def arriving(worker: Fed, transfer: str = "m", pull: str = "p", *onward: Hop) -> list[Action]:
    about = ModelPart(pull, 0, VERSION, onward=onward, chunk_bytes=1000)
    return worker(TransferArriving(transfer, "s0", 40, about))


def test_each_receiver_gets_the_part_of_the_tree_below_it() -> None:
    hops = [Hop("a", "wa", 1.0), Hop("b", "wb", 1.0, 1), Hop("c", "wc", 1.0, 2), Hop("d", "wd", 1.0)]
    (first, below), (second, nothing) = split_onward(tuple(hops))
    assert (first.node, second.node, nothing) == ("wa", "wd", ())
    assert [(hop.node, hop.depth) for hop in below] == [("wb", 0), ("wc", 1)]
    assert split_onward((Hop("x", "wx", 1.0, 3),)) == []


def test_a_part_is_passed_on_while_it_comes() -> None:
    worker = ready()
    worker(PullRequested("p"))
    accepted = one(AcceptTransfer, arriving(worker, "m", "p", Hop("q", "w5", 7.0), Hop("r", "w6", 8.0, 1)))
    assert accepted.buffer == "pull/p/0"
    (passed,) = accepted.onward
    assert (passed.node, passed.role, passed.rate_bytes_per_s, passed.chunk_bytes) == (
        "w5",
        "worker",
        7.0,
        1000,
    )
    assert passed.about == ModelPart("q", 0, VERSION, onward=(Hop("r", "w6", 8.0),), chunk_bytes=1000)
    assert one(ResolvePull, worker(TransferFinished("m"))).lent
    assert said(PullServed, worker(TransferSent(passed.transfer))) == PullServed("q", 0)


def test_a_model_of_which_nothing_is_passed_on_any_more_is_its_workers_own() -> None:
    worker = ready()
    worker(PullRequested("p"))
    accepted = one(AcceptTransfer, arriving(worker, "m", "p", Hop("q", "w5", 7.0)))
    worker(TransferFailed(accepted.onward[0].transfer, "refused"))
    assert not one(ResolvePull, worker(TransferFinished("m"))).lent


def test_the_scheduler_hears_of_what_will_not_be_passed_on() -> None:
    worker = ready()
    worker(PullRequested("p"))
    accepted = one(AcceptTransfer, arriving(worker, "m", "p", Hop("q", "w5", 7.0, attempt=1)))
    actions = worker(TransferFailed("m", "s0 is gone"))
    assert one(CancelTransfer, actions).transfer == accepted.onward[0].transfer
    assert said(PullServed, actions) == PullServed("q", 0, failed=True, attempt=1)


def test_what_is_not_wanted_here_is_passed_on_all_the_same() -> None:
    worker = ready()
    accepted = one(AcceptTransfer, arriving(worker, "m", "gone", Hop("q", "w5", 7.0)))
    assert accepted.buffer == "passing/m"
    assert len(accepted.onward) == 1
    assert one(FreeBuffer, worker(TransferFinished("m"))).buffer == "passing/m"
    assert of(RefuseTransfer, arriving(worker, "n", "gone")), "nobody wants it"


def test_a_model_of_an_earlier_epoch_is_passed_on_to_nobody() -> None:
    worker = ready()
    worker(PullRequested("p"))
    worker.tell(changed(AppliedIds()))
    assert of(RefuseTransfer, arriving(worker, "m", "p", Hop("q", "w5", 7.0)))


# --- from hosts to nodes ------------------------------------------------------------------------------------


def members(*names: str) -> dict[str, MemberInfo]:
    """Named "host.node"."""
    return {name: MemberInfo(name, name.split(".")[0], "", ("worker",), 1e6, 1e6) for name in names}


def wanted(*nodes: str, holder: str = "s.s") -> list[PartWanted]:
    return [PartWanted(f"pull-{node}", node, 0, holder, SIZE) for node in nodes]


def network(*hosts: str) -> Network:
    return Network.of(Host(name, 1e6, 1e6) for name in hosts)


def test_the_first_on_a_host_serves_the_others_there_and_the_next_host() -> None:
    nodes = ("a.0", "a.1", "b.0", "b.1", "s.1")
    copies = relay_copies(wanted(*nodes), members("s.s", *nodes), network("s", "a", "b"), [])
    ways = [(copy.part.node, copy.source, copy.through, copy.depth) for copy in copies]
    assert ways == [
        ("a.0", "s.s", "", 0),
        ("a.1", "a.0", "pull-a.0", 1),
        ("b.0", "a.0", "pull-a.0", 1),
        ("b.1", "b.0", "pull-b.0", 2),
    ], "whoever shares the leader's host gets it there"
    ((part, order),) = serve_orders(copies)
    assert (part.node, order.node, order.pull) == ("a.0", "a.0", "pull-a.0")
    assert [(hop.node, hop.depth) for hop in order.onward] == [("a.1", 0), ("b.0", 0), ("b.1", 1)]
    assert order.chunk_bytes > 0


def test_nobody_passes_a_model_on_to_itself() -> None:
    twice = [*wanted("a.0", "b.0"), PartWanted("second", "a.0", 0, "s.s", SIZE)]
    copies = relay_copies(twice, members("s.s", "a.0", "b.0"), network("s", "a", "b"), [])
    assert sorted(copy.part.pull for copy in copies) == ["pull-a.0", "pull-b.0"]


def test_a_part_that_may_not_be_relayed_is_left_to_its_holder() -> None:
    alone = PartWanted("p", "c.0", 0, "s.s", SIZE, may_relay=False)
    nodes = members("s.s", "a.0", "b.0", "c.0")
    copies = relay_copies([*wanted("a.0", "b.0"), alone], nodes, network("s", "a", "b", "c"), [])
    assert {copy.part.node for copy in copies} == {"a.0", "b.0"}


def test_one_pull_of_several_shards_is_not_relayed() -> None:
    parts = [PartWanted("p", "a.0", shard, "s.s", SIZE) for shard in range(3)]
    assert relay_copies(parts, members("s.s", "a.0"), network("s", "a"), []) == []
