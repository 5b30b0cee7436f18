"""What the scheduler believes of the links: what members said of themselves, and what their transfers showed.

A rate that was learned counts. A direction nobody has learned anything of is taken to be like the host's
other direction, and a host of which nothing is known, and whose own figure was a guess, like the fastest of
those that are known: if that is too much it will be the next to be learned.
"""

from __future__ import annotations

from mlfabric.messages import MemberInfo, RatesLearned
from mlfabric.roles.release import MAX_RATE
from mlfabric.topology import Host, Network

Rates = tuple[float | None, float | None]  # up, down


class BandwidthView:
    def __init__(self) -> None:
        self._members: dict[str, MemberInfo] = {}
        self._learned: dict[str, Rates] = {}  # by node

    def add(self, member: MemberInfo) -> None:
        self._members[member.node] = member
        self._learned.pop(member.node, None)

    def remove(self, node: str) -> None:
        self._members.pop(node, None)
        self._learned.pop(node, None)

    def learn(self, node: str, rates: RatesLearned) -> bool:
        """Believe what a node learned, if it is a rate; whether that is news."""
        up, down = rates.up_bytes_per_s, rates.down_bytes_per_s
        sensible = all(rate is None or 0 < rate < MAX_RATE for rate in (up, down))
        if node not in self._members or not sensible or self._learned.get(node) == (up, down):
            return False
        before = self._learned.get(node, (None, None))
        self._learned[node] = (up or before[0], down or before[1])
        return True

    def network(self) -> Network:
        nodes: dict[str, list[str]] = {}
        for name, member in self._members.items():
            nodes.setdefault(member.host, []).append(name)
        learned = {host: self._learned_of(mine) for host, mine in nodes.items()}
        fastest = (
            max((up for up, _ in learned.values() if up), default=None),
            max((down for _, down in learned.values() if down), default=None),
        )
        return Network.of(
            self._host(self._members[mine[-1]], learned[host], fastest) for host, mine in nodes.items()
        )

    def _learned_of(self, nodes: list[str]) -> Rates:
        """Processes of one host share its links: each sees its part."""
        both: list[float | None] = []
        for way in (0, 1):
            seen = [rate for node in nodes if (rate := self._learned.get(node, (None, None))[way])]
            both.append(sum(seen) * len(nodes) / len(seen) if seen else None)
        return both[0], both[1]

    def _host(self, member: MemberInfo, learned: Rates, fastest: Rates) -> Host:
        up, down = learned
        if member.rates_guessed and up is None and down is None:
            up, down = fastest
        if member.rates_guessed:
            up, down = up or down, down or up
        return Host(member.host, up or member.up_bytes_per_s, down or member.down_bytes_per_s, member.rack)
