"""How a fabric finds another scheduler, and how its members report to it."""

from __future__ import annotations

from mlfabric.messages.membership import MemberInfo
from mlfabric.messages.words import Message


class VoteWanted(Message, frozen=True):
    """A member that hears no scheduler offers itself for this term."""

    term: int
    serial: int  # of the last change of members it has heard of


class VoteGiven(Message, frozen=True):
    term: int
    granted: bool
    reason: str
    known_term: int  # whom the voter follows, so that who missed an election hears of it
    scheduler: str
    highest: int  # the highest term it follows or has voted in


class NewTerm(Message, frozen=True):
    """A majority has voted: this node schedules from now on."""

    term: int
    scheduler: str


class Register(Message, frozen=True):
    """To a new scheduler, or one that had given us up: a member with a label already. Its roles tell what
    they hold; `Reported` ends that."""

    member: MemberInfo
    label: str
    attempt: int
    expected: int = 0


class Reported(Message, frozen=True):
    term: int


class Rejoin(Message, frozen=True):
    """To a node that counts itself a member and is none: register again, unless it has since."""

    attempt: int  # the last the scheduler has heard of
    reason: str
