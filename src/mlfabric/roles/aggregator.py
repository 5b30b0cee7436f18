"""The aggregator: sums what the plan groups and forwards the sum, complete or late with what it has.

It never decides who belongs together; it tells the scheduler whom it left out. Workers keep their updates
until the server's word, so an aggregator that dies loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mlfabric.events import (
    DeadlinePassed,
    Event,
    MessageReceived,
    SchedulerChanged,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    TransferSent,
)
from mlfabric.messages import (
    Aggregate,
    GatherGroup,
    LeaderChanged,
    LeaveOut,
    LeftOut,
    StepSettings,
    UpdatePart,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    AddInto,
    CancelTransfer,
    FreeBuffer,
    Note,
    RefuseTransfer,
    Send,
    StartTransfer,
    WorkerSettings,
)

# Bytes can come before the order they belong to; without one they are given up after this time.
ORPHAN_S = 10.0


@dataclass(slots=True)
class _Gathering:
    deadline: float
    order: GatherGroup | None = None
    shard: int = 0
    epoch: int = 0
    got: dict[str, float] = field(default_factory=dict)  # update -> weight, in order of arrival
    settings: StepSettings | None = None  # the newest of those that came
    excused: set[str] = field(default_factory=set)


class AggregatorStatistics(msgspec.Struct, frozen=True):
    forwarded: int
    summed: int
    left_out: int
    gathering: int


class Aggregator:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._groups: dict[str, _Gathering] = {}
        self._closed: dict[str, None] = {}  # group names, oldest first, bounded
        self._arriving: dict[str, tuple[str, UpdatePart]] = {}  # transfer -> (buffer, about)
        self._forwarding: dict[str, tuple[GatherGroup, tuple[str, ...]]] = {}  # transfer -> (order, in it)
        self._counts = {"forwarded": 0, "summed": 0, "left_out": 0}

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case TransferArriving(about=UpdatePart() as about) if about.group is not None:
                return self._arrive(event, about, about.group, now)
            case TransferArriving():
                return [RefuseTransfer(event.transfer, "an aggregator takes members of groups only")]
            case TransferFinished(transfer=transfer):
                return self._add(transfer)
            case TransferSent(transfer=transfer) if transfer in self._forwarding:
                return [FreeBuffer(_sum_buffer(self._forwarding.pop(transfer)[0].group))]
            case TransferFailed(transfer=transfer, reason=reason):
                return self._failed(transfer, reason)
            case MessageReceived(message=GatherGroup() as order):
                return self._ordered(order, now)
            case MessageReceived(message=LeaveOut() as request):
                return self._excuse(request)
            case MessageReceived(message=LeaderChanged() as change):
                return self._discard_older(change)
            case SchedulerChanged():
                return self._discard_all()
            case DeadlinePassed():
                due = [name for name, gathering in self._groups.items() if gathering.deadline <= now]
                return [action for name in due for action in self._forward(name, "the time to wait was up")]
        return []

    def _arrive(self, event: TransferArriving, about: UpdatePart, group: str, now: float) -> list[Action]:
        if group in self._closed:
            return [RefuseTransfer(event.transfer, f"group {group} has been forwarded")]
        gathering = self._groups.setdefault(
            group, _Gathering(now + ORPHAN_S, shard=about.shard, epoch=about.epoch)
        )
        if about.update in gathering.got:
            return [RefuseTransfer(event.transfer, f"{about.update} is already in group {group}")]
        buffer = f"member/{event.transfer}"
        self._arriving[event.transfer] = (buffer, about)
        return [AcceptTransfer(event.transfer, buffer)]

    def _add(self, transfer: str) -> list[Action]:
        if transfer not in self._arriving:
            return []
        buffer, about = self._arriving.pop(transfer)
        assert about.group is not None
        gathering = self._groups.get(about.group)
        if gathering is None or about.update in gathering.got:
            return [FreeBuffer(buffer)]
        gathering.got[about.update] = about.weight
        gathering.settings = _newer(gathering.settings, about.settings)
        self._counts["summed"] += 1
        return [AddInto(_sum_buffer(about.group), buffer), FreeBuffer(buffer), *self._check(about.group)]

    def _ordered(self, order: GatherGroup, now: float) -> list[Action]:
        if order.group in self._closed:
            return []
        gathering = self._groups.setdefault(order.group, _Gathering(0.0))
        gathering.order, gathering.shard, gathering.epoch = order, order.shard, order.epoch
        gathering.deadline = now + order.forward_in_s
        return self._check(order.group)

    def _excuse(self, request: LeaveOut) -> list[Action]:
        """Confirmed only if the sum goes without it; otherwise the server will have it."""
        gathering = self._groups.get(request.group)
        if gathering is None or request.update in gathering.got:
            return []
        gathering.excused.add(request.update)
        confirmed = LeftOut(request.group, gathering.shard, (request.update,), request.reason)
        return [self._tell(confirmed), *self._check(request.group)]

    def _check(self, group: str) -> list[Action]:
        gathering = self._groups[group]
        if gathering.order is None:
            return []
        wanted = {member.update for member in gathering.order.members} - gathering.excused
        return self._forward(group, "complete") if wanted <= gathering.got.keys() else []

    def _forward(self, group: str, why: str) -> list[Action]:
        gathering = self._groups.pop(group)
        self._close(group)
        order = gathering.order
        if order is None:
            return [FreeBuffer(_sum_buffer(group)), Note("gave-up", f"no order came for group {group}")]
        members = tuple(member for member in order.members if member.update in gathering.got)
        missing = tuple(
            member.update
            for member in order.members
            if member.update not in gathering.got and member.update not in gathering.excused
        )
        actions: list[Action] = []
        if missing:
            self._counts["left_out"] += len(missing)
            actions.append(self._tell(LeftOut(group, order.shard, missing, why)))
        if not members:
            return [*actions, FreeBuffer(_sum_buffer(group))]
        self._counts["forwarded"] += 1
        transfer = f"{self._settings.node}/{group}"
        self._forwarding[transfer] = (order, tuple(member.update for member in members))
        weight = sum(gathering.got[member.update] for member in members)
        return [
            *actions,
            Note(
                "forwarded",
                f"{len(members)} of {len(order.members)}: {why}",
                tuple(m.update for m in members),
            ),
            StartTransfer(
                transfer=transfer,
                node=order.server,
                role=f"server.{order.shard}",
                buffer=_sum_buffer(group),
                about=Aggregate(
                    group, order.shard, order.epoch, members, weight, order.term, gathering.settings
                ),
                rate_bytes_per_s=order.rate_bytes_per_s,
            ),
        ]

    def _failed(self, transfer: str, reason: str) -> list[Action]:
        if transfer in self._arriving:
            buffer, _ = self._arriving.pop(transfer)
            return [FreeBuffer(buffer)]
        if transfer not in self._forwarding:
            return []
        order, updates = self._forwarding.pop(transfer)
        return [
            FreeBuffer(_sum_buffer(order.group)),
            self._tell(
                LeftOut(order.group, order.shard, updates, f"the sum could not be forwarded: {reason}")
            ),
        ]

    def _discard_older(self, change: LeaderChanged) -> list[Action]:
        """Members of groups bound for the old leader are offered again by their workers."""
        actions: list[Action] = []
        for name, gathering in list(self._groups.items()):
            if gathering.shard == change.shard.index and gathering.epoch < change.shard.epoch:
                del self._groups[name]
                self._close(name)
                actions.append(FreeBuffer(_sum_buffer(name)))
        return actions

    def _discard_all(self) -> list[Action]:
        """Whoever grouped these schedules no more; their workers offer them again."""
        actions: list[Action] = []
        for name in list(self._groups):
            del self._groups[name]
            self._close(name)
            actions.append(FreeBuffer(_sum_buffer(name)))
        for transfer, (order, _) in self._forwarding.items():
            actions.append(CancelTransfer(transfer, "the scheduler changed"))
            actions.append(FreeBuffer(_sum_buffer(order.group)))
        self._forwarding.clear()
        return actions

    def _close(self, group: str) -> None:
        self._closed[group] = None
        while len(self._closed) > 10_000:
            del self._closed[next(iter(self._closed))]

    def _tell(self, message: LeftOut) -> Send:
        return Send(self._settings.scheduler, "scheduler", message)

    def next_deadline(self) -> float | None:
        return min((gathering.deadline for gathering in self._groups.values()), default=None)

    def statistics(self) -> AggregatorStatistics:
        return AggregatorStatistics(**self._counts, gathering=len(self._groups))

    def validate(self) -> None:
        assert not self._groups.keys() & self._closed.keys(), "a group is both open and closed"
        for buffer, about in self._arriving.values():
            assert about.group is not None, f"{buffer} belongs to no group"


def _newer(one: StepSettings | None, other: StepSettings | None) -> StepSettings | None:
    """What was published is older than any change of it."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda settings: settings.version)


def _sum_buffer(group: str) -> str:
    return f"sum/{group}"
