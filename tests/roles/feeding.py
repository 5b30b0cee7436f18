"""Feeds a role one event at a time, has it validate itself after each, and sorts what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mlfabric.events import DeadlinePassed, Event, MessageReceived
from mlfabric.messages import ControlMessage, JobSettings, MemberUpdate, RuleSpec, ShardRange, Version
from mlfabric.roles.actions import Action, Note, Role, Send

Kind = TypeVar("Kind")

RULE = RuleSpec("Sum")
SETTINGS = JobSettings(max_delay=4, divergence=0.5)


class Fed:
    """A role and the time it is."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.now = 0.0

    def __call__(self, event: Event) -> list[Action]:
        actions = self.role.handle(event, self.now)
        self.role.validate()
        return actions

    def tell(self, message: ControlMessage, sender: str = "sched") -> list[Action]:
        return self(MessageReceived(sender, message))

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass, waking the role whenever it wants to be woken."""
        until, actions = self.now + seconds, []
        while (at := self.role.next_deadline()) is not None and at <= until:
            self.now = max(at, self.now)
            actions += self(DeadlinePassed())
        self.now = until
        return actions


def of(kind: type[Kind], actions: Sequence[Action]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def one(kind: type[Kind], actions: Sequence[Action]) -> Kind:
    found = of(kind, actions)
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {actions}"
    return found[0]


def sent(kind: type[Kind], actions: Sequence[Action], node: str | None = None) -> list[Kind]:
    """Messages of this kind, to this node or to anybody."""
    return [
        action.message
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, kind) and node in (None, action.node)
    ]


def said(kind: type[Kind], actions: Sequence[Action], node: str | None = None) -> Kind:
    found = sent(kind, actions, node)
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {actions}"
    return found[0]


def notes(what: str, actions: Sequence[Action]) -> list[Note]:
    return [note for note in of(Note, actions) if note.what == what]


def shard(index: int = 0, epoch: int = 0, leader: str = "s0", replica: str | None = "r0") -> ShardRange:
    return ShardRange(index, 10 * index, 10, leader, epoch, replica)


def member(update: str, base: int = 0, epoch: int = 0, floor: int = 0) -> MemberUpdate:
    return MemberUpdate(update, update.split("#")[0], Version(epoch, base), floor)
