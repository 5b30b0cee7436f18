"""Bulk transfers of a node: announced, paced, cut into chunks, received where they belong, counted.

Which connection leads to a peer, and when it is read and written, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlfabric.messages import TransferHeader
from mlfabric.node import Node
from mlfabric.numerics import Vector
from mlfabric.runtime.connection import Connection, Receiving, Sending
from mlfabric.wire import Frame, WireError, decode_open, encode_open


@dataclass(slots=True)
class Traffic:
    """Payload bytes to and from each peer."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)


class Transfers:
    def __init__(self, node: Node, reach: Callable[[str], Connection | None]) -> None:
        self._node = node
        self._reach = reach  # the connection for bulk bytes to a peer
        self._sending: dict[str, Connection] = {}  # transfer -> connection
        self._streams = 0
        self.traffic = Traffic()

    # --- sending ----------------------------------------------------------------------------------------

    def start(
        self, node: str, header: TransferHeader, payload: Vector, rate_bytes_per_s: float | None
    ) -> Connection | None:
        """The connection that has something to write now; None: the peer can't be reached."""
        connection = self._reach(node)
        if connection is None:
            return None
        self._streams += 1
        view = payload.view("u1").data if payload.nbytes else memoryview(b"")
        sending = Sending(
            header.transfer, self._streams, encode_open(header, self._streams), view, rate_bytes_per_s
        )
        connection.sendings.append(sending)
        self._sending[header.transfer] = connection
        return connection

    def cancel(self, transfer: str) -> Connection | None:
        """The connection that has to say so; None: there is nothing to say."""
        connection = self._sending.pop(transfer, None)
        return connection if connection is not None and connection.cancel(transfer) else None

    def sent(self, connection: Connection, finished: list[Sending]) -> None:
        for sending in finished:
            self._sending.pop(sending.transfer, None)
            sent = self.traffic.sent
            sent[connection.peer] = sent.get(connection.peer, 0) + len(sending.payload)
            self._node.transfer_sent(sending.transfer)

    # --- receiving --------------------------------------------------------------------------------------

    def opened(self, connection: Connection, frame: Frame) -> None:
        header = decode_open(frame.body)
        place = self._node.transfer_arriving(connection.peer, header)
        view = place.view("u1").data if place is not None and header.size_bytes else None
        if view is not None and len(view) != header.size_bytes:
            raise WireError(f"{header.size_bytes} bytes announced for a place of {len(view)}")
        if header.size_bytes == 0:
            if place is not None:
                self._node.transfer_finished(header.transfer)
            return
        connection.receiving[frame.stream] = Receiving(header.transfer, header.size_bytes, view)

    def arrived(self, connection: Connection, frame: Frame) -> None:
        receiving = connection.receiving.get(frame.stream)
        if receiving is None:
            return
        receiving.offset += frame.length
        received = self.traffic.received
        received[connection.peer] = received.get(connection.peer, 0) + frame.length
        if receiving.offset >= receiving.size_bytes:
            del connection.receiving[frame.stream]
            if receiving.place is not None:
                self._node.transfer_finished(receiving.transfer)

    def cancelled(self, connection: Connection, frame: Frame) -> None:
        receiving = connection.receiving.pop(frame.stream, None)
        if receiving is not None and receiving.place is not None:
            self._node.transfer_failed(receiving.transfer, "cancelled by its sender")

    # --- both -------------------------------------------------------------------------------------------

    def fail(self, connection: Connection, reason: str) -> None:
        """A connection is gone, and with it all that was under way on it."""
        broken = [sending.transfer for sending in connection.sendings if not sending.aborted]
        broken += [receiving.transfer for receiving in connection.receiving.values()]
        for transfer in broken:
            self._sending.pop(transfer, None)
            self._node.transfer_failed(transfer, f"{connection.peer}: {reason}")
