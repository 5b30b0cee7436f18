"""The scheduler's side of groups: who wants one, who has not come, and the standing plan of each.

A group is formed once all of its members have asked for it, so that nobody waits without being told for whom.
From then on its operations need no scheduler; it only sends better shares when the links have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlfabric.messages import (
    GroupFailed,
    GroupFormed,
    GroupHeld,
    GroupPending,
    GroupWanted,
    SharesPlanned,
)
from mlfabric.plan.groups import GroupPlan, plan_group, predicted_time
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.roster import STEPS
from mlfabric.topology import Network

# Those who wait hear whom they wait for this often.
PENDING_S = 1.0
# Rates learned within this time are planned with together.
GATHER_S = 0.03
# A new scheduler does not know how far the last one counted groups and plans.
NUMBERS_PER_TERM = 2**20
# A new plan that is faster by this factor is sent at once, one that is faster by less when it has been so for
# a while: rates that have just been learned are never quite right. Back to equal shares it goes sooner, as
# they need no rates to be right, and so where steps follow each other without a pause.
WORTH_CHANGING_NOW = 1.2
WORTH_CHANGING = 1.05
STEADY_S = 3.0
STEADY_SOON_S = 0.2


@dataclass(slots=True)
class _Forming:
    tell_at: float
    wanted: dict[str, GroupWanted] = field(default_factory=dict)  # by node


@dataclass(slots=True)
class _Formed:
    name: str
    nodes: tuple[str, ...]
    hosts: tuple[str, ...]
    plan: GroupPlan
    plans: int = 1  # how many it has had
    better_since: float | None = None  # since when another plan has been expected to be faster
    holders: set[str] | None = None  # of a group formed by an earlier scheduler: who knows of it


class Groups:
    """The groups of one job."""

    def __init__(self, term: int = 0) -> None:
        self._forming: dict[str, _Forming] = {}  # by name
        self._formed: dict[int, _Formed] = {}  # by number
        self._count = self._first_plan = term * NUMBERS_PER_TERM
        self._replan_at: float | None = None

    def want(self, node: str, message: GroupWanted, now: float) -> None:
        forming = self._forming.setdefault(message.name, _Forming(now + PENDING_S))
        forming.wanted[node] = message

    def check(
        self, name: str, workers: Sequence[str], absent: int, hosts: Mapping[str, str], network: Network
    ) -> list[Action]:
        """Form the group once everybody has come; everybody hears of it if they disagree."""
        forming = self._forming.get(name)
        if forming is None or self._missing(forming, workers, absent):
            return []
        del self._forming[name]
        asked = {message.nodes for message in forming.wanted.values()}
        if len(asked) > 1:
            first, second, *_ = sorted(asked, key=lambda nodes: (len(nodes), nodes))
            reason = (
                f"group {name or 'of all workers'}: its members disagree on who is in it: "
                f"{', '.join(first) or 'all'} or {', '.join(second)}"
            )
            return [Send(node, "participant", GroupFailed(name, reason)) for node in sorted(forming.wanted)]
        nodes = next(iter(asked)) or tuple(workers)
        plan = plan_group(network, [hosts[node] for node in nodes])
        self._formed = {number: group for number, group in self._formed.items() if group.name != name}
        self._count += 1
        self._formed[self._count] = _Formed(name, nodes, tuple(hosts[node] for node in nodes), plan)
        formed = GroupFormed(self._count, name, nodes)
        shares = _shares(self._count, 1, plan)
        return [
            Note("group-formed", f"group {name or 'of all workers'}: {plan.reason}"),
            *(Send(node, "participant", message) for node in nodes for message in (formed, shares)),
        ]

    def _missing(self, forming: _Forming, workers: Sequence[str], absent: int) -> tuple[str, ...]:
        named = next(iter(forming.wanted.values())).nodes
        missing = tuple(node for node in (named or workers) if node not in forming.wanted)
        if not missing and not named and absent:
            return (f"{absent} workers that have not joined",)
        return missing

    def held(self, node: str, message: GroupHeld, hosts: Mapping[str, str]) -> None:
        """A member of a group that an earlier scheduler formed: from now on it is ours to plan for."""
        if any(member not in hosts for member in message.nodes):
            return  # one of whose members somebody is missing is over
        known = self._formed.get(message.number)
        shares = message.shares
        if known is not None:
            known.plans = max(known.plans, shares.plan)
            if known.holders is not None:
                known.holders.add(node)
            return
        plan = GroupPlan(
            shares.reduces,
            shares.broadcasts,
            shares.gathers,
            shares.domains,
            shares.chunk_bytes,
            shares.predicted_s,
            shares.reason,
        )
        places = tuple(hosts[member] for member in message.nodes)
        plans = max(self._first_plan, shares.plan)
        self._formed[message.number] = _Formed(
            message.name, message.nodes, places, plan, plans, holders={node}
        )

    def welcome(self, node: str, message: GroupWanted) -> list[Action]:
        """Who had not heard of a group before the scheduler changed hears of it now."""
        for number, group in self._formed.items():
            unaware = group.holders is not None and node in group.nodes and node not in group.holders
            if group.name == message.name and unaware:
                assert group.holders is not None
                group.holders.add(node)
                group.plans += 1  # all get the same shares, whatever the last scheduler had sent to whom
                shares = _shares(number, group.plans, group.plan)
                formed = GroupFormed(number, group.name, group.nodes)
                return [
                    Send(node, "participant", formed),
                    *(Send(each, "participant", shares) for each in group.nodes),
                ]
        return []

    def rates_changed(self, now: float) -> None:
        """Plan again soon: when a link changes, others are learned anew a moment later."""
        soon = now + GATHER_S
        if self._formed and (self._replan_at is None or self._replan_at > soon):
            self._replan_at = soon

    def replan(self, network: Network, now: float) -> list[Action]:
        """Send better shares where the links have changed and it is worth it."""
        if self._replan_at is None or now < self._replan_at:
            return []
        self._replan_at = None
        actions: list[Action] = []
        for number, group in self._formed.items():
            if any(host not in network.hosts for host in group.hosts):
                continue
            plan = plan_group(network, group.hosts)
            standing_s = predicted_time(network, group.hosts, group.plan)
            gain = standing_s * group.plan.cost / (plan.predicted_s * plan.cost)
            soon = plan.is_equal or group.name.startswith(STEPS)
            if not self._worth_changing(group, gain, now, STEADY_SOON_S if soon else STEADY_S):
                continue
            group.plan, group.better_since = plan, None
            group.plans += 1
            shares = _shares(number, group.plans, plan)
            actions.append(Note("replanned", f"group {group.name or 'of all workers'}: {plan.reason}"))
            actions += [Send(node, "participant", shares) for node in group.nodes]
        return actions

    def _worth_changing(self, group: _Formed, gain: float, now: float, steady_s: float) -> bool:
        if gain <= WORTH_CHANGING:
            group.better_since = None
            return False
        if group.better_since is None:
            group.better_since = now
        if gain > WORTH_CHANGING_NOW or now >= group.better_since + steady_s:
            return True
        self._replan_at = group.better_since + steady_s
        return False

    def tell_pending(self, workers: Sequence[str], absent: int, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, forming in self._forming.items():
            if now < forming.tell_at:
                continue
            forming.tell_at = now + PENDING_S
            pending = GroupPending(name, self._missing(forming, workers, absent))
            actions += [Send(node, "participant", pending) for node in sorted(forming.wanted)]
        return actions

    def lost(self, node: str, reason: str) -> list[Action]:
        """Somebody is gone: its groups are over, and who waits for one with it hears of it."""
        for number in [number for number, group in self._formed.items() if node in group.nodes]:
            del self._formed[number]
        actions: list[Action] = []
        for name, forming in list(self._forming.items()):
            forming.wanted.pop(node, None)
            if all(message.nodes and node not in message.nodes for message in forming.wanted.values()):
                continue
            del self._forming[name]
            failed = GroupFailed(name, f"group {name or 'of all workers'}: {node} {reason}")
            actions += [Send(other, "participant", failed) for other in sorted(forming.wanted)]
        return actions

    def forget(self, is_over: Callable[[str], bool]) -> None:
        """Plan no more for groups, by name, that are over, and wait for nobody to come to them."""
        for number in [number for number, group in self._formed.items() if is_over(group.name)]:
            del self._formed[number]
        for name in [name for name in self._forming if is_over(name)]:
            del self._forming[name]

    def deadlines(self) -> list[float]:
        times = [forming.tell_at for forming in self._forming.values()]
        return times if self._replan_at is None else [*times, self._replan_at]


def _shares(group: int, number: int, plan: GroupPlan) -> SharesPlanned:
    return SharesPlanned(
        group,
        number,
        plan.reduces,
        plan.broadcasts,
        plan.gathers,
        plan.domains,
        plan.chunk_bytes,
        plan.predicted_s,
        plan.reason,
    )
