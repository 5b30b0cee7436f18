"""Namespaces, bridges and links of a lab, made from a blueprint through pyroute2.

The wiring is held by descriptors of the process that made it: the namespaces are in no list of the machine,
so they can't collide with anyone's, and when that process and all that runs inside them are gone, the kernel
removes them with every link and queue.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from mlfabric.lab import kernel
from mlfabric.lab.blueprint import NETWORK, SWITCH, Blueprint, Port, Shape
from mlfabric.lab.shaping import Counters, LinkEnd

# Bridges forget whom they have heard after this long; silence must not turn a switch into a hub.
_REMEMBER_CENTISECONDS = 100 * 24 * 3600
# Frames the TAP device of a delayed link holds while the forwarder looks away.
_TAP_QUEUE_FRAMES = 20_000


class Wiring:
    """Everything of a lab that lives in the kernel."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self.piece_frames = blueprint.piece_frames
        self.namespaces: dict[str, int] = {}  # name to descriptor
        self.cookies: dict[str, int] = {}
        self.ends: dict[str, LinkEnd] = {}  # "w3.up", "w3.down"
        self.taps: dict[str, tuple[int, int]] = {}  # of delayed hosts: descriptors of near and far end
        self._netlink: dict[str, Any] = {}
        self._indexes: dict[tuple[str, str], int] = {}

    def make_namespaces(self) -> None:
        """One for the switch, one for each host; this thread ends up in the switch."""
        for name in (SWITCH, *(port.owner for port in self.blueprint.hosts)):
            self.namespaces[name] = kernel.new_network_namespace()
            self.cookies[name] = kernel.network_cookie()
        self._go(SWITCH)

    def build(self) -> None:
        for name in self.namespaces:
            with self.inside(name):
                Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
                Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
                self._netlink[name] = IPRoute()
        switch = self._netlink[SWITCH]
        switch.link("set", index=1, state="up")
        for bridge in self.blueprint.bridges:
            switch.link(
                "add",
                ifname=bridge,
                kind="bridge",
                br_ageing_time=_REMEMBER_CENTISECONDS,
                br_mcast_snooping=0,
            )
            switch.link("set", index=self._index(SWITCH, bridge), state="up")
        for port in self.blueprint.racks:
            self._wire_rack(port)
        for port in self.blueprint.hosts:
            self._wire_host(port)
        self.set_piece_frames(self.blueprint.piece_frames)

    def set_piece_frames(self, count: int) -> None:
        """How many frames of a TCP stream may travel as one piece; with 1 all links carry plain frames."""
        self.piece_frames = count
        for port in self.blueprint.ports:
            for where, device in ((port.namespace, port.near), (SWITCH, port.far)):
                with self.inside(where):
                    kernel.set_offloads(device, glued=count > 1)
                    if where != SWITCH:
                        self._netlink[where].link(
                            "set", index=self._index(where, device), gso_max_segs=max(count, 1)
                        )

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Have this thread in the namespace for a while."""
        self._go(name)
        try:
            yield
        finally:
            self._go(SWITCH)

    def socket_inside(self, name: str, family: int, kind: int, protocol: int) -> socket.socket:
        with self.inside(name):
            return socket.socket(family, kind, protocol)

    def end(self, owner: str, direction: str) -> LinkEnd:
        return self.ends[f"{owner}.{direction}"]

    def counters(self) -> dict[str, Counters]:
        queues = self._switch_dump("get_qdiscs")
        return {name: end.counters(queues.get(name)) for name, end in self.ends.items()}

    def check(self) -> None:
        """Read back what the kernel made of every shape."""
        queues, classes = self._switch_dump("get_qdiscs"), self._switch_dump("get_classes")
        for name, end in self.ends.items():
            end.check(queues.get(name), classes.get(name))

    def received_bytes(self, owner: str, direction: str) -> kernel.ReceivedBytes:
        """A quick reader of what has come out at the other end of this direction of the owner's link."""
        port = self.port(owner)
        where, device = (SWITCH, port.far) if direction == "up" else (port.namespace, port.near)
        with self.inside(where):
            return kernel.ReceivedBytes(self._index(where, device))

    def port(self, owner: str) -> Port:
        return next(port for port in self.blueprint.ports if port.owner == owner)

    def sender(self, owner: str, direction: str) -> tuple[str, str]:
        """Namespace and device whose egress is this direction of the owner's link."""
        port = self.port(owner)
        return (port.namespace, port.near) if direction == "up" else (SWITCH, port.far)

    def inodes(self) -> dict[int, str]:
        return {kernel.network_inode(fd): name for name, fd in self.namespaces.items()}

    def _switch_dump(self, what: str) -> dict[str, list[Any]]:
        """All queues or classes of the switch by the name of their link end: one question instead of many."""
        ends = [f"{port.owner}.down" for port in self.blueprint.ports]
        ends += [f"{port.owner}.up" for port in self.blueprint.racks]
        names = {self.ends[name].index: name for name in ends}
        found: dict[str, list[Any]] = {name: [] for name in ends}
        dump = getattr(self._netlink[SWITCH], what)
        # Queues are told for all devices at once, classes for one device at a time.
        messages = dump() if what == "get_qdiscs" else (m for index in names for m in dump(index))
        for message in messages:
            if message["index"] in names:
                found[names[message["index"]]].append(message)
        return found

    def _wire_rack(self, port: Port) -> None:
        switch = self._netlink[SWITCH]
        switch.link("add", ifname=port.near, kind="veth", peer={"ifname": port.far})
        for device, bridge in ((port.near, port.near_bridge), (port.far, port.bridge)):
            index = self._index(SWITCH, device)
            switch.link("set", index=index, master=self._index(SWITCH, str(bridge)), state="up")
        self._shape(port)

    def _wire_host(self, port: Port) -> None:
        switch, host = self._netlink[SWITCH], self._netlink[port.namespace]
        if port.delay_s > 0:
            far_tap = kernel.open_tap(port.far)
            with self.inside(port.namespace):
                near_tap = kernel.open_tap(port.near)
            self.taps[port.owner] = (near_tap, far_tap)
            for where, device in ((SWITCH, port.far), (port.namespace, port.near)):
                index = self._index(where, device)
                self._netlink[where].link("set", index=index, txqlen=_TAP_QUEUE_FRAMES)
        else:
            peer = {"ifname": port.near, "net_ns_fd": self.namespaces[port.namespace]}
            switch.link("add", ifname=port.far, kind="veth", peer=peer)
        far = self._index(SWITCH, port.far)
        switch.link("set", index=far, ifalias=port.owner, master=self._index(SWITCH, port.bridge), state="up")
        near = self._index(port.namespace, port.near)
        host.link("set", index=1, state="up")
        host.link("set", index=near, address=port.mac, state="up")
        host.addr(
            "add", index=near, address=port.address, prefixlen=NETWORK.prefixlen,
            broadcast=str(NETWORK.broadcast_address),
        )  # fmt: skip
        self._shape(port)

    def _shape(self, port: Port) -> None:
        for direction, where, device, shape in (
            ("up", port.namespace, port.near, port.up),
            ("down", SWITCH, port.far, port.down),
        ):
            name = f"{port.owner}.{direction}"
            self.ends[name] = LinkEnd(name, self._netlink[where], self._index(where, device), shape)
            self.ends[name].build()

    def _index(self, where: str, device: str) -> int:
        if (where, device) not in self._indexes:
            with self.inside(where):
                self._indexes[where, device] = socket.if_nametoindex(device)
        return self._indexes[where, device]

    def _go(self, name: str) -> None:
        kernel.enter_network(self.namespaces[name])

    def close(self) -> None:
        for netlink in self._netlink.values():
            netlink.close()
        for pair in self.taps.values():
            for fd in pair:
                os.close(fd)
        for fd in self.namespaces.values():
            os.close(fd)


def shape_with(shape: Shape, rate_bps: float | None, queue_bytes: int | None) -> Shape:
    return Shape(
        shape.rate_bps if rate_bps is None else rate_bps,
        shape.queue_bytes if queue_bytes is None else queue_bytes,
    )
