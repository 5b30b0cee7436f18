"""Who is called to a step, in virtual time: workers compute, straggle, fail and die around one roster."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from mlfabric.messages import StepBroken, StepCalled, StepEnded, StepReady, StepsOver, StepsWithout
from mlfabric.roles.actions import Action, Send
from mlfabric.roles.roster import CALL_S, GROUPS_KEPT, MOST_QUEUED, MOST_ROUNDS, StepRoster
from mlfabric.topology import Host, Network

SIZE_BYTES = 1_000_000
MAX_DELAY = 8
COMPUTE_S = 0.1
LATENCY_S = 0.001


@dataclass
class Worker:
    """What a trainer and its thread for steps do, without bytes: a model is the list of sums in it."""

    name: str
    sums: list[int] = field(default_factory=list)  # by step, the number of the call
    holds: int = -1
    applied: int = -1
    base: int | None = None
    computes: bool = False
    alive: bool = True
    running: StepCalled | None = None
    gradients_in: int = 0
    dropped: int = 0

    def standing(self, waits: bool, computed_s: float | None = None) -> StepReady:
        until = self.base + MAX_DELAY if self.base is not None else -1
        running = self.running.group if self.running is not None else None
        return StepReady(self.holds, self.applied, self.base, until, waits, SIZE_BYTES, computed_s, running)


class World:
    def __init__(self, rates: dict[str, float], seed: int = 0, straggling: float = 0.0) -> None:
        self.draw = random.Random(seed)
        self.straggling = straggling
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.workers = {name: Worker(name) for name in rates}
        self.rates = dict(rates)
        self.network = self._seen()
        self.roster = StepRoster(0, 0.0)
        self.calls: list[tuple[float, StepCalled]] = []
        self.without: list[tuple[str, tuple[str, ...]]] = []
        for worker in self.workers.values():
            self.tell(worker, worker.standing(waits=True))

    def _seen(self) -> Network:
        return Network.of(Host(name, rate, rate) for name, rate in self.rates.items())

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._count), do))

    def set_rate(self, name: str, rate: float) -> None:
        self.rates[name] = rate
        self.network = self._seen()
        self.look()

    def run(self, until: float) -> None:
        while True:
            look_at = self.roster.look_at
            due = self._heap[0][0] if self._heap else until
            if look_at is not None and self.now < look_at < min(due, until):
                self.now = look_at
                self.look()
                continue
            if due >= until:
                self.now = until
                return
            self.now, _, do = heapq.heappop(self._heap)
            do()
            self.check()

    # --- the scheduler's side ---------------------------------------------------------------------------

    def tell(self, worker: Worker, message: StepReady | StepEnded | StepsOver) -> None:
        def heard() -> None:
            if worker.alive:
                self.take(self.roster.heard(worker.name, message, self.now))
                self.look()

        self.at(self.now + LATENCY_S, heard)

    def look(self) -> None:
        hosts = {name: name for name, worker in self.workers.items() if worker.alive}
        self.take(self.roster.look(hosts, 0, self.network, self.now))

    def take(self, actions: list[Action]) -> None:
        calls = {}
        for action in actions:
            if not isinstance(action, Send):
                continue
            match action.message:
                case StepCalled() as call:
                    calls[call.group, call.step] = call
                case StepBroken(group=group):
                    self.at(self.now + LATENCY_S, partial(self.fail, action.node, group))
                case StepsWithout(peers=peers):
                    self.without.append((action.node, peers))
        for call in calls.values():
            self._check_call(call)
            self.calls.append((self.now, call))
            number = len(self.calls)
            for name in call.nodes:
                self.workers[name].running = call
            took = self.exchange_s(call)
            for name in call.nodes:
                self.at(self.now + took, partial(self.end, name, call, number))

    def _check_call(self, call: StepCalled) -> None:
        for name in call.nodes:
            worker = self.workers[name]
            assert worker.alive
            assert worker.running is None, "one step at a time"
            assert (worker.holds == call.step) != (name in call.joiners), "current, or a joiner"
            assert worker.holds - worker.applied <= MOST_QUEUED or name in call.joiners
        assert call.contributors
        assert set(call.contributors) <= set(call.nodes)
        assert bool(call.feeders) == bool(call.joiners)
        for name in call.feeders:
            assert name in call.contributors
            assert self.workers[name].applied == self.workers[name].holds == call.step
        if call.step >= 0:
            for name in call.contributors:
                base = self.workers[name].base
                assert base is not None
                assert call.step - base <= MAX_DELAY

    def exchange_s(self, call: StepCalled) -> float:
        if len(call.nodes) < 2:
            return LATENCY_S
        return 2 * SIZE_BYTES / min(self.rates[name] for name in call.nodes)

    # --- the workers' side ------------------------------------------------------------------------------

    def end(self, name: str, call: StepCalled, number: int) -> None:
        worker = self.workers[name]
        if not worker.alive or worker.running is not call:
            return
        if any(not self.workers[other].alive for other in call.nodes) and self.draw.random() < 0.5:
            self.fail(name, call.group)
            return
        worker.running = None
        if name in call.joiners:
            feeder = self.workers[call.feeders[0]]
            worker.sums = feeder.sums[: call.step + 1]
        worker.sums.append(number)
        worker.holds = call.step + 1
        if not worker.computes:
            worker.applied = worker.holds
        elif name in call.joiners:
            worker.applied = call.step
        self.tell(worker, StepEnded(call.step, call.step + 1))
        if call.step < 0:
            self.compute(worker)
        elif worker.base is not None and name in call.contributors:
            worker.base = None
            worker.gradients_in += 1
            self.compute(worker)
        elif worker.base is not None and call.step >= worker.base + MAX_DELAY:
            worker.base = None
            worker.dropped += 1
            self.compute(worker)

    def fail(self, name: str, group: str) -> None:
        worker = self.workers[name]
        if worker.alive and worker.running is not None and worker.running.group == group:
            step, worker.running = worker.running.step, None
            self.tell(worker, StepEnded(step, worker.holds, "it failed"))

    def compute(self, worker: Worker) -> None:
        worker.computes = True
        base = worker.holds
        self.tell(worker, worker.standing(waits=False))
        took = COMPUTE_S * (10 if self.draw.random() < self.straggling else 1)

        def done() -> None:
            if not worker.alive:
                return
            worker.computes = False
            worker.applied = worker.holds
            if base + MAX_DELAY < worker.holds:
                worker.dropped += 1
                self.compute(worker)
                return
            worker.base = base
            self.tell(worker, worker.standing(waits=True, computed_s=took))

        self.at(self.now + took, done)

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        worker.alive = False
        call = worker.running
        if call is not None:
            for other in call.nodes:
                if self.draw.random() < 0.5:
                    self.at(self.now + 0.01, partial(self.fail, other, call.group))
        self.at(self.now + 0.05, self.look)

    def check(self) -> None:
        """Wherever the same step is held, the same sums are in it."""
        alive = [worker for worker in self.workers.values() if worker.alive]
        for one, other in itertools.pairwise(sorted(alive, key=lambda worker: worker.holds)):
            if other.holds == self.roster.step == one.holds:
                assert one.sums == other.sums
        assert not alive or self.roster.current or not self.calls, "somebody is always current"

    @property
    def members(self) -> str:
        """Of the last step."""
        return "".join(self.calls[-1][1].nodes)

    @property
    def steps(self) -> int:
        return max(worker.holds for worker in self.workers.values() if worker.alive)


FAST, SLOW = 50e6, 2e6


def test_all_begin_with_the_values_of_the_first_and_step_together() -> None:
    world = World(dict.fromkeys("abcd", FAST))
    world.run(2.0)
    assert world.calls[0][1].step == -1
    assert all(call.contributors == tuple("abcd") for _, call in world.calls[1:])
    assert 10 <= world.steps <= 15


def test_a_slow_link_is_left_out_and_comes_back_when_it_is_fast() -> None:
    world = World({"a": FAST, "b": FAST, "c": FAST, "d": SLOW})
    world.run(3.0)
    assert world.members == "abc"
    assert [name for name, _ in world.without] == ["d"]
    held = world.workers["d"].holds
    world.set_rate("d", FAST)
    world.run(6.0)
    assert world.members == "abcd"
    joined = [call for _, call in world.calls if call.joiners == ("d",)]
    assert len(joined) == 1
    assert joined[0].step > held + MAX_DELAY
    assert world.workers["d"].dropped == 1
    assert world.workers["d"].gradients_in > 10


def test_stragglers_hold_nobody_up_and_stay_current() -> None:
    world = World(dict.fromkeys("abcdefgh", FAST), seed=3, straggling=0.15)
    world.run(20.0)
    alone = World(dict.fromkeys("abcdefgh", FAST))
    alone.run(20.0)
    assert world.steps > 0.7 * alone.steps
    assert sum(worker.gradients_in for worker in world.workers.values()) > 3 * world.steps
    assert sum(bool(call.joiners) for _, call in world.calls) < 0.1 * world.steps


def test_a_step_whose_link_turns_out_to_be_slow_is_made_by_the_others() -> None:
    world = World(dict.fromkeys("abcd", FAST))
    world.run(1.0)
    while world.workers["d"].running is None:
        world.run(world.now + 0.01)
    step = world.roster.step
    world.rates["d"] = SLOW / 4
    world.set_rate("d", SLOW / 4)
    world.run(world.now + 1.0)
    assert world.steps > step + 3
    assert world.members == "abc"


@pytest.mark.parametrize("seed", range(40))
def test_whoever_dies_whenever_the_others_go_on(seed: int) -> None:
    draw = random.Random(seed)
    names = "abcdef"
    world = World({name: draw.choice([FAST, FAST / 2, SLOW]) for name in names}, seed, straggling=0.15)
    for victim in draw.sample(names, 4):
        world.run(world.now + draw.uniform(0.05, 1.5))
        world.set_rate(draw.choice(names), draw.choice([FAST, FAST / 2, SLOW]))
        world.run(world.now + draw.uniform(0.05, 1.5))
        world.kill(victim)
    before = len(world.calls)
    world.run(world.now + 15.0)
    assert len(world.calls) > before + 10, "steps are called after the last loss"


def test_a_new_scheduler_goes_on_where_the_furthest_worker_is() -> None:
    world = World(dict.fromkeys("abc", FAST))
    world.run(1.0)
    while not any(worker.running for worker in world.workers.values()):
        world.run(world.now + 0.001)
    world.roster = StepRoster(1, world.now)
    for worker in world.workers.values():
        world.tell(worker, worker.standing(waits=not worker.computes))
    held = world.steps
    calls = len(world.calls)
    world.run(world.now + 2.0)
    assert world.calls[calls][1].step >= held
    assert world.calls[calls][1].group.startswith("steps/1.")
    assert world.steps > held + 5


def test_one_who_takes_part_no_more_is_not_waited_for() -> None:
    world = World(dict.fromkeys("abc", FAST))
    world.run(1.0)
    world.workers["c"].computes = False
    world.tell(world.workers["c"], StepsOver())
    world.workers["c"].alive = False
    world.run(3.0)
    assert world.members == "ab"


def test_a_step_may_end_after_all_have_said_that_it_is_their_last() -> None:
    roster, hosts = StepRoster(0, 0.0), {name: name for name in "ab"}
    for name in hosts:
        roster.heard(name, StepReady(4, 4, 4, 4 + MAX_DELAY, True, SIZE_BYTES), 0.0)
    called = roster.look(hosts, 0, Network.of(Host(name, FAST, FAST) for name in hosts), 0.0)
    assert sum(isinstance(each, Send) and isinstance(each.message, StepCalled) for each in called) == 2
    for name in hosts:
        roster.heard(name, StepsOver(), 0.1)
    for name in hosts:
        assert roster.heard(name, StepEnded(4, 5), 0.2) == []


def test_only_the_last_groups_are_used_again() -> None:
    world = World(dict.fromkeys("abcdef", FAST), seed=1)
    for _ in range(60):
        world.run(world.now + 0.5)
        name = world.draw.choice("abcdef")
        world.set_rate(name, SLOW if world.rates[name] == FAST else FAST)
    names = {call.group for _, call in world.calls}
    assert len(names) > 2 * GROUPS_KEPT
    kept = {name for name in names if not world.roster.is_over(name)}
    assert world.calls[-1][1].group in kept
    assert len(kept) <= GROUPS_KEPT
    assert not world.roster.is_over("of somebody else")


def rolling(roster: StepRoster, hosts: dict[str, str], parts: int) -> StepCalled:
    """All begin with the same values, and have something to give: the first call to roll."""
    network = Network.of(Host(host, 1e6, 1e6) for host in hosts)
    for name in hosts:
        roster.heard(name, StepReady(-1, -1, waits=True, size_bytes=SIZE_BYTES, parts=parts), 0.0)
    roster.look(hosts, 0, network, 0.0)
    for name in hosts:
        roster.heard(name, StepEnded(-1, 0), 0.1)
        roster.heard(name, StepReady(0, 0, 0, 8, size_bytes=SIZE_BYTES, parts=parts), 0.2)
    return next(iter(calls_in(roster.look(hosts, 0, network, 0.2))))


def calls_in(actions: list[Action]) -> list[StepCalled]:
    sent = [action.message for action in actions if isinstance(action, Send)]
    return [message for message in sent if isinstance(message, StepCalled)]


def test_where_steps_roll_one_of_each_part_is_called_at_a_time() -> None:
    hosts = {name: name for name in ("w0", "w1", "w2")}
    network = Network.of(Host(host, 1e6, 1e6) for host in hosts)
    roster = StepRoster(0, 0.0)
    first = rolling(roster, hosts, parts=4)
    assert (first.step, first.count, first.nodes) == (0, 4, ("w0", "w1", "w2"))
    for name in hosts:
        assert not calls_in(roster.look(hosts, 0, network, 0.3))
        roster.heard(name, StepEnded(0, 4, more=True), 0.3)
    assert {(call.step, call.count) for call in calls_in(roster.look(hosts, 0, network, 0.4))} == {(4, 4)}


def test_rounds_are_called_together_while_workers_compute_faster_than_they_follow_each_other() -> None:
    hosts = {name: name for name in ("w0", "w1", "w2")}
    network = Network.of(Host(host, 1e6, 1e6) for host in hosts)
    roster = StepRoster(0, 0.0)
    call, now = rolling(roster, hosts, parts=4), 0.2
    counts = []
    # How long a round takes, and how many gradients each worker tells of meanwhile.
    for round_s, gradients in ((1.5, 3), (1.5, 2), (0.5, 2), (0.5, 1)):
        now += round_s * call.count / 4
        end = call.step + call.count
        for name in hosts:
            for _ in range(gradients * call.count // 4):
                ready = StepReady(call.step, call.step, 0, 99, size_bytes=SIZE_BYTES, parts=4)
                roster.heard(name, ready, now)
            roster.heard(name, StepEnded(call.step, end, more=True), now)
        call = calls_in(roster.look(hosts, 0, network, now))[0]
        assert call.step == end
        counts.append(call.count // 4)
    assert counts == [int(CALL_S / 1.5), int(CALL_S / 1.5), MOST_ROUNDS, 1]


def test_where_somebody_joins_one_round_is_called() -> None:
    hosts = {name: name for name in ("w0", "w1", "w2")}
    network = Network.of(Host(host, 1e6, 1e6) for host in hosts)
    roster = StepRoster(0, 0.0)
    rolling(roster, hosts, parts=4)
    for name in ("w0", "w1"):
        for _ in range(5):
            roster.heard(name, StepReady(0, 0, 0, 99, size_bytes=SIZE_BYTES, parts=4), 0.5)
        roster.heard(name, StepEnded(0, 4, more=True), 1.0)
    roster.heard("w2", StepEnded(0, 0, more=True), 1.0)
    roster.heard("w2", StepReady(0, 0, 0, 99, size_bytes=SIZE_BYTES, parts=4), 1.0)
    call = calls_in(roster.look(hosts, 0, network, 1.0))[0]
    assert (call.joiners, call.count) == (("w2",), 4)


def test_where_steps_roll_who_got_further_before_a_failure_goes_on_and_feeds_the_others() -> None:
    hosts = {name: name for name in ("w0", "w1", "w2", "w3")}
    network = Network.of(Host(host, 1e6, 1e6) for host in hosts)
    roster = StepRoster(0, 0.0)
    rolling(roster, hosts, parts=4)
    del hosts["w3"]
    for name, holds in (("w0", 3), ("w1", 2), ("w2", 3)):
        roster.heard(name, StepEnded(0, holds, "w3 was lost", more=True), 0.4)
        roster.heard(name, StepReady(holds, holds, 0, 8, size_bytes=SIZE_BYTES, parts=4), 0.4)
    again = calls_in(roster.look(hosts, 0, network, 0.5))[0]
    assert (again.step, again.count) == (3, 4)
    assert again.nodes == ("w0", "w1", "w2")
    assert (again.joiners, again.feeders) == (("w1",), ("w0", "w2"))
