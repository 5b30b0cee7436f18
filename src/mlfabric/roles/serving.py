"""A holder's side of pulls: one snapshot per version, shared by all who asked for it.

A checkpoint waits until the order has reached its number, and holds back what comes after it, so that all
shards are caught at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlfabric.messages import ModelPart, PullServed, ServePull, Version
from mlfabric.roles.actions import Action, CancelTransfer, FreeBuffer, SnapshotShard, StartTransfer


@dataclass(slots=True)
class _Snapshot:
    buffer: str
    users: int = 0


class Serving:
    def __init__(self, shard: int, epoch: int) -> None:
        self._shard = shard
        self.epoch = epoch
        self.wanted: list[ServePull] = []  # not served yet
        self._snapshots: dict[tuple[int, bool], _Snapshot] = {}  # by version and whether it has state
        self._under_way: dict[str, tuple[ServePull, tuple[int, bool]]] = {}  # transfer -> (pull, snapshot)
        self._sent = 0

    def last_number_allowed(self) -> int | None:
        """Nothing beyond this number may be applied before a checkpoint is taken; None: no such limit."""
        numbers = [pull.after_number for pull in self.wanted if pull.after_number is not None]
        return min(numbers, default=None)

    def serve(self, version: int, applying: bool, open_numbers: Iterable[int]) -> list[Action]:
        """Begin every pull that can be served now."""
        actions: list[Action] = []
        for pull in list(self.wanted):
            after = pull.after_number
            if after is not None and (applying or any(number <= after for number in open_numbers)):
                continue
            self.wanted.remove(pull)
            actions += self._send(pull, version)
        return actions

    def _send(self, pull: ServePull, version: int) -> list[Action]:
        key = (version, pull.with_state)
        actions: list[Action] = []
        if key not in self._snapshots:
            buffer = f"model/{self._shard}/{self.epoch}.{version}.{int(pull.with_state)}"
            self._snapshots[key] = _Snapshot(buffer)
            actions.append(SnapshotShard(self._shard, buffer, pull.with_state))
        snapshot = self._snapshots[key]
        snapshot.users += 1
        self._sent += 1  # the same pull may be asked for twice, after a fault
        transfer = f"{pull.pull}/{self._shard}/{self.epoch}.{version}/{self._sent}"
        self._under_way[transfer] = (pull, key)
        start = StartTransfer(
            transfer=transfer,
            node=pull.node,
            role="worker",
            buffer=snapshot.buffer,
            about=ModelPart(
                pull.pull,
                self._shard,
                Version(self.epoch, version),
                pull.with_state,
                pull.onward,
                pull.chunk_bytes,
            ),
            rate_bytes_per_s=pull.rate_bytes_per_s,
            chunk_bytes=pull.chunk_bytes,
        )
        return [*actions, start]

    def is_transfer(self, transfer: str) -> bool:
        return transfer in self._under_way

    def sent(self, transfer: str, failed: bool = False) -> PullServed | None:
        """What to say of bytes that have left, or failed to; None: no transfer of ours."""
        if transfer not in self._under_way:
            return None
        pull, key = self._under_way.pop(transfer)
        self._snapshots[key].users -= 1
        return PullServed(pull.pull, self._shard, failed, pull.attempt)

    def stop(self, reason: str) -> list[Action]:
        """Send nothing more of what is under way; who waits for it will ask elsewhere."""
        stopped: list[Action] = [CancelTransfer(transfer, reason) for transfer in self._under_way]
        for transfer in list(self._under_way):
            self.sent(transfer)
        return [*stopped, *self.free_unused()]

    def free_unused(self) -> list[Action]:
        unused = [key for key, snapshot in self._snapshots.items() if snapshot.users == 0]
        return [FreeBuffer(self._snapshots.pop(key).buffer) for key in unused]

    def end(self) -> list[Action]:
        """What is on its way goes on; the driver holds its bytes."""
        return [FreeBuffer(snapshot.buffer) for snapshot in self._snapshots.values()]

    def validate(self) -> None:
        for snapshot in self._snapshots.values():
            assert snapshot.users > 0, f"{snapshot.buffer} has no user"
