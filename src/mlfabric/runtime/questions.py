"""What whoever has the secret may ask: any member who schedules, a scheduler its status or to drain one."""

from __future__ import annotations

from collections.abc import Mapping

from mlfabric.config import format_address
from mlfabric.events import MessageReceived
from mlfabric.messages import (
    DrainAnswered,
    DrainWanted,
    LimitAnswered,
    LimitWanted,
    StatusReport,
    StatusWanted,
)
from mlfabric.node import Node
from mlfabric.roles.scheduler import Scheduler
from mlfabric.wire import Frame, Kind, WireError, decode_message


def who_schedules(node: Node, addresses: Mapping[str, tuple[str, int]]) -> tuple[str, str]:
    """(name, address) of whoever schedules, for those who come to ask; an empty address means this node."""
    if "scheduler" in node.roles:
        return node.name, ""
    address = addresses.get(node.scheduler)
    return node.scheduler, format_address(*address) if address else ""


def answer_question(
    node: Node, asker: str, frame: Frame, only: str | None, now: float
) -> StatusReport | DrainAnswered | LimitAnswered:
    """The answer goes back the same way; `only` is the job that may be asked about, None: all of them."""
    scheduler = node.roles.get("scheduler")
    message = decode_message(frame.body).message if frame.kind is Kind.CONTROL else None
    if not isinstance(scheduler, Scheduler):
        raise WireError("a question to a member that does not schedule")
    if isinstance(message, StatusWanted):
        return scheduler.status(now, only)
    if isinstance(message, DrainWanted):
        answer = scheduler.drain(message.target, only)
        if not answer.error:
            node.post("scheduler", MessageReceived(asker, DrainWanted(message.target, only)))
        return answer
    if isinstance(message, LimitWanted):
        limited = scheduler.limit(message, only)
        if not limited.error:
            node.post("scheduler", MessageReceived(asker, message))
        return limited
    raise WireError("no question of ours")
