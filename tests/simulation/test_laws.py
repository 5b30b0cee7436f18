"""Laws that hold for every run, drawn by Hypothesis: outcomes, delays, divergence, sums.

All is read from outside: from the log, from what workers were told, and from the weights themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.client import Committed
from mlfabric.data import ArrayData
from mlfabric.eventlog import LogSink
from mlfabric.messages import OfferUpdate, UpdateApplied, split_update_id
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Action, ResolveUpdate, Send
from mlfabric.sim.engine import SimNode, Simulation
from mlfabric.topology import Network
from tests.simulation import ledger
from tests.simulation.ledger import LedgerRun

seeds = st.integers(0, 10**6)


def draw_run(seed: int, faults: bool) -> LedgerRun:
    """A random job; with faults, some of its nodes die or fall silent."""
    draw = random.Random(seed)
    workers = draw.randint(1, 6)
    names = [f"w{i}" for i in range(1, workers)] + ["a0", "a1", "s0", "r0"]
    victims = draw.sample(names, draw.randint(1, min(3, len(names)))) if faults else []
    if "s0" in victims and "r0" in victims:
        victims.remove("r0")  # the second replica may not be filled yet
    return LedgerRun(
        workers=workers,
        steps=draw.randint(1, 5),
        shards=draw.choice([1, 1, 2]),
        divergence=draw.choice([0.0, 0.1, 0.5]),
        max_delay=draw.choice([None, 1, 2, workers]),
        compute_s=draw.choice([0.0, 0.01, 0.05]),
        rates=draw.choice([(1e6,), (2e5, 1e6, 2e6), (1e5,)]),
        aggregate=draw.random() < 0.8,
        faults=tuple((draw.uniform(0.0, 1.0), draw.choice(["kill", "stall"]), name) for name in victims),
    )


def actions(run: LedgerRun) -> Iterator[Action]:
    return (record.record for record in run.log.records if record.kind == "action")


def acknowledgements(run: LedgerRun) -> list[UpdateApplied]:
    return [a.message for a in actions(run) if isinstance(a, Send) and isinstance(a.message, UpdateApplied)]


@settings(max_examples=25, deadline=None)
@given(seeds, st.booleans())
def test_every_offered_update_ends_in_exactly_one_outcome(seed: int, faults: bool) -> None:
    run = draw_run(seed, faults).run()
    run.check_everything()
    told = Counter(a.update for a in actions(run) if isinstance(a, ResolveUpdate) and not a.lost)
    lost = Counter(a.update for a in actions(run) if isinstance(a, ResolveUpdate) and a.lost)
    dead = {name for name, node in run.nodes.items() if not node.alive}
    for update in run.offered:
        if update.split("#")[0] not in dead:
            assert told[update] == 1, f"{update} has {told[update]} outcomes"
        assert told[update] <= 1
        assert lost[update] <= 1
    assert told.keys() <= run.offered.keys()
    for update in lost:  # only what was committed can be lost
        assert isinstance(run.outcomes[update], Committed)


@settings(max_examples=25, deadline=None)
@given(seeds, st.booleans())
def test_no_applied_update_is_older_than_the_bound(seed: int, faults: bool) -> None:
    run = draw_run(seed, faults).run()
    bound = run.max_delay if run.max_delay is not None else 2 * run.workers
    applied = acknowledgements(run)
    assert applied or run.max_delay == 0
    for acknowledged in applied:
        assert acknowledged.delay_updates <= bound, acknowledged
    for outcome in run.committed():
        assert outcome.delay_updates <= bound


# --- the delay identity ---------------------------------------------------------------------------------


@dataclass
class Delays:
    """What a run without aggregation and faults says about delays, from its log."""

    total: int
    commits: int
    identity: int  # T(n-1) minus, per worker, how far its last commit is from the end
    pulled_late: int  # versions that pulls saw beyond their worker's own commit, over all updates


def delays_of(run: LedgerRun) -> Delays:
    applied = acknowledgements(run)
    at = {each.update: each.version.count for each in applied}
    last: dict[str, int] = {}
    for each in applied:
        last[split_update_id(each.update)[0]] = each.version.count
    late = 0
    for action in actions(run):
        if isinstance(action, Send) and isinstance(action.message, OfferUpdate):
            worker, number = split_update_id(action.message.update)
            own = at[f"{worker}#{number - 1}"] if number else 0
            late += action.message.bases[0].count - own
    commits = len(applied)
    identity = commits * (run.workers - 1) - sum(commits - index for index in last.values())
    return Delays(sum(each.delay_updates for each in applied), commits, identity, late)


def plain_run(seed: int, equal_links: bool) -> LedgerRun:
    draw = random.Random(seed)
    return LedgerRun(
        workers=draw.randint(1, 7),
        steps=draw.randint(1, 6),
        aggregators=0,
        replicas=0,
        divergence=None,
        max_delay=1000,
        aggregate=False,
        compute_s=draw.choice([0.0, 0.007, 0.05]),
        rates=(1e6,) if equal_links else (2e5, 1e6, 3e6),
    )


class InstantSimulation(Simulation):
    """Messages take no time worth speaking of, so that a worker's pull can be at its own commit."""

    def __init__(self, network: Network, log: LogSink) -> None:
        super().__init__(network, latency_s=1e-9, log=log)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_delays_add_up_exactly_when_each_worker_pulls_at_its_own_commit(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "Simulation", InstantSimulation)
        run = plain_run(seed, equal_links=True).run()
    run.check_everything()
    delays = delays_of(run)
    assert delays.commits == run.workers * run.steps
    assert delays.pulled_late == 0, "a pull was served after another commit: the identity does not apply"
    assert delays.total == delays.identity


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_later_pulls_shorten_the_delays_by_exactly_what_they_saw(seed: int) -> None:
    run = plain_run(seed, equal_links=False).run()
    run.check_everything()
    delays = delays_of(run)
    assert delays.total == delays.identity - delays.pulled_late


# --- the model and its replica --------------------------------------------------------------------------


@dataclass
class WatchedRun(LedgerRun):
    """Pushes random real updates and compares leader and replica, weight by weight, at every commit."""

    seed: int = 0
    initial_norm: float = 0.0
    divergences: list[float] = field(default_factory=list)

    def initial(self) -> Vector:
        draw = np.random.default_rng(self.seed)
        direction = draw.normal(size=(self.shards, self.elements))
        return (self.initial_norm * direction / np.linalg.norm(direction)).astype(np.float32)

    def update(self, index: int, step: int) -> Vector:
        draw = np.random.default_rng([self.seed, index, step])
        direction = draw.normal(size=(self.shards, self.elements))
        return (10 ** draw.uniform(-1, 1) * direction / np.linalg.norm(direction)).astype(np.float32)

    def run(self) -> WatchedRun:
        super().run()
        return self

    def _begin_faults(self) -> None:
        """The model is in place, as the first worker hears: watch every commit from now on."""
        if not self._watching:
            self._watching = True
            for node in self.nodes.values():
                self._watch(node)
        super()._begin_faults()

    _watching: bool = False

    def _watch(self, node: SimNode) -> None:
        data = node.node.data
        assert isinstance(data, ArrayData)
        commit = data.commit_step

        def commit_and_compare(shard: int) -> None:
            commit(shard)
            for other in self.nodes.values():
                if f"replica.{shard}" in other.node.roles:
                    self.divergences.append(apart(shard, node, other))

        data.commit_step = commit_and_compare  # type: ignore[method-assign]


def apart(shard: int, leader: SimNode, replica: SimNode) -> float:
    """||w_s - w_r|| / ||w_s||, from the weights of both."""
    leads, follows = (node.node.data for node in (leader, replica))
    assert isinstance(leads, ArrayData)
    assert isinstance(follows, ArrayData)
    here, there = leads.shards[shard].weights.astype(float), follows.shards[shard].weights.astype(float)
    return float(np.linalg.norm(here - there) / np.linalg.norm(here))


def watched(seed: int, divergence: float, **changes: object) -> WatchedRun:
    draw = random.Random(seed)
    run = WatchedRun(
        seed=seed,
        workers=draw.randint(1, 6),
        steps=draw.randint(2, 6),
        shards=draw.choice([1, 2]),
        divergence=divergence,
        compute_s=draw.choice([0.0, 0.01]),
        rates=draw.choice([(1e6,), (2e5, 1e6, 2e6)]),
        initial_norm=draw.choice([0.0, 1.0, 30.0]),
        elements=400,
    )
    return replace(run, **changes)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.02, 0.1, 0.5, 2.0]))
def test_the_replica_is_within_its_bound_at_every_commit(seed: int, bound: float) -> None:
    run = watched(seed, bound).run()
    assert not run.failures
    assert len(run.divergences) > 0
    assert max(run.divergences) <= bound * (1 + 1e-5)


def test_the_bound_is_used_and_not_kept_by_copying_every_step() -> None:
    run = watched(3, 0.5, workers=4, steps=6, shards=1, initial_norm=30.0).run()
    assert max(run.divergences) > 0.1
    assert len(run.notes("replicating")) < len(run.committed()) / 2


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_with_a_bound_of_zero_the_replica_has_all_that_is_visible(seed: int) -> None:
    run = watched(seed, 0.0).run()
    assert not run.failures
    assert len(run.divergences) > 0
    assert max(run.divergences) == 0.0


@settings(max_examples=12, deadline=None)
@given(seeds, st.floats(0.05, 0.5))
def test_with_a_bound_of_zero_a_dead_leader_takes_nothing_acknowledged_with_it(seed: int, at: float) -> None:
    run = watched(seed, 0.0, shards=1, faults=((at, "kill", "s0"),)).run()
    assert not run.failures
    assert not run.lost()
    check_sum(run)


def check_sum(run: WatchedRun) -> None:
    """The final model is the initial one plus the committed updates, added directly and in wide numbers."""
    lost = run.lost()
    total = run.initial().astype(float)
    size = np.abs(total)
    for name, coordinate in run.offered.items():
        if isinstance(run.outcomes.get(name), Committed) and name not in lost:
            update = run.update(*divmod(coordinate, run.steps)).astype(float)
            total += update
            size += np.abs(update)
    for shard in range(run.shards):
        # One rounding of half a unit in the last place for every addition on the way.
        slack = size[shard] * (len(run.offered) + 2) * np.finfo(np.float32).eps
        difference = np.abs(run.weights(shard) - total[shard])
        assert (difference <= slack).all(), f"seed {run.seed}: off by {difference.max()}"


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_the_sum_through_aggregators_equals_the_direct_sum(seed: int) -> None:
    run = watched(seed, 0.5, workers=8, compute_s=0.0, rates=(1e6,)).run()
    assert not run.failures
    check_sum(run)
    grouped = run.notes("forwarded")
    assert any(len(note.updates) > 1 for note in grouped), "nothing was summed on the way"
