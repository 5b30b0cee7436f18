"""Where a node is called: listening, accepting, and handshakes, by the secret of each job.

A secret opens the job it belongs to and no other, and a name belongs to one living member.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Mapping, Set

from mlfabric.config import format_address, is_loopback
from mlfabric.errors import ConnectError, FabricError
from mlfabric.messages import MemberInfo
from mlfabric.runtime.complaints import Complaints
from mlfabric.runtime.connection import Connection
from mlfabric.runtime.pacing import prepare_socket
from mlfabric.runtime.tls import Tls
from mlfabric.runtime.trust import NONCE_BYTES, Handshake, Purpose, Refused
from mlfabric.wire import MAX_CONTROL_BYTES, Kind, WireError, encode_frame

HANDSHAKE_S = 5.0
CONNECT_S = 5.0
MAX_STRANGERS = 64  # connections that have not proved themselves yet


class Reception:
    def __init__(
        self,
        name: str,
        listen: tuple[str, int],
        secret: bytes,
        insecure: bool,
        job_secrets: Mapping[str, bytes] | None,
        tls: Tls | None,
        complaints: Complaints,
    ) -> None:
        if not secret and not job_secrets and not insecure and not is_loopback(listen[0]):
            raise FabricError(
                f"refusing to listen on {format_address(*listen)} without a secret: set MLFABRIC_SECRET "
                "on all members, or say insecure=True where the network is trusted"
            )
        self._name = name
        self.job = ""  # named when a connection is opened: its secret is meant
        self._secret = secret
        self._job_secrets = job_secrets  # of a scheduler that serves several jobs; None: one secret for all
        self._job_names: dict[str, str] = {}  # node -> the job whose secret it has shown
        self._tls = tls
        self._complaints = complaints
        self.listener = _listen(listen)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()[:2]
        return host, port

    # --- being called -----------------------------------------------------------------------------------

    def accept(self, connections: Set[Connection], scheduler: tuple[str, str]) -> Connection | None:
        """The next caller; `scheduler` is the (name, address) told to those who come to ask."""
        try:
            sock, origin = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return None
        strangers = sum(1 for c in connections if not c.ready and not c.outbound)
        if strangers >= MAX_STRANGERS:
            said = "closed a connection: too many prove themselves just now"
            self._complaints.say(origin[0], "too many", said)
            sock.close()
            return None
        handshake = Handshake(
            self._name, self._secret_of, secrets.token_bytes(NONCE_BYTES), scheduler=scheduler
        )
        prepare_socket(sock, bulk=False)
        secured = self._tls.wrap(sock, called=True) if self._tls is not None else sock
        connection = Connection(secured, handshake, "", False, time.monotonic() + HANDSHAKE_S)
        connection.origin = format_address(*origin[:2])
        return connection

    # --- calling ----------------------------------------------------------------------------------------

    def call(self, node: str, address: tuple[str, int], purpose: Purpose) -> tuple[Connection | None, int]:
        """A connection that is being opened, or None and the error number."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        prepare_socket(sock, bulk=purpose is Purpose.BULK)
        job = self._job_names.get(node, "")
        secret = self._secret_of(job) or self._secret
        handshake = Handshake(
            self._name, secret, secrets.token_bytes(NONCE_BYTES), purpose, job=job or self.job
        )
        connection = Connection(sock, handshake, node, True, time.monotonic() + CONNECT_S)
        result = sock.connect_ex(address)
        if result not in (0, 115):  # EINPROGRESS
            sock.close()
            return None, result
        connection.queue_frame(encode_frame(Kind.HANDSHAKE, handshake.begin()), during_handshake=True)
        return connection, 0

    # --- proving ----------------------------------------------------------------------------------------

    def prove(self, connection: Connection, body: bytes, connections: Set[Connection]) -> bool:
        """The next words of a handshake; whether it is done."""
        handshake = connection.handshake
        if connection.ready:
            raise WireError("a second handshake")
        answer = handshake.feed(body)
        asked = handshake.purpose is Purpose.PROBE and not connection.outbound
        if asked and self._taken(handshake.peer, connections):
            raise Refused(f"the name {handshake.peer} is taken by a living member; choose another")
        if self._job_names.get(handshake.peer, handshake.job) != handshake.job:
            raise Refused(f"the name {handshake.peer} is taken by a member of another job; choose another")
        if answer is not None:
            connection.queue_frame(encode_frame(Kind.HANDSHAKE, answer), during_handshake=True)
        if handshake.done:
            connection.peer = handshake.peer
            connection.reader.limit_bytes = MAX_CONTROL_BYTES
            connection.become_ready()
        return handshake.done

    def check_job(self, connection: Connection, member: MemberInfo) -> None:
        """A secret opens the job it belongs to and no other; nor does a name of another job."""
        if self._job_secrets is None:
            return
        if member.job != connection.handshake.job or member.node != connection.peer:
            raise WireError(f"{connection.peer} of job {connection.handshake.job} speaks for {member.node}")
        self._job_names[member.node] = member.job

    def only_job(self, connection: Connection) -> str | None:
        """The one job that this peer may ask about; None: all of them."""
        return connection.handshake.job if self._job_secrets is not None else None

    def _secret_of(self, job: str) -> bytes | None:
        return self._secret if self._job_secrets is None else self._job_secrets.get(job)

    def _taken(self, name: str, connections: Set[Connection]) -> bool:
        return name == self._name or any(
            c.ready and c.peer == name and c.purpose is Purpose.CONTROL for c in connections
        )


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(512)
    except OSError as error:
        sock.close()
        used = error.errno == errno.EADDRINUSE
        taken = " by another process, or by an earlier join of this one" if used else ""
        where = format_address(*address)
        raise ConnectError(f"can't listen on {where}: {(error.strerror or '').lower()}{taken}") from None
    sock.setblocking(False)
    return sock
