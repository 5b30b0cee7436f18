"""Replays a recorded log through the pure roles: the same events must yield the same actions.

This is what makes a log worth keeping: a run that went wrong between real hosts can be stepped through
again, role by role, with nothing but the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Union

import msgspec

from mlfabric.eventlog import to_plain
from mlfabric.events import Event, LogRecord
from mlfabric.node import make_role
from mlfabric.roles.actions import Role

_AnyEvent: Any = Union[tuple(Event.__subclasses__())]  # noqa: UP007 - built from a list of types


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay departs from its log: after which record, what was expected, what came."""

    after: str  # id of the event
    role: str
    expected: list[Any]
    got: list[Any]


def replay(records: Iterable[LogRecord]) -> list[Difference]:
    """All differences between a log and its replay; none for an honest log of pure roles."""
    ordered = _by_node(records)
    answers: dict[str, list[Any]] = {}  # id of the cause -> recorded actions
    for record in ordered:
        if record.kind == "action":
            answers.setdefault(record.cause, []).append(_plain(record.record))
    roles: dict[tuple[str, str], Role] = {}
    differences: list[Difference] = []
    for record in ordered:
        key = (record.node, record.role)
        if record.kind == "role":
            roles[key], actions = make_role(record.role, _plain(record.record))
        elif record.kind == "event" and key in roles:
            event = msgspec.convert(_plain(record.record), _AnyEvent)
            actions = roles[key].handle(event, record.at_s)
        else:
            continue
        got = [to_plain(action) for action in actions]
        expected = answers.get(record.id, [])
        if got != expected:
            differences.append(Difference(record.id, f"{record.node}/{record.role}", expected, got))
    return differences


def _plain(record: Any) -> Any:
    return to_plain(record) if isinstance(record, msgspec.Struct) else record


def _by_node(records: Iterable[LogRecord]) -> list[LogRecord]:
    """Several processes may share a log file; each node's own records are in order by their count."""

    def place(record: LogRecord) -> tuple[str, int]:
        node, _, count = record.id.rpartition(":")
        return node, int(count)

    return sorted(records, key=place)
