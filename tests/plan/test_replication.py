"""Replication plans, replayed by a referee that knows only the definition of the bound."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.plan.planner import plan_updates
from mlfabric.plan.replication import Follower, ReplicationPlan, ServerStep, plan_replication
from mlfabric.plan.reservation import Ledger
from mlfabric.plan.values import JobState, Offer, Shard
from mlfabric.topology import Host, Network


def random_case(seed: int) -> tuple[Ledger, list[Follower], list[ServerStep]]:
    draw = random.Random(seed)
    names = ["server", "r0", "r1", "other"]
    network = Network.of([Host(n, 1e8 * draw.uniform(0.2, 1), 1e8 * draw.uniform(0.2, 1)) for n in names])
    ledger = Ledger(network)
    for _ in range(draw.randint(0, 5)):
        ledger.reserve(ledger.path("server", "other"), draw.randint(1, 10**8), draw.uniform(0, 5))
    bound = draw.choice((0.0, draw.uniform(0.1, 2.0), draw.uniform(1, 6)))
    followers = [
        Follower(0, "server", name, 10**7, bound, pending=draw.uniform(0, bound))
        for name in names[1 : 1 + draw.randint(1, 2)]
    ]
    times = sorted(draw.uniform(0, 10) for _ in range(draw.randint(0, 12)))
    steps = [ServerStep(f"step{k}", t, draw.uniform(0.01, 1.0)) for k, t in enumerate(times)]
    return ledger, followers, steps


def replay(plan: ReplicationPlan, follower: Follower, steps: list[ServerStep]) -> None:
    """At every moment a step counts, what the replica lacks, that step included, is within the bound."""
    messages = [m for m in plan.messages if m.replica == follower.replica]
    assert all(a.finish_s <= b.start_s for a, b in pairwise(messages))
    visible = dict(zip((s.name for s in steps), plan.visible_s, strict=True))
    norms = {step.name: step.norm for step in steps}
    for index, step in enumerate(steps):
        at_s = visible[step.name]
        through = [m for m in messages if m.finish_s <= at_s]
        has = {name for m in through for name in m.covers}
        pending = 0.0 if through else follower.pending
        pending += sum(norms[s.name] for s in steps[: index + 1] if s.name not in has)
        assert pending <= follower.bound * (1 + 1e-9) + 1e-12, (step, pending)
    for message in messages:
        held = {hold.step for hold in plan.held}
        for name in message.covers:
            assert visible[name] <= message.start_s or name in held or visible[name] >= message.finish_s


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6))
def test_bound_is_never_broken_and_order_is_kept(seed: int) -> None:
    ledger, followers, steps = random_case(seed)
    plan = plan_replication(ledger, followers, steps, 0.0)
    assert list(plan.visible_s) == sorted(plan.visible_s)
    assert all(t >= step.at_s for t, step in zip(plan.visible_s, steps, strict=True))
    assert ledger.overbooked() == []
    for follower in followers:
        replay(plan, follower, steps)
    for entry in (*(m.reason for m in plan.messages), *(h.reason for h in plan.held)):
        assert len(entry.split()) > 4


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_strict_replication_is_never_faster(seed: int) -> None:
    """One message per step, each step waiting for it, is the baseline a bound has to beat."""
    ledger, followers, steps = random_case(seed)
    mark = ledger.mark()
    plan = plan_replication(ledger, followers, steps, 0.0)
    ledger.undo(mark)
    strict = [Follower(f.shard, f.server, f.replica, f.size_bytes, 0.0) for f in followers]
    baseline = plan_replication(ledger, strict, steps, 0.0)
    assert len(plan.messages) <= max(len(steps) * len(followers), 1) + len(followers)
    assert sum(plan.visible_s) <= sum(baseline.visible_s) * (1 + 1e-9) or followers[0].pending > 0


def idle_ledger() -> Ledger:
    return Ledger(Network.of([Host("server", 1e8, 1e8), Host("replica", 1e8, 1e8), Host("w", 1e8, 1e8)]))


def test_spare_capacity_means_no_step_waits() -> None:
    steps = [ServerStep(f"s{k}", 1.0 * k, 1.0) for k in range(10)]
    plan = plan_replication(idle_ledger(), [Follower(0, "server", "replica", 10**7, 3.0)], steps, 0.0)
    assert plan.held == ()
    assert len(plan.messages) == 3  # ten steps of 1 under a bound of 3: after 3, 6 and 9
    assert plan.messages[0].covers == ("s0", "s1", "s2")


def test_step_is_held_only_as_long_as_needed() -> None:
    ledger = idle_ledger()
    ledger.reserve(ledger.path("server", "w"), 5 * 10**8, 0.0)  # the uplink is taken for five seconds
    steps = [ServerStep("s0", 1.0, 1.0), ServerStep("s1", 2.0, 1.0)]
    plan = plan_replication(ledger, [Follower(0, "server", "replica", 10**8, 1.5)], steps, 0.0)
    assert plan.visible_s == (1.0, 6.0)
    assert plan.held[0].step == "s1"
    assert "bound 1.5" in plan.held[0].reason


def test_bound_of_zero_replicates_every_step_before_it_counts() -> None:
    steps = [ServerStep(f"s{k}", 1.0, 1.0) for k in range(3)]
    plan = plan_replication(idle_ledger(), [Follower(0, "server", "replica", 10**8, 0.0)], steps, 0.0)
    assert plan.messages[0].covers == ("s0", "s1", "s2")  # those that are there travel together
    assert plan.visible_s == (2.0, 2.0, 2.0)


def test_plan_brings_every_replica_of_a_shard_up_to_date() -> None:
    names = ["s", "r0", "r1", "w0", "w1"]
    network = Network.of([Host(name, 1e8, 1e8) for name in names])
    shard = Shard(0, "s", "r0", more_replicas=("r1",))
    offers = [Offer(f"u{k}", f"w{k}", f"w{k}", 10**7, 0, norm=1.0) for k in range(2)]
    plan = plan_updates(network, [], JobState(shards=(shard,), divergence=0.0), offers, 5.0)
    for replica in ("r0", "r1"):
        covers = [m.covers for m in plan.replication if m.replica == replica]
        assert sorted(name for names in covers for name in names) == ["u0", "u1"]
    assert {held.step for held in plan.held} == {"u0", "u1"}
    assert all(held.until_s >= placed.finish_s for held, placed in zip(plan.held, plan.placed, strict=False))
    assert all("nothing counts before" in message.reason for message in plan.replication)


def test_chain_is_replicated_when_its_last_host_is_through() -> None:
    network = Network.of([Host(name, 1e8, 1e8) for name in ("s", "r", "w0", "w1", "w2")])
    workers = ("w0", "w1", "w2")
    job = JobState(
        shards=(Shard(0, "s", "r"),), aggregators=workers, chunk_bytes=10**6, divergence=0.0, objective="last"
    )
    offers = [Offer(f"u-{name}", name, name, 10**8, 0, norm=1.0) for name in workers]
    plan = plan_updates(network, [], job, offers, 0.0)
    assert [group.chain for group in plan.groups] == [workers]
    assert plan.replication[0].start_s >= plan.groups[0].finish_s


def test_step_counts_when_the_last_of_several_replicas_allows_it() -> None:
    network = Network.of([Host("server", 1e9, 1e9), Host("near", 1e9, 1e9), Host("far", 1e9, 1e7)])
    followers = [Follower(0, "server", name, 10**7, 0.0) for name in ("far", "near")]
    plan = plan_replication(Ledger(network), followers, [ServerStep("s", 0.0, 1.0)], 0.0)
    assert plan.visible_s[0] >= 1.0
    assert {m.replica for m in plan.messages} == {"far", "near"}
