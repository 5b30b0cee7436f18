"""The model travels from worker to worker: as fast as one transfer, to everybody, whoever dies on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from mlfabric.eventlog import MemoryLog
from mlfabric.messages import MEMBER_ROLES, JobSettings, Version
from mlfabric.numerics import Vector
from mlfabric.roles.actions import AcceptTransfer, Note
from mlfabric.rules import Sum
from mlfabric.sim.engine import Process, SimNode, Simulation
from mlfabric.topology import Host, Link, Network, Rack
from tests.simulation.ledger import LedgerRun

RATE = 1e7
SIZE = 4_000_000
ALONE_S = SIZE / RATE
BEGIN_S = 20.0


@dataclass
class PullRun:
    """Workers w1, w2, ... that all pull a model from s at the same time, or one after the other."""

    workers: int = 16
    apart_s: float = 0.0
    shards: int = 1
    hosts: tuple[Host, ...] = ()  # of s, w1, w2, ...; none: one each, with equal links
    racks: tuple[Rack, ...] = ()
    everywhere: bool = False  # everybody leads a part
    aggregate: bool = True
    seconds: float = 60.0
    fault: tuple[float, Callable[[Simulation], None]] | None = None  # so long after they have asked

    log: MemoryLog = field(default_factory=MemoryLog)
    took: dict[str, float] = field(default_factory=dict)
    got: dict[str, tuple[Vector, tuple[Version, ...]]] = field(default_factory=dict)

    def run(self) -> PullRun:
        names = ["s", *(f"w{k}" for k in range(1, self.workers + 1))]
        hosts = self.hosts or tuple(Host(f"h-{name}", RATE, RATE) for name in names)
        sim = self.sim = Simulation(Network.of(dict.fromkeys(hosts), self.racks), log=self.log)
        sim.add_scheduler("sched", hosts[0].name)
        self.model = np.random.default_rng(3).standard_normal(SIZE // 4).astype(np.float32)
        settings = JobSettings(unbounded=True, divergence=None, shards=self.shards, aggregate=self.aggregate)
        for number, (name, host) in enumerate(zip(names, hosts, strict=True)):
            roles = MEMBER_ROLES if self.everywhere else ("worker", "server" if name == "s" else "aggregator")
            node = sim.add_node(name, host.name, "sched", roles, expected=len(names))
            sim.spawn(self._work(number, node, settings), node)
        if self.fault is not None:
            sim.at(BEGIN_S + self.fault[0], lambda: self.fault[1](sim))  # type: ignore[index]
        sim.run(BEGIN_S + self.seconds)
        return self

    def _work(self, number: int, node: SimNode, settings: JobSettings) -> Process:
        assert node.joined is not None
        yield node.joined
        yield node.client.publish({"w": self.model}, Sum(), settings)
        yield BEGIN_S + self.apart_s * number - self.sim.now
        if number > 0:
            asked = self.sim.now
            parts, versions = yield node.client.pull()[1]
            self.took[node.name] = self.sim.now - asked
            self.got[node.name] = (np.concatenate(parts), versions)

    def notes(self, what: str) -> list[Note]:
        records = (record.record for record in self.log.records)
        return [record for record in records if isinstance(record, Note) and record.what == what]

    def passed_on(self) -> int:
        records = (record.record for record in self.log.records)
        return sum(len(record.onward) for record in records if isinstance(record, AcceptTransfer))

    def check(self, but: tuple[str, ...] = (), leftovers: bool = False) -> None:
        """Everybody has the same bits at the same version, and holds nothing more."""
        assert self.got.keys() >= {f"w{k}" for k in range(1, self.workers + 1)} - set(but)
        for values, versions in self.got.values():
            np.testing.assert_array_equal(values, self.model)
            assert set(versions) == {Version(0, 0)}
        for name, node in self.sim.nodes.items():
            if node.alive:
                for role in node.node.roles.values():
                    role.validate()
                held = node.node.data.names()  # type: ignore[attr-defined]
                assert leftovers or not held, f"{name} still holds {held}"


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_all_workers_have_the_model_in_little_more_than_one_transfer(workers: int) -> None:
    run = PullRun(workers=workers).run()
    run.check()
    assert run.passed_on() == workers - 1
    assert max(run.took.values()) < 1.5 * ALONE_S  # directly: `workers` transfers


def test_every_link_carries_the_model_once() -> None:
    run = PullRun(workers=8).run()
    for link in (Link("h-s", "up"), *(Link(f"h-w{k}", "down") for k in range(1, 9))):
        assert run.sim.carried[str(link)].carried_bytes == pytest.approx(SIZE, rel=0.01), link


def test_those_who_come_while_others_are_served_share_the_next_transfer() -> None:
    run = PullRun(workers=16, apart_s=0.1 * ALONE_S).run()
    run.check()
    assert max(run.took.values()) < 2.6 * ALONE_S  # the rest of the transfer before, a wait, their own


def test_a_worker_that_asks_alone_gets_it_from_the_leader_at_once() -> None:
    run = PullRun(workers=5, apart_s=2.0).run()
    run.check()
    assert run.passed_on() == 0
    del run.took["w1"]  # the first may wait a moment for the others
    assert all(took < ALONE_S + 0.002 for took in run.took.values())


def test_where_everybody_leads_nothing_is_passed_on() -> None:
    """Every uplink carries its share of all copies already."""
    run = PullRun(workers=7, shards=8, everywhere=True).run()
    run.check()
    assert run.passed_on() == 0


def test_members_that_shall_not_work_for_others_pass_nothing_on() -> None:
    run = PullRun(workers=4, aggregate=False).run()
    run.check()
    assert run.passed_on() == 0
    assert max(run.took.values()) == pytest.approx(4 * ALONE_S, rel=0.01)


def test_one_copy_enters_a_host_and_a_rack() -> None:
    server = Host("h0", RATE, RATE, "a")
    far = [Host(f"h{k}", RATE, RATE, "b") for k in range(1, 4)]
    run = PullRun(
        workers=6,
        hosts=(server, far[0], far[0], far[1], far[1], far[2], far[2]),
        racks=(Rack("a", 2 * RATE, 2 * RATE), Rack("b", 2 * RATE, 2 * RATE)),
    ).run()
    run.check()
    for link in (Link(owner, "down") for owner in ("h1", "h2", "h3", "b")):
        assert run.sim.carried[str(link)].carried_bytes == pytest.approx(SIZE, rel=0.01), link


def test_slow_links_hold_up_nobody_else() -> None:
    rates = [RATE] * 6 + [RATE / 10] * 2
    hosts = (Host("h-s", RATE, RATE), *(Host(f"h-w{k}", r, r) for k, r in enumerate(rates, 1)))
    run = PullRun(workers=8, hosts=hosts).run()
    run.check()
    fast = [took for name, took in run.took.items() if name not in ("w7", "w8")]
    assert max(fast) < 1.5 * ALONE_S
    assert max(run.took.values()) < 12 * ALONE_S


def chain_of(run: PullRun) -> list[str]:
    """Workers in the order in which they get the model from each other."""
    onward = {
        record.node: [hop.node for hop in record.record.onward]
        for record in run.log.records
        if isinstance(record.record, AcceptTransfer) and record.record.onward
    }
    below = {node for nodes in onward.values() for node in nodes}
    chain = [next(node for node in onward if node not in below)]
    while chain[-1] in onward:
        chain.append(onward[chain[-1]][0])
    return chain


CHAIN = chain_of(PullRun(workers=8).run())


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("at", [0.01, 0.4, 1.01])
def test_a_relay_that_dies_costs_those_below_it_one_more_transfer(place: int, at: float) -> None:
    victim = CHAIN[place]
    run = PullRun(workers=8, fault=(at * ALONE_S, lambda sim: sim.kill(victim))).run()
    run.check(but=(victim,))
    assert max(run.took.values()) < (at + 2.5) * ALONE_S


@pytest.mark.parametrize("place", [0, 3])
def test_a_relay_that_is_stopped_is_given_up_in_time(place: int) -> None:
    victim = CHAIN[place]
    run = PullRun(workers=8, fault=(0.4 * ALONE_S, lambda sim: sim.stall(victim))).run()
    run.check(but=(victim,), leftovers=True)  # here nobody's connection to it ever ends
    assert max(run.took.values()) < 10.0


@pytest.mark.parametrize("what", ["pause", "cut"])
def test_a_relay_that_is_away_for_a_while_gets_it_too(what: str) -> None:
    victim = CHAIN[2]
    run = PullRun(workers=8, fault=(0.4 * ALONE_S, lambda sim: getattr(sim, what)(victim, 2.0))).run()
    run.check()


def test_a_relay_whose_link_breaks_down_does_not_hold_up_those_below_it() -> None:
    """Nobody learns of it here but by its silence."""
    victim = CHAIN[1]
    slow = (0.2 * ALONE_S, lambda sim: sim.set_rate(f"h-{victim}", RATE / 1000, RATE / 1000))
    run = PullRun(workers=8, fault=slow).run()
    others = {name for name in CHAIN if name != victim}
    assert others <= run.got.keys()
    assert max(run.took[name] for name in others) < 7.0


def test_the_leader_of_a_chain_may_die() -> None:
    """Workers begin again with its successor."""
    run = LedgerRun(
        workers=5, steps=3, aggregators=0, elements=100_000, rates=(4e6,), faults=((0.15, "kill", "s0"),)
    ).run()
    run.check_everything()
    assert run.notes("relayed")


@pytest.mark.parametrize("seed", range(10))
def test_the_ledger_holds_through_relays_and_faults(seed: int) -> None:
    rng = np.random.default_rng(seed)
    what = str(rng.choice(["kill", "kill", "stall", "pause", "cut"]))
    more = {"pause": (1.5,), "cut": (1.5, bool(rng.random() < 0.5))}.get(what, ())
    victim = str(rng.choice(["w1", "w2", "w3", "w4", "s0"]))
    run = LedgerRun(
        workers=6,
        steps=3,
        aggregators=0,
        shards=int(rng.choice([1, 2])),
        divergence=float(rng.choice([0.0, 0.5])),
        elements=50_000,
        compute_s=0.0,
        rates=(2e6,),
        faults=((float(rng.uniform(0.0, 1.0)), what, victim, *more),),
    ).run()
    run.check_everything()
    assert run.notes("relayed")


def test_a_model_never_mixes_versions() -> None:
    """Every update adds one to all elements, so every model is as many as its version everywhere."""
    log = MemoryLog()
    names = ["s", *(f"w{k}" for k in range(6))]
    sim = Simulation(Network.of(Host(name, RATE, RATE) for name in names), log=log)
    sim.add_scheduler("sched", "s")
    seen: list[int] = []

    def work(node: SimNode) -> Process:
        assert node.joined is not None
        yield node.joined
        zeros = {"w": np.zeros(SIZE // 40, np.float32)}
        yield node.client.publish(zeros, Sum(), JobSettings(unbounded=True, divergence=None, shards=2))
        if node.name == "s":
            return
        for _ in range(6):
            parts, versions = yield node.client.pull()[1]
            for part, version in zip(parts, versions, strict=True):
                assert set(np.unique(part)) == {float(version.count)}
            seen.append(versions[0].count)
            yield node.client.push({"w": np.ones(SIZE // 40, np.float32)})[1]

    for name in names:
        roles = ("worker", "server") if name == "s" else ("worker", "aggregator")
        node = sim.add_node(name, name, "sched", roles, expected=len(names))
        sim.spawn(work(node), node)
    sim.run(60.0)
    assert len(seen) == 36
    assert max(seen) > 20
    assert any(isinstance(r.record, Note) and r.record.what == "relayed" for r in log.records)


def test_steps_of_all_workers_share_their_models() -> None:
    """A step takes everybody's gradient, and everybody begins the next one with the same model."""
    log = MemoryLog()
    workers = 8
    names = ["s", *(f"w{k}" for k in range(workers))]
    sim = Simulation(Network.of(Host(name, RATE, RATE) for name in names), log=log)
    sim.add_scheduler("sched", "s")
    began: dict[int, list[float]] = {}

    def work(node: SimNode) -> Process:
        assert node.joined is not None
        yield node.joined
        settings = JobSettings(unbounded=True, divergence=None, wait_for=workers)
        yield node.client.publish({"w": np.zeros(SIZE // 4, np.float32)}, Sum(), settings)
        for step in range(4 if node.name != "s" else 0):
            _, versions = yield node.client.pull()[1]
            assert versions[0].count == workers * step
            began.setdefault(step, []).append(sim.now)
            yield 0.01
            yield node.client.push({"w": np.ones(SIZE // 4, np.float32)})[1]

    for name in names:
        roles = ("worker", "server") if name == "s" else ("worker", "aggregator")
        node = sim.add_node(name, name, "sched", roles, expected=len(names))
        sim.spawn(work(node), node)
    sim.run(120.0)
    assert [len(times) for times in began.values()] == [workers] * 4
    relayed = [r.at_s for r in log.records if isinstance(r.record, Note) and r.record.what == "relayed"]
    assert len(relayed) >= 4
    for times in began.values():
        assert max(times) - min(times) < 1.2 * ALONE_S  # directly, all would have it after eight
