"""Who is gone: what a lost connection, the scheduler's word or a peer's silence says about a peer.

A peer is gone with its last connection. One that the scheduler gives up for its silence keeps its link: it
may merely be busy. So does one whose other connections have ended: it may be the one that gave us up. A
process that ends closes its link too.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping

from mlfabric.node import Node
from mlfabric.runtime.connection import Connection
from mlfabric.runtime.mesh import Mesh
from mlfabric.runtime.roster import Roster
from mlfabric.runtime.transfers import Transfers
from mlfabric.runtime.trust import Purpose

# What a host answers where no process listens any more.
REFUSED = os.strerror(errno.ECONNREFUSED).lower()
LEAVE_S = 0.5  # after one connection of a peer has ended, the others may carry what was under way
MAX_LOOKS = 3  # connections opened to find out whether a peer is gone
# A peer that the scheduler gave up for its silence, but whose link is open, has so long to speak.
SILENT_LINK_S = 15.0


class Departures:
    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        transfers: Transfers,
        roster: Roster,
        links: Mapping[str, Connection],
    ) -> None:
        self._node = node
        self._mesh = mesh
        self._transfers = transfers
        self._roster = roster
        self._connections = roster.connections
        self._links = links
        self._looked: dict[str, int] = {}  # how often we tried whether a peer is gone
        self._doubted: dict[str, tuple[float, int, str]] = {}  # given up: (until, bytes heard so far, why)
        self.leaving: dict[str, tuple[float, str]] = {}  # a connection of theirs ended: (until, reason)

    def spoken(self, peer: str) -> None:
        """It has proved itself just now."""
        self._looked.pop(peer, None)
        self._doubted.pop(peer, None)

    def listed(self, peers: Iterable[str]) -> None:
        """The scheduler hears them, some of them again."""
        for peer in peers:
            self._doubted.pop(peer, None)

    def lose(self, connection: Connection, reason: str) -> None:
        """A connection is gone. Its peer is gone with the last one; others may still carry bytes."""
        known = connection.ready or connection.outbound
        passing = connection.purpose in (Purpose.PROBE, Purpose.QUERY)
        self._roster.drop(connection)
        peer = connection.peer
        if not known or passing or not peer:
            return
        self._transfers.fail(connection, reason)
        if connection.purpose is Purpose.COLLECTIVE:
            self._mesh.lose(peer, reason)
        if any(other.peer == peer for other in self._connections):
            self.leaving.setdefault(peer, (time.monotonic() + LEAVE_S, reason))
        else:
            self.down(peer, reason)
            if connection.connected:
                self._look_for(peer)

    def _look_for(self, peer: str) -> None:
        """Where its process is gone, its host says so at once. A process that is just dying may still take a
        connection and drop it, so it is tried more than once, and not for ever."""
        looked = self._looked.get(peer, 0)
        if looked < MAX_LOOKS:
            self._looked[peer] = looked + 1
            self._roster.to(peer, Purpose.CONTROL)

    def down(self, peer: str, reason: str) -> None:
        self.leaving.pop(peer, None)
        self._doubted.pop(peer, None)
        for connection in [c for c in self._connections if c.peer == peer]:
            self._roster.drop(connection)
            self._transfers.fail(connection, reason)
        self._mesh.lose(peer, reason)
        self._node.peer_lost(peer, reason, proved=reason == REFUSED)

    def give_up(self, peer: str, reason: str) -> None:
        """The scheduler hears nothing of a peer. Its place in the order is taken by others at once, but a
        process that is merely busy, with the interpreter held, goes on with its collectives."""
        link = self._link(peer)
        if link is None or link.link is None:
            self.down(peer, reason)
            return
        self.leaving.pop(peer, None)
        for connection in [c for c in self._connections if c.peer == peer and c is not link]:
            self._roster.drop(connection)
            self._transfers.fail(connection, reason)
        self._doubted[peer] = (time.monotonic() + SILENT_LINK_S, link.link.received_bytes, reason)
        self._node.peer_lost(peer, reason)

    def _link(self, peer: str) -> Connection | None:
        """Its open link, if there is one."""
        connection = self._links.get(peer)
        return connection if connection in self._connections else None

    def expire(self, now: float) -> None:
        """Those whose time is up are gone; of those that closed all but the link we wait to hear."""
        for peer, (until, received, reason) in list(self._doubted.items()):
            connection = self._link(peer)
            if connection is None or connection.link is None:
                del self._doubted[peer]
            elif connection.link.received_bytes != received:
                del self._doubted[peer]  # it speaks
            elif now >= until:
                self.down(peer, reason)
        for peer, (until, reason) in list(self.leaving.items()):
            if now >= until:
                self.give_up(peer, reason)
