"""What a peer says, frame by frame, and who hears of it. Before it has proved itself, nobody does."""

from __future__ import annotations

from collections.abc import Callable

from mlfabric.config import parse_address
from mlfabric.messages import Join, Register
from mlfabric.node import Node
from mlfabric.runtime.connection import Connection
from mlfabric.runtime.departures import Departures
from mlfabric.runtime.questions import answer_question
from mlfabric.runtime.reception import Reception
from mlfabric.runtime.roster import Roster
from mlfabric.runtime.transfers import Transfers
from mlfabric.runtime.trust import Purpose
from mlfabric.wire import Frame, Kind, WireError, decode_message, encode_message


class Incoming:
    def __init__(
        self,
        node: Node,
        reception: Reception,
        roster: Roster,
        transfers: Transfers,
        departures: Departures,
        know: Callable[[str, tuple[str, int]], None],
        become_link: Callable[[Connection], None],
        now: Callable[[], float],
    ) -> None:
        self._node = node
        self._reception = reception
        self._roster = roster
        self._transfers = transfers
        self._departures = departures
        self._know = know  # where a node is
        self._become_link = become_link
        self._now = now

    def take(self, connection: Connection, frame: Frame) -> None:
        """Raises Refused or WireError where the connection has to end."""
        if frame.kind is Kind.HANDSHAKE:
            self._handshake(connection, frame.body)
        elif not connection.ready:
            raise WireError("it spoke before proving itself")
        elif connection.purpose is Purpose.QUERY:
            self._question(connection, frame)
        elif frame.kind is Kind.CONTROL:
            envelope = decode_message(frame.body)
            message = envelope.message
            if isinstance(message, Join | Register):
                self._reception.check_job(connection, message.member)
                self._know(message.member.node, parse_address(message.member.address))
            self._node.message(connection.peer, envelope.role, message, envelope.cause)
        elif frame.kind is Kind.OPEN:
            self._transfers.opened(connection, frame)
        elif frame.kind is Kind.DATA:
            self._transfers.arrived(connection, frame)
        else:
            self._transfers.cancelled(connection, frame)

    def _handshake(self, connection: Connection, body: bytes) -> None:
        if self._reception.prove(connection, body, self._roster.connections):
            if connection.purpose is Purpose.COLLECTIVE:
                self._become_link(connection)
            self._departures.spoken(connection.peer)
        self._roster.watch(connection)

    def _question(self, connection: Connection, frame: Frame) -> None:
        """Somebody asks; the answer goes back the same way."""
        only = self._reception.only_job(connection)
        answer = answer_question(self._node, connection.peer, frame, only, self._now())
        connection.queue_frame(encode_message("", answer))
        self._roster.watch(connection)
