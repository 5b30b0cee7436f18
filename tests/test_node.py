"""A node hosts roles in whatever world its driver is: here one that only keeps what it is asked for."""

from __future__ import annotations

import numpy as np

from mlfabric.data import ArrayData
from mlfabric.eventlog import MemoryLog
from mlfabric.events import PublishRequested
from mlfabric.messages import (
    ArraySpec,
    ControlMessage,
    HeartbeatSeen,
    JobSettings,
    Members,
    NodeLost,
    PublishFirst,
    RuleSpec,
    ShardRange,
    SharesPlanned,
    TransferHeader,
    TransferRefused,
)
from mlfabric.node import Node
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Action, WorkerSettings
from mlfabric.roles.publication import AGAIN_S


class Keeper:
    """A driver without a network."""

    def __init__(self) -> None:
        self.time = 0.0
        self.started: list[str] = []

    def now(self) -> float:
        return self.time

    def clock_offset(self) -> tuple[float, float]:
        return 0.0, 0.0

    def send(self, node: str, role: str, message: ControlMessage, cause: str) -> None:
        pass

    def start_transfer(
        self,
        node: str,
        header: TransferHeader,
        payload: Vector,
        rate_bytes_per_s: float | None,
        chunk_bytes: int = 0,
        follows: str = "",
    ) -> None:
        self.started.append(header.transfer)

    def cancel_transfer(self, transfer: str) -> None:
        pass

    def form_group(self, number: int, name: str, nodes: tuple[str, ...]) -> None:
        pass

    def probe_links(self, peers: tuple[str, ...]) -> None:
        pass

    def adopt_shares(self, shares: SharesPlanned) -> None:
        pass

    def observe(self, message: Members | HeartbeatSeen | NodeLost) -> None:
        pass

    def resolve(self, action: Action) -> None:
        pass


def test_a_transfer_refused_after_its_last_byte_had_left_is_sent_again() -> None:
    """The leader may hear that it leads after the publisher has heard whom to send to."""
    keeper, data = Keeper(), ArrayData()
    node = Node("w0", keeper, data, MemoryLog())
    node.scheduler = "c0"
    node.start_role("worker", WorkerSettings("w0", "w0", "c0"))
    data.put("publish", np.zeros(10, np.float32))
    arrays = (ArraySpec("w", (10,), "float32"),)
    node.post("worker", PublishRequested("publish", arrays, RuleSpec("Sum"), JobSettings(), 10, "float32"))
    node.message("c0", "worker", PublishFirst((ShardRange(0, 0, 10, "s0"),)), "")
    (transfer,) = keeper.started
    node.transfer_sent(transfer)
    node.message("s0", "member", TransferRefused(transfer, "s0 is no server.0"), "")
    assert node.next_deadline() == AGAIN_S
    keeper.time = AGAIN_S
    node.tick()
    assert keeper.started == [transfer, transfer]
