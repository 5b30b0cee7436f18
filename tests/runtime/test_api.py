"""The public calls, over real TCP on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.api import Fabric
from tests.runtime.engines import engine_of


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with mf.local(workers=3) as fabric:
        yield fabric


def zeros(count: int = 1000) -> dict[str, Any]:
    return {"w": np.zeros((count // 10, 10), np.float32), "b": np.zeros(3)}


def test_updates_are_committed_and_pulled_by_everybody(fabric: Fabric) -> None:
    def work(member: Fabric) -> tuple[int, Any]:
        member.publish(zeros(), apply=mf.Sum())
        for _ in range(4):
            member.pull()
            outcome = member.push({"w": np.ones((100, 10)), "b": np.full(3, 0.5)}).result(20)
            assert isinstance(outcome, mf.Committed)
            last = outcome.version
        return last, member.pull().arrays

    versions = [version for version, _ in fabric.run(work, 60)]
    model = fabric.pull()
    assert model.version == 12 == max(versions)
    np.testing.assert_array_equal(model.arrays["w"], np.full((100, 10), 12, np.float32))
    np.testing.assert_array_equal(model.arrays["b"], np.full(3, 6.0))
    assert model.arrays["w"].dtype == np.float32
    assert model.arrays["b"].dtype == np.float64


def test_the_model_may_be_cut_into_shards(fabric: Fabric) -> None:
    def work(member: Fabric) -> mf.Model:
        member.publish({"w": np.zeros(10_007, np.float32)}, apply=mf.Sum(), shards=3)
        member.push({"w": np.arange(10_007, dtype=np.float32)}).result(20)
        return member.pull()

    fabric.run(work, 60)
    model = fabric.pull()
    assert len(model.versions) == 3
    np.testing.assert_array_equal(model.arrays["w"], 3 * np.arange(10_007, dtype=np.float32))


def test_all_reduce_sums_in_place_and_alike_everywhere(fabric: Fabric) -> None:
    rng = np.random.default_rng(5)
    parts = {f"w{rank}": rng.standard_normal(100_003).astype(np.float32) for rank in range(3)}
    expected = parts["w0"] + parts["w1"] + parts["w2"]

    def work(member: Fabric) -> Any:
        mine = parts[member.name].copy()
        assert member.all_reduce(mine, timeout=20) is mine
        tiny = np.array([1, 2], np.int64)
        member.all_reduce(tiny, timeout=20)
        assert tiny.tolist() == [3, 6]
        return mine

    first, *others = fabric.run(work, 60)
    np.testing.assert_array_equal(first, expected)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_an_all_reduce_that_waits_names_who_did_not_come(fabric: Fabric) -> None:
    with pytest.raises(TimeoutError, match="w1, w2 did not come"):
        fabric.all_reduce(np.zeros(3), timeout=1.5)


def test_arrays_of_different_sizes_are_an_error_for_everybody(fabric: Fabric) -> None:
    def work(member: Fabric) -> str:
        with pytest.raises(mf.FabricError) as caught:
            member.all_reduce(np.zeros(4 if member.name == "w2" else 3), timeout=20)
        return str(caught.value)

    for sentence in fabric.run(work, 60):
        assert "called all_reduce of 3 elements of float64" in sentence
        assert "rank 2 (w2) all_reduce of 4 elements" in sentence


def test_durable_returns_once_the_replica_holds_the_update(fabric: Fabric) -> None:
    fabric.publish(zeros(), apply=mf.Sum(), divergence=100.0)
    ticket = fabric.push({"w": np.ones((100, 10)), "b": np.ones(3)})
    ticket.result(20)
    ticket.durable(20)
    leader = [member for member in fabric.workers if "server.0" in engine_of(member).node.roles]
    replica = [member for member in fabric.workers if "replica.0" in engine_of(member).node.roles]
    assert len(leader) == len(replica) == 1
    assert leader[0] is not replica[0]
    held: Any = engine_of(replica[0]).node.data
    assert held.shards[0].weights.sum() == 1003


def test_a_job_without_a_replica_says_so(fabric: Fabric) -> None:
    fabric.publish(zeros(), apply=mf.Sum(), divergence=None)
    ticket = fabric.push({"w": np.ones((100, 10)), "b": np.ones(3)})
    with pytest.raises(mf.FabricError, match="no replica"):
        ticket.durable(20)


@pytest.mark.parametrize("rule", [mf.SGD(0.1), mf.SGD(0.1, momentum=0.9), mf.Adam(0.01)])
def test_a_checkpoint_resumes_on_another_number_of_hosts(rule: Any) -> None:
    gradients = [np.random.default_rng(step).standard_normal(50) for step in range(6)]

    def train(fabric: Fabric, steps: range) -> None:
        for step in steps:
            fabric.pull()
            fabric.push({"w": gradients[step]}).result(20)

    with mf.local(workers=1) as straight:
        straight.publish({"w": np.zeros(50)}, apply=rule)
        train(straight, range(6))
        expected = straight.pull().arrays["w"]
    with mf.local(workers=2) as before:
        before.publish({"w": np.zeros(50)}, apply=rule, shards=2)
        train(before, range(3))
        state = before.state_dict()
    assert state["version"] == 3
    with mf.local(workers=3) as after:
        after.publish(state, shards=3)
        assert after.pull().version == 3
        train(after, range(3, 6))
        np.testing.assert_allclose(after.pull().arrays["w"], expected, rtol=1e-12)
        assert after.pull().version == 6


def test_a_second_publisher_with_other_shapes_is_told_which(fabric: Fabric) -> None:
    fabric.publish(zeros(), apply=mf.Sum())
    other = fabric.workers[1]
    with pytest.raises(mf.ShapeMismatch, match=r"array 'b' is \[3\].*\[4\]"):
        other.publish({"w": np.zeros((100, 10), np.float32), "b": np.zeros(4)}, apply=mf.Sum())
    other.publish(zeros(), apply=mf.Sum())


def test_wrong_updates_are_refused_in_one_sentence(fabric: Fabric) -> None:
    with pytest.raises(mf.FabricError, match="nothing is published"):
        fabric.push({"w": np.zeros(3)})
    fabric.publish(zeros(), apply=mf.Sum())
    with pytest.raises(mf.ShapeMismatch, match="lacks array 'b'"):
        fabric.push({"w": np.zeros((100, 10))})
    with pytest.raises(mf.ShapeMismatch, match=r"shape \[3\]"):
        fabric.push({"w": np.zeros(3), "b": np.zeros(3)})
    with pytest.raises(mf.FabricError, match="infinite or undefined"):
        fabric.push({"w": np.zeros((100, 10)), "b": np.array([1, np.nan, 2])})
    with pytest.raises(mf.ShapeMismatch, match="int64"):
        fabric.publish({"w": np.zeros(3, np.int64)}, apply=mf.Sum())


def test_a_closed_fabric_says_so() -> None:
    fabric = mf.local(workers=1)
    fabric.close()
    with pytest.raises(mf.FabricError, match="has left the fabric"):
        fabric.pull()
    fabric.close()


def test_a_worker_that_waits_for_a_pull_is_not_forgotten_when_the_model_comes_later(fabric: Fabric) -> None:
    pulled: list[mf.Model] = []
    waiting = threading.Thread(target=lambda: pulled.append(fabric.workers[1].pull(timeout=20)), daemon=True)
    waiting.start()
    fabric.publish(zeros(), apply=mf.Sum())
    waiting.join(20)
    assert pulled[0].version == 0


def test_a_name_that_is_taken_is_refused(fabric: Fabric) -> None:
    with pytest.raises(mf.ConnectError, match="the name w1 is taken"):
        mf.join(fabric.address, job="local", name="w1", timeout=2)


def test_members_that_do_not_work_take_no_part_in_an_all_reduce() -> None:
    with (
        mf.join("127.0.0.1:0", job="j", name="w0", scheduler=True, expected=2) as worker,
        mf.join(worker.address, job="j", name="s0", roles=("server",), expected=2),
    ):
        assert worker.all_reduce(np.ones(3), timeout=10).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("codec", "exact"), [("bfloat16", 0.01), ("float16", 0.01), ("int8", 0.02), ("topk", 1.0)]
)
def test_coded_updates_bring_the_model_where_whole_ones_would(
    fabric: Fabric, codec: str, exact: float
) -> None:
    """What a codec loses goes with later updates, so in the end little is missing."""
    rng = np.random.default_rng(5)
    fabric.publish(zeros(), apply=mf.Sum(), codec=codec, shards=2, divergence=None, max_delay="none")
    pushed = {"w": np.zeros((100, 10)), "b": np.zeros(3)}
    for _ in range(8):
        update = {"w": rng.normal(size=(100, 10)), "b": rng.normal(size=3)}
        assert isinstance(fabric.push(update).result(20), mf.Committed)
        pushed = {name: pushed[name] + update[name] for name in update}
    model = fabric.pull(20).arrays
    missing = np.linalg.norm(model["w"] - pushed["w"]) / np.linalg.norm(pushed["w"])
    assert missing < exact
    assert missing > 0, "nothing was coded"


def test_an_unknown_codec_is_refused_before_anything_is_published(fabric: Fabric) -> None:
    with pytest.raises(mf.FabricError, match="unknown codec 'zip'"):
        fabric.publish(zeros(), apply=mf.Sum(), codec="zip")
