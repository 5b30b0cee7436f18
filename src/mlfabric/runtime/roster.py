"""The connections of a node: where its peers are, which connection leads to whom, what each is waited for.

A connection is opened when there is something to say. What goes over it is not this module's business.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable

from mlfabric.runtime.connection import Connection
from mlfabric.runtime.link import Link
from mlfabric.runtime.reception import Reception
from mlfabric.runtime.tls import Tls
from mlfabric.runtime.trust import Purpose


class Roster:
    def __init__(
        self,
        selector: selectors.BaseSelector,
        reception: Reception,
        tls: Tls | None,
        unreachable: Callable[[str, str], None],
        drop_link: Callable[[Link], None],
    ) -> None:
        self.connections: set[Connection] = set()
        self.addresses: dict[str, tuple[str, int]] = {}
        self._selector = selector
        self._reception = reception
        self._tls = tls
        self._unreachable = unreachable  # told of a peer that can't be called, and why
        self._drop_link = drop_link
        self._out: dict[tuple[str, Purpose], Connection] = {}

    def to(self, node: str, purpose: Purpose) -> Connection | None:
        """The connection that carries this to a node, opened if need be; None: nobody knows where it is."""
        connection = self._out.get((node, purpose))
        if connection is not None:
            return connection
        address = self.addresses.get(node)
        if address is None:
            return None
        connection, error = self._reception.call(node, address, purpose)
        if connection is None:
            self._unreachable(node, os.strerror(error).lower())
            return None
        self._out[node, purpose] = connection
        self.add(connection)
        return connection

    def add(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        self.watch(connection)

    def watch(self, connection: Connection) -> None:
        """Have the loop woken when it can be read, and when it can be written if it has to be."""
        if connection.link is not None:
            return  # the mesh does
        events = selectors.EVENT_READ
        if connection.wants_write():
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def connected(self, connection: Connection) -> str | None:
        """The kernel has an answer to a call: None, or why it failed."""
        error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return os.strerror(error).lower()
        connection.connected = True
        if self._tls is not None:
            self._selector.unregister(connection.sock)
            connection.sock = self._tls.wrap(connection.sock, called=False)
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        return None

    def drop(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if connection.link is None:
            self._selector.unregister(connection.sock)
        else:
            self._drop_link(connection.link)
        connection.close()
        for key, held in list(self._out.items()):
            if held is connection:
                del self._out[key]

    def close(self) -> None:
        for connection in list(self.connections):
            connection.close()
        self.connections.clear()
