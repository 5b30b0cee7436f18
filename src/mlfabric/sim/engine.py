"""Virtual time: a heap of (time, sequence, call), flows that share links, and the nodes of a fabric.

A node here is the same `Node` as between real hosts; only its driver differs. Faults enter as calls at a
time: a killed node's peers notice a closed connection, a stalled one is silent, a paused one wakes up again
and finds what came meanwhile, one whose cable is cut can neither hear nor be heard. Ties are broken by the
order in which things were asked for, so equal inputs give equal runs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from mlfabric.client import Client, NodeCourier
from mlfabric.collective.frames import HEADER_BYTES, unpack_header
from mlfabric.collective.switchboard import OutFrame, Switchboard
from mlfabric.data import ArrayData, DataPlane
from mlfabric.errors import FabricError
from mlfabric.eventlog import LogSink, NoLog
from mlfabric.events import GroupRequested
from mlfabric.groupcalls import Answer, GroupCalls
from mlfabric.messages import (
    LEFT,
    MEMBER_ROLES,
    ControlMessage,
    HeartbeatSeen,
    MemberInfo,
    Members,
    NodeLost,
    SharesPlanned,
    TransferHeader,
)
from mlfabric.node import Node
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Action, MemberSettings, SchedulerSettings
from mlfabric.sim.flows import CRUMB_BYTES, Flow, share_rates
from mlfabric.topology import Network

# Bytes per second inside a host.
INSIDE = 1e12

# A process: yields a number of seconds to sleep, or an answer to wait for.
Process = Generator[float | Answer, Any, None]


@dataclass(slots=True)
class _Transfer:
    source: str  # node
    target: str  # node
    header: TransferHeader
    payload: Vector
    flow: Flow
    place: Vector | None = None
    under_way: bool = False


@dataclass(slots=True)
class _FrameMoving:
    """A frame of a collective operation on its way; one at a time between each two nodes."""

    source: str
    target: str
    frame: OutFrame
    flow: Flow


@dataclass(slots=True)
class LinkUse:
    """What a link carried."""

    carried_bytes: float = 0.0


@dataclass(slots=True)
class PairUse:
    """What one node sent another in bulk, as a kernel counts it."""

    acked_bytes: float = 0.0
    busy_s: float = 0.0  # so long has it had bytes to send
    raised: float = 0.0  # pace that what follows may keep to, while there is something to send


@dataclass(order=True, slots=True)
class _Call:
    at_s: float
    sequence: int
    do: Callable[[], None] = field(compare=False)


class Simulation:
    """The world: time, links, nodes."""

    def __init__(self, network: Network, latency_s: float = 1e-4, log: LogSink | None = None) -> None:
        self.now = 0.0
        self.network = network
        self.log = log or NoLog()
        self.nodes: dict[str, SimNode] = {}
        self.carried: dict[str, LinkUse] = {str(link): LinkUse() for link in network.links()}
        self.latency_s = latency_s
        self._heap: list[_Call] = []
        self._sequence = 0
        self._capacity = {link: network.capacity(link) for link in network.links()}
        self._transfers: dict[tuple[str, str], _Transfer] = {}  # (source node, transfer)
        self._lines: dict[tuple[str, str], list[_Transfer]] = {}  # under way, by source and target node
        self.sent: defaultdict[tuple[str, str], PairUse] = defaultdict(PairUse)  # (source, target node)
        self.headroom = 1.0  # transfers may go so much faster than planned
        self._frames: dict[tuple[str, str], _FrameMoving] = {}  # (source node, target node)
        self._stuck: list[_FrameMoving] = []  # cut off on their way; TCP sends them again
        self._moved_until = 0.0
        self._flow_round = 0
        self._cut: dict[str, bool] = {}  # node -> whether what is sent meanwhile is lost
        self._held: list[tuple[str, str, Callable[[Node], None]]] = []  # until a cable is whole again

    # --- time -------------------------------------------------------------------------------------------

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, _Call(max(at_s, self.now), self._sequence, do))

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0].at_s <= until_s:
            call = heapq.heappop(self._heap)
            self.now = call.at_s
            call.do()
        self.now = max(self.now, until_s)
        self._move()

    def spawn(self, process: Process, node: SimNode | None = None) -> None:
        """Run a process; what it yields is slept or waited for. It ends with its node."""

        def resume(value: Any = None, error: BaseException | None = None) -> None:
            if node is not None and (not node.alive or node.hold(lambda: resume(value, error))):
                return
            try:
                wanted = process.throw(error) if error is not None else process.send(value)
            except (StopIteration, FabricError):
                return
            if isinstance(wanted, float | int):
                self.at(self.now + wanted, resume)
            else:
                wanted.add_done_callback(lambda done: self.at(self.now, lambda: answered(done)))

        def answered(done: Answer) -> None:
            error = done.exception()
            resume(None if error else done.result(), error)

        self.at(self.now, resume)

    # --- nodes ------------------------------------------------------------------------------------------

    def add_scheduler(self, name: str, host: str) -> SimNode:
        node = SimNode(self, name, host, ArrayData())
        self.nodes[name] = node
        node.node.start_role("scheduler", SchedulerSettings(name))
        return node

    def add_node(
        self,
        name: str,
        host: str,
        scheduler: str,
        roles: tuple[str, ...] = MEMBER_ROLES,
        job: str = "job",
        expected: int = 0,
        data: DataPlane | None = None,
    ) -> SimNode:
        """A member; it joins at once. A node that also schedules keeps its scheduler."""
        node = self.nodes.get(name) or SimNode(self, name, host, data or ArrayData())
        if not node.alive:
            node = SimNode(self, name, host, data or ArrayData())
        self.nodes[name] = node
        place = self.network.hosts[host]
        member = MemberInfo(
            name, host, "", roles, place.up_bytes_per_s, place.down_bytes_per_s, job, place.rack
        )
        node.node.start_role("member", MemberSettings(member, scheduler, expected))
        node.joined = node.client.join()
        return node

    def kill(self, name: str) -> None:
        """The process ends; whoever has a connection to it sees it close."""
        node = self.nodes[name]
        node.alive = False
        self._break_transfers(name, f"{name} closed the connection")
        for other in self.nodes.values():
            if other.alive:
                self.at(self.now + self.latency_s, lambda o=other: o.lost(name, "connection closed", True))  # type: ignore[misc]

    def stall(self, name: str) -> None:
        """The process stops answering without closing anything; only its silence tells."""
        self.nodes[name].alive = False
        self._break_transfers(name, None)

    def drain(self, name: str) -> None:
        """The node asks to leave once nothing needs it."""
        self.nodes[name].client.drain()

    def pause(self, name: str, seconds: float) -> None:
        """The process is stopped and goes on later; what is sent to it meanwhile waits."""
        node = self.nodes[name]
        if node.alive and not node.paused:
            node.paused = True
            self._break_transfers(name, "it timed out", both=True)
            self.at(self.now + seconds, node.wake_up)

    def cut(self, name: str, seconds: float, lossy: bool = False) -> None:
        """Its cable is pulled for a while. TCP sends again what was lost, or its connections break."""
        if name in self._cut:
            return
        self._cut[name] = lossy
        under_way = [t for t in self._transfers.values() if name in (t.source, t.target)]
        self._break_transfers(name, None)
        self.at(self.now + seconds, lambda: self._mend(name, under_way))

    def _mend(self, name: str, broken: list[_Transfer]) -> None:
        lossy = self._cut.pop(name)
        for transfer in broken:
            for each in (transfer.source, transfer.target):
                self._later(each, lambda n, t=transfer: n.transfer_failed(t.header.transfer, "it timed out"))  # type: ignore[misc]
        held = [each for each in self._held if name in each[:2]]
        self._held = [each for each in self._held if name not in each[:2]]
        self._break_transfers(name, "it timed out", both=True)
        for source, target, do in held:
            self.deliver(source, target, do)
        if not lossy:
            self.send_again(name)
        else:
            for other in self.nodes.values():
                if other.name != name:
                    other.lost(name, "connection reset")
                    self.nodes[name].lost(other.name, "connection reset")

    def _break_transfers(self, name: str, reason: str | None, both: bool = False) -> None:
        for pair in [pair for pair in self._frames if name in pair]:
            self._stuck.append(self._frames.pop(pair))
        for key, transfer in list(self._transfers.items()):
            if name not in (transfer.source, transfer.target):
                continue
            self._end_flow(key)
            other = transfer.target if transfer.source == name else transfer.source
            told = [other, name] if both else [other]
            for each in told if reason is not None else ():
                self._later(each, lambda n, t=transfer: n.transfer_failed(t.header.transfer, reason))  # type: ignore[misc]

    def _later(self, name: str, do: Callable[[Node], None]) -> None:
        def call() -> None:
            node = self.nodes[name]
            node.do(lambda: do(node.node))

        self.at(self.now + self.latency_s, call)

    # --- messages and flows -----------------------------------------------------------------------------

    def deliver(self, source: str, target: str, do: Callable[[Node], None]) -> None:
        if target not in self.nodes or not self.nodes[source].alive:
            return
        if source != target and (source in self._cut or target in self._cut):
            if not (self._cut.get(source) or self._cut.get(target)):
                self._held.append((source, target, do))
            return
        self._later(target, do)

    def start_transfer(self, transfer: _Transfer) -> None:
        key = (transfer.source, transfer.header.transfer)
        if key in self._transfers:
            self._end_flow(key)
        self._transfers[key] = transfer

        def arrive(node: Node) -> None:
            if self._transfers.get(key) is not transfer:
                return
            transfer.place = node.transfer_arriving(transfer.source, transfer.header)
            if transfer.place is None:
                self._end_flow(key)
                return
            transfer.under_way = True
            line = self._lines.setdefault((transfer.source, transfer.target), [])
            line.append(transfer)
            if _heads(line)[-1] is transfer:
                self._reshare()

        self.deliver(transfer.source, transfer.target, arrive)

    def cancel_transfer(self, source: str, name: str) -> None:
        transfer = self._transfers.get((source, name))
        if transfer is None:
            return
        self._end_flow((source, name))
        self.deliver(source, transfer.target, lambda node: node.transfer_failed(name, "cancelled"))

    def set_rate(self, host: str, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """The real links change; what the planner believes is its own business."""
        self._move()
        changed = replace(
            self.network.hosts[host], up_bytes_per_s=up_bytes_per_s, down_bytes_per_s=down_bytes_per_s
        )
        self.network = self.network.with_host(changed)
        self._capacity = {link: self.network.capacity(link) for link in self.network.links()}
        self._reshare()

    def _end_flow(self, key: tuple[str, str]) -> None:
        transfer = self._transfers.pop(key)
        if transfer.under_way and self._leave_line(transfer):
            self._reshare()
            transfer.flow.rate = 0.0  # nothing more comes for those who pass it on

    def _leave_line(self, transfer: _Transfer) -> bool:
        """Between two nodes transfers go one after the other, over one connection; whether it was the one
        that moves. What was raised of its pace holds for those behind it."""
        self._move()
        pair = (transfer.source, transfer.target)
        line = self._lines[pair]
        moved = any(head is transfer for head in _heads(line))
        self._lines[pair] = line = [other for other in line if other is not transfer]
        if not line:
            del self._lines[pair]
            self.sent[pair].raised = 0.0
        elif moved:
            line[0].flow.pace = max(line[0].flow.pace, self.sent[pair].raised)
        return moved

    def bulk_flows(self) -> list[tuple[str, str, Flow]]:
        """(source node, target node, flow) of all transfers that have bytes to send, up to now."""
        self._move()
        flows = [
            (*pair, next((head.flow for head in _heads(line) if head.flow.room() > CRUMB_BYTES), None))
            for pair, line in self._lines.items()
        ]
        return [(source, target, flow) for source, target, flow in flows if flow is not None and flow.path]

    def share_again(self) -> None:
        """After the pace of a flow has changed."""
        self._reshare()

    def flow_to(self, target: str, transfer: str) -> Flow | None:
        """A transfer on its way to a node; None: it is there."""
        coming = (t for t in self._transfers.values() if t.target == target)
        return next((t.flow for t in coming if t.header.transfer == transfer), None)

    def raise_pace(self, source: str, target: str, factor: float) -> None:
        """What a node sends another may go faster than planned."""
        flow = self._lines[source, target][0].flow
        flow.pace = self.sent[source, target].raised = factor * flow.pace

    def _moving(self) -> list[Flow]:
        """In the order in which they began: what is passed on comes after what brings it."""
        heads = {id(transfer) for line in self._lines.values() for transfer in _heads(line)}
        flows = [transfer.flow for transfer in self._transfers.values() if id(transfer) in heads]
        return flows + [moving.flow for moving in self._frames.values()]

    # --- frames of collective operations ----------------------------------------------------------------

    def send_frames(self, source: SimNode) -> None:
        """Let every idle link of a node take up the next frame that became possible."""
        woken, begun = source.board.woken, False
        while woken:
            peer = woken.pop()
            target = self.nodes.get(peer)
            if (source.name, peer) in self._frames or target is None or not self._connected(source, target):
                continue
            frame = source.board.next_frame(peer)
            if frame is None:
                continue
            size = len(frame.head) + len(frame.payload or b"")
            path = self.network.path(source.host, target.host)
            flow = Flow(peer, path, float(size), INSIDE if not path else float("inf"))
            self._frames[source.name, peer] = _FrameMoving(source.name, peer, frame, flow)
            begun = True
        if begun:
            self._reshare()

    def _connected(self, source: SimNode, target: SimNode) -> bool:
        return all(node.alive and not node.paused and node.name not in self._cut for node in (source, target))

    def send_again(self, name: str) -> None:
        """A node is back: TCP sends again what was stuck on its way, and what waited goes out."""
        stuck, self._stuck = self._stuck, []
        for moving in stuck:
            if self._connected(self.nodes[moving.source], self.nodes[moving.target]):
                self._frames[moving.source, moving.target] = moving
            elif self.nodes[moving.source].alive and self.nodes[moving.target].alive:
                self._stuck.append(moving)
        self._reshare()
        for node in self.nodes.values():
            if node.alive:
                node.board.woken.update(self.nodes if node.name == name else [name])
                self.send_frames(node)

    def _frame_landed(self, moving: _FrameMoving) -> None:
        source, frame = self.nodes[moving.source], moving.frame
        payload = bytes(frame.payload) if frame.payload is not None else frame.head[HEADER_BYTES:]
        header = unpack_header(frame.head)

        target = self.nodes[moving.target]

        def arrive() -> None:
            place = target.board.place(moving.source, header)
            if place is not None:
                place[:] = payload
            target.board.received(moving.source, header, place)
            self.send_frames(target)

        self.at(self.now + self.latency_s, lambda: target.do(arrive))
        source.board.sent(frame)
        source.board.woken.add(moving.target)
        self.send_frames(source)

    def _move(self) -> None:
        """Let the flows run up to now."""
        passed = self.now - self._moved_until
        self._moved_until = self.now
        if passed <= 0:
            return
        for pair, line in self._lines.items():
            use = self.sent[pair]
            use.acked_bytes += sum(self._move_flow(head.flow, passed) for head in _heads(line))
            use.busy_s += passed
        for moving in self._frames.values():
            self._move_flow(moving.flow, passed)

    def _move_flow(self, flow: Flow, seconds: float) -> float:
        moved = min(flow.rate * seconds, flow.remaining)
        flow.remaining -= moved
        for link in flow.path:
            self.carried[str(link)].carried_bytes += moved
        return moved

    def _reshare(self) -> None:
        self._move()
        moving = self._moving()
        share_rates(moving, self._capacity)
        self._flow_round += 1
        if moving:
            # A byte in a billion is rounding, not data: without it a flow could need another instant for it.
            soonest = min(flow.changes_in_s() for flow in moving)
            if soonest != float("inf"):
                this_round = self._flow_round
                self.at(self.now + soonest, lambda: self._flows_due(this_round))

    def _flows_due(self, flow_round: int) -> None:
        if flow_round != self._flow_round:
            return  # rates changed since
        self._move()
        heads = [transfer for line in self._lines.values() for transfer in _heads(line)]
        done = [t for t in heads if t.flow.remaining <= max(1e-6, 1e-9 * t.payload.nbytes)]
        complete = {id(transfer.flow) for transfer in done}
        for transfer in done:
            del self._transfers[transfer.source, transfer.header.transfer]
            self._leave_line(transfer)
        for transfer in self._transfers.values():
            if id(transfer.flow.ahead) in complete:
                transfer.flow.ahead = None
        landed = [moving for moving in self._frames.values() if moving.flow.remaining <= 1e-3]
        for moving in landed:
            del self._frames[moving.source, moving.target]
        self._reshare()
        for moving in landed:
            if self.nodes[moving.source].alive:
                self._frame_landed(moving)
        for transfer in done:
            assert transfer.place is not None
            transfer.place[:] = transfer.payload
            name = transfer.header.transfer
            self.deliver(transfer.source, transfer.target, lambda node, n=name: node.transfer_finished(n))  # type: ignore[misc]
            source = self.nodes[transfer.source]
            source.do(lambda s=source, n=name: s.node.transfer_sent(n))  # type: ignore[misc]


def _heads(line: list[_Transfer]) -> list[_Transfer]:
    """Those of a line that move: the first, and while it waits for bytes to pass on those behind it."""
    for count, transfer in enumerate(line, 1):
        if transfer.flow.ahead is None:
            return line[:count]
    return line


class SimNode:
    """A node's driver in virtual time."""

    def __init__(self, sim: Simulation, name: str, host: str, data: DataPlane) -> None:
        self.name = name
        self.host = host
        self.alive = True
        self.paused = False
        self._backlog: list[Callable[[], None]] = []
        self.node = Node(name, self, data, sim.log)
        self.board = Switchboard(name)
        groups = GroupCalls(name, self.board, self._call, self._request_group)
        self.client = Client(NodeCourier(self.node, self._now, groups), groups)
        self.joined: Answer | None = None
        self.warnings: list[str] = []
        self._sim = sim
        self._armed: float | None = None

    def _now(self, call: Callable[[], None]) -> None:
        self._sim.at(self._sim.now, lambda: self.do(call))

    def _request_group(self, name: str, nodes: tuple[str, ...]) -> None:
        self.node.post("participant", GroupRequested(name, nodes))

    def hold(self, call: Callable[[], None]) -> bool:
        """Whether the call has to wait until the process goes on."""
        if self.paused:
            self._backlog.append(call)
        return self.paused

    def do(self, call: Callable[[], None]) -> None:
        if self.alive and not self.hold(call):
            call()
            self.rearm()

    def wake_up(self) -> None:
        """Sockets are read before clocks are looked at, as the runtime's engine does."""
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            self.do(call)
        self.do(self.node.tick)
        self._sim.send_again(self.name)

    def _call(self, do: Callable[[], None]) -> None:
        def call() -> None:
            if self.alive:
                do()
                self._sim.send_frames(self)
                self.rearm()

        self._sim.at(self._sim.now, call)

    def rearm(self) -> None:
        """Make sure the roles are woken when the next of them wants to be."""
        at = self.node.next_deadline()
        if at is None or (self._armed is not None and self._armed <= at and self._armed > self._sim.now):
            return
        self._armed = at

        def wake() -> None:
            if self._armed == at:
                self._armed = None
            if not self.paused:
                self.do(self.node.tick)

        self._sim.at(at, wake)

    def lost(self, name: str, reason: str, proved: bool = False) -> None:
        def tell() -> None:
            self.board.lost(name, reason)
            self.node.peer_lost(name, reason, proved)

        self.do(tell)

    # --- what the node asks for -------------------------------------------------------------------------

    def now(self) -> float:
        return self._sim.now

    def clock_offset(self) -> tuple[float, float]:
        return 0.0, 0.0

    def send(self, node: str, role: str, message: ControlMessage, cause: str) -> None:
        self._sim.deliver(self.name, node, lambda n: n.message(self.name, role, message, cause))

    def start_transfer(
        self,
        node: str,
        header: TransferHeader,
        payload: Vector,
        rate_bytes_per_s: float | None,
        chunk_bytes: int = 0,
        follows: str = "",
    ) -> None:
        sim = self._sim
        target = sim.nodes.get(node)
        if target is None or not target.alive:
            sim.at(
                sim.now + sim.latency_s,
                lambda: self.node.transfer_failed(header.transfer, f"{node} can't be reached"),
            )
            return
        path = sim.network.path(self.host, target.host)
        pace = rate_bytes_per_s * sim.headroom if rate_bytes_per_s is not None else float("inf")
        flow = Flow(header.transfer, path, float(max(payload.nbytes, 1)), pace if path else INSIDE)
        flow.ahead = sim.flow_to(self.name, follows) if follows else None
        flow.chunk = float(min(chunk_bytes, payload.nbytes))
        sim.start_transfer(_Transfer(self.name, node, header, payload, flow))

    def cancel_transfer(self, transfer: str) -> None:
        self._sim.cancel_transfer(self.name, transfer)

    def form_group(self, number: int, name: str, nodes: tuple[str, ...]) -> None:
        self.board.form(number, name, nodes)
        self._call(lambda: None)

    def adopt_shares(self, shares: SharesPlanned) -> None:
        self.board.adopt(shares)
        self._call(lambda: None)

    def probe_links(self, peers: tuple[str, ...]) -> None:
        pass  # rates are known here, or learned from what is sent

    def observe(self, message: Members | HeartbeatSeen | NodeLost) -> None:
        if isinstance(message, NodeLost) and message.reason != LEFT:
            self.board.lost(message.node, message.reason)

    def resolve(self, action: Action) -> None:
        if type(action).__name__ == "Note":
            self.warnings.append(action.reason)  # type: ignore[attr-defined]
        else:
            self.client.resolve(action)
