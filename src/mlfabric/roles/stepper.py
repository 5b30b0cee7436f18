"""The stepper: a worker's standing where the scheduler calls the steps (`roles.roster`).

It tells where the training stands and passes calls on; the application carries steps out by itself. A new
scheduler hears from it what the last one knew.
"""

from __future__ import annotations

import msgspec

from mlfabric.events import (
    Event,
    MessageReceived,
    SchedulerChanged,
    StepCarriedOut,
    TrainingBegun,
    TrainingEnded,
    TrainingReported,
)
from mlfabric.messages import (
    StepBroken,
    StepCalled,
    StepEnded,
    StepReady,
    StepsOver,
    StepsWithout,
    TrainsIn,
    WayRefused,
)
from mlfabric.roles.actions import Action, CarryOutStep, FailJob, GiveUpStep, ProbeLinks, Send, WorkerSettings


class StepperStatistics(msgspec.Struct, frozen=True):
    holds: int
    taken_part: int
    failed: int


class Stepper:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._way: str | None = None  # of training, where it is not by called steps
        self._training: TrainingReported | None = None
        self._holds = -1
        self._call: StepCalled | None = None  # it is carried out just now
        self._probes = False
        self._taken_part = 0
        self._failed = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case TrainingBegun(way=way):
                self._way = way
                return [self._tell(TrainsIn(way))]
            case TrainingReported():
                self._way, self._training = None, event
                self._holds = max(self._holds, event.applied)
                return [self._tell(self._standing(event))]
            case StepCarriedOut(step=step, holds=holds, error=error, more=more):
                self._carried_out(event)
                return [self._tell(StepEnded(step, holds, error, more))]
            case TrainingEnded():
                self._training = None
                return [self._tell(StepsOver()), *self._probe(())]
            case SchedulerChanged() if self._training is not None:
                return [self._tell(self._standing(self._training))]
            case SchedulerChanged() if self._way is not None:
                return [self._tell(TrainsIn(self._way, again=True))]
            case MessageReceived(message=WayRefused(reason=reason)):
                return [FailJob(reason)]
            case MessageReceived(message=StepCalled() as call):
                self._call = call
                stop = self._probe(()) if len(call.nodes) > 1 else []
                return [*stop, CarryOutStep(call)]
            case MessageReceived(message=StepBroken(group=group, reason=reason)):
                return [GiveUpStep(group, reason)]
            case MessageReceived(message=StepsWithout(peers=peers)) if self._training is not None:
                return self._probe(peers)
        return []

    def _carried_out(self, ended: StepCarriedOut) -> None:
        call, training, step = self._call, self._training, ended.step
        self._call = None
        self._holds = max(self._holds, ended.holds)
        if ended.error is not None:
            self._failed += 1
            return
        self._taken_part += 1
        if training is not None and training.parts:
            self._training = msgspec.structs.replace(training, base=step if ended.more else None)
            return
        if call is None or training is None or training.base is None:
            return
        if training.base <= step and (self._settings.node in call.contributors or step >= training.until):
            self._training = msgspec.structs.replace(training, base=None)  # it is in, or too old by now

    def _standing(self, training: TrainingReported) -> StepReady:
        return StepReady(
            self._holds,
            training.applied,
            training.base,
            training.until,
            training.waits,
            training.size_bytes,
            training.computed_s,
            self._call.group if self._call is not None else None,
            training.parts,
        )

    def _probe(self, peers: tuple[str, ...]) -> list[Action]:
        if not peers and not self._probes:
            return []
        self._probes = bool(peers)
        return [ProbeLinks(tuple(peer for peer in peers if peer != self._settings.node))]

    def _tell(self, message: TrainsIn | StepReady | StepEnded | StepsOver) -> Send:
        return Send(self._settings.scheduler, "scheduler", message)

    def next_deadline(self) -> float | None:
        return None

    def statistics(self) -> StepperStatistics:
        return StepperStatistics(self._holds, self._taken_part, self._failed)

    def validate(self) -> None:
        assert self._call is None or self._settings.node in self._call.nodes, "called to steps it is in"
