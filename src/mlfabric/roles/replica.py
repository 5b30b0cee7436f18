"""The replica: follows a leader, whole message by whole message, and becomes the leader when told.

It changes values, version and applied ids together or not at all. To newcomers that are nearer to it than to
the leader it sends what it holds.
"""

from __future__ import annotations

import msgspec

from mlfabric.events import (
    Event,
    MessageReceived,
    SchedulerChanged,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    TransferSent,
)
from mlfabric.messages import (
    AppliedIds,
    Promote,
    Promoted,
    ReplicaHas,
    ReplicaPart,
    ReplicaReport,
    ServePull,
    Version,
)
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    CreateShard,
    FillShard,
    FreeBuffer,
    Note,
    RefuseTransfer,
    ReplicaSettings,
    Send,
    ServerSettings,
    StartRole,
)
from mlfabric.roles.serving import Serving


class ReplicaStatistics(msgspec.Struct, frozen=True):
    version: int  # -1: not filled yet
    state_version: int
    messages: int


class Replica:
    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._version = -1
        self._state_version = -1
        self._epoch = settings.shard.epoch
        self._applied = AppliedIds()
        self._fail_overs: tuple[Version, ...] = ()
        self._arriving: dict[str, tuple[str, ReplicaPart, str]] = {}  # transfer -> (buffer, about, leader)
        self._serving = Serving(settings.shard.index, self._epoch)
        self._promoted = False
        self._messages = 0

    def begin(self) -> list[Action]:
        return [CreateShard(self._settings.shard, self._settings.rule, self._settings.dtype)]

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case TransferArriving(about=ReplicaPart() as about):
                return self._arrive(event, about)
            case TransferArriving():
                return [RefuseTransfer(event.transfer, "a replica follows its leader only")]
            case TransferFinished(transfer=transfer) if transfer in self._arriving:
                return self._adopt(*self._arriving.pop(transfer))
            case TransferFailed(transfer=transfer) if transfer in self._arriving:
                return [FreeBuffer(self._arriving.pop(transfer)[0])]
            case MessageReceived(message=ServePull() as wanted) if self._version >= 0:
                self._serving.wanted.append(wanted)
                return self._serving.serve(self._version, False, ())
            case TransferSent(transfer=transfer) | TransferFailed(transfer=transfer):
                return self._sent(transfer, failed=isinstance(event, TransferFailed))
            case MessageReceived(message=Promote() as promote):
                return self._promote(promote)
            case SchedulerChanged() if not self._promoted:
                report = ReplicaReport(
                    self._settings.shard.index, self._epoch, self._version, self._state_version
                )
                return [Send(self._settings.scheduler, "scheduler", report)]
        return []

    def _sent(self, transfer: str, failed: bool) -> list[Action]:
        served = self._serving.sent(transfer, failed)
        if served is None:
            return []
        return [Send(self._settings.scheduler, "scheduler", served), *self._serving.free_unused()]

    def end(self) -> list[Action]:
        return [*(FreeBuffer(buffer) for buffer, _, _ in self._arriving.values()), *self._serving.end()]

    def _arrive(self, event: TransferArriving, about: ReplicaPart) -> list[Action]:
        if self._promoted or about.epoch < self._epoch or about.version < self._version:
            return [
                RefuseTransfer(
                    event.transfer, f"version {about.epoch}:{about.version} is behind this replica"
                )
            ]
        buffer = f"replica/{event.transfer}"
        self._arriving[event.transfer] = (buffer, about, event.sender)
        return [AcceptTransfer(event.transfer, buffer)]

    def _adopt(self, buffer: str, about: ReplicaPart, leader: str) -> list[Action]:
        if self._promoted or about.version < self._version:
            return [FreeBuffer(buffer)]
        self._messages += 1
        self._epoch, self._version, self._applied = about.epoch, about.version, about.applied
        self._serving.epoch = about.epoch
        self._fail_overs = about.fail_overs
        if about.with_state:
            self._state_version = about.state_version
        shard = self._settings.shard.index
        return [
            FillShard(shard, buffer, about.with_state, about.version),
            FreeBuffer(buffer),
            Send(
                leader, f"server.{shard}", ReplicaHas(shard, about.epoch, about.version, self._state_version)
            ),
        ]

    def _promote(self, promote: Promote) -> list[Action]:
        shard = self._settings.shard
        if self._promoted or promote.epoch <= self._epoch:
            return []
        answer = Promoted(shard.index, promote.epoch, self._version, self._applied, self._state_version)
        reply = Send(self._settings.scheduler, "scheduler", answer)
        if self._version < 0:
            return [Note("not-promoted", "this replica was never filled", loud=True), reply]
        self._promoted = True
        began = Version(promote.epoch, self._version)
        lead = msgspec.structs.replace(shard, epoch=promote.epoch, replica=None)
        settings = ServerSettings(
            shard=lead,
            rule=self._settings.rule,
            settings=self._settings.settings,
            scheduler=self._settings.scheduler,
            dtype=self._settings.dtype,
            version=self._version,
            applied=self._applied,
            fail_overs=self._fail_overs if promote.orderly else (*self._fail_overs, began),
            promoted=True,
            state_version=self._state_version,
        )
        return [
            *self.end(),
            Note(
                "promoted", f"leads from version {self._version} in epoch {promote.epoch}: {promote.reason}"
            ),
            StartRole(f"server.{shard.index}", settings),
            reply,
        ]

    def next_deadline(self) -> float | None:
        return None

    def statistics(self) -> ReplicaStatistics:
        return ReplicaStatistics(self._version, self._state_version, self._messages)

    def validate(self) -> None:
        assert self._state_version <= self._version, "optimizer state can't be newer than the model"
        self._serving.validate()
