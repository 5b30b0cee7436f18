"""The engine: one thread that carries a node's decisions out over TCP, with an epoll loop.

It opens a connection to a peer when there is something to say, proves itself on each, paces transfers as
planned, and tells the node what arrived, what was sent, what broke and who is gone. The application's thread
never waits for the network here; it hands calls over and waits for answers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from mlfabric.client import Client, OperationCall
from mlfabric.collective.switchboard import Switchboard
from mlfabric.config import format_address, is_loopback, parse_address
from mlfabric.data import DataPlane
from mlfabric.errors import ConnectError, FabricError
from mlfabric.eventlog import LogSink
from mlfabric.events import Event, MessageReceived, RatesMeasured
from mlfabric.messages import (
    LEFT,
    ControlMessage,
    DrainAnswered,
    DrainWanted,
    HeartbeatSeen,
    Join,
    MemberInfo,
    Members,
    NodeLost,
    Register,
    SharesPlanned,
    StatusReport,
    StatusWanted,
    TransferHeader,
)
from mlfabric.node import Node
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Action, FailJob, Note
from mlfabric.roles.scheduler import Scheduler
from mlfabric.runtime.connection import Connection, Receiving, Sending
from mlfabric.runtime.mesh import Closed, Link, Mesh
from mlfabric.runtime.pacing import notice_death, prepare_socket, share_evenly
from mlfabric.runtime.tls import Tls
from mlfabric.runtime.trust import NONCE_BYTES, Handshake, Purpose, Refused, encode_refusal
from mlfabric.wire import (
    MAX_CONTROL_BYTES,
    Frame,
    Kind,
    WireError,
    decode_message,
    decode_open,
    encode_frame,
    encode_message,
    encode_open,
)

logger = logging.getLogger("mlfabric")

HANDSHAKE_S = 5.0
CONNECT_S = 5.0
# What a host answers where no process listens any more.
REFUSED = os.strerror(errno.ECONNREFUSED).lower()
LEAVE_S = 0.5  # after one connection of a peer has ended, the others may carry what was under way
MAX_LOOKS = 3  # connections opened to find out whether a peer is gone
QUIET_S = 60.0  # for how long the same complaint about a host is not repeated
MAX_COMPLAINTS = 1000
MAX_STRANGERS = 64  # connections that have not proved themselves yet
OFFSET_SAMPLES = 16
# A peer that the scheduler gave up for its silence, but whose link is open, has so long to speak.
SILENT_LINK_S = 15.0
EXPIRE_S = 0.01  # how often it is looked whose time is up


@dataclass(slots=True)
class Traffic:
    """Payload bytes to and from each peer."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)


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
    ) -> None:
        if not secret and not job_secrets and not insecure and not is_loopback(listen[0]):
            raise FabricError(
                f"refusing to listen on {format_address(*listen)} without a secret: set MLFABRIC_SECRET "
                "on all members, or say insecure=True where the network is trusted"
            )
        self.name = name
        self.job = ""  # named when a connection is opened: its secret is meant
        self.traffic = Traffic()
        self.workers: tuple[str, ...] = ()  # of our job, as the scheduler last told
        self.node = Node(name, self, data, log)
        self.mesh = Mesh(Switchboard(name), self._open_link, self._watch_link)
        self.client = Client(self.node, self._post, self.call, self.mesh.board)
        self._secret = secret
        self._tls = tls
        self._complained: dict[tuple[str, str], float] = {}  # (host, kind) -> until when it is not repeated
        self._job_secrets = job_secrets  # of a scheduler that serves several jobs; None: one secret for all
        self._job_names: dict[str, str] = {}  # node -> the job whose secret it has shown
        self._anchor = time.time() - time.monotonic()
        self._offsets: deque[tuple[float, float]] = deque(maxlen=OFFSET_SAMPLES)  # (round trip, offset)
        self._addresses: dict[str, tuple[str, int]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._connections: set[Connection] = set()
        self._out: dict[tuple[str, Purpose], Connection] = {}
        self._sending: dict[str, Connection] = {}  # transfer -> connection
        self._links: dict[str, Connection] = {}
        self._doubted: dict[str, tuple[float, int, str]] = {}  # given up: (until, bytes heard so far, why)
        self._links_wanted: set[str] = set()  # peers whose address nobody knows yet
        self._leaving: dict[str, tuple[float, str]] = {}  # a connection of theirs ended: (until, reason)
        self._expire_at = 0.0
        self._looked: dict[str, int] = {}  # how often we tried whether a peer is gone
        self._streams = 0
        self._stopping = False
        self._linger_until: float | None = None
        self._said_goodbye = False
        self._thread = threading.Thread(target=self._main, name=f"mlfabric-{name}", daemon=True)
        self._listener = self._listen(listen)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _listen(self, address: tuple[str, int]) -> socket.socket:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(512)
        except OSError as error:
            sock.close()
            raise ConnectError(f"can't listen on {format_address(*address)}: {error.strerror}") from None
        sock.setblocking(False)
        return sock

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        self._thread.start()

    def stop(self, linger_s: float = 1.0) -> None:
        """Wait for the scheduler's good-bye, for a short while at most, then close everything."""
        self.call(lambda: self._begin_stop(linger_s))
        if threading.current_thread() is not self._thread:
            self._thread.join(linger_s + 5.0)

    def _begin_stop(self, linger_s: float) -> None:
        self._linger_until = time.monotonic() + linger_s

    def know(self, node: str, address: tuple[str, int]) -> None:
        self._addresses[node] = address
        if node in self._links_wanted:
            self._links_wanted.discard(node)
            self._open_link(node)

    def call(self, do: Callable[[], None]) -> None:
        """Have something done on the engine's thread."""
        self._calls.append(do)
        with contextlib.suppress(OSError):  # it is awake already, or gone
            self._wake_out.send(b"x")

    def _post(self, role: str, event: Event, before: Callable[[], None]) -> None:
        def do() -> None:
            before()
            self.node.post(role, event)

        self.call(do)

    # --- collectives --------------------------------------------------------------------------------------

    def form_group(self, number: int, name: str, nodes: tuple[str, ...]) -> None:
        self.mesh.board.form(number, name, nodes)
        self.mesh.connect(nodes)

    def adopt_shares(self, shares: SharesPlanned) -> None:
        self.mesh.board.adopt(shares)

    def waiting_for(self, call: OperationCall) -> str:
        """Who or what a collective call waits for, in words."""
        answer: Future[str] = Future()
        self.call(lambda: answer.set_result(self.client.waiting_for(call)))
        try:
            return answer.result(1.0)
        except FutureTimeout:
            return "the engine is busy"

    # --- the loop ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # the thread must not die silently: whoever waits would wait for ever
            logger.exception("the engine of %s failed", self.name)
            self.client.resolve(FailJob(f"the engine of {self.name} failed: {error!r}"))
        finally:
            self._close_all()
            self.client.resolve(FailJob(f"{self.name} has left the fabric"))
            self.client.end_groups(f"{self.name} has left the fabric")

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._patience()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_in:
                self._drain_wake()
            else:
                connection: Connection = key.data
                if mask & selectors.EVENT_WRITE:
                    self._write(connection)
                if mask & selectors.EVENT_READ and connection in self._connections:
                    self._read(connection)
        self.mesh.flush()
        while self._calls:
            self._calls.popleft()()
        self.mesh.flush()
        now = time.monotonic()
        at = self.node.next_deadline()
        if at is not None and at <= self._anchor + now:
            self.node.tick()
        rates = self.mesh.look(now)
        if rates is not None:
            self.node.post("member", RatesMeasured(*rates))
        if now >= self._expire_at:
            self._expire_at = now + EXPIRE_S
            self._expire()

    def _patience(self) -> float:
        if self._calls:
            return 0.0
        now = time.monotonic()
        until = now + 1.0
        at = self.node.next_deadline()
        if at is not None:
            until = min(until, at - self._anchor)
        look_at = self.mesh.next_look(now)
        if look_at is not None:
            until = min(until, look_at)
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
                said = f"closed a connection from {_origin(connection)}: it did not prove itself in time"
                self._complain(_host(connection), "late", said)
            self._lose(connection, "no handshake in time" if connection.connected else "no answer")
        self._look_at_doubted(now)
        for peer, (until, reason) in list(self._leaving.items()):
            if now >= until:
                self._peer_down(peer, reason)
        if self._linger_until is not None:
            # What the kernel still holds would be lost if a peer's bytes are unread when we close.
            quiet = not any(c.wants_write() or (c.link and c.link.unsent()) for c in self._connections)
            if (quiet and self._said_goodbye) or now >= self._linger_until:
                self._stopping = True

    def _close_all(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        self._listener.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # --- connections ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, origin = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        strangers = sum(1 for c in self._connections if not c.ready and not c.outbound)
        if strangers >= MAX_STRANGERS:
            self._complain(origin[0], "too many", "closed a connection: too many prove themselves just now")
            sock.close()
            return
        handshake = Handshake(
            self.name, self._secret_of, secrets.token_bytes(NONCE_BYTES), scheduler=self._scheduler_at()
        )
        prepare_socket(sock, bulk=False)
        secured = self._tls.wrap(sock, called=True) if self._tls is not None else sock
        connection = Connection(secured, handshake, "", False, time.monotonic() + HANDSHAKE_S)
        connection.origin = format_address(*origin[:2])
        self._add(connection)

    def _secret_of(self, job: str) -> bytes | None:
        return self._secret if self._job_secrets is None else self._job_secrets.get(job)

    def _scheduler_at(self) -> tuple[str, str]:
        """(name, address) of whoever schedules, for those who come to ask; an empty address means us."""
        if "scheduler" in self.node.roles:
            return self.name, ""
        address = self._addresses.get(self.node.scheduler)
        return self.node.scheduler, format_address(*address) if address else ""

    def _add(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ
        if connection.wants_write():
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _to(self, node: str, purpose: Purpose) -> Connection | None:
        """The connection that carries this to a node, opened if need be; None: nobody knows where it is."""
        connection = self._out.get((node, purpose))
        if connection is not None:
            return connection
        address = self._addresses.get(node)
        if address is None:
            return None
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        prepare_socket(sock, bulk=purpose is Purpose.BULK)
        job = self._job_names.get(node, "")
        secret = self._secret_of(job) or self._secret
        handshake = Handshake(
            self.name, secret, secrets.token_bytes(NONCE_BYTES), purpose, job=job or self.job
        )
        connection = Connection(sock, handshake, node, True, time.monotonic() + CONNECT_S)
        result = sock.connect_ex(address)
        if result not in (0, 115):  # EINPROGRESS
            sock.close()
            self.call(lambda: self._peer_down(node, os.strerror(result).lower()))
            return None
        connection.queue_frame(encode_frame(Kind.HANDSHAKE, handshake.begin()), during_handshake=True)
        self._out[node, purpose] = connection
        self._add(connection)
        return connection

    def _write(self, connection: Connection) -> None:
        if not connection.connected:
            error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._lose(connection, os.strerror(error).lower())
                return
            connection.connected = True
            if self._tls is not None:
                self._selector.unregister(connection.sock)
                connection.sock = self._tls.wrap(connection.sock, called=False)
                self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        try:
            finished = connection.pump()
            if connection.link is not None:
                connection.link.pump()
        except Refused as refusal:
            self._refuse(connection, str(refusal))
            return
        except OSError as error:
            self._lose(connection, (error.strerror or str(error)).lower())
            return
        self._watch(connection)
        for sending in finished:
            self._sending.pop(sending.transfer, None)
            sent = self.traffic.sent
            sent[connection.peer] = sent.get(connection.peer, 0) + len(sending.payload)
            self.node.transfer_sent(sending.transfer)

    def _read(self, connection: Connection) -> None:
        try:
            if connection.link is not None:
                connection.link.receive()
                return
            for frame in connection.receive():
                if frame is None:
                    self._lose(connection, "connection closed")
                    return
                self._on_frame(connection, frame)
                if connection not in self._connections or connection.link is not None:
                    return
            if self._tls is not None:
                self._read_on(connection)
        except Closed:
            self._lose(connection, "connection closed")
        except Refused as refusal:
            self._refuse(connection, str(refusal))
        except WireError as error:
            said = f"closed a connection from {_origin(connection)}: {error}"
            self._complain(_host(connection), "garbage", said)
            self._lose(connection, f"it sent something else: {error}")
        except OSError as error:
            self._lose(connection, (error.strerror or str(error)).lower())

    def _complain(self, host: str, kind: str, sentence: str) -> None:
        """Say it once per host and kind and minute: strangers must not fill the log."""
        now = time.monotonic()
        if now < self._complained.get((host, kind), 0.0):
            return
        if len(self._complained) >= MAX_COMPLAINTS:
            self._complained.clear()
        self._complained[host, kind] = now + QUIET_S
        logger.warning("%s", sentence)

    def _read_on(self, connection: Connection) -> None:
        """What TLS has decrypted already wakes nobody up; and what waited for a read may be written now."""
        if connection in self._connections:
            self._watch(connection)
            if connection.connected and connection.sock.pending():
                self.call(lambda: self._read(connection) if connection in self._connections else None)

    def _refuse(self, connection: Connection, reason: str) -> None:
        said = f"handshake with {_origin(connection)} failed: {reason}"
        self._complain(_host(connection), reason, said)
        if not connection.outbound:
            with contextlib.suppress(OSError, Refused):
                connection.sock.send(encode_frame(Kind.HANDSHAKE, encode_refusal(reason)))
        self._lose(connection, reason)

    def _lose(self, connection: Connection, reason: str) -> None:
        """A connection is gone. Its peer is gone with the last one; others may still carry bytes."""
        if connection not in self._connections:
            return
        known = connection.ready or connection.outbound
        passing = connection.purpose in (Purpose.PROBE, Purpose.QUERY)
        self._drop(connection)
        peer = connection.peer
        if not known or passing or not peer:
            return
        self._fail_transfers(connection, reason)
        if connection.purpose is Purpose.COLLECTIVE:
            self.mesh.lose(peer, reason)
        if any(other.peer == peer for other in self._connections):
            self._leaving.setdefault(peer, (time.monotonic() + LEAVE_S, reason))
        else:
            self._peer_down(peer, reason)
            if connection.connected:
                self._look_for(peer)

    def _look_for(self, peer: str) -> None:
        """Where its process is gone, its host says so at once. A process that is just dying may still take a
        connection and drop it, so it is tried more than once, and not for ever."""
        looked = self._looked.get(peer, 0)
        if looked < MAX_LOOKS:
            self._looked[peer] = looked + 1
            self._to(peer, Purpose.CONTROL)

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.close()
        for key, held in list(self._out.items()):
            if held is connection:
                del self._out[key]

    def _peer_down(self, peer: str, reason: str) -> None:
        self._leaving.pop(peer, None)
        self._doubted.pop(peer, None)
        for connection in [c for c in self._connections if c.peer == peer]:
            self._drop(connection)
            self._fail_transfers(connection, reason)
        self.mesh.lose(peer, reason)
        self.node.peer_lost(peer, reason, proved=reason == REFUSED)

    def _peer_given_up(self, peer: str, reason: str) -> None:
        """The scheduler hears nothing of a peer. Its place in the order is taken by others at once, but a
        process that is merely busy, with the interpreter held, goes on with its collectives."""
        link = self._links.get(peer)
        if link is None or link not in self._connections or link.link is None:
            self._peer_down(peer, reason)
            return
        self._leaving.pop(peer, None)
        for connection in [c for c in self._connections if c.peer == peer and c is not link]:
            self._drop(connection)
            self._fail_transfers(connection, reason)
        self._doubted[peer] = (time.monotonic() + SILENT_LINK_S, link.link.received_bytes, reason)
        self.node.peer_lost(peer, reason)

    def _look_at_doubted(self, now: float) -> None:
        for peer, (until, received, reason) in list(self._doubted.items()):
            connection = self._links.get(peer)
            if connection is None or connection not in self._connections or connection.link is None:
                del self._doubted[peer]
            elif connection.link.received_bytes != received:
                del self._doubted[peer]  # it speaks
            elif now >= until:
                self._peer_down(peer, reason)

    def _fail_transfers(self, connection: Connection, reason: str) -> None:
        broken = [sending.transfer for sending in connection.sendings if not sending.aborted]
        broken += [receiving.transfer for receiving in connection.receiving.values()]
        for transfer in broken:
            self._sending.pop(transfer, None)
            self.node.transfer_failed(transfer, f"{connection.peer}: {reason}")

    # --- frames -----------------------------------------------------------------------------------------

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is Kind.HANDSHAKE:
            self._on_handshake(connection, frame.body)
        elif not connection.ready:
            raise WireError("it spoke before proving itself")
        elif connection.purpose is Purpose.QUERY:
            self._on_query(connection, frame)
        elif frame.kind is Kind.CONTROL:
            envelope = decode_message(frame.body)
            message = envelope.message
            if isinstance(message, Join | Register):
                self._check_job(connection, message.member)
                self.know(message.member.node, parse_address(message.member.address))
            self.node.message(connection.peer, envelope.role, message, envelope.cause)
        elif frame.kind is Kind.OPEN:
            self._on_open(connection, frame)
        elif frame.kind is Kind.DATA:
            self._on_data(connection, frame)
        else:
            receiving = connection.receiving.pop(frame.stream, None)
            if receiving is not None and receiving.place is not None:
                self.node.transfer_failed(receiving.transfer, "cancelled by its sender")

    def _on_handshake(self, connection: Connection, body: bytes) -> None:
        handshake = connection.handshake
        if connection.ready:
            raise WireError("a second handshake")
        answer = handshake.feed(body)
        if handshake.purpose is Purpose.PROBE and not connection.outbound and self._taken(handshake.peer):
            raise Refused(f"the name {handshake.peer} is taken by a living member; choose another")
        if self._job_names.get(handshake.peer, handshake.job) != handshake.job:
            raise Refused(f"the name {handshake.peer} is taken by a member of another job; choose another")
        if answer is not None:
            connection.queue_frame(encode_frame(Kind.HANDSHAKE, answer), during_handshake=True)
        if handshake.done:
            connection.peer = handshake.peer
            connection.reader.limit_bytes = MAX_CONTROL_BYTES
            connection.become_ready()
            if handshake.purpose is Purpose.COLLECTIVE:
                self._become_link(connection)
            self._looked.pop(connection.peer, None)
        self._watch(connection)

    def _become_link(self, connection: Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            connection.pump()  # the handshake's last word goes before anything else
        prepare_socket(connection.sock, bulk=True)
        share_evenly(connection.sock)
        notice_death(connection.sock)
        connection.link = Link(connection.sock, connection.peer, self.mesh.board)
        self._links[connection.peer] = connection
        self.mesh.add(connection.link)

    def _open_link(self, node: str) -> None:
        if self._to(node, Purpose.COLLECTIVE) is None and node not in self._addresses:
            self._links_wanted.add(node)

    def _watch_link(self, link: Link) -> None:
        connection = self._links.get(link.peer)
        if connection is not None and connection in self._connections:
            self._watch(connection)

    def _on_query(self, connection: Connection, frame: Frame) -> None:
        """Somebody asks; the answer goes back the same way."""
        scheduler = self.node.roles.get("scheduler")
        message = decode_message(frame.body).message if frame.kind is Kind.CONTROL else None
        only = connection.handshake.job if self._job_secrets is not None else None
        answer: StatusReport | DrainAnswered
        if not isinstance(scheduler, Scheduler):
            raise WireError("a question to a member that does not schedule")
        if isinstance(message, StatusWanted):
            answer = scheduler.status(self.now(), only)
        elif isinstance(message, DrainWanted):
            answer = scheduler.drain(message.target, only)
            if not answer.error:
                wanted = DrainWanted(message.target, only)
                self.node.post("scheduler", MessageReceived(connection.peer, wanted))
        else:
            raise WireError("no question of ours")
        connection.queue_frame(encode_message("", answer))
        self._watch(connection)

    def _check_job(self, connection: Connection, member: MemberInfo) -> None:
        """A secret opens the job it belongs to and no other; nor does a name of another job."""
        if self._job_secrets is None:
            return
        if member.job != connection.handshake.job or member.node != connection.peer:
            raise WireError(f"{connection.peer} of job {connection.handshake.job} speaks for {member.node}")
        self._job_names[member.node] = member.job

    def _taken(self, name: str) -> bool:
        return name == self.name or any(
            c.ready and c.peer == name and c.purpose is Purpose.CONTROL for c in self._connections
        )

    def _on_open(self, connection: Connection, frame: Frame) -> None:
        header = decode_open(frame.body)
        place = self.node.transfer_arriving(connection.peer, header)
        view = place.view("u1").data if place is not None and header.size_bytes else None
        if view is not None and len(view) != header.size_bytes:
            raise WireError(f"{header.size_bytes} bytes announced for a place of {len(view)}")
        if header.size_bytes == 0:
            if place is not None:
                self.node.transfer_finished(header.transfer)
            return
        connection.receiving[frame.stream] = Receiving(header.transfer, header.size_bytes, view)

    def _on_data(self, connection: Connection, frame: Frame) -> None:
        receiving = connection.receiving.get(frame.stream)
        if receiving is None:
            return
        receiving.offset += frame.length
        received = self.traffic.received
        received[connection.peer] = received.get(connection.peer, 0) + frame.length
        if receiving.offset >= receiving.size_bytes:
            del connection.receiving[frame.stream]
            if receiving.place is not None:
                self.node.transfer_finished(receiving.transfer)

    # --- what the node asks for -------------------------------------------------------------------------

    def now(self) -> float:
        """Host time: wall-clock seconds that never jump."""
        return self._anchor + time.monotonic()

    def clock_offset(self) -> tuple[float, float]:
        if not self._offsets:
            return 0.0, 0.0
        round_trip, offset = min(self._offsets)
        return offset, round_trip / 2

    def send(self, node: str, role: str, message: ControlMessage, cause: str) -> None:
        connection = self._to(node, Purpose.CONTROL)
        if connection is None:
            logger.debug("%s: nobody to send %s to: %s is unknown", self.name, type(message).__name__, node)
            return
        connection.queue_frame(encode_message(role, message, cause))
        self._watch(connection)

    def start_transfer(
        self, node: str, header: TransferHeader, payload: Vector, rate_bytes_per_s: float | None
    ) -> None:
        connection = self._to(node, Purpose.BULK)
        if connection is None:
            self.call(lambda: self.node.transfer_failed(header.transfer, f"{node} can't be reached"))
            return
        self._streams += 1
        view = payload.view("u1").data if payload.nbytes else memoryview(b"")
        sending = Sending(
            header.transfer, self._streams, encode_open(header, self._streams), view, rate_bytes_per_s
        )
        connection.sendings.append(sending)
        self._sending[header.transfer] = connection
        self._watch(connection)

    def cancel_transfer(self, transfer: str) -> None:
        connection = self._sending.pop(transfer, None)
        if connection is not None and connection.cancel(transfer):
            self._watch(connection)

    def observe(self, message: Members | HeartbeatSeen | NodeLost) -> None:
        match message:
            case Members(members=members):
                self.workers = tuple(member.node for member in members if "worker" in member.roles)
                for member in members:
                    if member.node != self.name and member.address:
                        self.know(member.node, parse_address(member.address))
            case HeartbeatSeen(sent_s=sent, seen_s=seen):
                now = self.now()
                self._offsets.append((now - sent, seen - (sent + now) / 2))
            case NodeLost(node=node) if node == self.name:
                self._said_goodbye = True  # the scheduler knows that we leave
            case NodeLost(node=node, reason=reason) if reason != LEFT:
                self.call(lambda: self._peer_given_up(node, reason))

    def resolve(self, action: Action) -> None:
        if isinstance(action, Note):
            logger.warning("%s: %s", action.what, action.reason)
        else:
            self.client.resolve(action)


def _host(connection: Connection) -> str:
    return parse_address(connection.origin)[0] if connection.origin else connection.peer


def _origin(connection: Connection) -> str:
    return connection.peer or connection.origin
