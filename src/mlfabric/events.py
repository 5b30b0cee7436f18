"""What happens to a role, and the log that every run can write.

A role is fed events and answers with actions (`mlfabric.roles.actions`). Both go into the event log, each
with the id of its cause, so that one update's story is one query, and so that a log replayed through the
pure roles must yield the same actions. Everything here is a value.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlfabric.messages import (
    ArraySpec,
    ControlMessage,
    JobSettings,
    RuleSpec,
    StepSettings,
    TransferAbout,
    Version,
)


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What every event derives from; events are named in the past tense."""


class MessageReceived(Event, frozen=True):
    sender: str  # node
    message: ControlMessage


class TransferArriving(Event, frozen=True):
    """The header of a bulk transfer came; the role accepts or refuses its bytes."""

    transfer: str
    sender: str
    size_bytes: int
    about: TransferAbout


class TransferFinished(Event, frozen=True):
    """All bytes of an accepted transfer are in their buffer."""

    transfer: str


class TransferSent(Event, frozen=True):
    """All bytes of an outgoing transfer have left this process; its buffer is no longer needed for it."""

    transfer: str


class TransferFailed(Event, frozen=True):
    """An incoming or outgoing transfer broke off."""

    transfer: str
    reason: str


class PeerLost(Event, frozen=True):
    node: str
    reason: str
    proved: bool = False  # its host answered that no such process listens there any more


class SchedulerChanged(Event, frozen=True):
    """The node follows this scheduler from now on; what a role holds has to be told to it."""

    scheduler: str
    term: int


class LeaseRenewed(Event, frozen=True):
    """Until then nobody else is made the leader of what this node leads."""

    until_s: float


class DeadlinePassed(Event, frozen=True):
    """The time a role asked for with `next_deadline` has come."""


class StepMeasured(Event, frozen=True):
    """The step a server asked for is computed and staged, not applied."""

    shard: int
    step_norm: float
    divergence: float  # ||w + step - replica|| / ||w + step||; zero where nothing is compared
    weights_norm: float


# --- from the application ---------------------------------------------------------------------------------


class JoinRequested(Event, frozen=True):
    """The node is up and wants to be a member."""


class PublishRequested(Event, frozen=True):
    buffer: str
    arrays: tuple[ArraySpec, ...]
    rule: RuleSpec
    settings: JobSettings
    elements: int
    dtype: str
    state_vectors: int = 0
    version: int = 0
    parts: tuple[ArraySpec, ...] = ()


class UpdateSubmitted(Event, frozen=True):
    update: str
    buffer: str
    size_bytes: int
    norm: float
    bases: tuple[Version, ...] = ()  # of the model it was computed from; none: of the last one pulled
    settings: StepSettings | None = None  # what it is to be applied by; None: as published


class PullRequested(Event, frozen=True):
    pull: str
    with_state: bool = False
    aside: bool = False  # not for the next step: nobody waits for it, it waits for nobody


class DurabilityRequested(Event, frozen=True):
    update: str


class GroupRequested(Event, frozen=True):
    name: str
    nodes: tuple[str, ...] = ()  # in rank order; none: all workers of the job


class RatesMeasured(Event, frozen=True):
    """What this host's links were seen to carry, in payload bytes per second; None: never seen."""

    up_bytes_per_s: float | None
    down_bytes_per_s: float | None


class FlowsMeasured(Event, frozen=True):
    """How fast bulk bytes go to peers: (peer, payload bytes per second, whether the network held them back);
    None when they have just begun, zero when they have all gone. Also what goes out and comes in, all
    peers together."""

    flows: tuple[tuple[str, float | None, bool], ...]
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


class TrainingBegun(Event, frozen=True):
    """This worker wants to train in a mode of which the scheduler does not hear otherwise."""

    way: str


class TrainingReported(Event, frozen=True):
    """Where this worker's training stands, in the words of `messages.StepReady`."""

    applied: int
    base: int | None = None
    until: int = -1
    waits: bool = False
    size_bytes: int = 0
    computed_s: float | None = None
    parts: int = 0


class StepCarriedOut(Event, frozen=True):
    """The steps that were called are over here, in the words of `messages.StepEnded`."""

    step: int
    holds: int
    error: str | None = None
    more: bool = False


class TrainingEnded(Event, frozen=True):
    """This worker takes no part in steps any more."""


class DrainRequested(Event, frozen=True):
    """The node wants to leave once nothing needs it."""


class LeaveRequested(Event, frozen=True):
    pass


# --- the log ----------------------------------------------------------------------------------------------


class LogRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the event log."""

    id: str  # "node:count"
    cause: str  # id of what led to it, empty where nothing did
    node: str
    role: str
    at_s: float  # host time
    offset_s: float  # estimated offset of the host's clock to the scheduler's
    uncertainty_s: float
    kind: str  # "role" (a role began), "event" (fed to the role) or "action" (what the role answered)
    type: str
    record: Any
