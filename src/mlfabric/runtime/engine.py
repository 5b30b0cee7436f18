"""The engine: one thread that carries a node's decisions out over TCP, with an epoll loop.

It opens a connection to a peer when there is something to say, proves itself on each, paces transfers as
planned, and tells the node what arrived, what was sent, what broke and who is gone. The application's thread
never waits for the network here; it hands calls over and waits for answers.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from mlfabric.client import Answers, Client, NodeCourier
from mlfabric.collective.switchboard import Switchboard
from mlfabric.config import parse_address
from mlfabric.data import DataPlane
from mlfabric.eventlog import FileLog, LogSink
from mlfabric.events import GroupRequested, RatesMeasured
from mlfabric.groupcalls import GroupCalls
from mlfabric.messages import (
    LEFT,
    ControlMessage,
    HeartbeatSeen,
    Members,
    NodeLost,
    SharesPlanned,
    TransferHeader,
)
from mlfabric.node import Node
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Action, FailJob, LimitSending, Note
from mlfabric.runtime.allowance import Allowance
from mlfabric.runtime.clock import HostClock
from mlfabric.runtime.complaints import Complaints, host_of, origin_of
from mlfabric.runtime.connection import Connection
from mlfabric.runtime.counters import Traffic
from mlfabric.runtime.departures import Departures
from mlfabric.runtime.incoming import Incoming
from mlfabric.runtime.link import Closed, Link
from mlfabric.runtime.mesh import LinkEnd, Mesh
from mlfabric.runtime.pacing import notice_death, prepare_socket, share_evenly
from mlfabric.runtime.questions import who_schedules
from mlfabric.runtime.reception import Reception
from mlfabric.runtime.roster import Roster
from mlfabric.runtime.tls import Tls
from mlfabric.runtime.transfers import Transfers
from mlfabric.runtime.trust import Purpose, Refused, encode_refusal
from mlfabric.wire import Kind, WireError, encode_frame, encode_message

logger = logging.getLogger("mlfabric")

EXPIRE_S = 0.01  # how often it is looked whose time is up
MAX_UNADDRESSED = 256  # messages that wait for the address of their receiver


class Engine:
    def __init__(
        self,
        name: str,
        data: DataPlane,
        log: LogSink,
        listen: tuple[str, int],
        secret: bytes = b"",
        insecure: bool = False,
        job_secrets: Mapping[str, bytes] | None = None,
        tls: Tls | None = None,
        pace: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self.allowance = Allowance()
        self.node = Node(name, self, data, log)
        self.mesh = Mesh(Switchboard(name), self._open_link, self._link_ended, pace)
        self.groups = GroupCalls(name, self.mesh.board, self.call, self._request_group)
        self.client = Client(NodeCourier(self.node, self.call, self.groups), self.groups)
        self.answers: Answers = self.client
        self.workers: tuple[str, ...] = ()  # of our job, as the scheduler last told
        self._complaints = Complaints()
        self.reception = Reception(name, listen, secret, insecure, job_secrets, tls, self._complaints)
        self._listener = self.reception.listener
        self._tls = tls
        self._clock = HostClock()
        self._anchor = self._clock.anchor_s
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._mesh_watched = False
        self._roster = Roster(self._selector, self.reception, tls, self._unreachable, self.mesh.drop)
        self._connections = self._roster.connections
        self._addresses = self._roster.addresses
        self._to = self._roster.to
        self._watch = self._roster.watch
        self._links: dict[str, Connection] = {}
        self._links_wanted: set[str] = set()  # peers whose address nobody knows yet
        self._unaddressed: deque[tuple[str, bytes]] = deque(maxlen=MAX_UNADDRESSED)  # messages for such
        self._transfers = Transfers(
            self.node, lambda peer: self._to(peer, Purpose.BULK), self._watch, self.allowance
        )
        self._departures = Departures(self.node, self.mesh, self._transfers, self._roster, self._links)
        self._leaving = self._departures.leaving
        self._incoming = Incoming(
            self.node,
            self.reception,
            self._roster,
            self._transfers,
            self._departures,
            self.know,
            self._become_link,
            self.now,
        )
        self._expire_at = 0.0
        self._stopping = False
        self._linger_until: float | None = None
        self._said_goodbye = False
        self.thread = threading.Thread(target=self._main, name=f"mlfabric-{name}", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        return self.reception.address

    @property
    def traffic(self) -> Traffic:
        return self._transfers.traffic

    @property
    def own_processor_s(self) -> float:
        """Processor time beside that of this process: a thread's is part of it."""
        return 0.0

    @property
    def noticed_s(self) -> list[float]:
        """When the rates of this host were seen to change, lately."""
        return self.mesh.rates.noticed

    def start(self) -> None:
        self.thread.start()

    def stop(self, linger_s: float = 1.0) -> None:
        """Wait for the scheduler's good-bye, for a short while at most, then close everything."""
        self.call(lambda: self._begin_stop(linger_s))
        if threading.current_thread() is not self.thread:
            self.thread.join(linger_s + 5.0)

    def _begin_stop(self, linger_s: float) -> None:
        self._linger_until = time.monotonic() + linger_s

    def know(self, node: str, address: tuple[str, int]) -> None:
        self._addresses[node] = address
        if node in self._links_wanted:
            self._links_wanted.discard(node)
            self._open_link(node)
        waiting = [frame for each, frame in self._unaddressed if each == node]
        if waiting:
            self._unaddressed = deque(
                (entry for entry in self._unaddressed if entry[0] != node), MAX_UNADDRESSED
            )
            connection = self._to(node, Purpose.CONTROL)
            if connection is not None:
                for frame in waiting:
                    connection.queue_frame(frame)
                self._watch(connection)

    def call(self, do: Callable[[], None]) -> None:
        """Have something done on the engine's thread."""
        self._calls.append(do)
        with contextlib.suppress(OSError):  # it is awake already, or gone
            self._wake_out.send(b"x")

    # --- collectives --------------------------------------------------------------------------------------

    def form_group(self, number: int, name: str, nodes: tuple[str, ...]) -> None:
        self.mesh.board.form(number, name, nodes)
        self.mesh.connect(nodes)

    def adopt_shares(self, shares: SharesPlanned) -> None:
        self.mesh.board.adopt(shares)
        self.mesh.flush()

    def probe_links(self, peers: tuple[str, ...]) -> None:
        """Find out about our own link by probing these peers, from now on; none: no more."""
        self.mesh.probe(peers)

    def _request_group(self, name: str, nodes: tuple[str, ...]) -> None:
        self.node.post("participant", GroupRequested(name, nodes))

    # --- the loop ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # the thread must not die silently: whoever waits would wait for ever
            logger.exception("the engine of %s failed", self.name)
            self.answers.resolve(FailJob(f"the engine of {self.name} failed: {error!r}"))
        finally:
            self._close_all()
            self.answers.resolve(FailJob(f"{self.name} has left the fabric"))
            self.answers.end_groups(f"{self.name} has left the fabric")

    def _turn(self) -> None:
        self._watch_mesh()
        links_wait = self.mesh.hurried
        for key, mask in self._selector.select(self._patience()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_in:
                self._drain_wake()
            elif key.fileobj is self.mesh:
                links_wait = True
            else:
                connection: Connection = key.data
                if mask & selectors.EVENT_WRITE:
                    self._write(connection)
                if mask & selectors.EVENT_READ and connection in self._connections:
                    self._read(connection)
        if links_wait or (self.mesh.rests and time.monotonic() >= self.mesh.rest_until):
            self.mesh.serve(time.monotonic())
        while self._calls:
            self._calls.popleft()()
        self.mesh.flush()
        now = time.monotonic()
        if self.allowance.waits and self.allowance.may_send(now):
            self._send_on()
        at = self.node.next_deadline()
        if at is not None and at <= self._anchor + now:
            self.node.tick()
        rates = self.mesh.look(now)
        if rates is not None:
            self.node.post("member", RatesMeasured(*rates))
        flows = self._transfers.look(time.monotonic(), self.mesh.board.busy)
        if flows is not None:
            self.node.post("member", flows)
        if now >= self._expire_at:
            self._expire_at = now + EXPIRE_S
            self._expire()

    def _send_on(self) -> None:
        """Those who had sent as much as they may go on."""
        self.allowance.waits = False
        self.mesh.resume()
        for connection in self._transfers.under_way():
            self._watch(connection)

    def _watch_mesh(self) -> None:
        """While the links rest, what comes over them wakes nobody."""
        watched = not self.mesh.rests
        if watched and not self._mesh_watched:
            self._selector.register(self.mesh, selectors.EVENT_READ)
        elif self._mesh_watched and not watched:
            self._selector.unregister(self.mesh)
        self._mesh_watched = watched

    def _patience(self) -> float:
        if self._calls or self.mesh.hurried:
            return 0.0
        now = time.monotonic()
        until = now + 1.0
        if self.mesh.rests:
            until = min(until, self.mesh.rest_until)
        at = self.node.next_deadline()
        if at is not None:
            until = min(until, at - self._anchor)
        for wanted_at in (
            self.mesh.next_look(now),
            self._transfers.next_look(now),
            self.allowance.next_s(now),
        ):
            if wanted_at is not None:
                until = min(until, wanted_at)
        if self._linger_until is not None or self._leaving:
            until = min(until, now + EXPIRE_S)
        return max(until - now, 0.0)

    def _drain_wake(self) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _expire(self) -> None:
        now = time.monotonic()
        late = [c for c in self._connections if c.deadline_s is not None and now >= c.deadline_s]
        for connection in late:
            if not connection.outbound:
                said = f"closed a connection from {origin_of(connection)}: it did not prove itself in time"
                self._complaints.say(host_of(connection), "late", said)
            self._lose(connection, "no handshake in time" if connection.connected else "no answer")
        self._departures.expire(now)
        if self._linger_until is not None:
            # What the kernel still holds would be lost if a peer's bytes are unread when we close.
            quiet = not any(c.wants_write() or (c.link and c.link.unsent()) for c in self._connections)
            if (quiet and self._said_goodbye) or now >= self._linger_until:
                self._stopping = True

    def _close_all(self) -> None:
        self._roster.close()
        self._listener.close()
        self._selector.close()
        self.mesh.close()
        self._wake_in.close()
        self._wake_out.close()
        if isinstance(self.log, FileLog):
            self.log.close()

    # --- connections ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection = self.reception.accept(self._connections, who_schedules(self.node, self._addresses))
        if connection is not None:
            self._roster.add(connection)

    def _unreachable(self, node: str, reason: str) -> None:
        self.call(lambda: self._departures.down(node, reason))

    def _write(self, connection: Connection) -> None:
        if not connection.connected:
            failure = self._roster.connected(connection)
            if failure is not None:
                self._lose(connection, failure)
                return
        try:
            finished = connection.pump()
        except (Refused, OSError) as error:
            self._end(connection, error)
            return
        self._watch(connection)
        self._transfers.sent(connection, finished)

    def _read(self, connection: Connection) -> None:
        try:
            for frame in connection.receive():
                if frame is None:
                    self._lose(connection, "connection closed")
                    return
                self._incoming.take(connection, frame)
                if connection not in self._connections or connection.link is not None:
                    return
            if self._tls is not None:
                self._read_on(connection)
        except (Refused, WireError, OSError) as error:
            self._end(connection, error)

    def _link_ended(self, link: Link, end: LinkEnd) -> None:
        self._end(self._links[link.peer], end)

    def _end(self, connection: Connection, end: LinkEnd) -> None:
        """A connection can't go on."""
        match end:
            case Closed():
                self._lose(connection, "connection closed")
            case Refused():
                self._refuse(connection, str(end))
            case WireError():
                said = f"closed a connection from {origin_of(connection)}: {end}"
                self._complaints.say(host_of(connection), "garbage", said)
                self._lose(connection, f"it sent something else: {end}")
            case OSError():
                self._lose(connection, (end.strerror or str(end)).lower())

    def _read_on(self, connection: Connection) -> None:
        """What TLS has decrypted already wakes nobody up; and what waited for a read may be written now."""
        if connection in self._connections:
            self._watch(connection)
            if connection.connected and connection.sock.pending():
                self.call(lambda: self._read(connection) if connection in self._connections else None)

    def _refuse(self, connection: Connection, reason: str) -> None:
        said = f"handshake with {origin_of(connection)} failed: {reason}"
        self._complaints.say(host_of(connection), reason, said)
        if not connection.outbound:
            with contextlib.suppress(OSError, Refused):
                connection.sock.send(encode_frame(Kind.HANDSHAKE, encode_refusal(reason)))
        self._lose(connection, reason)

    def _lose(self, connection: Connection, reason: str) -> None:
        if connection in self._connections:
            self._departures.lose(connection, reason)

    # --- links ------------------------------------------------------------------------------------------

    def _become_link(self, connection: Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            connection.pump()  # the handshake's last word goes before anything else
        prepare_socket(connection.sock, bulk=True)
        share_evenly(connection.sock)
        notice_death(connection.sock)
        self._selector.unregister(connection.sock)
        connection.link = Link(
            connection.sock, connection.peer, self.mesh.board, self.allowance, self.traffic
        )
        self._links[connection.peer] = connection
        self.mesh.add(connection.link)

    def _open_link(self, node: str) -> None:
        if self._to(node, Purpose.COLLECTIVE) is None and node not in self._addresses:
            self._links_wanted.add(node)

    # --- what the node asks for -------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.now()

    def clock_offset(self) -> tuple[float, float]:
        return self._clock.offset()

    def send(self, node: str, role: str, message: ControlMessage, cause: str) -> None:
        connection = self._to(node, Purpose.CONTROL)
        if connection is not None:
            connection.queue_frame(encode_message(role, message, cause))
            self._watch(connection)
        elif node not in self._addresses:
            # Whoever sends us something may come before the word of who it is.
            logger.debug("%s: %s for %s waits for its address", self.name, type(message).__name__, node)
            self._unaddressed.append((node, encode_message(role, message, cause)))

    def start_transfer(
        self,
        node: str,
        header: TransferHeader,
        payload: Vector,
        rate_bytes_per_s: float | None,
        chunk_bytes: int = 0,
        follows: str = "",
    ) -> None:
        connection = self._transfers.start(node, header, payload, rate_bytes_per_s, chunk_bytes, follows)
        if connection is None:
            self.call(lambda: self.node.transfer_failed(header.transfer, f"{node} can't be reached"))
        else:
            self._watch(connection)

    def cancel_transfer(self, transfer: str) -> None:
        connection = self._transfers.cancel(transfer)
        if connection is not None:
            self._watch(connection)

    def observe(self, message: Members | HeartbeatSeen | NodeLost) -> None:
        match message:
            case Members(members=members):
                self.workers = tuple(member.node for member in members if "worker" in member.roles)
                for member in members:
                    self.mesh.place(member.node, member.rack)
                    if member.node != self.name and member.address:
                        self.know(member.node, parse_address(member.address))
                # In turn: what was said of them before is still to be done.
                names = [member.node for member in members]
                self.call(lambda: self._departures.listed(names))
            case HeartbeatSeen(sent_s=sent, seen_s=seen):
                self._clock.answered(sent, seen)
            case NodeLost(node=node) if node == self.name:
                self._said_goodbye = True  # the scheduler knows that we leave
            case NodeLost(node=node, reason=reason) if reason != LEFT:
                self.call(lambda: self._departures.give_up(node, reason))

    def resolve(self, action: Action) -> None:
        if isinstance(action, Note):
            logger.warning("%s: %s", action.what, action.reason)
        elif isinstance(action, LimitSending):
            self.allowance.set_limit(action.bytes_per_s, time.monotonic())
        else:
            self.answers.resolve(action)
