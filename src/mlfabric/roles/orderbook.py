"""One job's order: offers that wait, updates that were granted, groups that gather; who is told what.

The planner decides order and routes; this book carries its decisions out and keeps them true while members
come late, refuse, or die. It belongs to the scheduler and sees no bytes. What is written in it is in
`roles.entries`; grants are given in `roles.granting` and taken back in `roles.withdrawing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from mlfabric.messages import (
    AppliedReport,
    DropUpdate,
    JobSettings,
    JudgeUpdate,
    MemberInfo,
    OfferUpdate,
    count_at,
)
from mlfabric.plan.planner import plan_updates
from mlfabric.plan.values import JobState, Offer, Placed, Plan, Reserved, Shard
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.entries import Entries, WaitingUpdate
from mlfabric.roles.granting import Granting
from mlfabric.roles.release import at_full_rate, due_prefix, goes_straight, host_of, lookahead, start_at
from mlfabric.roles.rounds import choose
from mlfabric.roles.withdrawing import Withdrawing
from mlfabric.topology import Network

# Offers that come within this time are planned together.
BATCH_S = 0.002
# So are changes of rates.
RATES_S = 0.05
# Groups are not made before so much of a transfer's time has passed since the first offer that waits, or
# since the last one.
GATHER_SHARE = 0.5
QUIET_SHARE = 0.15
# How often it is tried whether servers could take more at a time.
PROBE_S = 4.0


class OrderBook:
    def __init__(
        self, job: str, settings: JobSettings, elements: int, term: int = 0, first_number: int = 0
    ) -> None:
        self.entries = Entries(job, settings, elements, term, first_number)
        self._granting = Granting(self.entries)
        self.withdrawing = Withdrawing(self.entries)
        self.shards = self.entries.shards
        self._drops_in_row: dict[str, int] = {}
        self._probe_at = float("-inf")
        self._arrivals = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=1000)  # (when, updates applied), of any shard

    def offered(self, offer: OfferUpdate, worker: str, now: float) -> list[Action]:
        actions: list[Action] = []
        self.entries.counts["offers"] += 1
        if offer.again:
            self.entries.counts["again"] += 1
        if self._keeps_place(offer):
            self.entries.broken.add(offer.update)
            self.entries.plan_soon(now)
            return []
        if offer.update in self.entries.granted:
            actions = self.withdrawing.void(offer.update, offer.again or "it was offered again")
        self._arrivals += 1
        self.entries.waiting[offer.update] = WaitingUpdate(offer, worker, self._arrivals, now)
        self.entries.plan_soon(now + BATCH_S)
        return actions

    def _keeps_place(self, offer: OfferUpdate) -> bool:
        """Whether an update that is offered again has to be sent in the place it has.

        Some shards have applied it, so it can't be dropped any more, and others wait for it where its bound
        is near: they would go before it if it had to be placed anew. That is granted once; a path that breaks
        every time must not hold up everybody.
        """
        granted = self.entries.granted.get(offer.update)
        if granted is None or granted.again or len(offer.shards) == len(self.shards):
            return False
        straight = all(part.group is None and not part.held for part in granted.parts.values())
        known = granted.parts.keys() == set(offer.shards)
        return straight and known and not self.withdrawing.is_asked(granted.number)

    def rates_changed(self, now: float) -> None:
        """What waits is planned anew, soon: news of rates come in flocks."""
        if self.entries.waiting:
            self.entries.plan_soon(now + RATES_S)

    def applied(self, report: AppliedReport, now: float) -> list[str]:
        """Take a server's account; the workers whose updates are in everywhere by it."""
        settled: list[str] = []
        book = self.shards[report.shard]
        if report.epoch != book.range.epoch:
            return []
        book.version = max(book.version, report.version)
        self.recent.append((now, len(report.updates)))
        held = report.replica_version if report.replica_version is not None else report.version
        book.undurable.update(dict.fromkeys(report.updates, report.version))
        book.undurable = {update: at for update, at in book.undurable.items() if at > held}
        for update in report.updates:
            self.entries.leaving.pop((report.shard, update), None)
            granted = self.entries.granted.get(update)
            if granted is not None:
                self.entries.finish_part(granted, report.shard)
                self._drops_in_row.pop(granted.worker, None)
                if update not in self.entries.granted:
                    settled.append(granted.worker)
            waiting = self.entries.waiting.get(update)
            if waiting is not None:  # offered again, and came by its first way after all
                rest = tuple(index for index in waiting.offer.shards if index != report.shard)
                waiting.offer = msgspec.structs.replace(waiting.offer, shards=rest)
                if waiting.judging is not None:
                    waiting.judging.discard(report.shard)
                if not rest:
                    del self.entries.waiting[update]
        self.entries.plan_soon(now)
        return settled

    def refused(self, update: str) -> None:
        """A server found it too old when its turn came; its worker knows."""
        granted = self.entries.granted.get(update)
        self.entries.waiting.pop(update, None)
        for shard in self.shards:
            self.entries.leaving.pop((shard, update), None)
        if granted is not None:
            self.entries.counts["dropped_late"] += 1
            for shard in list(granted.parts):
                self.entries.finish_part(granted, shard)

    def plan(
        self,
        network: Network,
        others: list[Reserved],
        members: Mapping[str, MemberInfo],
        now: float,
        max_rate_bytes_per_s: float | None = None,
    ) -> list[Action]:
        """Plan what waits, tell everybody concerned what starts now, leave the rest for later.

        The job may send no more than `max_rate_bytes_per_s` from any one host.
        """
        self.entries.plan_at = None
        workers = sum(1 for member in members.values() if "worker" in member.roles)
        bound = self.entries.max_delay(workers)
        actions = self._granting.grant_broken(network, members, bound, now)
        actions += self._granting.grant_remainders(network, members, bound, now)
        chosen = choose(self.entries, network, members, now)
        if not chosen:
            return actions
        state, offers = self._situation(chosen, members, workers, bound, max_rate_bytes_per_s)
        plan = at_full_rate(
            plan_updates(network, [*others, *self.entries.reserved(now)], state, offers, 0.0),
            now,
            network.sending_at_most(max_rate_bytes_per_s),
            {offer.update: offer.host for offer in offers},
            {shard.index: shard.server for shard in state.shards},
        )
        for drop in plan.drops:
            actions += self._drop(drop.update, drop.reason)
        group_at = self._group_at(plan, workers) if plan.groups else now
        released = due_prefix(plan, now, groups=group_at <= now) or self._probe(plan, now)
        if released:
            actions += self._granting.release(plan, released, members, bound, now)
        rest = plan.placed[len(released) :]
        if rest:
            starts = [
                part.start_s - lookahead(part.finish_s - part.start_s)
                if part.group is None
                else max(part.start_s - lookahead(part.finish_s - part.start_s), group_at)
                for p in rest
                for part in p.parts
            ]
            self.entries.plan_soon(max(min(starts), now + BATCH_S))
        return actions

    def _probe(self, plan: Plan, now: float) -> tuple[Placed, ...]:
        """Now and then an update goes to its servers beside another one: only so it shows when their links
        could take more than any one worker sends."""
        if now < self._probe_at or not plan.placed or not goes_straight(plan.placed[0]):
            return ()
        self._probe_at = now + PROBE_S
        return (start_at(plan.placed[0], now),)

    def _group_at(self, plan: Plan, workers: int) -> float:
        """When what waits may be cut into groups.

        Workers that compute for about as long offer within a moment of each other. Groups made of the first
        few are small, and each of them costs the server's link as much as a large one; updates that go there
        straight meanwhile keep it busy. So it is waited for a share of a transfer's time, unless nobody is
        left who could offer, or nobody has offered for a while.
        """
        entries = self.entries
        if len(entries.waiting) + len(entries.granted) >= workers * entries.settings.in_flight:
            return float("-inf")
        lasts_s = min(group.finish_s - group.start_s for group in plan.groups)
        first, last = entries.arrived_between()
        return min(first + GATHER_SHARE * lasts_s, last + QUIET_SHARE * lasts_s)

    def _situation(
        self,
        chosen: list[WaitingUpdate],
        members: Mapping[str, MemberInfo],
        workers: int,
        bound: int | None,
        max_rate: float | None,
    ) -> tuple[JobState, list[Offer]]:
        placed = {index: self.entries.placed_count(index) for index in self.shards}
        top = max(placed.values())
        offers = []
        for waiting in chosen:
            offer = waiting.offer
            behind = max(
                placed[index] - count_at(offer.bases[index], self.shards[index].fail_overs)
                for index in self.shards
            )
            offers.append(
                Offer(
                    update=offer.update,
                    worker=waiting.worker,
                    host=members[waiting.worker].host,
                    size_bytes=offer.size_bytes,
                    base_version=top - behind,
                    norm=offer.norm,
                    arrival=waiting.arrival,
                    drops_in_row=self._drops_in_row.get(waiting.worker, 0),
                    job=self.entries.job,
                )
            )
        aggregators: tuple[str, ...] = ()
        if self.entries.settings.aggregate:
            aggregators = tuple(sorted({m.host for m in members.values() if "aggregator" in m.roles}))
        shards = tuple(
            Shard(
                index=index,
                server=members[self.entries.taking_over.get(index, book.range.leader)].host,
                replica=host_of(book.range.replica, members),
                share=book.range.count / self.entries.elements,
            )
            for index, book in sorted(self.shards.items())
        )
        state = JobState(
            name=self.entries.job,
            placed_version=top,
            max_delay=bound,
            concurrency=max(workers * self.entries.settings.in_flight, 1),
            shards=shards,
            aggregators=aggregators,
            policy=self.entries.settings.policy,
            max_rate_bytes_per_s=max_rate,
        )
        return state, offers

    def _drop(self, update: str, reason: str) -> list[Action]:
        waiting = self.entries.waiting[update]
        if waiting.offer.again and waiting.judging is None:
            return self._judge(waiting)
        del self.entries.waiting[update]
        self.entries.counts["dropped"] += 1
        self._drops_in_row[waiting.worker] = self._drops_in_row.get(waiting.worker, 0) + 1
        return [
            Note("dropped", reason, (update,)),
            Send(waiting.worker, "worker", DropUpdate(update, reason)),
        ]

    def _judge(self, waiting: WaitingUpdate) -> list[Action]:
        """An update offered again after a fault may be in the model, its acknowledgement lost: ask first."""
        waiting.judging = set(waiting.offer.shards)
        return [
            Send(
                self.shards[index].range.leader,
                f"server.{index}",
                JudgeUpdate(index, self.entries.member(waiting, index)),
            )
            for index in waiting.offer.shards
        ]

    def grant_anew(
        self,
        shard: int,
        network: Network,
        members: Mapping[str, MemberInfo],
        now: float,
        moved: bool,
    ) -> list[Action]:
        """What was on its way to a shard's former leader goes to the one it has now; or it has not moved
        after all, and gets what was held back."""
        workers = sum(1 for member in members.values() if "worker" in member.roles)
        bound = self.entries.max_delay(workers)
        self.entries.plan_soon(now)
        taken_back = self.withdrawing.lead_moved(shard, now) if moved else []
        granted = self._granting.grant_anew(shard, network, members, bound, now, only_held=not moved)
        return [*taken_back, *granted]

    def not_applied(self, shard: int, update: str, now: float) -> None:
        waiting = self.entries.waiting.get(update)
        if waiting is not None and waiting.judging is not None:
            waiting.judging.discard(shard)
            self.entries.plan_soon(now)

    def node_lost(self, node: str, reason: str) -> list[Action]:
        """A worker's offers go with it; what it was gathering for others is offered again by them."""
        actions: list[Action] = []
        for update, waiting in list(self.entries.waiting.items()):
            if waiting.worker == node:
                del self.entries.waiting[update]
                actions.append(Note("abandoned", f"host {node} lost: {reason}", (update,)))
        for name, gathering in list(self.entries.groups.items()):
            if gathering.aggregator == node:
                actions += self.withdrawing.fail_group(name, f"aggregator {node} lost: {reason}")
        for update, granted in list(self.entries.granted.items()):
            if granted.worker == node:
                actions += self.withdrawing.void(update, f"host {node} lost: {reason}")
        return actions
