"""One process of the fabric: hosts the roles, feeds them events, carries out what they answer.

Everything that touches the world goes through a `Driver`: the runtime's engine, with sockets and wall time,
or the simulator, with flows and virtual time. Everything that touches bytes goes through a `DataPlane`.
What a node does itself is the same under both, and every event and action of it goes into the log.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, cast

import msgspec

from mlfabric.data import DataPlane
from mlfabric.errors import FabricError
from mlfabric.eventlog import LogSink
from mlfabric.events import (
    DeadlinePassed,
    Event,
    LeaseRenewed,
    LogRecord,
    MessageReceived,
    PeerLost,
    SchedulerChanged,
    StepMeasured,
    TransferArriving,
    TransferFailed,
    TransferFinished,
    TransferSent,
)
from mlfabric.messages import (
    LEFT,
    ORDERS,
    SCHEDULER,
    ControlMessage,
    HeartbeatSeen,
    Members,
    NodeLost,
    SharesPlanned,
    TransferHeader,
    TransferRefused,
)
from mlfabric.numerics import Vector
from mlfabric.roles.actions import (
    AcceptTransfer,
    Action,
    AddInto,
    AdoptShares,
    CancelTransfer,
    CommitStep,
    CreateShard,
    DumpShard,
    FillShard,
    FollowScheduler,
    FormGroup,
    FreeBuffer,
    MarkReplicaImage,
    MeasureStep,
    MemberSettings,
    Note,
    ProbeLinks,
    RefuseTransfer,
    RenewLease,
    ReplicaSettings,
    Role,
    SchedulerSettings,
    Send,
    ServerSettings,
    SnapshotShard,
    StartRole,
    StartTransfer,
    StopRole,
    WorkerSettings,
)
from mlfabric.roles.aggregator import Aggregator
from mlfabric.roles.member import Member
from mlfabric.roles.participant import Participant
from mlfabric.roles.replica import Replica
from mlfabric.roles.scheduler import Scheduler
from mlfabric.roles.server import Server
from mlfabric.roles.stepper import Stepper
from mlfabric.roles.worker import Worker

# Transfers whose refusal may still come: what the kernel can hold of them is sent within a round trip.
SENT_LATELY = 256

# Each role with the settings it begins from; the part of a role's name before the dot chooses.
ROLE_TYPES: dict[str, tuple[type[Any], type[Any]]] = {
    "member": (Member, MemberSettings),
    "worker": (Worker, WorkerSettings),
    "aggregator": (Aggregator, WorkerSettings),
    "participant": (Participant, WorkerSettings),
    "stepper": (Stepper, WorkerSettings),
    "server": (Server, ServerSettings),
    "replica": (Replica, ReplicaSettings),
    "scheduler": (Scheduler, SchedulerSettings),
}


def make_role(name: str, settings: Any) -> tuple[Role, list[Action]]:
    """A role in its first state, and what it wants done to begin."""
    role_type, settings_type = ROLE_TYPES[name.split(".")[0]]
    role = role_type(msgspec.convert(settings, settings_type))
    begin = getattr(role, "begin", None)
    return cast(Role, role), begin() if begin else []


class Driver(Protocol):
    """What a node asks of the world it runs in."""

    def now(self) -> float: ...
    def clock_offset(self) -> tuple[float, float]:
        """(offset to the scheduler's clock, uncertainty), in seconds."""
        ...

    def send(self, node: str, role: str, message: ControlMessage, cause: str) -> None: ...
    def start_transfer(
        self,
        node: str,
        header: TransferHeader,
        payload: Vector,
        rate_bytes_per_s: float | None,
        chunk_bytes: int = 0,
        follows: str = "",
    ) -> None:
        """Send bytes; those that an incoming transfer brings (`follows`) as they come."""
        ...

    def cancel_transfer(self, transfer: str) -> None: ...
    def form_group(self, number: int, name: str, nodes: tuple[str, ...]) -> None: ...
    def adopt_shares(self, shares: SharesPlanned) -> None: ...
    def probe_links(self, peers: tuple[str, ...]) -> None: ...
    def observe(self, message: Members | HeartbeatSeen | NodeLost) -> None:
        """Membership news that the driver itself needs: addresses, the clock, who is gone."""
        ...

    def resolve(self, action: Action) -> None:
        """An answer for the application."""
        ...


class Node:
    def __init__(self, name: str, driver: Driver, data: DataPlane, log: LogSink) -> None:
        self.name = name
        self.data = data
        self.roles: dict[str, Role] = {}
        self.scheduler = ""  # whose orders are taken
        self._driver = driver
        self._log = log
        self._count = 0
        self._deadline: float | None = None
        self._deadline_of = -1  # the count of records at which it was asked for
        self._queue: deque[tuple[str, Event, str]] = deque()
        self._running = False
        self._outgoing: dict[str, str] = {}  # transfer -> role that sends it
        self._sent: dict[str, str] = {}  # the same of those sent lately: they may still be refused
        self._incoming: dict[str, tuple[str, str, TransferHeader]] = {}  # transfer -> (role, sender, header)
        self._places: dict[str, Vector] = {}  # accepted transfer -> where its bytes go
        self._local: dict[str, Vector] = {}  # transfer inside this node -> its bytes

    # --- from the driver and the application ------------------------------------------------------------

    def start_role(self, name: str, settings: Any, cause: str = "") -> None:
        role, begin = make_role(name, settings)
        if name.startswith("server."):
            self.roles.pop(name.replace("server", "replica"), None)
        if isinstance(settings, MemberSettings):
            self.scheduler = settings.scheduler
        self.roles[name] = role
        began = self._record(cause, name, "role", type(settings).__name__, settings)
        for action in begin:
            did = self._record(began, name, "action", type(action).__name__, action)
            self._perform(name, action, did)

    def post(self, role: str, event: Event, cause: str = "") -> None:
        """Feed an event to a role, and all that follows from it."""
        self._queue.append((role, event, cause))
        self.run()

    def message(self, sender: str, role: str, message: ControlMessage, cause: str) -> None:
        if isinstance(message, TransferRefused):
            self._refused(message.transfer, f"refused by {sender}: {message.reason}")
            return
        if isinstance(message, ORDERS) and sender != self.scheduler:
            return  # a scheduler that has been succeeded, or a member that is none
        if isinstance(message, Members | HeartbeatSeen | NodeLost):
            self._driver.observe(message)
        self.post(role, MessageReceived(sender, message), cause)
        if isinstance(message, NodeLost) and message.reason != LEFT:
            self.peer_lost(message.node, message.reason)

    def transfer_arriving(self, sender: str, header: TransferHeader) -> Vector | None:
        """Where the bytes of a transfer should go; None: they are not wanted."""
        self._incoming[header.transfer] = (header.role, sender, header)
        event = TransferArriving(header.transfer, sender, header.size_bytes, header.about)
        if header.role in self.roles:
            self.post(header.role, event, header.cause)
        else:
            self._refuse(header.transfer, f"{self.name} is no {header.role}", header.cause)
        return self._places.get(header.transfer)

    def transfer_finished(self, transfer: str) -> None:
        role, _, header = self._incoming.pop(transfer)
        self._places.pop(transfer, None)
        self.post(role, TransferFinished(transfer), header.cause)

    def transfer_sent(self, transfer: str) -> None:
        role = self._outgoing.pop(transfer, None)
        if role is not None:
            self._sent[transfer] = role
            if len(self._sent) > SENT_LATELY:
                del self._sent[next(iter(self._sent))]
            self.post(role, TransferSent(transfer))

    def _refused(self, transfer: str, reason: str) -> None:
        """A short one may be on its way completely before the receiver's word comes."""
        role = self._sent.pop(transfer, None)
        if role is None:
            self.transfer_failed(transfer, reason)
        else:
            self.post(role, TransferFailed(transfer, reason))

    def transfer_failed(self, transfer: str, reason: str) -> None:
        role = self._outgoing.pop(transfer, None)
        if role is not None:
            self._driver.cancel_transfer(transfer)
        elif transfer in self._incoming:
            role = self._incoming.pop(transfer)[0]
            self._places.pop(transfer, None)
        if role is not None:
            self.post(role, TransferFailed(transfer, reason))

    def peer_lost(self, node: str, reason: str, proved: bool = False) -> None:
        for role in list(self.roles):
            self.post(role, PeerLost(node, reason, proved))

    def next_deadline(self) -> float | None:
        """When a role wants to be woken. Roles change their minds only when something happens to them."""
        if self._deadline_of != self._count:
            self._deadline_of = self._count
            self._deadline = self._soonest()
        return self._deadline

    def _soonest(self) -> float | None:
        times = [at for role in self.roles.values() if (at := role.next_deadline()) is not None]
        return min(times, default=None)

    def tick(self) -> None:
        """Tell the roles whose time has come."""
        now = self._driver.now()
        for name, role in list(self.roles.items()):
            at = role.next_deadline()
            if at is not None and at <= now:
                self.post(name, DeadlinePassed())

    def run(self) -> None:
        if self._running:
            return  # events that arise while one is handled wait for their turn
        self._running = True
        try:
            while self._queue:
                self._step(*self._queue.popleft())
        finally:
            self._running = False

    # --- one step ---------------------------------------------------------------------------------------

    def _step(self, name: str, event: Event, cause: str) -> None:
        role = self.roles.get(name)
        if role is None:
            return
        now = self._driver.now()
        happened = self._record(cause, name, "event", type(event).__name__, event, now)
        for action in role.handle(event, now):
            did = self._record(happened, name, "action", type(action).__name__, action, now)
            self._perform(name, action, did)

    def _record(
        self, cause: str, role: str, kind: str, type_: str, record: Any, now: float | None = None
    ) -> str:
        self._count += 1
        id_ = f"{self.name}:{self._count}"
        offset, uncertainty = self._driver.clock_offset()
        at = self._driver.now() if now is None else now
        self._log.write(LogRecord(id_, cause, self.name, role, at, offset, uncertainty, kind, type_, record))
        return id_

    def _perform(self, role: str, action: Action, cause: str) -> None:
        data = self.data
        match action:
            case Send():
                self._send(action, cause)
            case StartTransfer():
                self._start(role, action, cause)
            case CancelTransfer(transfer=transfer):
                if self._outgoing.pop(transfer, None) is not None:
                    self._driver.cancel_transfer(transfer)
            case AcceptTransfer():
                self._accept(role, action, cause)
            case RefuseTransfer(transfer=transfer, reason=reason):
                self._refuse(transfer, reason, cause)
            case AddInto(target=target, source=source):
                data.add_into(target, source)
            case FreeBuffer(buffer=buffer):
                data.free(buffer)
            case CreateShard(shard=shard, rule=rule, dtype=dtype):
                data.create_shard(shard, rule, dtype)
            case FillShard():
                data.fill_shard(action.shard, action.buffer, action.with_state, action.version)
            case MeasureStep():
                came_with = action.settings.rule if action.settings is not None else None
                norms = data.measure_step(
                    action.shard, action.buffer, action.weight, action.members, came_with
                )
                self._queue.append((role, StepMeasured(action.shard, *norms), cause))
            case CommitStep(shard=index):
                data.commit_step(index)
            case SnapshotShard():
                data.snapshot_shard(
                    action.shard, action.buffer, action.with_state, action.with_staged, action.for_replica
                )
            case DumpShard(shard=index, label=label):
                data.dump_shard(index, label)
            case MarkReplicaImage(shard=index, buffer=buffer):
                data.mark_image(index, buffer)
            case StartRole(role=name, settings=settings):
                self.start_role(name, settings, cause)
            case FormGroup(number=number, name=name, nodes=nodes):
                self._driver.form_group(number, name, nodes)
            case AdoptShares(shares=shares):
                self._driver.adopt_shares(shares)
            case ProbeLinks(peers=peers):
                self._driver.probe_links(peers)
            case StopRole(role=name):
                self._stop_role(name, cause)
            case FollowScheduler(scheduler=scheduler, term=term):
                self._follow(scheduler, term, cause)
            case RenewLease(until_s=until):
                for name in self.roles:
                    if name.startswith("server."):
                        self._queue.append((name, LeaseRenewed(until), cause))
            case Note(loud=False):
                pass
            case _:
                self._driver.resolve(action)

    def _send(self, action: Send, cause: str) -> None:
        node = self.scheduler if action.node == SCHEDULER else action.node
        if node != self.name:
            self._driver.send(node, action.role, action.message, cause)
        elif not isinstance(action.message, ORDERS) or self.scheduler == self.name:
            if isinstance(action.message, Members | HeartbeatSeen | NodeLost):
                self._driver.observe(action.message)
            self._queue.append((action.role, MessageReceived(self.name, action.message), cause))

    def _stop_role(self, name: str, cause: str) -> None:
        """A role that ends frees what it holds."""
        role = self.roles.pop(name, None)
        end = getattr(role, "end", None)
        for action in end() if end else []:
            self._perform(name, action, cause)
        kind, _, shard = name.partition(".")
        other = {"server": "replica", "replica": "server"}.get(kind)
        if role is not None and other is not None and f"{other}.{shard}" not in self.roles:
            self.data.drop_shard(int(shard))

    def _follow(self, scheduler: str, term: int, cause: str) -> None:
        """The other roles report to the new scheduler first; the member's own word ends the report."""
        self.scheduler = scheduler
        others = [name for name in self.roles if name not in ("member", "scheduler")]
        for name in (*others, "member"):
            self._queue.append((name, SchedulerChanged(scheduler, term), cause))

    def _start(self, role: str, action: StartTransfer, cause: str) -> None:
        payload, kind = self.data.outgoing(action.buffer, action.ranges, action.scale, action.codec)
        header = TransferHeader(action.transfer, action.role, payload.nbytes, kind, action.about, cause)
        self._outgoing[action.transfer] = role
        self._sent.pop(action.transfer, None)
        if action.node == self.name:
            self._copy_here(header, payload)
        else:
            self._driver.start_transfer(
                action.node, header, payload, action.rate_bytes_per_s, action.chunk_bytes
            )

    def _copy_here(self, header: TransferHeader, payload: Vector) -> None:
        """A transfer inside the node: the receiving role decides in its turn, then the bytes are copied."""
        if header.role not in self.roles:
            sending = self._outgoing.pop(header.transfer)
            gone = TransferFailed(header.transfer, f"{self.name} is no {header.role}")
            self._queue.append((sending, gone, header.cause))
            return
        event = TransferArriving(header.transfer, self.name, header.size_bytes, header.about)
        self._incoming[header.transfer] = (header.role, self.name, header)
        self._local[header.transfer] = payload
        self._queue.append((header.role, event, header.cause))

    def _accept(self, role: str, action: AcceptTransfer, cause: str) -> None:
        if action.transfer not in self._incoming:
            return
        _, _, header = self._incoming[action.transfer]
        try:
            place = self.data.incoming(action.buffer, header.dtype, header.size_bytes, action.start)
        except FabricError as error:
            self._refuse(action.transfer, str(error), cause)
            self._queue.append((role, TransferFailed(action.transfer, str(error)), cause))
            return
        payload = self._local.pop(action.transfer, None)
        if payload is None:
            self._places[action.transfer] = place
            self._pass_on(role, action, place, action.transfer, cause)
            return
        place[:] = payload
        self._pass_on(role, action, place, "", cause)
        del self._incoming[action.transfer]
        self._queue.append((role, TransferFinished(action.transfer), cause))
        sending = self._outgoing.pop(action.transfer, None)
        if sending is not None:
            self._queue.append((sending, TransferSent(action.transfer), cause))

    def _pass_on(self, role: str, action: AcceptTransfer, place: Vector, follows: str, cause: str) -> None:
        kind = self._incoming[action.transfer][2].dtype
        for hop in action.onward:
            header = TransferHeader(hop.transfer, hop.role, place.nbytes, kind, hop.about, cause)
            self._outgoing[hop.transfer] = role
            self._driver.start_transfer(
                hop.node, header, place, hop.rate_bytes_per_s, hop.chunk_bytes, follows
            )

    def _refuse(self, transfer: str, reason: str, cause: str) -> None:
        if transfer not in self._incoming:
            return
        _, sender, _ = self._incoming.pop(transfer)
        if sender == self.name:
            self._local.pop(transfer, None)
            sending = self._outgoing.pop(transfer, None)
            if sending is not None:
                self._queue.append((sending, TransferFailed(transfer, reason), cause))
        else:
            self._driver.send(sender, "member", TransferRefused(transfer, reason), cause)
