"""Bulk transfers of a node: announced, paced, cut into chunks, received where they belong, counted.

Which connection leads to a peer, and when it is read and written, is the engine's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mlfabric.events import FlowsMeasured
from mlfabric.messages import TransferHeader
from mlfabric.node import Node
from mlfabric.numerics import Vector
from mlfabric.roles.flows import REPEAT_S, TICK_S, FlowWatch
from mlfabric.runtime.allowance import Allowance
from mlfabric.runtime.connection import Connection, Receiving, Sending
from mlfabric.runtime.counters import Traffic
from mlfabric.wire import CHUNK_BYTES, Frame, WireError, decode_open, encode_open

# A look at all flows takes no longer, unless something came between.
BRIEF_S = 0.005


class Transfers:
    def __init__(
        self,
        node: Node,
        reach: Callable[[str], Connection | None],
        watch: Callable[[Connection], None],
        allowance: Allowance,
    ) -> None:
        self._node = node
        self._reach = reach  # the connection for bulk bytes to a peer
        self._watch = watch  # one that may have something to write
        self._allowance = allowance
        self._sending: dict[str, Connection] = {}  # transfer -> connection
        self._passing: dict[str, list[tuple[Sending, Connection]]] = {}  # by the transfer that brings it
        self._streams = 0
        self.traffic = Traffic()
        self._flows = FlowWatch()
        self._look_at: float | None = None
        self._came_at = float("-inf")
        self._used: dict[Connection, tuple[int, int]] = {}  # to other hosts: bytes sent and received so far
        self._counts = (0, 0)  # over all of them, those that are gone too

    # --- rates ------------------------------------------------------------------------------------------

    def next_look(self, now: float) -> float | None:
        """When the flows have to be looked at again; None: nothing is under way."""
        if self._look_at is None and (self._sending or now - self._came_at < REPEAT_S):
            self._look_at = now
        return self._look_at

    def look(self, now: float, shared: bool) -> FlowsMeasured | None:
        """See how the flows fare; what of it is news. `shared`: collectives use the same links just now."""
        if self._look_at is None or now < self._look_at:
            return None
        self._sending = {transfer: c for transfer, c in self._sending.items() if c.sock.fileno() >= 0}
        sending = {c.peer: c for c in self._sending.values() if c.ready and c.sendings}
        self._look_at = now + TICK_S if self._sending or now - self._came_at < REPEAT_S else None
        states = [(peer, connection.bulk_state()) for peer, connection in sending.items()]
        self._count()
        if time.monotonic() - now > BRIEF_S:
            return None  # we were interrupted: nobody knows when it was like that
        for peer in self._flows.look(now, states, shared, self._counts):
            sending[peer].raise_pace()
        flows, (up, down) = self._flows.news(now), self._flows.totals(now)
        if not flows and up is None and down is None:
            return None
        return FlowsMeasured(tuple((flow.peer, flow.bytes_per_s, flow.limited) for flow in flows), up, down)

    def _use(self, connection: Connection) -> None:
        if connection not in self._used and connection.crosses_links():
            self._used[connection] = connection.moved_bytes()

    def _count(self) -> None:
        """What all connections carried since the last look."""
        sent, received = self._counts
        self._used = {c: counts for c, counts in self._used.items() if c.sock.fileno() >= 0}
        for connection, before in self._used.items():
            now = self._used[connection] = connection.moved_bytes()
            sent += now[0] - before[0]
            received += now[1] - before[1]
        self._counts = (sent, received)

    # --- sending ----------------------------------------------------------------------------------------

    def start(
        self,
        node: str,
        header: TransferHeader,
        payload: Vector,
        rate_bytes_per_s: float | None,
        chunk_bytes: int = 0,
        follows: str = "",
    ) -> Connection | None:
        """The connection that has something to write now; None: the peer can't be reached."""
        connection = self._reach(node)
        if connection is None:
            return None
        self._streams += 1
        view = payload.view("u1").data if payload.nbytes else memoryview(b"")
        sending = Sending(
            header.transfer,
            self._streams,
            encode_open(header, self._streams),
            view,
            rate_bytes_per_s,
            0 if follows else len(view),
            chunk_bytes or CHUNK_BYTES,
        )
        if follows:
            self._passing.setdefault(follows, []).append((sending, connection))
        connection.allowance = self._allowance
        connection.sendings.append(sending)
        self._use(connection)
        self._sending[header.transfer] = connection
        return connection

    def under_way(self) -> set[Connection]:
        """Connections that have something to send."""
        return {connection for connection in self._sending.values() if connection.sock.fileno() >= 0}

    def cancel(self, transfer: str) -> Connection | None:
        """The connection that has to say so; None: there is nothing to say."""
        connection = self._sending.pop(transfer, None)
        return connection if connection is not None and connection.cancel(transfer) else None

    def sent(self, connection: Connection, finished: list[Sending]) -> None:
        for sending in finished:
            self._sending.pop(sending.transfer, None)
            self.traffic.count_sent(connection.peer, len(sending.payload))
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
        self._use(connection)

    def arrived(self, connection: Connection, frame: Frame) -> None:
        receiving = connection.receiving.get(frame.stream)
        if receiving is None:
            return
        receiving.offset += frame.length
        self._came_at = time.monotonic()
        self.traffic.count_received(connection.peer, frame.length)
        for sending, onward in self._passing.get(receiving.transfer, ()):
            sending.there = receiving.offset
            if onward.sock.fileno() >= 0:
                self._watch(onward)
        if receiving.offset >= receiving.size_bytes:
            self._passing.pop(receiving.transfer, None)
            del connection.receiving[frame.stream]
            if receiving.place is not None:
                self._node.transfer_finished(receiving.transfer)

    def cancelled(self, connection: Connection, frame: Frame) -> None:
        receiving = connection.receiving.pop(frame.stream, None)
        if receiving is not None:
            self._passing.pop(receiving.transfer, None)
        if receiving is not None and receiving.place is not None:
            self._node.transfer_failed(receiving.transfer, "cancelled by its sender")

    # --- both -------------------------------------------------------------------------------------------

    def fail(self, connection: Connection, reason: str) -> None:
        """A connection is gone, and with it all that was under way on it."""
        broken = [sending.transfer for sending in connection.sendings if not sending.aborted]
        broken += [receiving.transfer for receiving in connection.receiving.values()]
        for transfer in broken:
            self._sending.pop(transfer, None)
            self._passing.pop(transfer, None)
            self._node.transfer_failed(transfer, f"{connection.peer}: {reason}")
