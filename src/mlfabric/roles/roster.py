"""Who takes part in the next step, where steps are all-reduces among the workers that are fast now.

The scheduler calls every step. Workers with a slow link are left out until it is faster; those that merely
take long to compute get the sum without giving to it, so that they hold nobody up and still have the model.
Whoever was left out comes back as a joiner: it gets model and optimizer state beside the sum.

Where workers roll, all of them take part in every step and nobody is waited for. A step is of one part of the
model; a round of them, one of each part, is called as soon as the last one has ended and half of the workers
have something to give. They follow each other without another word, and each takes what is there when it
begins. Where workers compute faster than rounds follow each other a few rounds are called at once, so that
links have no pause between them; who wants to join waits for the end of such a call.

The step that is due is the one that the worker furthest on holds the model of; whoever holds that is current.
So if all that had a sum are gone, the step is made again by those who are left, and no step ever has two
sums. The next step is called when the last one has ended wherever it was called, well or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from mlfabric.messages import StepBroken, StepCalled, StepEnded, StepReady, StepsOver, StepsWithout
from mlfabric.plan.allreduce import Participation, choose_participants, ring_time, worth_of
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.topology import Network

# A step of so many gradients is worth half of one by all gradients there are: averaging more of them makes a
# step less noisy, but not longer. From 1 to 8 gradients a step gains a factor of 4.5 by this.
HALF_WORTH: Final = 8.0
# So many take part whatever it costs: what is believed of links reads low, and who trains alone sees none of
# them rise.
LEAST: Final = 3
# Whoever has computed for so many times its usual time straggles, and is not waited for.
OVERDUE: Final = 1.3
# News of a gradient may take so long.
GRACE_S: Final = 0.005
# Others take part instead only if steps are worth more by this factor.
WORTH_CHANGING: Final = 1.1
# By this one where somebody has to be given the model first, which makes the next step a longer one.
WORTH_JOINING: Final = 1.15
# Sums that may wait at a worker that is busy; then it gets no more and joins again when it is back.
MOST_QUEUED: Final = 8
# A worker's usual time to compute is the median of so many.
TIMES_KEPT: Final = 9
# After a succession workers have so long to say where they stand.
SETTLE_S: Final = 3.0
# A step that took so much longer than expected shows that the links are not what they are taken for. What is
# believed of them is trusted less then, until something else is learned or for so long.
SURPRISE: Final = 2.0
SURPRISE_S: Final = 0.1
DOUBT_S: Final = 5.0
# A step whose links turn out to be slow is broken off if so many times as much can be done instead, and by so
# much sooner: whoever is not in it has to join again.
WORTH_BREAKING: Final = 1.5
WORTH_BREAKING_S: Final = 0.2
# Rounds of rolling steps are called together up to so many, and about so long, where workers make so many
# gradients in each.
FEW: Final = 2
MOST_ROUNDS: Final = 8
CALL_S: Final = 5.0
# With so many others a worker that is left out measures its link.
PROBED: Final = 4
# Groups that are kept, by who is in them; workers keep as many.
GROUPS_KEPT: Final = 8
# Names of groups of steps begin so.
STEPS: Final = "steps/"


@dataclass(slots=True)
class _Worker:
    """What a worker said, and what has ended at it since."""

    holds: int = -1
    applied: int = -1
    base: int | None = None
    until: int = -1
    waits: bool = True
    size_bytes: int = 0
    since: float | None = None  # when it began to compute
    times: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES_KEPT))
    told_without: frozenset[str] = frozenset()
    looks_on: bool = False  # it gives nothing: nobody waits for it
    parts: int = 0  # of the model, each a step of its own, if it gives to every step what it has by then

    def gives(self, step: int) -> bool:
        return self.base is not None and step <= self.until


@dataclass(frozen=True, slots=True)
class _Doubt:
    """What is believed of a host's links is too much by this factor."""

    believed: float
    factor: float
    until: float


class StepRoster:
    """Of one job. `look_at` is when to look again, if nothing happens before."""

    def __init__(self, term: int, now: float) -> None:
        self._term = term
        self._settle_at = now + SETTLE_S
        self._settled = False
        self._workers: dict[str, _Worker] = {}
        self._call: StepCalled | None = None
        self._running: dict[str, str] = {}  # who is still at the step that was called last, and its group
        self._broken = False  # it failed, and those who are still at it know
        self._called_at = 0.0
        self._expected_s = 0.0
        self._reported = 0  # gradients that workers told of since then
        self._network: Network | None = None  # as it was when it was last looked at
        self._doubts: dict[str, _Doubt] = {}  # by host
        self._chosen: frozenset[str] = frozenset()
        self._groups: dict[tuple[str, ...], str] = {}  # names, by members; the last used last
        self._count = 0
        self._hosts: dict[str, str] = {}
        self.look_at: float | None = None

    @property
    def step(self) -> int:
        """The one that is due."""
        return max((worker.holds for worker in self._workers.values()), default=-1)

    @property
    def current(self) -> list[str]:
        step = self.step
        return sorted(name for name, worker in self._workers.items() if worker.holds == step)

    def is_over(self, group: str) -> bool:
        """Whether this is a group of steps that will not be called again."""
        if not group.startswith(STEPS) or not self._settled:
            return False
        return group not in self._groups.values() and group not in self._running.values()

    # --- what workers say -------------------------------------------------------------------------------

    def heard(self, node: str, message: StepReady | StepEnded | StepsOver, now: float) -> list[Action]:
        match message:
            case StepReady():
                self._stands(node, message, now)
            case StepEnded():
                return self._ended(node, message, now)
            case StepsOver():
                self._workers.pop(node, None)
        return []

    def _stands(self, node: str, ready: StepReady, now: float) -> None:
        worker = self._workers.setdefault(node, _Worker())
        worker.holds, worker.applied = ready.holds, ready.applied
        worker.base, worker.until, worker.waits = ready.base, ready.until, ready.waits
        worker.size_bytes, worker.parts = ready.size_bytes, ready.parts
        worker.looks_on = ready.waits and ready.base is None
        worker.since = None if ready.waits else now
        if ready.computed_s is not None:
            worker.times.append(ready.computed_s)
        if ready.running is not None:
            self._running[node] = ready.running
        self._reported += ready.base is not None

    def _ended(self, node: str, ended: StepEnded, now: float) -> list[Action]:
        step, error = ended.step, ended.error
        call, worker = self._call, self._workers.get(node)
        self._running.pop(node, None)
        if worker is not None:
            worker.holds = max(worker.holds, ended.holds)
        if error is not None:
            return self._break(step, f"{node}: {error}")
        if not self._running and not self._broken and call is not None and call.count == 1:
            self._through(call, now)
        if worker is None:
            return []
        if call is not None and call.step == step and node in call.joiners:
            worker.applied = step
        if worker.waits:
            worker.applied = ended.holds
        if worker.parts:
            worker.base = step if ended.more else None
            return []
        contributed = call is None or node in call.contributors
        if worker.base is not None and worker.base <= step and (contributed or step >= worker.until):
            worker.base = None  # it is in, or too old by now
        return []

    @property
    def _group(self) -> str:
        return self._call.group if self._call is not None else ""

    def _through(self, call: StepCalled, now: float) -> None:
        """A step has ended everywhere: was it as fast as its links were taken for?"""
        took_s = now - self._called_at
        if call.joiners or call.step < 0 or self._network is None:
            return
        # What was learned meanwhile may explain it.
        expected_s = max(self._expected_s, self._plain_s(call.nodes))
        if took_s < SURPRISE * expected_s + SURPRISE_S:
            return
        for name in call.nodes:
            if name in self._hosts:
                host = self._hosts[name]
                believed = _rate(self._network, host)
                self._doubts[host] = _Doubt(believed, expected_s / took_s, now + DOUBT_S)

    def _break(self, step: int, reason: str) -> list[Action]:
        """A step failed somewhere: it will not end where it has not, and its group is over."""
        self._groups = {nodes: name for nodes, name in self._groups.items() if name != self._group}
        if self._broken:
            return []
        self._broken = True
        return [
            Note("step-failed", f"step {step}: {reason}"),
            *(
                Send(name, "stepper", StepBroken(group, reason))
                for name, group in sorted(self._running.items())
            ),
        ]

    # --- calling ----------------------------------------------------------------------------------------

    def look(self, hosts: Mapping[str, str], absent: int, network: Network, now: float) -> list[Action]:
        """Call a step if it is time. `hosts` of the job's workers, by name; so many more are `absent`."""
        self.look_at = None
        for gone in self._workers.keys() - hosts.keys():
            del self._workers[gone]
        self._groups = {
            nodes: name for nodes, name in self._groups.items() if self._workers.keys() >= {*nodes}
        }
        for gone in self._running.keys() - hosts.keys():
            del self._running[gone]
        actions = self._settle(hosts, absent, now)
        news, self._network, self._hosts = network is not self._network, network, dict(hosts)
        if self._settled and self._running and news:
            actions += self._break_off(now)
        if not self._settled or self._running or not self._workers:
            return actions
        if self.step < 0:
            return [*actions, *self._begin(hosts, absent)]
        if parts := max(worker.parts for worker in self._workers.values()):
            return [*actions, *self._roll(parts, now)]
        return [*actions, *self._next(now)]

    def _settle(self, hosts: Mapping[str, str], absent: int, now: float) -> list[Action]:
        """Nothing is called before all have said where they stand, or had time to."""
        if self._settled:
            return []
        everybody = not absent and self._workers.keys() >= hosts.keys()
        self._settled = everybody or (now >= self._settle_at and self.step >= 0)
        if not self._settled:
            self.look_at = self._settle_at if now < self._settle_at else None
            return []
        if not self._running:
            return []
        # Whether all who are in it have heard of a step that another scheduler called is not known.
        return self._break(self.step, "the scheduler changed")

    def _begin(self, hosts: Mapping[str, str], absent: int) -> list[Action]:
        """All begin with the values of the first."""
        if absent or self._workers.keys() != hosts.keys():
            return []
        nodes = sorted(self._workers)
        return self._called(-1, nodes, nodes[:1], [], [])

    def _break_off(self, now: float) -> list[Action]:
        """A step that has not ended anywhere, and will take long by what is known now, is made by others."""
        call = self._call
        if call is None or call.step < 0 or self._broken or len(self._running) < len(call.nodes):
            return []
        if not self._knows_times:
            return []
        left_s = self._plain_s(call.nodes) - (now - self._called_at)
        best = self._weigh(self._workers, now)
        if left_s < best.step_s + WORTH_BREAKING_S:
            return []
        # The same gradients in another step, and what more is done until this one would be through.
        instead = worth_of(len(best.participants), HALF_WORTH) + best.pace * (left_s - best.step_s)
        if instead < WORTH_BREAKING * worth_of(len(call.nodes), HALF_WORTH):
            return []
        return self._break(call.step, f"it would take {left_s:.2f} s more, another one {best.step_s:.2f} s")

    def _next(self, now: float) -> list[Action]:
        step = self.step
        actions, chosen = self._choose(now)
        members = [
            name
            for name in self.current
            if name in chosen and step - self._workers[name].applied <= MOST_QUEUED
        ]
        givers = [name for name in members if self._workers[name].gives(step)]
        computing = [
            name for name in members if self._workers[name].base is None and not self._workers[name].looks_on
        ]
        late_at = [self._overdue_at(self._workers[name]) for name in computing]
        if any(at is None or now < at for at in late_at):
            self.look_at = min((at for at in late_at if at is not None and now < at), default=None)
            return actions
        if not givers:
            # All that were to give straggle or are not current: whoever is and can does it.
            givers = [name for name in self.current if self._workers[name].gives(step)]
            members = sorted({*members, *givers})
        if not givers:
            return actions
        feeders = [name for name in givers if self._workers[name].applied == step]
        absent = [name for name in self._by_rate() if name in chosen and name not in members]
        # No more than those who feed them, the fastest first: soon they feed others themselves.
        joiners = sorted([name for name in absent if self._joinable(name, step)][: len(feeders)])
        givers += [name for name in joiners if self._workers[name].gives(step)]
        nodes = sorted([*members, *joiners])
        self._called_at, self._expected_s = now, self._weigh(nodes, now, everybody=True).step_s
        actions += self._called(step, nodes, sorted(givers), feeders if joiners else [], joiners)
        return [*actions, *self._without(chosen, tuple(nodes))]

    def _roll(self, parts: int, now: float) -> list[Action]:
        """Steps of all who are current, if half of those who compute have something to give."""
        step, most = self.step, parts * MOST_QUEUED
        members = [name for name in self.current if step - self._workers[name].applied <= most]
        for name in set(self.current) - set(members):
            self._workers[name].base = None  # until it says again that it has something, and joins
        computing = [name for name in members if not self._workers[name].looks_on]
        giving = [name for name in computing if self._workers[name].base is not None]
        if not giving or 2 * len(giving) < len(computing):
            return []
        joiners = [name for name in sorted(self._workers) if self._joinable(name, step)]
        nodes = sorted([*members, *joiners])
        rounds = 1 if joiners or len(nodes) == 1 else self._rounds(parts, len(computing), now)
        self._called_at, self._reported = now, 0
        return self._called(step, nodes, nodes, members if joiners else [], joiners, rounds * parts)

    def _rounds(self, parts: int, computing: int, now: float) -> int:
        """Several, if in the last ones workers made a few gradients each: steps do not wait for them."""
        call = self._call
        if call is None or call.step < 0 or self._broken:
            return 1
        last = call.count // parts
        if self._reported < FEW * last * computing:
            return 1
        return max(min(int(CALL_S * last / (now - self._called_at)), MOST_ROUNDS), 1)

    def _joinable(self, name: str, step: int) -> bool:
        worker = self._workers[name]
        return worker.holds < step and (worker.base is not None or worker.waits)

    def _called(
        self,
        step: int,
        nodes: list[str],
        givers: list[str],
        feeders: list[str],
        joiners: list[str],
        count: int = 1,
    ) -> list[Action]:
        members = tuple(nodes)
        name = self._groups.pop(members, None)
        if name is None:
            self._count += 1
            name = f"{STEPS}{self._term}.{self._count}"
        self._groups[members] = name
        while len(self._groups) > GROUPS_KEPT:
            del self._groups[next(iter(self._groups))]
        self._call = StepCalled(step, name, members, tuple(givers), tuple(joiners), tuple(feeders), count)
        self._running = dict.fromkeys(members, name)
        self._broken = False
        for member in members if len(members) > 1 else []:
            self._workers[member].told_without = frozenset()
        return [Send(member, "stepper", self._call) for member in members]

    def _without(self, chosen: Iterable[str], nodes: tuple[str, ...]) -> list[Action]:
        """Those whose links nobody sees at work hear whom to measure them with: the fastest of the others, as
        a probe shows no more than the slower of two links."""
        hosts, fastest = self._hosts, self._by_rate()
        actions: list[Action] = []
        for name, worker in sorted(self._workers.items()):
            if (name in nodes and len(nodes) > 1) or (name not in nodes and name in chosen):
                continue
            peers = [other for other in fastest if hosts[other] != hosts[name]][:PROBED]
            if peers and worker.told_without != frozenset(peers):
                worker.told_without = frozenset(peers)
                actions.append(Send(name, "stepper", StepsWithout(tuple(peers))))
        return actions

    # --- who is fast ------------------------------------------------------------------------------------

    def _choose(self, now: float) -> tuple[list[Action], frozenset[str]]:
        """Those whose taking part makes the steps worth most, by what is known of the links."""
        if not self._knows_times:
            return [], frozenset(self._workers)
        best = self._weigh(self._workers, now)
        if self._chosen and self._chosen <= self._workers.keys():
            standing = self._weigh(self._chosen, now, everybody=True)
            worth = WORTH_CHANGING if self._inside(best) <= self._chosen else WORTH_JOINING
            if best.pace <= standing.pace * worth:
                return [], self._chosen
        chosen = self._inside(best)
        changed, self._chosen = chosen != self._chosen, chosen
        return ([Note("chosen", f"{', '.join(sorted(chosen))}: {best.reason}")] if changed else []), chosen

    def _inside(self, chosen: Participation) -> frozenset[str]:
        return frozenset(name for name in self._workers if self._hosts[name] in chosen.participants)

    @property
    def _knows_times(self) -> bool:
        """Whether it is known how long anybody computes: else all take part."""
        return any(worker.times for worker in self._workers.values())

    @property
    def _size_bytes(self) -> int:
        """Of a gradient; 0 once nobody takes part: the last step may end after all have said that it is."""
        return max((worker.size_bytes for worker in self._workers.values()), default=0)

    def _weigh(self, names: Iterable[str], now: float, everybody: bool = False) -> Participation:
        """Whom of these to take for a step, and what it takes then; `everybody`: with all of them."""
        hosts = sorted({self._hosts[name] for name in names if name in self._hosts})
        workers = self._workers.values()
        typical = [typical_s for worker in workers if (typical_s := self._typical_s(worker)) is not None]
        return choose_participants(
            self._doubted(hosts, now),
            hosts,
            self._size_bytes,
            compute_s=median(typical) if typical else 0.0,
            least=len(hosts) if everybody else min(LEAST, len(hosts)),
            half_worth=HALF_WORTH,
            overlapped=all(not worker.waits for worker in workers if worker.base is not None),
        )

    def _by_rate(self) -> list[str]:
        """All workers, the fastest first."""
        assert self._network is not None
        network, hosts = self._network, self._hosts
        return sorted(self._workers, key=lambda name: (-_rate(network, hosts[name]), name))

    def _plain_s(self, names: Iterable[str]) -> float:
        """What a step takes that was not planned for the links as they are."""
        assert self._network is not None
        hosts = sorted({self._hosts[name] for name in names if name in self._hosts})
        return ring_time(self._network, hosts, self._size_bytes)

    def _doubted(self, hosts: Iterable[str], now: float) -> Network:
        assert self._network is not None
        network = self._network
        for name in hosts:
            doubt = self._doubts.get(name)
            if doubt is None:
                continue
            if now >= doubt.until or _rate(network, name) != doubt.believed:
                del self._doubts[name]
                continue
            host = network.hosts[name]
            up, down = host.up_bytes_per_s * doubt.factor, host.down_bytes_per_s * doubt.factor
            network = network.with_host(replace(host, up_bytes_per_s=up, down_bytes_per_s=down))
        return network

    def _typical_s(self, worker: _Worker) -> float | None:
        if worker.times:
            return median(worker.times)
        others = [median(other.times) for other in self._workers.values() if other.times]
        return median(others) if others else None

    def _overdue_at(self, worker: _Worker) -> float | None:
        """When it straggles if it has no gradient by then; None: that can't be said."""
        typical_s = self._typical_s(worker)
        if worker.since is None or typical_s is None:
            return None
        return worker.since + OVERDUE * typical_s + GRACE_S


def _rate(network: Network, host: str) -> float:
    return min(network.hosts[host].up_bytes_per_s, network.hosts[host].down_bytes_per_s)
