"""The ledger test over TCP: members are torn away at random moments, the model shows what is in it.

A member is torn away by closing its sockets without a word, which is what peers of a killed process see; the
demo's test kills real processes.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.api import Fabric
from mlfabric.client import Outcome
from tests.runtime.engines import engine_of

WORKERS, STEPS = 3, 12


@dataclass
class Cluster:
    """Three workers, an aggregating host, a server and two that can follow, in one process."""

    divergence: float
    members: dict[str, Fabric] = field(default_factory=dict)
    outcomes: dict[str, tuple[int, Outcome]] = field(default_factory=dict)

    def __enter__(self) -> Cluster:
        parts: list[tuple[str, tuple[str, ...]]] = [
            (f"w{i}", ("worker", "aggregator")) for i in range(WORKERS)
        ]
        parts += [("a0", ("aggregator",)), ("s0", ("server",)), ("r0", ("replica",)), ("r1", ("replica",))]
        for name, roles in parts:
            address = self.members["w0"].address if self.members else "127.0.0.1:0"
            self.members[name] = mf.join(
                address,
                job="ledger",
                name=name,
                host=name,
                roles=roles,
                scheduler=name == "w0",
                expected=len(parts),
                up="200mbit",
                down="100mbit",
            )
        return self

    def __exit__(self, *_: object) -> None:
        for member in reversed(self.members.values()):
            member.close()

    def tear_away(self, name: str) -> None:
        self.members.pop(name)._engine.stop(0.0)

    def work(self, index: int) -> None:
        fabric = self.members[f"w{index}"]
        try:
            self._push_all(fabric, index)
        except mf.FabricError:
            if f"w{index}" in self.members:  # only who was torn away may fail
                raise

    def _push_all(self, fabric: Fabric, index: int) -> None:
        fabric.publish({"w": np.zeros(50_000, np.float32)}, apply=mf.Sum(), divergence=self.divergence)
        for step in range(STEPS):
            fabric.pull()
            coordinate = index * STEPS + step
            update = np.zeros(50_000, np.float32)
            update[coordinate] = 1
            ticket = fabric.push({"w": update})
            self.outcomes[ticket.update] = (coordinate, ticket.result(30))

    def lost(self) -> set[str]:
        return {update for member in self.members.values() for update in member.lost}


@pytest.mark.parametrize("seed", range(6))
def test_the_ledger_holds_over_tcp_while_members_are_torn_away(seed: int) -> None:
    rng = random.Random(seed)
    victim = ["s0", "a0", "r0", "s0", "w2", "s0"][seed]
    divergence = [0.5, 0.5, 0.1, 0.0, 0.5, 0.1][seed]
    with Cluster(divergence) as cluster:
        threads = [threading.Thread(target=cluster.work, args=(i,), daemon=True) for i in range(WORKERS)]
        for thread in threads:
            thread.start()
        _wait_for(lambda: len(cluster.outcomes) >= rng.randint(3, 20))
        cluster.tear_away(victim)
        for index, thread in enumerate(threads):
            if victim != f"w{index}":
                thread.join(60)
                assert not thread.is_alive(), f"w{index} hangs after {victim} was lost (seed {seed})"
        weights: Any = cluster.members["w0"].pull().arrays["w"]
        lost = cluster.lost()
        for update, (coordinate, outcome) in cluster.outcomes.items():
            if update.startswith(victim):
                assert weights[coordinate] in (0, 1)
            elif isinstance(outcome, mf.Committed) and update not in lost:
                assert weights[coordinate] == 1, (update, outcome, seed)
            else:
                assert weights[coordinate] == 0, (update, outcome, seed)
        if divergence == 0:
            assert not lost
        for member in cluster.members.values():
            for role in engine_of(member).node.roles.values():
                role.validate()


def test_a_job_whose_only_server_is_lost_ends_with_a_sentence_not_a_hang() -> None:
    with mf.join("127.0.0.1:0", job="j", name="w0", roles=("worker",), scheduler=True, expected=2) as worker:
        server = mf.join(worker.address, job="j", name="s0", roles=("server",), expected=2)
        worker.publish({"w": np.zeros(10)}, apply=mf.Sum(), divergence=None)
        server._engine.stop(0.0)
        with pytest.raises(mf.FabricError, match=r"server s0 of shard 0 was lost .* no replica"):
            worker.pull(timeout=20)


def test_a_lost_scheduler_is_succeeded_and_nothing_fails() -> None:
    first = mf.join("127.0.0.1:0", job="j", name="w0", scheduler=True, expected=3)
    with (
        mf.join(first.address, job="j", name="w1", expected=3) as second,
        mf.join(first.address, job="j", name="w2", expected=3) as third,
    ):
        first._engine.stop(0.0)
        threads = [
            threading.Thread(target=fabric.all_reduce, args=(np.ones(3),), kwargs={"timeout": 20})
            for fabric in (second, third)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        terms = {engine_of(fabric).node.roles["member"].statistics().term for fabric in (second, third)}  # type: ignore[attr-defined]
        assert terms == {1}
        with mf.join(third.address, job="j", name="w3") as late:  # any member knows who schedules
            assert engine_of(late).node.scheduler == engine_of(second).node.scheduler


def test_a_member_given_up_while_it_was_merely_busy_goes_on_with_its_collectives() -> None:
    with (
        mf.join("127.0.0.1:0", job="j", name="w0", scheduler=True, expected=2) as first,
        mf.join(first.address, job="j", name="w1", expected=2) as second,
    ):
        _reduce_all(first, second)
        departures = engine_of(second)._departures
        engine_of(first).call(lambda: engine_of(first)._departures.give_up("w1", "silent for 3.0 s"))
        _wait_for(lambda: departures.leaving)  # the other connections have ended
        _wait_for(lambda: not departures.leaving)
        _reduce_all(first, second)
        _wait_for(lambda: not departures._doubted, 10.0)


def _reduce_all(*members: Fabric) -> None:
    arrays = [np.ones(1000, np.float32) for _ in members]
    threads = [
        threading.Thread(target=fabric.all_reduce, args=(array,), kwargs={"timeout": 20})
        for fabric, array in zip(members, arrays, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for array in arrays:
        assert (array == len(members)).all()


def test_a_late_joiner_fetches_the_model_from_the_nearest_holder() -> None:
    with (
        mf.join("127.0.0.1:0", job="j", name="s0", host="far", roles=("server",), scheduler=True) as lead,
        mf.join(lead.address, job="j", name="r0", host="near", roles=("replica",)),
        mf.join(lead.address, job="j", name="w0", host="far", roles=("worker",), expected=3) as first,
    ):
        first.publish({"w": np.arange(10_000.0)}, apply=mf.Sum(), divergence=0.1)
        with mf.join(lead.address, job="j", name="w1", host="near", roles=("worker",)) as late:
            late.publish({"w": np.zeros(10_000)}, apply=mf.Sum())
            assert late.pull().arrays["w"][-1] == 9_999
            assert late.traffic.received["r0"] >= 10_000 * 4
            assert isinstance(late.push({"w": np.ones(10_000)}).result(20), mf.Committed)
            assert late.pull().arrays["w"][-1] == 10_000
            assert late.traffic.received["s0"] >= 10_000 * 4


def test_a_worker_may_come_back_under_its_name() -> None:
    with mf.join("127.0.0.1:0", job="j", name="w0", scheduler=True) as first:
        first.publish({"w": np.zeros(10)}, apply=mf.Sum(), divergence=None)
        second = mf.join(first.address, job="j", name="w1", roles=("worker",))
        second.publish({"w": np.zeros(10)}, apply=mf.Sum())
        second.push({"w": np.ones(10)}).result(20)
        second._engine.stop(0.0)
        _wait_for(lambda: engine_of(first).node.roles["scheduler"].statistics().members == 1)  # type: ignore[attr-defined]
        with mf.join(first.address, job="j", name="w1", roles=("worker",)) as again:
            again.publish({"w": np.zeros(10)}, apply=mf.Sum())
            ticket = again.push({"w": np.ones(10)})
            assert isinstance(ticket.result(20), mf.Committed)
            assert ticket.update == "w1~2#0"
            assert first.pull().arrays["w"].tolist() == [2.0] * 10


def _wait_for(holds: Any, limit_s: float = 30.0) -> None:
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.002)
