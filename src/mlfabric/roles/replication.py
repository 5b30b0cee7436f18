"""A server's side of replication: what its replica holds, what is on the way, who waits for it.

One message at a time is under way; it carries the shard's current values, so repeating it does no harm.
The optimizer state, as large as the weights or larger, travels with every few messages sent in spare time;
those a withheld step waits for leave it out, unless the bound is zero, when the replica must hold everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlfabric.messages import AppliedIds, ReplicaHas, ReplicaPart, UpdateDurable, Version
from mlfabric.roles.actions import (
    Action,
    FreeBuffer,
    MarkReplicaImage,
    Note,
    Send,
    SnapshotShard,
    StartTransfer,
)

RETRY_S = 0.5
# The bound is on the weights; the state may be older. Of so many messages in spare time one has it.
STATE_EVERY = 4


@dataclass(slots=True)
class _UnderWay:
    transfer: str
    buffer: str
    version: int
    with_state: bool
    ahead: bool


class ReplicaLink:
    def __init__(
        self, shard: int, epoch: int, bound: float | None, fail_overs: tuple[Version, ...] = ()
    ) -> None:
        self._shard = shard
        self._epoch = epoch
        self._bound = bound
        self._fail_overs = fail_overs
        self._node: str | None = None
        self._held = -1  # version the replica has acknowledged
        self._state_held = -1
        self._under_way: _UnderWay | None = None
        self._sent = 0
        self._since_state = 0  # messages that went without it
        self._waiters: dict[str, tuple[str, int]] = {}  # update -> (worker, version to reach)
        self.retry_at: float | None = None

    @property
    def node(self) -> str | None:
        return self._node

    def waits_for(self, node: str) -> bool:
        """Whether a message is under way to this node; with its connection its answer is lost too."""
        return self._under_way is not None and self._node == node

    @property
    def filled(self) -> bool:
        return self._node is not None and self._held >= 0

    def allows(self, divergence: float) -> bool:
        """Whether a step that leads to this relative divergence may become visible now."""
        if self._bound is None or not self.filled:
            return True  # no replica to diverge from: the bound is suspended
        return self._bound > 0 and divergence <= self._bound

    def is_level(self, version: int) -> bool:
        return self.filled and self._held >= version and self._under_way is None

    def has_everything(self, version: int) -> bool:
        return self.is_level(version) and self._state_held >= version

    def durable_version(self) -> Version | None:
        if self._node is None:
            return None
        return Version(self._epoch, max(self._held, 0))

    def acknowledged_version(self) -> int | None:
        return self._held if self.filled else None

    def is_transfer(self, transfer: str) -> bool:
        return self._under_way is not None and self._under_way.transfer == transfer

    def assigned(self, node: str | None, reason: str, orderly: bool) -> list[Action]:
        suspended = self.filled and node is None
        self._node, self._held, self._state_held = node, -1, -1
        self.retry_at = None
        actions: list[Action] = []
        if self._under_way is not None:
            actions.append(FreeBuffer(self._under_way.buffer))
            self._under_way = None
        actions.append(MarkReplicaImage(self._shard, None))
        if suspended:
            actions.append(
                Note("bound-suspended", f"no replica of shard {self._shard}: {reason}", loud=not orderly)
            )
        return actions

    def send(
        self,
        version: int,
        applied: AppliedIds,
        reason: str,
        rate: float | None,
        ahead: bool,
        whole: bool = False,
    ) -> list[Action]:
        """Bring the replica to this version, unless a message is under way or it is there already; `whole`:
        with the optimizer state of that version."""
        there = self._held >= version and (not whole or self._state_held >= version)
        if self._node is None or self._under_way is not None or (there and not ahead):
            return []
        self._sent += 1
        self.retry_at = None
        due = rate is not None and self._since_state >= STATE_EVERY - 1
        with_state = whole or due or not self.filled or self._bound == 0 or ahead
        self._since_state = 0 if with_state else self._since_state + 1
        transfer = f"replica.{self._shard}/{self._epoch}.{version}/{self._sent}"
        buffer = f"image/{transfer}"
        self._under_way = _UnderWay(transfer, buffer, version, with_state, ahead)
        state_version = version if with_state else self._state_held
        about = ReplicaPart(
            self._shard, self._epoch, version, applied, with_state, state_version, self._fail_overs
        )
        return [
            Note("replicating", f"version {version}: {reason}"),
            SnapshotShard(self._shard, buffer, with_state, with_staged=ahead, for_replica=True),
            StartTransfer(
                transfer=transfer,
                node=self._node,
                role=f"replica.{self._shard}",
                buffer=buffer,
                about=about,
                rate_bytes_per_s=rate,
            ),
        ]

    def broke(self, now: float) -> list[Action]:
        assert self._under_way is not None
        buffer, self._under_way = self._under_way.buffer, None
        self.retry_at = now + RETRY_S
        return [FreeBuffer(buffer)]

    def retry_due(self, now: float) -> bool:
        return self.retry_at is not None and now >= self.retry_at

    def acknowledged(self, node: str, message: ReplicaHas) -> tuple[list[Action], bool]:
        """What follows from the replica's word, and whether a step that went ahead may now become visible."""
        under_way = self._under_way
        if under_way is None or node != self._node or message.version < under_way.version:
            return [], False
        self._under_way = None
        self._held = message.version
        self._state_held = message.state_version
        actions: list[Action] = [MarkReplicaImage(self._shard, under_way.buffer)]
        for update, (worker, version) in list(self._waiters.items()):
            if version <= self._held:
                del self._waiters[update]
                actions.append(Send(worker, "worker", UpdateDurable(update, self._shard)))
        return actions, under_way.ahead

    def end(self) -> list[Action]:
        return [FreeBuffer(self._under_way.buffer)] if self._under_way is not None else []

    def wait_for(self, update: str, worker: str, version: int) -> list[Action]:
        if self._node is None or self._held >= version:
            return [Send(worker, "worker", UpdateDurable(update, self._shard))]
        self._waiters[update] = (worker, version)
        return []

    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def validate(self) -> None:
        assert self._under_way is None or self._node is not None, "bytes on the way to no replica"
        assert self._state_held <= self._held or self._held < 0, "state newer than the model"
