"""What is written in a job's order book: shards, offers that wait, updates granted, groups that gather."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlfabric.messages import JobSettings, MemberUpdate, OfferUpdate, ShardRange, Version, count_at
from mlfabric.plan.values import Reserved
from mlfabric.roles.release import remainder

# A new scheduler does not know how far the last one numbered: each term has numbers of its own.
NUMBERS_PER_TERM = 2**40


@dataclass(slots=True)
class ShardBook:
    """What the scheduler knows of a shard."""

    range: ShardRange
    version: int = 0
    ready: bool = False
    replica_filled: bool = False
    fail_overs: list[Version] = field(default_factory=list)
    undurable: dict[str, int] = field(default_factory=dict)  # update -> version, not at the replica yet


@dataclass(slots=True)
class WaitingUpdate:
    offer: OfferUpdate
    worker: str  # node
    arrival: int
    since: float
    judging: set[int] | None = None  # shards that have yet to say that they lack it; None: not asked


@dataclass(slots=True)
class GrantedPart:
    shard: int
    slot: int  # number of the slot it belongs to at this shard
    group: str | None
    reserved: Reserved
    finish_s: float
    held: bool = False  # until another node has taken over the shard


@dataclass(slots=True)
class GrantedUpdate:
    offer: OfferUpdate
    worker: str
    number: int
    parts: dict[int, GrantedPart]
    weight: float = 1.0
    again: bool = False  # its parts have been granted a second time in its place


@dataclass(slots=True)
class GatheringGroup:
    group: str
    aggregator: str  # node
    shard: int
    slot: int
    members: set[str]
    reserved: Reserved
    finish_s: float


class Entries:
    def __init__(self, job: str, settings: JobSettings, elements: int, term: int, first_number: int) -> None:
        self.job = job
        self.term = term
        self.settings = settings
        self.elements = elements
        self.shards: dict[int, ShardBook] = {}
        self.waiting: dict[str, WaitingUpdate] = {}
        self.granted: dict[str, GrantedUpdate] = {}
        self.groups: dict[str, GatheringGroup] = {}
        self.taking_over: dict[int, str] = {}  # shard whose lead moves just now -> node that will have it
        self.leaving: dict[tuple[int, str], int] = {}  # (shard, update) -> slot; may still be applied
        self.broken: set[str] = set()  # granted ones that keep their place; their parts are to be sent again
        self.next_number = max(term * NUMBERS_PER_TERM, first_number)
        self.next_group = first_number  # no fewer than there were groups; their names are not used twice
        self.plan_at: float | None = None
        self.counts = {"offers": 0, "granted": 0, "dropped": 0, "dropped_late": 0, "grouped": 0, "again": 0}

    def plan_soon(self, at: float) -> None:
        self.plan_at = at if self.plan_at is None else min(self.plan_at, at)

    def finish_part(self, granted: GrantedUpdate, shard: int) -> None:
        part = granted.parts.pop(shard, None)
        if part is not None and part.group in self.groups:
            gathering = self.groups[part.group]
            gathering.members.discard(granted.offer.update)
            if not gathering.members:
                del self.groups[part.group]
        if not granted.parts:
            self.granted.pop(granted.offer.update, None)

    def max_delay(self, workers: int) -> int | None:
        """The bound in force; "auto" is twice the updates that can be in flight."""
        if self.settings.unbounded:
            return None
        if self.settings.max_delay is not None:
            return self.settings.max_delay
        return 2 * max(workers, 1) * self.settings.in_flight

    def placed_count(self, shard: int) -> int:
        under_way = sum(1 for granted in self.granted.values() if shard in granted.parts)
        leaving = sum(1 for index, _ in self.leaving if index == shard)
        return self.shards[shard].version + under_way + leaving

    def age(self, waiting: WaitingUpdate) -> int:
        """How many updates a shard that lacks this one has taken since it was computed, at the most."""
        offer = waiting.offer
        books = [(self.shards[index], offer.bases[index]) for index in offer.shards]
        return max(book.version - count_at(base, book.fail_overs) for book, base in books)

    def reserved(self, now: float) -> list[Reserved]:
        """What is under way for this job, as far as it should still be."""
        held: list[GrantedPart | GatheringGroup] = list(self.groups.values())
        held += [part for granted in self.granted.values() for part in granted.parts.values()]
        return [remainder(each.reserved, each.finish_s, now) for each in held]

    def member(self, held: WaitingUpdate | GrantedUpdate, shard: int) -> MemberUpdate:
        offer = held.offer
        return MemberUpdate(offer.update, held.worker, offer.bases[shard], offer.floor)

    def arrived_between(self) -> tuple[float, float]:
        """When the first and the last of those that can be decided came."""
        times = [waiting.since for waiting in self.decidable()]
        return min(times), max(times)

    def decidable(self) -> list[WaitingUpdate]:
        """What waits, but for updates whose first way may still lead to the model: nobody decides twice."""
        undecided = {update for _, update in self.leaving}
        return [
            waiting
            for update, waiting in self.waiting.items()
            if update not in undecided and not waiting.judging
        ]

    def has_open(self, worker: str) -> bool:
        """Whether updates of this node, or sums it makes, are without an outcome."""
        return (
            any(waiting.worker == worker for waiting in self.waiting.values())
            or any(granted.worker == worker for granted in self.granted.values())
            or any(gathering.aggregator == worker for gathering in self.groups.values())
        )

    def open_counts(self) -> tuple[int, int]:
        """(updates that wait, updates on their way)."""
        return len(self.waiting), len(self.granted)

    def last_number(self) -> int:
        return self.next_number - 1

    def validate(self) -> None:
        assert not self.waiting.keys() & self.granted.keys(), "an update both waits and is granted"
        for name, gathering in self.groups.items():
            for update in gathering.members:
                granted = self.granted.get(update)
                assert granted is not None, f"{update} in group {name} is not granted"
                assert any(part.group == name for part in granted.parts.values()), (
                    f"{update} is not in {name}"
                )
