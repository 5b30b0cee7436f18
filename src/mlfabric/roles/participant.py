"""The participant: gets its node into groups and keeps their plans.

What happens inside a group's operations is not its business: those are the collective engine's, which needs
nobody's word but the members' own.
"""

from __future__ import annotations

import msgspec

from mlfabric.events import Event, GroupRequested, MessageReceived, SchedulerChanged
from mlfabric.messages import (
    GroupFailed,
    GroupFormed,
    GroupHeld,
    GroupPending,
    GroupWanted,
    JobFailed,
    SharesPlanned,
)
from mlfabric.roles.actions import (
    Action,
    AdoptShares,
    FormGroup,
    GroupWaits,
    ResolveGroup,
    Send,
    WorkerSettings,
)


class ParticipantStatistics(msgspec.Struct, frozen=True):
    formed: int
    waiting: int
    plans: int


class Participant:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._waiting: dict[str, GroupRequested] = {}
        self._formed: dict[int, GroupFormed] = {}
        self._shares: dict[int, SharesPlanned] = {}
        self._plans = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case GroupRequested(name=name, nodes=nodes):
                self._waiting[name] = event
                return [self._tell(GroupWanted(name, nodes))]
            case SchedulerChanged():
                # It hears of the groups there are, then of those that are waited for.
                return [
                    *(self._tell(self._held(number)) for number in self._shares),
                    *(self._tell(GroupWanted(name, event.nodes)) for name, event in self._waiting.items()),
                ]
            case MessageReceived(message=GroupPending(name=name, missing=missing)) if name in self._waiting:
                return [GroupWaits(name, missing)]
            case MessageReceived(message=GroupFormed(number=number, name=name, nodes=nodes) as formed):
                if self._waiting.pop(name, None) is None:
                    return []
                for older in [each.number for each in self._formed.values() if each.name == name]:
                    del self._formed[older]
                    self._shares.pop(older, None)
                self._formed[number] = formed
                return [FormGroup(number, name, nodes), ResolveGroup(name, number, nodes)]
            case MessageReceived(message=SharesPlanned() as shares) if shares.group in self._formed:
                self._shares[shares.group] = shares
                self._plans += 1
                return [AdoptShares(shares)]
            case MessageReceived(message=GroupFailed(name=name, reason=reason)):
                return self._fail(name, reason)
            case MessageReceived(message=JobFailed(reason=reason)):
                return [action for name in list(self._waiting) for action in self._fail(name, reason)]
        return []

    def _tell(self, message: GroupWanted | GroupHeld) -> Send:
        return Send(self._settings.scheduler, "scheduler", message)

    def _held(self, number: int) -> GroupHeld:
        formed = self._formed[number]
        return GroupHeld(number, formed.name, formed.nodes, self._shares[number])

    def _fail(self, name: str, reason: str) -> list[Action]:
        return [ResolveGroup(name, 0, (), reason)] if self._waiting.pop(name, None) else []

    def next_deadline(self) -> float | None:
        return None

    def statistics(self) -> ParticipantStatistics:
        return ParticipantStatistics(len(self._formed), len(self._waiting), self._plans)

    def validate(self) -> None:
        assert self._plans == 0 or self._formed, "shares are adopted for groups that exist"
