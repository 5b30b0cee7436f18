"""Whom a member follows, and how a new scheduler is found when the old one is not heard any more.

Terms are numbered; a member follows the highest it has heard of and votes once per term. Members stand in a
line known to all: the first that is alive offers itself at once, each further one a moment later. It needs
more than half of the members, not counting those whose hosts say that their process is gone. A member that
still hears the scheduler votes for nobody, so a wrong suspicion of one changes nothing.

The old scheduler goes on as long as it hears at least half of the members (`roles.scheduler`); more than half
and at least half can't both be had without a member in common, and that one tells.
"""

from __future__ import annotations

from mlfabric.messages import LEFT, HeartbeatSeen, Members, NewTerm, VoteGiven, VoteWanted
from mlfabric.roles.actions import Action, Note, RenewLease, SchedulerSettings, Send, StartRole, StopRole
from mlfabric.roles.leases import CEILING_S

# How much later each further member in the line offers itself: an election takes a few round trips.
STEP_S = 0.3
# How often a candidate asks those again who have not voted for it.
ASK_S = 0.1


class Succession:
    def __init__(self, me: str, scheduler: str) -> None:
        self._me = me
        self.scheduler = scheduler
        self.term = 0
        self.lease_s = CEILING_S
        self._serial = -1
        self._line: tuple[str, ...] = ()
        self._dead: set[str] = set()  # their hosts say so
        self._lease_until: float | None = None  # none before we are a member
        self._orphaned = False
        self._orderly = False  # the scheduler left by itself
        self._ask_at = 0.0
        self._asking: int | None = None  # the term we want
        self._votes: set[str] = set()
        self._voted: tuple[int, str] = (0, "")
        self._promised_until = 0.0  # after a vote the old scheduler is not counted on
        self._highest = 0

    @property
    def orphaned(self) -> bool:
        """Whether no scheduler is heard."""
        return self._orphaned

    def speaks_to_scheduler(self, now: float) -> bool:
        return self.scheduler not in self._dead and now >= self._promised_until

    # --- the scheduler is heard -------------------------------------------------------------------------

    def joined(self, lease_s: float, now: float) -> None:
        self.lease_s, self._lease_until = lease_s, now + lease_s

    def members_changed(self, message: Members) -> None:
        if (message.term, message.serial) <= (self.term, self._serial):
            return
        self.term, self._serial = message.term, message.serial
        self._line = tuple(member.node for member in message.members)
        self._dead -= set(self._line)

    def seen(self, message: HeartbeatSeen, now: float) -> list[Action]:
        if message.term != self.term or now < self._promised_until or self._lease_until is None:
            return []
        self.lease_s = message.lease_s
        relied = message.lease_s if message.relied_s is None else message.relied_s
        self._lease_until = max(self._lease_until, message.sent_s + relied)
        if self._orphaned and now < self._lease_until:
            self._orphaned, self._asking = False, None
        return [RenewLease(self._lease_until)]

    def followed(self, term: int, scheduler: str, now: float) -> list[Action]:
        """A new scheduler begins its time with a lease; one that lives here and is replaced ends."""
        ends = [StopRole("scheduler")] if self.scheduler == self._me != scheduler else []
        self.term, self.scheduler = term, scheduler
        self._highest = max(self._highest, term)
        self._lease_until = now + self.lease_s
        self._orphaned, self._asking, self._promised_until = False, None, 0.0
        self._dead.discard(scheduler)
        return [*ends]

    # --- it is not heard any more -----------------------------------------------------------------------

    def lost(self, node: str, reason: str, proved: bool, now: float) -> list[Action]:
        """A connection that ended proves nothing; its lease will tell, or its host's word."""
        if proved:
            self._dead.add(node)
        gone = node == self.scheduler and (proved or reason == LEFT)
        if gone and self._lease_until is not None and not self._orphaned:
            return self._orphan(reason, now)
        return self._count(now)

    def passed(self, now: float) -> list[Action]:
        """Time has passed: the lease may have ended, or it may be our turn to ask."""
        if self._lease_until is None:
            return []
        if not self._orphaned and now >= self._lease_until:
            return self._orphan(f"silent for {now - self._lease_until + self.lease_s:.1f} s", now)
        if self._orphaned and now >= self._ask_at:
            return self._ask(now)
        return []

    def _orphan(self, reason: str, now: float) -> list[Action]:
        self._orphaned, self._asking, self._orderly = True, None, reason == LEFT
        if self._orderly:
            self._dead.add(self.scheduler)
        self._ask_at = now + STEP_S * self._place()
        sentence = f"{self.scheduler} schedules no more: {reason}; waiting for {self._next()}"
        return [Note("scheduler-lost", sentence, loud=not self._orderly), *self.passed(now)]

    def _standbys(self) -> list[str]:
        """Who may succeed, in order; the lost one itself only after all others."""
        living = [name for name in self._line if name not in self._dead]
        return sorted(living, key=lambda name: name == self.scheduler)

    def _place(self) -> int:
        standbys = self._standbys()
        return standbys.index(self._me) if self._me in standbys else len(standbys)

    def _next(self) -> str:
        return next(iter(self._standbys()), self._me)

    def _ask(self, now: float) -> list[Action]:
        self._ask_at = now + ASK_S
        if self._me not in self._line:
            return []
        if self._asking is None:
            self._asking = max(self.term, self._voted[0], self._highest) + 1
            self._voted, self._votes = (self._asking, self._me), {self._me}
        wanted = VoteWanted(self._asking, self._serial)
        asked = [name for name in self._standbys() if name not in self._votes]
        return [*(Send(name, "member", wanted) for name in asked), *self._count(now)]

    def _promise(self, now: float) -> None:
        self._promised_until = now + self.lease_s

    def asked(self, candidate: str, message: VoteWanted, now: float) -> list[Action]:
        """Another member wants to schedule."""
        self._highest = max(self._highest, message.term)
        refusal = self._refusal(candidate, message)
        if not refusal:
            self._voted = (message.term, candidate)
            self._asking = None
            self._promise(now)
            self._ask_at = max(self._ask_at, now + STEP_S * (1 + self._place()))
        highest = max(self.term, self._voted[0])
        answer = VoteGiven(message.term, not refusal, refusal, self.term, self.scheduler, highest)
        return [Send(candidate, "member", answer)]

    def _refusal(self, candidate: str, message: VoteWanted) -> str:
        if message.term <= self.term:
            return f"{self.scheduler} schedules in term {self.term}"
        if not self._orphaned:
            return f"{self.scheduler} is still heard here"
        if message.serial < self._serial:
            return "it has not heard of all members"
        if (message.term, candidate) != self._voted and message.term <= self._voted[0]:
            return f"the vote of term {self._voted[0]} went to {self._voted[1]}"
        return ""

    def answered(self, voter: str, message: VoteGiven, now: float) -> NewTerm | list[Action]:
        """A vote, or the news that somebody schedules already."""
        self._highest = max(self._highest, message.highest)
        if message.known_term > self.term:
            return NewTerm(message.known_term, message.scheduler)
        if message.term != self._asking:
            return []
        if message.granted:
            self._promise(now)
            self._votes.add(voter)
            return self._count(now)
        if message.highest >= message.term:
            self._asking = None  # that term is spoilt; the next attempt takes another
            self._ask_at = now + STEP_S * (1 + self._place())
        return []

    def _count(self, now: float) -> list[Action]:
        if self._asking is None:
            return []
        electorate = [name for name in self._line if name not in self._dead]
        if 2 * len(self._votes & set(electorate)) <= len(electorate):
            return []
        term, old = self._asking, self.scheduler
        self._asking = None
        why = f"term {term}: {len(self._votes)} of {len(electorate)} members voted for {self._me}"
        # The old one was silent to most of us for a lease: it counts, but nobody waits for its report.
        silent = tuple(name for name in electorate if name == old != self._me)
        awaited = tuple(name for name in electorate if name not in silent)
        settings = SchedulerSettings(
            self._me, term, self._serial, awaited, self.lease_s, silent=silent, orderly=self._orderly
        )
        tell = [name for name in self._line if name != self._me]
        return [
            Note("took-over", why, loud=not self._orderly),
            StartRole("scheduler", settings),
            *(Send(name, "member", NewTerm(term, self._me)) for name in tell),
            *([Send(old, "scheduler", NewTerm(term, self._me))] if old not in self._line else []),
            Send(self._me, "member", NewTerm(term, self._me)),
        ]

    def next_deadline(self) -> float | None:
        return self._ask_at if self._orphaned else self._lease_until
