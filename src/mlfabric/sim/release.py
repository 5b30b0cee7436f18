"""When waiting updates may start: the planner's order, as far as servers have room, and drops before that.

An update's place in the order of application is where it will be when it arrives, so those that are expected
to overtake it on its way count as before it: what would arrive beyond its bound is dropped before a byte is
sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from mlfabric.plan.ordering import DROPS_BEFORE_FIRST, order_updates
from mlfabric.plan.values import JobState, Offer
from mlfabric.roles.granting import PATIENCE, PATIENCE_S
from mlfabric.sim.estimate import OBSERVE_S
from mlfabric.sim.gathering import Gathered, gather_updates
from mlfabric.sim.order import ApplicationOrder, Numbered
from mlfabric.sim.placing import Placement
from mlfabric.sim.streams import Signal
from mlfabric.sim.workload import JobRun

# Updates are let go until the rates they are believed to reach fill the servers' links so many times.
FILL: Final = 3.0
# The same of racks' links. What waits for them may be summed meanwhile, so fewer go at once.
RACK_FILL: Final = 2.0
# With others under way an update gets the servers' rate over their number, so many times: not all push
# always.
CROWDING: Final = 1.5
# Overtakers are counted so many times: what is late in the end costs all the others.
MARGIN: Final = 1.1
# Offers that come within this part of a nominal transfer are planned together where they may be summed.
BATCH_TRANSFERS: Final = 0.125
# Without room the hopeless are looked for at every look at the links only, if more than so many wait.
MANY: Final = 64
# The pace of commits is looked at over about so long.
PACE_S: Final = 2.0


@dataclass(slots=True, eq=False)
class Update:
    """A worker's update from the moment it is computed."""

    worker: int
    base: int
    gradient: Any
    step: int
    go: Signal = field(default_factory=Signal)  # with the message it is part of; None: dropped


class Release:
    """Offers that wait, and what is under way of those that were let go."""

    def __init__(
        self,
        job: JobRun,
        order: ApplicationOrder,
        in_flight: int,
        let_go: Callable[[list[Update], Numbered, Gathered | None], None],
        dropped: Callable[[Update], None],
    ) -> None:
        self.placement: Placement | None = None
        self._job = job
        self._order = order
        self._concurrency = len(job) * in_flight
        self._let_go = let_go
        self._dropped = dropped
        self._waiting: dict[str, tuple[Update, Offer]] = {}
        self._rates: dict[Update, float] = {}  # under way -> believed rate of its push
        self._in_use = 0.0  # their sum
        self._drops_in_row: dict[int, int] = {}
        self._arrivals = 0
        self._planned_at = -math.inf
        self._ordered_at = -math.inf
        self._due = False
        self._pace = 0.0  # commits per second, lately
        self._paced_at = 0.0

    def offer(self, update: Update) -> None:
        job = self._job
        self._arrivals += 1
        name = f"{job.names[update.worker]}/{update.step}"
        offer = Offer(
            update=name,
            worker=job.names[update.worker],
            host=job.names[update.worker],
            size_bytes=job.size_bytes,
            base_version=update.base,
            arrival=self._arrivals,
            drops_in_row=self._drops_in_row.get(update.worker, 0),
        )
        self._waiting[name] = (update, offer)
        self._soon()

    def finished(self, members: list[Update], committed: bool = True) -> None:
        """These are applied or given up."""
        for update in members:
            self._in_use -= self._rates.pop(update, 0.0)
        if committed:
            self._pace = self.pace() + len(members) / PACE_S
            self._paced_at = self._job.world.now
        self._soon()

    def pace(self) -> float:
        """Commits per second, lately."""
        return self._pace * math.exp((self._paced_at - self._job.world.now) / PACE_S)

    def round_s(self) -> float:
        """How long a worker lately takes from one commit to the next."""
        return self._concurrency / max(self.pace(), 1e-9)

    def forget(self, worker: int) -> int:
        """Its host is gone; how many of its updates waited."""
        mine = [name for name, (update, _) in self._waiting.items() if update.worker == worker]
        for name in mine:
            del self._waiting[name]
        return len(mine)

    def _soon(self) -> None:
        """Plan now, or with whatever else comes within the world's grain; where updates may be summed, with
        what comes within a part of a transfer."""
        world = self._job.world
        if self._due:
            return
        wait_s = world.grain_s
        if self.placement is not None and self.placement.in_racks:
            wait_s = max(wait_s, BATCH_TRANSFERS * self._job.transfer_s)
        if world.now >= self._planned_at + wait_s:
            self.run()
        else:
            self._due = True
            world.at(self._planned_at + wait_s, self.run)

    def _room(self) -> tuple[float, float]:
        """Bytes per second that all servers together can take in, by belief; and what is left of it."""
        assert self.placement is not None
        _, down = self._job.rates()
        shares = self.placement.shares
        hosts = list(shares)
        whole = float((down[hosts] / np.array(list(shares.values()))).min())
        through = self.placement.through_racks()
        # Hosts' links find their level by themselves; what waits for a rack's link may be summed meanwhile.
        return min(whole, through), min(FILL * whole, RACK_FILL * through) - self._in_use

    def run(self) -> None:
        """Let the first of the order go while the servers have room for more, and drop the hopeless."""
        self._due = False
        self._planned_at = self._job.world.now
        if not self._waiting or self.placement is None:
            return
        whole, room = self._room()
        if room <= 0 and self._rates:
            many = len(self._waiting) > MANY and self._job.world.now < self._ordered_at + OBSERVE_S
            if many or len(self._waiting) < 2:
                return
        self._ordered_at = self._job.world.now
        rates, offers = self._estimate(self.placement, whole)
        durations = {name: self._job.size_bytes / rate for name, rate in rates.items()}
        state = JobState(
            name=self._job.spec.name,
            placed_version=self._order.placed,
            max_delay=self._order.bound,
            concurrency=self._concurrency,
            policy=self._job.spec.policy,
        )
        ordered = order_updates(offers, state, durations)
        for drop in ordered.drops:
            update, _ = self._waiting.pop(drop.update)
            self._drops_in_row[update.worker] = self._drops_in_row.get(update.worker, 0) + 1
            self._dropped(update)
        groups: dict[str, Gathered] = {}
        if self.placement.in_racks and (room > 0 or not self._rates):
            groups = gather_updates(self._job, self.placement, state, ordered.kept)
        for offer in ordered.kept:
            if room <= 0 and self._rates:
                break
            if offer.update in self._waiting:
                room -= self._start(offer.update, groups.get(offer.update), rates)

    def _estimate(self, placement: Placement, whole: float) -> tuple[dict[str, float], list[Offer]]:
        """The rates that waiting updates are believed to reach, and the offers as they will arrive."""
        job = self._job
        up, _ = job.rates()
        crowded = CROWDING * whole / (len(self._rates) + 1)
        rates, offers = {}, []
        for name, (update, offer) in self._waiting.items():
            own = placement.shares.get(update.worker, 0.0)
            rates[name] = max(min(float(up[update.worker]) / max(1 - own, 1e-9), whole), 1.0)
            arrives_s = job.size_bytes / max(min(rates[name], crowded), 1.0)
            offers.append(self._as_it_arrives(offer, arrives_s))
        return rates, offers

    def _start(self, name: str, group: Gathered | None, rates: dict[str, float]) -> float:
        """Let an update go, with its group if it has one in time; the rate it is believed to take."""
        names = group.members if group is not None else (name,)
        order, bound = self._order, self._order.bound
        bases = tuple(self._waiting[each][0].base for each in names)
        if bound is not None and any(order.placed + k - base > bound for k, base in enumerate(bases)):
            group, names, bases = None, (name,), (self._waiting[name][0].base,)
        members = [self._waiting.pop(each)[0] for each in names]
        rate = min(rates[each] for each in names)
        for member in members:
            self._drops_in_row.pop(member.worker, None)
            self._rates[member] = rate / len(members)
        self._in_use += rate
        lease = len(group.push if group else "1") * self._job.size_bytes / rate * PATIENCE + PATIENCE_S
        self._let_go(members, order.give_number(bases, self._job.world.now + lease), group)
        return rate

    def _as_it_arrives(self, offer: Offer, duration_s: float) -> Offer:
        """The offer with the delay it would have after those that are expected to overtake it."""
        if offer.drops_in_row >= DROPS_BEFORE_FIRST:
            return offer
        before = self._order.placed - self._job.version
        overtaken = math.ceil(max(0.0, MARGIN * self.pace() * duration_s - before))
        return _older(offer, overtaken)


def _older(offer: Offer, updates: int) -> Offer:
    if updates == 0:
        return offer
    return Offer(
        offer.update,
        offer.worker,
        offer.host,
        offer.size_bytes,
        offer.base_version - updates,
        offer.norm,
        offer.arrival,
        offer.drops_in_row,
        offer.job,
    )
