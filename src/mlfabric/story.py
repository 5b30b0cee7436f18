"""The story of one update, told from an event log: what happened to it, where, when and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from mlfabric.errors import FabricError
from mlfabric.eventlog import to_plain
from mlfabric.events import LogRecord
from mlfabric.units import format_rate, format_size


class Chapter(msgspec.Struct, frozen=True):
    """One moment of an update's life."""

    at_s: float  # on the scheduler's clock
    since_s: float  # since the story began
    node: str
    role: str
    text: str
    id: str
    cause: str


def tell_story(records: Iterable[LogRecord], update: str) -> list[Chapter]:
    """The chapters in order of time; a FabricError where the log has never heard of the update."""
    records = list(records)
    names = {update, *_groups_with(records, update)}
    moments = []
    for record in records:
        plain = to_plain(record.record) if isinstance(record.record, msgspec.Struct) else record.record
        text = _sentence(record, plain, update, names)
        if text:
            moments.append((record.at_s + _offset(record), record, text))
    if not moments:
        raise FabricError(f"the log has nothing about update {update}; its ids look like w0#12")
    moments.sort(key=lambda moment: moment[0])
    begin = moments[0][0]
    return [
        Chapter(at, at - begin, record.node, record.role, text, record.id, record.cause)
        for at, record, text in moments
    ]


def _offset(record: LogRecord) -> float:
    """What to add to a host's time. An offset smaller than its uncertainty would only shuffle what clocks
    that agree have in order."""
    return record.offset_s if abs(record.offset_s) > record.uncertainty_s else 0.0


def _groups_with(records: list[LogRecord], update: str) -> set[str]:
    groups = set()
    for record in records:
        if record.type != "Send":
            continue
        plain = to_plain(record.record) if isinstance(record.record, msgspec.Struct) else record.record
        message = plain["message"]
        if message["type"] == "GatherGroup" and update in _names(message["members"]):
            groups.add(message["group"])
    return groups


def _names(members: Iterable[dict[str, Any]]) -> list[str]:
    return [member["update"] for member in members]


def _is_about(about: dict[str, Any], names: set[str]) -> bool:
    return about.get("update") in names or about.get("group") in names


def _sentence(record: LogRecord, plain: Any, update: str, names: set[str]) -> str | None:
    """What this record says about the update; None: nothing."""
    tell = _EVENTS.get(record.type) if record.kind == "event" else _ACTIONS.get(record.type)
    return tell(plain, update, names) if tell else None


def _submitted(plain: Any, update: str, names: set[str]) -> str | None:
    if plain["update"] != update:
        return None
    return f"computed: {format_size(plain['size_bytes'])}, norm {plain['norm']:.4g}"


def _received(plain: Any, update: str, names: set[str]) -> str | None:
    message = plain["message"]
    match message["type"]:
        case "Grant" if message["update"] == update:
            ways = "; ".join(_way(part) for part in message["parts"])
            return f"granted place {message['number']}, weight {message['weight']:.3g}: {ways}"
        case "OfferAgain" if message["update"] == update:
            return f"asked to offer it again: {message['reason']}"
        case "LeaderChanged":
            return None
    return None


def _way(part: dict[str, Any]) -> str:
    to = f"shard {part['shard']} to {part['node']}"
    if part.get("group"):
        to += f" as part of group {part['group']}"
    if part["rate_bytes_per_s"] < 1e11:
        to += f" at {format_rate(part['rate_bytes_per_s'] * 8)}"
    if part["start_in_s"] > 0:
        to += f" in {part['start_in_s'] * 1000:.0f} ms"
    return to


def _sent(plain: Any, update: str, names: set[str]) -> str | None:
    message = plain["message"]
    kind = message["type"]
    if kind == "OfferUpdate" and message["update"] == update:
        bases = ", ".join(f"{epoch}:{count}" if epoch else str(count) for epoch, count in message["bases"])
        again = f" again, because {message['again']}" if message.get("again") else ""
        return f"offered to the scheduler{again} (computed from version {bases})"
    if kind == "UpdateApplied" and message["update"] == update:
        _, count = message["version"]
        return f"applied to shard {message['shard']} as version {count}, delay {message['delay_updates']}"
    if kind == "UpdateRefused" and message["update"] == update:
        return f"refused by shard {message['shard']}: {message['reason']}"
    if kind == "LeftOut" and update in message["updates"]:
        return f"left out of group {message['group']}: {message['reason']}"
    return None


def _noted(plain: Any, update: str, names: set[str]) -> str | None:
    return f"{plain['what']}: {plain['reason']}" if update in plain.get("updates", ()) else None


def _started(plain: Any, update: str, names: set[str]) -> str | None:
    if not _is_about(plain["about"], names):
        return None
    rate = plain.get("rate_bytes_per_s")
    pace = f" at {format_rate(rate * 8)}" if rate is not None and rate < 1e11 else ""
    what = "the sum it is in" if plain["about"]["type"] == "Aggregate" else "its bytes"
    return f"sends {what} to {plain['node']}{pace}"


def _arriving(plain: Any, update: str, names: set[str]) -> str | None:
    if not _is_about(plain["about"], names):
        return None
    what = "the sum it is in" if plain["about"]["type"] == "Aggregate" else "its bytes"
    return f"{what} begin to arrive from {plain['sender']}"


def _finished(plain: Any, update: str, names: set[str]) -> str | None:
    transfer = plain["transfer"]
    if transfer.startswith(f"{update}/"):
        return "its bytes are here"
    return "the sum it is in is here" if transfer.rpartition("/")[2] in names else None


def _added(plain: Any, update: str, names: set[str]) -> str | None:
    if not plain["source"].startswith(f"member/{update}/"):
        return None
    return f"added to the sum of group {plain['target'].removeprefix('sum/')}"


def _resolved(plain: Any, update: str, names: set[str]) -> str | None:
    if plain["update"] != update:
        return None
    if plain.get("lost"):
        return f"lost: {plain['reason']}"
    if plain["committed"]:
        return f"outcome: committed, delay {plain.get('delay_updates', 0)}"
    return f"outcome: dropped, {plain['reason']}"


def _failed(plain: Any, update: str, names: set[str]) -> str | None:
    return (
        f"its transfer broke off: {plain['reason']}" if plain["transfer"].startswith(f"{update}/") else None
    )


Teller = Callable[[Any, str, set[str]], str | None]
_EVENTS: dict[str, Teller] = {
    "UpdateSubmitted": _submitted,
    "MessageReceived": _received,
    "TransferArriving": _arriving,
    "TransferFinished": _finished,
    "TransferFailed": _failed,
}
_ACTIONS: dict[str, Teller] = {
    "Send": _sent,
    "Note": _noted,
    "StartTransfer": _started,
    "AddInto": _added,
    "ResolveUpdate": _resolved,
}


def updates_in(records: Iterable[LogRecord]) -> Iterator[str]:
    """The ids of all updates a log tells of, in order of submission."""
    for record in records:
        if record.type == "UpdateSubmitted":
            plain = to_plain(record.record) if isinstance(record.record, msgspec.Struct) else record.record
            yield plain["update"]
