"""The scheduler's side of pulls: who sends to whom and how fast, and what that leaves to replicas.

The model comes from the leaders. A worker's first one comes, while others train, from whoever holds it
nearest by: the leader or its replica. Those who ask at about the same time are served together: where that
is faster they pass the model on to each other (`roles.relaying`). `roles.sharing` says who waits for whom.

What a relay fails to bring is served again, to all below it: by relays once more, then by its holder alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mlfabric.messages import AppliedReport, PullFailed, PullServed, PullWanted, Replicate, ServePull
from mlfabric.plan.values import Reserved
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.domain import Domain, Fetch, Job
from mlfabric.roles.entries import ShardBook
from mlfabric.roles.pace import Pace
from mlfabric.roles.relaying import Copy, PartWanted, relay_copies, serve_orders
from mlfabric.roles.release import MAX_RATE, remainder
from mlfabric.roles.sharing import Sharing
from mlfabric.topology import Link
from mlfabric.units import format_time

# A replica is brought up to date in spare time once it has used up this share of its bound.
SPARE_SHARE = 0.5
# What was not brought by relays so often comes from its holder.
RELAYS_TRIED = 2
# A relay's bytes are late when they take so many times as long as the links should need, and a while more: a
# member that is dead has been given up by then.
LATE_TIMES = 4.0
LATE_S = 3.0


class Pulls:
    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._sharing = Sharing(domain)

    def pull(self, job: Job, sender: str, message: PullWanted, now: float) -> list[Action]:
        if job.failed is not None:
            return [Send(sender, "worker", PullFailed(message.pull, job.failed))]
        if job.book is None or not job.ready:
            job.early_pulls.append((sender, message))
            return []
        if message.shards:  # the rest of a pull that is under way
            held = message.pull in job.gathering or (job.pace is not None and job.pace.holds(message.pull))
            if message.pull in job.pulls:
                job.pulls[message.pull].broken.update(message.shards)
            return [] if held else self._serve(job, [(sender, message)], now)
        if job.book.entries.has_open(sender):
            job.demand.alongside = True
        if job.pace is None:
            job.pace = Pace(job.book.entries.settings)
        if job.pace.binds:
            job.pace.ask(sender, message)
        elif message.clock < 0:  # it takes no part in the steps
            return self._serve(job, [(sender, message)], now)
        else:
            job.gathering[message.pull] = (sender, message)
        return self.serve_due(job, now)

    def serve_due(self, job: Job, now: float) -> list[Action]:
        """Give the model to those whose next step may begin, where steps are bound to each other, and to all
        who have been waiting for company long enough."""
        if job.book is None or job.failed is not None:
            return []
        actions = self._look_for_late(job, now)
        if job.pace is not None and job.pace.binds:
            version = min(shard.version for shard in job.book.shards.values())
            due = job.pace.due(version)
            job.gathering |= {pull.pull: (node, pull) for node, pull in due if pull.clock >= 0}
            for each in due:
                actions += self._serve(job, [each], now) if each[1].clock < 0 else []
        if not job.gathering or self._sharing.waits(job, now):
            return actions
        batch, job.gathering, job.gather_until = list(job.gathering.values()), {}, None
        actions += self._serve(job, batch, now)
        job.together = max(len(job.pulls), 1)
        return actions

    def deadlines(self, job: Job) -> list[float]:
        if job.book is None or job.failed is not None:
            return []
        times = [at for fetch in job.pulls.values() for _, at in fetch.relayed.values()]
        return times + self._sharing.deadlines(job)

    # --- serving ----------------------------------------------------------------------------------------

    def _serve(self, job: Job, batch: Sequence[tuple[str, PullWanted]], now: float) -> list[Action]:
        assert job.book is not None
        lost = any(job.book.shards[index].range.leader not in self._domain.members for index in job.promoting)
        if lost or job.ending is not None:
            return []  # the new leader's announcement makes the worker ask again; or the job ends
        parts = [part for sender, message in batch for part in self._parts(job, sender, message)]
        after = job.book.entries.last_number() if any(message.with_state for _, message in batch) else None
        return self._deliver(job, parts, now, after)

    def _parts(self, job: Job, sender: str, message: PullWanted) -> list[PartWanted]:
        """What a worker wants of whom; shards that change hands are held."""
        assert job.book is not None
        if sender not in self._domain.members:
            return []
        moving = job.taking_over()
        fetch = job.pulls.setdefault(message.pull, Fetch(sender, {}, {}, message.with_state))
        indices = message.shards or sorted(job.book.shards)
        fetch.held |= {index for index in indices if index in moving}  # it asks again when it hears who leads
        parts = []
        for index in indices:
            if index not in moving:
                shard = job.book.shards[index]
                holder = self._nearest(job, shard, sender) if message.first else shard.range.leader
                parts.append(self._part(job, message.pull, index, holder))
        return parts

    def _part(self, job: Job, pull: str, index: int, holder: str) -> PartWanted:
        assert job.book is not None
        fetch, shard = job.pulls[pull], job.book.shards[index]
        member = self._domain.members[fetch.node]
        helps = "worker" in member.roles and fetch.node not in self._domain.draining
        helps = helps and job.book.entries.settings.aggregate
        may_relay = helps and not fetch.with_state and fetch.broken[index] < RELAYS_TRIED
        size_bytes = shard.range.count * 4
        job.attempts += 1
        fetch.attempts[index] = job.attempts
        return PartWanted(pull, fetch.node, index, holder, size_bytes, shard.version, may_relay, job.attempts)

    def _deliver(
        self, job: Job, parts: Sequence[PartWanted], now: float, after: int | None = None
    ) -> list[Action]:
        """Have these parts sent: by relays where that is faster, each by its holder where it is not."""
        members = self._domain.members
        copies: list[Copy] = []
        if len(parts) > 1:
            copies = relay_copies(parts, members, self._domain.network_of(job), self._under_way(now))
        actions: list[Action] = []
        if copies:
            hosts = len({members[copy.part.node].host for copy in copies})
            last_s = max(copy.finish_s for copy in copies)
            why = f"{hosts} hosts pass the model on to each other and should have it in {format_time(last_s)}"
            actions.append(Note("relayed", why, value=float(hosts)))
        for copy in copies:
            self._book(job, copy.part, copy.source, copy.rate_bytes_per_s, now, now + copy.finish_s)
            if copy.through:
                fetch = job.pulls[copy.part.pull]
                fetch.through[copy.part.shard] = copy.through
                fetch.relayed[copy.part.shard] = (now, now + LATE_TIMES * copy.finish_s + LATE_S)
        actions += [self._order(job, part, order) for part, order in serve_orders(copies)]
        passed_on = {(copy.part.pull, copy.part.shard) for copy in copies}
        users, last = self._users(), ""
        for part in parts:
            if (part.pull, part.shard) in passed_on:
                continue
            if part.pull != last:  # parts of one model leave each other's rates alone
                users, last = self._users(), part.pull
            rate = self._spare_rate(part.holder, part.node, users)
            self._book(job, part, part.holder, rate, now, now + part.size_bytes / rate)
            with_state = job.pulls[part.pull].with_state
            number = after if with_state else None
            order = ServePull(
                part.pull, part.node, part.shard, rate, with_state, number, attempt=part.attempt
            )
            actions.append(self._order(job, part, order))
        return actions

    def _book(
        self, job: Job, part: PartWanted, source: str, rate: float, now: float, finish_s: float
    ) -> None:
        fetch = job.pulls[part.pull]
        fetch.sources[part.shard] = source
        fetch.through.pop(part.shard, None)
        fetch.relayed.pop(part.shard, None)
        fetch.reserved.pop(part.shard, None)
        here, there = self._domain.members[source].host, self._domain.members[part.node].host
        if here != there:
            fetch.reserved[part.shard] = (Reserved(here, there, float(part.size_bytes), rate), finish_s)

    def _order(self, job: Job, part: PartWanted, order: ServePull) -> Send:
        assert job.book is not None
        role = "server" if part.holder == job.book.shards[part.shard].range.leader else "replica"
        return Send(part.holder, f"{role}.{part.shard}", order)

    def _under_way(self, now: float) -> list[Reserved]:
        """What the links carry for all jobs."""
        moving = [
            remainder(reserved, finish_s, now)
            for job in self._domain.jobs.values()
            for fetch in job.pulls.values()
            for reserved, finish_s in fetch.reserved.values()
        ]
        books = [job.book for job in self._domain.jobs.values() if job.book is not None]
        return moving + [reserved for book in books for reserved in book.entries.reserved(now)]

    def lead_stayed(self, job: Job, shard: int, now: float) -> list[Action]:
        """It did not move after all: what was held back comes from who leads it still."""
        batch = []
        for name, fetch in job.pulls.items():
            if shard in fetch.held:
                fetch.held.discard(shard)
                batch.append((fetch.node, PullWanted(name, fetch.with_state, shards=(shard,))))
        return self._serve(job, batch, now)

    def lead_moved(self, job: Job, shard: int, now: float) -> None:
        """Parts that the old leader is still sending end without its word."""
        for name in list(job.pulls):
            job.pulls[name].held.discard(shard)
            self._part_ended(job, name, shard, now)

    # --- what does not come -----------------------------------------------------------------------------

    def _serve_again(self, job: Job, broken: Iterable[tuple[str, int]], why: str, now: float) -> list[Action]:
        """Parts that will not come the way they were sent, and all that was to be passed on from them."""
        assert job.book is not None
        below: dict[tuple[str, int], list[str]] = {}
        for name, fetch in job.pulls.items():
            for index, through in fetch.through.items():
                below.setdefault((through, index), []).append(name)
        affected: dict[tuple[str, int], None] = {}
        to_do = list(broken)
        while to_do:
            name, index = to_do.pop()
            if (name, index) not in affected:
                affected[name, index] = None
                to_do += [(other, index) for other in below.get((name, index), ())]
        moving = job.taking_over()
        parts = []
        for name, index in affected:
            wanting, leader = job.pulls.get(name), job.book.shards[index].range.leader
            if wanting is None or index not in wanting.sources or leader not in self._domain.members:
                continue  # it is there; or its leader's successor makes the worker ask again
            if index in moving:
                wanting.held.add(index)
                continue
            wanting.broken[index] += 1
            parts.append(self._part(job, name, index, leader))
        if not parts:
            return []
        note = Note("served-again", f"{len(parts)} parts of models: {why}")
        return [note, *self._deliver(job, parts, now)]

    def _look_for_late(self, job: Job, now: float) -> list[Action]:
        """Relays that stand still: the first of them has to do without others, and they without it. If the
        links have turned out slower than planned they get the time."""
        late = [
            (name, index)
            for name, fetch in job.pulls.items()
            for index, (_, at) in fetch.relayed.items()
            if now >= at
        ]
        broken = []
        for name, index in late:
            fetch = job.pulls[name]
            since, _ = fetch.relayed.pop(index)
            until = since + LATE_TIMES * self._lasts(job, name, index) + LATE_S
            if until > now:
                fetch.relayed[index] = (since, until)
            else:
                fetch.broken[index] = max(fetch.broken[index], RELAYS_TRIED - 1)
                broken.append((name, index))
        return self._serve_again(job, broken, "relays brought nothing in time", now) if broken else []

    def _lasts(self, job: Job, pull: str, index: int) -> float:
        """How long the links of a part's way need for it, as they are believed to be now."""
        slowest_s, fetch = 0.0, job.pulls.get(pull)
        while fetch is not None and index in fetch.reserved:
            moving, _ = fetch.reserved[index]
            rate = self._domain.network.rate(moving.source, moving.target)
            slowest_s = max(slowest_s, moving.remaining_bytes / rate)
            fetch = job.pulls.get(fetch.through.get(index, ""))
        return slowest_s

    def source_lost(self, job: Job, node: str, now: float) -> list[Action]:
        """Who is gone sends nothing any more, and asks for nothing."""
        known = self._domain.network.hosts
        for each in self._domain.jobs.values():
            for fetch in each.pulls.values():
                fetch.reserved = {
                    index: (reserved, finish_s)
                    for index, (reserved, finish_s) in fetch.reserved.items()
                    if reserved.source in known and reserved.target in known
                }
        job.gathering = {pull: asked for pull, asked in job.gathering.items() if asked[0] != node}
        if not job.gathering:
            job.gather_until = None
        if job.book is None:
            return []
        broken = [
            (name, index)
            for name, fetch in job.pulls.items()
            for index, source in fetch.sources.items()
            if source == node
        ]
        return self._serve_again(job, broken, f"{node} is gone", now)

    def pull_served(self, job: Job, sender: str, message: PullServed, now: float) -> list[Action]:
        """Bytes have left, or failed to. Who lacks them asks again by itself, unless it may not have heard of
        them: those who were to get them from a relay are served again at once."""
        name, index = message.pull, message.shard
        fetch = job.pulls.get(name)
        if not message.failed:
            self._part_ended(job, name, index, now)
            return []
        if fetch is None or fetch.attempts.get(index) != message.attempt:
            return []  # it is on its way again
        if index in fetch.through:
            return self._serve_again(job, [(name, index)], f"{sender} could not pass them on", now)
        below = [other for other, each in job.pulls.items() if each.through.get(index) == name]
        self._part_ended(job, name, index, now)
        return self._serve_again(
            job, [(other, index) for other in below], f"{sender} could not send them", now
        )

    def _part_ended(self, job: Job, pull: str, shard: int, now: float) -> None:
        fetch = job.pulls.get(pull)
        if fetch is None:
            return
        for kept in (fetch.sources, fetch.reserved, fetch.through, fetch.relayed):
            kept.pop(shard, None)
        if not fetch.sources and not fetch.held:
            del job.pulls[pull]
            job.demand.waits_no_more(fetch.node, now)

    # --- who has it, and how fast -----------------------------------------------------------------------

    def _nearest(self, job: Job, shard: ShardBook, sender: str) -> str:
        """The leader, or its replica where that is nearer and not far behind: updates would come too late."""
        assert job.book is not None
        leader, replica = shard.range.leader, shard.range.replica
        if replica is None or replica not in self._domain.members or not shard.replica_filled:
            return leader
        here = self._domain.members[sender]
        lag = len(shard.undurable)
        if lag and ("worker" not in here.roles or not any(job.book.entries.open_counts())):
            return leader  # who looks at what came of the training wants all of it
        bound = job.book.entries.max_delay(len(self._domain.workers(job)))
        if bound is not None and 2 * lag > bound:
            return leader

        def nearness(node: str) -> tuple[bool, bool, float, bool]:
            member = self._domain.members[node]
            same_rack = member.rack is not None and member.rack == here.rack
            return member.host == here.host, same_rack, self._spare_rate(node, sender), node == leader

        return max((leader, replica), key=nearness)

    def _spare_rate(self, source: str, target: str, users: Mapping[Link, int] | None = None) -> float:
        """What the path has left beside other pulls; never less than a fair part of it."""
        here, there = self._domain.members[source].host, self._domain.members[target].host
        if here == there:
            return MAX_RATE
        users = self._users() if users is None else users
        network = self._domain.network
        return min(network.capacity(link) / (1 + users.get(link, 0)) for link in network.path(here, there))

    def _users(self) -> Counter[Link]:
        """How many pulls each link serves; the parts that one host sends another follow each other."""
        network = self._domain.network
        ways = [
            {(reserved.source, reserved.target) for reserved, _ in pulling.reserved.values()}
            for job in self._domain.jobs.values()
            for pulling in job.pulls.values()
        ]
        return Counter(link for each in ways for way in each for link in network.path(*way))

    def spare_replication(self, job: Job, report: AppliedReport) -> list[Action]:
        """Use a moment's spare capacity before the bound makes the server wait."""
        assert job.book is not None
        assert job.published is not None
        bound = job.published.settings.divergence
        shard = job.book.shards[report.shard]
        replica = shard.range.replica
        if not bound or replica not in self._domain.members or report.replica_version is None:
            return []
        if report.replica_version >= report.version or report.divergence < SPARE_SHARE * bound:
            return []
        rate = self._spare_rate(shard.range.leader, replica)
        why = f"divergence {report.divergence:.3g} of {bound:.3g}"
        return [Send(shard.range.leader, f"server.{report.shard}", Replicate(report.shard, rate, why))]
