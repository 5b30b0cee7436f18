"""What the scheduler believes of the links: what members said of themselves, and what their transfers showed.

A rate that was learned counts. A direction nobody has learned anything of is taken to be like the host's
other direction. A host of which nothing is known, and whose own figure was a guess, is taken to be twice as
fast as the fastest of those that are known: links are learned when they are full, so it is one that never
was, and if that is too much it will be the next to be learned.
"""

from __future__ import annotations

from typing import Final

from mlfabric.messages import FlowsSeen, MemberInfo, RatesLearned
from mlfabric.roles.blame import LinkBeliefs
from mlfabric.roles.release import MAX_RATE
from mlfabric.topology import Host, Network

Rates = tuple[float | None, float | None]  # up, down
WAYS = ("up", "down")
# How fast a host is that nobody has seen at its limit, by the fastest that was.
UNSEEN: Final = 2.0


class BandwidthView:
    def __init__(self) -> None:
        self._members: dict[str, MemberInfo] = {}
        self._learned: dict[str, Rates] = {}  # by node, from its collectives
        self._beliefs = LinkBeliefs()  # by host

    def add(self, member: MemberInfo) -> None:
        self.remove(member.node)
        self._members[member.node] = member
        if not member.rates_guessed:
            self._beliefs.assume(member.host, "up", member.up_bytes_per_s)
            self._beliefs.assume(member.host, "down", member.down_bytes_per_s)

    def remove(self, node: str) -> None:
        member = self._members.pop(node, None)
        self._learned.pop(node, None)
        if member is not None and all(other.host != member.host for other in self._members.values()):
            self._beliefs.forget(member.host)

    def learn(self, node: str, message: RatesLearned | FlowsSeen, now: float) -> bool:
        """Believe what a node learned, if it is a rate; whether that is news."""
        if node not in self._members:
            return False
        if isinstance(message, FlowsSeen):
            return self._see_flows(node, message, now)
        up, down = message.up_bytes_per_s, message.down_bytes_per_s
        if not all(rate is None or 0 < rate < MAX_RATE for rate in (up, down)):
            return False
        before = self._learned.get(node, (None, None))
        self._learned[node] = (up or before[0], down or before[1])
        host = self._members[node].host
        # What is not said again may have changed since: only what is new counts as seen now.
        news = [
            self._beliefs.learn(host, way, rate, now)
            for way, rate, said in zip(WAYS, self._learned_of(host), (up, down), strict=True)
            if rate is not None and said is not None
        ]
        return any(news)

    def _see_flows(self, node: str, message: FlowsSeen, now: float) -> bool:
        news = False
        for way, total in zip(WAYS, (message.up_bytes_per_s, message.down_bytes_per_s), strict=True):
            if total is not None and 0 <= total < MAX_RATE:
                news |= self._beliefs.total_seen(self._members[node].host, way, total, now, node)
        for flow in message.flows:
            sensible = flow.bytes_per_s is None or 0 <= flow.bytes_per_s < MAX_RATE
            if flow.node in self._members and sensible:
                here, there = self._members[node], self._members[flow.node]
                # What holds flows between racks back may be a link of the racks.
                limited = flow.limited and here.rack == there.rack
                nodes = (node, flow.node)
                rate = flow.bytes_per_s
                news |= self._beliefs.flow_seen(here.host, there.host, rate, limited, now, nodes)
        return news

    def network(self) -> Network:
        hosts = {member.host: member for member in self._members.values()}
        learned = {host: (self._beliefs.rate(host, "up"), self._beliefs.rate(host, "down")) for host in hosts}
        fastest = max((rate or 0.0 for rates in learned.values() for rate in rates), default=0.0) or None
        return Network.of(self._host(member, learned[host], fastest) for host, member in hosts.items())

    def _learned_of(self, host: str) -> Rates:
        """Processes of one host share its links: each sees its part."""
        nodes = [node for node, member in self._members.items() if member.host == host]
        both: list[float | None] = []
        for way in (0, 1):
            seen = [rate for node in nodes if (rate := self._learned.get(node, (None, None))[way])]
            both.append(sum(seen) * len(nodes) / len(seen) if seen else None)
        return both[0], both[1]

    def _host(self, member: MemberInfo, learned: Rates, fastest: float | None) -> Host:
        up, down = learned
        if member.rates_guessed and up is None and down is None:
            up = down = UNSEEN * fastest if fastest is not None else None
        if member.rates_guessed:
            up, down = up or down, down or up
        return Host(member.host, up or member.up_bytes_per_s, down or member.down_bytes_per_s, member.rack)
