"""What a process has sent and received so far, by peer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Payload bytes to and from each peer: of updates, models and collectives."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    def count_sent(self, peer: str, count: int) -> None:
        self.sent[peer] = self.sent.get(peer, 0) + count

    def count_received(self, peer: str, count: int) -> None:
        self.received[peer] = self.received.get(peer, 0) + count
