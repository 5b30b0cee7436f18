"""Exactly once, through aggregators, fail-overs and kills, by seeds."""

from __future__ import annotations

import random

import pytest

from mlfabric.events import LogRecord
from mlfabric.messages import OfferUpdate
from mlfabric.roles.actions import Note, Send
from tests.simulation.ledger import LedgerRun


def test_every_update_is_in_the_model_exactly_once() -> None:
    run = LedgerRun().run()
    run.check_everything()
    assert len(run.committed()) == 24


def test_updates_are_aggregated_and_still_counted_once() -> None:
    run = LedgerRun(workers=8, compute_s=0.0, rates=(1e6,)).run()
    run.check_everything()
    statistics = run.leader(0).node.roles["server.0"].statistics()
    assert statistics.aggregated > 0  # type: ignore[attr-defined]


def test_members_may_be_in_racks_of_which_nobody_knows_the_rate() -> None:
    run = LedgerRun(workers=6, racks=3).run()
    run.check_everything()
    assert len(run.committed()) == 36


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_dead_server_loses_only_what_is_reported_lost(shards: int) -> None:
    run = LedgerRun(shards=shards, servers=2, faults=((0.3, "kill", "s0"),)).run()
    run.check_everything()


def test_with_a_bound_of_zero_nothing_committed_is_lost() -> None:
    for at in (0.1, 0.2, 0.25, 0.3, 0.4):
        run = LedgerRun(divergence=0.0, faults=((at, "kill", "s0"),)).run()
        run.check_everything()
        assert not run.lost()


def random_faults(seed: int) -> LedgerRun:
    rng = random.Random(seed)
    workers = rng.randint(2, 6)
    candidates = [f"w{i}" for i in range(1, workers)] + ["a0", "a1", "s0", "r0"]
    victims = rng.sample(candidates, rng.randint(1, 3))
    if "s0" in victims and "r0" in victims:
        victims.remove("r0")  # the second replica may not be filled yet
    faults = tuple(
        (rng.uniform(0.0, 1.0), rng.choice(["kill", "kill", "stall"]), victim) for victim in victims
    )
    return LedgerRun(
        workers=workers,
        steps=rng.randint(2, 6),
        shards=rng.choice([1, 1, 2]),
        divergence=rng.choice([0.0, 0.1, 0.5]),
        max_delay=rng.choice([None, 2, workers]),
        compute_s=rng.choice([0.0, 0.01, 0.05]),
        rates=rng.choice([(1e6,), (2e5, 1e6, 2e6), (1e5,)]),
        faults=faults,
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_ledger_holds_through_random_faults(seed: int) -> None:
    random_faults(seed).run().check_everything()


def random_succession(seed: int) -> LedgerRun:
    """The scheduler is struck, alone or with others: killed, stopped, paused, or its cable cut."""
    rng = random.Random(seed)
    workers = rng.randint(2, 6)
    embed = rng.random() < 0.5
    scheduler = "w0" if embed else "sched"
    others = [f"w{i}" for i in range(1 if embed else 0, workers)] + ["a0", "a1", "s0", "r0"]
    victims = [scheduler, *rng.sample(others, rng.choice([0, 0, 1, 1, 2]))]
    faults: list[tuple[object, ...]] = []
    for victim in victims:
        what = rng.choice(["kill", "kill", "stall", "pause", "cut", "cut"])
        at = rng.uniform(0.0, 1.5)
        lasts = rng.choice([0.3, 0.9, 1.5, 4.0, 8.0])
        more = {"pause": (lasts,), "cut": (lasts, rng.random() < 0.5)}.get(what, ())
        faults.append((at, what, victim, *more))
    if "s0" in victims and "r0" in victims:
        faults = [fault for fault in faults if fault[2] != "r0"]
    return LedgerRun(
        workers=workers,
        steps=rng.randint(2, 8),
        shards=rng.choice([1, 1, 2]),
        divergence=rng.choice([0.0, 0.1, 0.5]),
        max_delay=rng.choice([None, 2, workers]),
        compute_s=rng.choice([0.0, 0.05, 0.3]),
        rates=rng.choice([(1e6,), (2e5, 1e6, 2e6), (1e5,)]),
        faults=tuple(faults),
        embed=embed,
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_ledger_holds_while_the_scheduler_is_struck(seed: int) -> None:
    random_succession(seed).run().check_everything()


@pytest.mark.parametrize("how", [("kill",), ("stall",), ("pause", 8.0), ("cut", 8.0, True)])
def test_rank_0_lost_is_made_good_within_three_seconds(how: tuple[object, ...]) -> None:
    """Its process schedules, leads the only shard and works: succession, then fail-over."""
    run = LedgerRun(
        workers=4,
        steps=40,
        servers=0,
        aggregators=0,
        replicas=0,
        rates=(3e6, 1e6, 1e6, 1e6),  # the best linked leads
        faults=((0.5, how[0], "w0", *how[1:]),),
        embed=True,
        everywhere=True,
    )
    run.run().check_everything()
    over = next(r.at_s for r in run.log.records if _says(r, "failed-over"))
    assert over - (run.ready_at + 0.5) < 3.0
    after = [
        r.at_s for r in run.log.records if r.node != "w0" and r.type == "ResolveUpdate" and r.at_s > over
    ]
    assert len(after) > 60  # the others went on


def _says(record: LogRecord, what: str) -> bool:
    return isinstance(record.record, Note) and record.record.what == what


@pytest.mark.parametrize("divergence", [None, 0.0, 0.5])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_drained_server_hands_its_shards_on_and_nothing_is_lost(
    divergence: float | None, shards: int
) -> None:
    run = LedgerRun(steps=20, shards=shards, divergence=divergence, faults=((0.3, "drain", "s0"),)).run()
    run.check_everything()
    assert not run.lost()
    assert all(run.leader(shard).name != "s0" for shard in range(shards))
    assert run.nodes["s0"].client.gone.is_set()
    assert len(run.committed()) == 80


def test_a_drained_replica_and_a_drained_aggregator_are_replaced_first() -> None:
    run = LedgerRun(steps=20, faults=((0.2, "drain", "r0"), (0.3, "drain", "a0"))).run()
    run.check_everything()
    assert {run.nodes[name].client.gone.is_set() for name in ("r0", "a0")} == {True}
    assert not run.notes("bound-suspended")


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_holds_while_hosts_drain_and_others_are_struck(seed: int) -> None:
    run = random_faults(seed)
    rng = random.Random(seed)
    run.faults = (*run.faults, (rng.uniform(0.0, 1.0), "drain", rng.choice(["s0", "r1", "a1"])))
    run.run().check_everything()


@pytest.mark.parametrize("divergence", [None, 0.5])
@pytest.mark.parametrize(
    "longer", [0, 4, -4], ids=["all at once", "who schedules first", "who schedules last"]
)
@pytest.mark.parametrize("shards", [1, 4])
def test_workers_leave_when_they_are_through_and_the_others_go_on(
    divergence: float | None, longer: int, shards: int
) -> None:
    """Each process leads shards and the first one schedules: all of that is handed on, and nobody waits."""
    run = LedgerRun(
        workers=4,
        steps=20,
        shards=shards,
        servers=0,
        aggregators=0,
        replicas=0,
        divergence=divergence,
        rates=(1e6,),
        embed=True,
        everywhere=True,
        longer=longer,
        leaves=True,
    )
    run.run()
    assert not run.failures, run.failures
    assert len(run.left) >= run.workers - 1
    assert len(run.outcomes) == len(run.committed()) == sum(run.steps_of(index) for index in range(4))
    assert not run.lost()
    assert run.sim.now < 20.0
    if longer:
        run.check_everything()  # where all leave at once, some take the model along


def random_news(seed: int, divergence: float | None) -> LedgerRun:
    """Every member may lead, and their links change again and again."""
    rng = random.Random(seed)
    workers = rng.randint(3, 6)
    news = tuple(
        (rng.uniform(0.0, 4.0), f"w{rng.randrange(workers)}", rng.choice([2e4, 1e5, 1e5, 5e5]))
        for _ in range(16)
    )
    return LedgerRun(
        workers=workers,
        steps=rng.randint(10, 20),
        aggregators=0,
        servers=0,
        replicas=0,
        shards=rng.choice([1, 2, 4]),
        divergence=divergence,
        max_delay=rng.choice([None, None, workers]),
        compute_s=rng.choice([0.0, 0.05]),
        rates=(1e5,),
        elements=1000,
        everywhere=True,
        news=news,
        aggregate=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_ledger_holds_while_leads_follow_the_bandwidth(seed: int) -> None:
    run = random_news(seed, random.Random(seed).choice([None, None, 0.0, 0.5])).run()
    run.check_everything()
    assert not run.lost()
    assert not run.notes("partly-applied")


def test_leads_move_while_updates_are_on_their_way() -> None:
    runs = [random_news(seed, None).run() for seed in range(4)]
    assert sum(len(run.notes("lead-moved")) for run in runs) > 10


@pytest.mark.parametrize("seed", range(12))
def test_the_ledger_holds_while_leads_move_and_members_are_struck(seed: int) -> None:
    rng = random.Random(1000 + seed)
    run = random_news(seed, rng.choice([0.0, 0.1, 0.5]))
    victim = f"w{rng.randrange(1, run.workers)}"
    what = rng.choice(["kill", "kill", "stall", "pause", "cut", "drain"])
    more = {"pause": (2.0,), "cut": (2.0, rng.random() < 0.5)}.get(what, ())
    at = rng.uniform(0.0, 4.0)
    run.faults = ((at, what, victim, *more),)
    run.run()
    if what == "drain":  # its worker had more to do
        assert all(failure.startswith(victim) and "drained" in failure for failure in run.failures)
        run.failures.clear()
        run.unanswered = {update for update in run.unanswered if not update.startswith(victim)}
    if any("never been filled" in failure for failure in run.failures):
        # The one loss that a job does not survive: of a leader so new that nobody follows it yet.
        moved = [record.at_s for record in run.log.records if _says(record, "lead-moved")]
        assert any(0.0 <= run.ready_at + at - then < 0.1 for then in moved)
        return
    run.check_everything()


@pytest.mark.parametrize("seed", range(8))
def test_the_ledger_holds_while_leads_move_and_the_scheduler_is_struck(seed: int) -> None:
    rng = random.Random(2000 + seed)
    run = random_news(seed, rng.choice([None, 0.1]))
    what = rng.choice(["kill", "stall", "pause", "cut"])
    more = {"pause": (2.0,), "cut": (2.0, rng.random() < 0.5)}.get(what, ())
    run.faults = ((rng.uniform(0.0, 4.0), what, "sched", *more),)
    run.run().check_everything()


@pytest.mark.parametrize("seed", range(4))
def test_connections_that_break_leave_no_update_partly_applied(seed: int) -> None:
    """While others wait for it where its bound is near, what broke off is sent again in its place."""
    rng = random.Random(seed)
    run = LedgerRun(
        workers=6 + seed % 2,
        steps=10,
        aggregators=0,
        servers=2,
        replicas=0,
        shards=2,
        divergence=None,
        max_delay=7 + seed % 2,
        compute_s=0.01,
        rates=(1e6, 1e6, 2e6),
        elements=20000,
        aggregate=False,
        faults=tuple((0.4 + 1.5 * turn + rng.random(), "reset", "s1") for turn in range(5)),
    ).run()
    run.check_everything()
    assert any(_is_offered_again(record) for record in run.log.records)
    assert not run.notes("partly-applied")


def test_leads_leave_a_slow_host_and_everybody_is_done_sooner() -> None:
    def run(told: bool) -> LedgerRun:
        return LedgerRun(
            workers=5,
            steps=30,
            aggregators=0,
            servers=0,
            replicas=0,
            shards=5,
            divergence=None,
            rates=(1e6,),
            elements=1000,
            everywhere=True,
            news=((0.1, "w1", 5e4), (0.1, "w2", 5e4)),
            told=told,
        ).run()

    def others_done_s(run: LedgerRun) -> float:
        slow = ("w1", "w2")
        ends = [r.at_s for r in run.log.records if r.type == "ResolveUpdate" and r.node not in slow]
        return max(ends) - run.ready_at

    follows, stays = run(told=True), run(told=False)
    for each in (follows, stays):
        each.check_everything()
    assert all(follows.leader(shard).name not in ("w1", "w2") for shard in range(5))
    assert stays.notes("lead-moved") == []
    assert others_done_s(follows) < 0.5 * others_done_s(stays)


def _is_offered_again(record: LogRecord) -> bool:
    sent = record.record
    return isinstance(sent, Send) and isinstance(sent.message, OfferUpdate) and bool(sent.message.again)
