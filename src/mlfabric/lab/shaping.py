"""Rates, queues and cuts on one end of a link, through pyroute2.

Each end has an HTB with one class of the asked rate and a byte-limited queue (bfifo) under it. A second
class ends in a blackhole: what a filter sends there is lost, as on a cut cable, while the sender believes
it sent. Tokens are L2 bytes (1,514 for a full frame), because offloads are off.
"""

from __future__ import annotations

import ipaddress
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyroute2 import protocols
from pyroute2.netlink.rtnl import TC_H_ROOT
from pyroute2.netlink.rtnl.tcmsg import plugins

from mlfabric.errors import FabricError
from mlfabric.lab.blueprint import Shape
from mlfabric.units import format_rate

# pyroute2 knows pfifo, whose options bfifo shares; a blackhole has none.
plugins.setdefault("bfifo", plugins["pfifo"])
plugins.setdefault("blackhole", types.SimpleNamespace(parent=TC_H_ROOT))

_ROOT: Final = 0x10000  # 1:0
_OPEN: Final = 0x10001  # 1:1, the class that carries
_LOST: Final = 0x10002  # 1:2, the class that loses
_QUEUE: Final = 0x100000
_LOST_QUEUE: Final = 0x200000
_CUT_QUEUE: Final = 0x300000
_ARP_SENDER: Final = 14  # offset of the sender's address in an ARP packet
_IP_SOURCE: Final = 12
# A class sends this much per round; HTB has one busy class here, so any sane number serves.
_QUANTUM: Final = 60_000


@dataclass(frozen=True, slots=True)
class Counters:
    """What one direction of a link has carried and lost since it was made, in wire bytes."""

    sent_bytes: int
    sent_frames: int
    dropped_frames: int
    backlog_bytes: int


class LinkEnd:
    """The egress of one device: one direction of one link."""

    def __init__(self, name: str, netlink: Any, index: int, shape: Shape) -> None:
        self.name = name  # as in "w3.up"
        self.shape = shape
        self.cut = False
        self.lost_sources: dict[str, int] = {}  # address to the priority of its filters
        self._netlink = netlink
        self.index = index
        self._gone = Counters(0, 0, 0, 0)  # counted by queues that were replaced

    def build(self) -> None:
        tc = self._netlink.tc
        tc("add", "htb", self.index, _ROOT, default=1)
        tc("add-class", "htb", self.index, _OPEN, parent=_ROOT, **self._class())
        tc("add", "bfifo", self.index, _QUEUE, parent=_OPEN, limit=self.shape.queue_bytes)
        tc("add-class", "htb", self.index, _LOST, parent=_ROOT, **self._class())
        tc("add", "blackhole", self.index, _LOST_QUEUE, parent=_LOST)

    def set_shape(self, shape: Shape) -> None:
        """Change the rate in place; what is queued stays queued and leaves at the new rate."""
        old, self.shape = self.shape, shape
        if shape.rate_bps != old.rate_bps:
            self._netlink.tc("change-class", "htb", self.index, _OPEN, parent=_ROOT, **self._class())
        if shape.queue_bytes != old.queue_bytes and not self.cut:
            self._netlink.tc("change", "bfifo", self.index, _QUEUE, parent=_OPEN, limit=shape.queue_bytes)

    def lose_everything(self) -> None:
        """Cut: what is queued is lost, and so is all that follows."""
        if not self.cut:
            self._keep_counts()
            self._netlink.tc("replace", "blackhole", self.index, _CUT_QUEUE, parent=_OPEN)
            self.cut = True

    def carry_again(self) -> None:
        if self.cut:
            self._renew_queue()
            self.cut = False

    def lose_from(self, address: str) -> None:
        """Lose what comes from this address alone, ARP included."""
        if address in self.lost_sources:
            return
        value = int(ipaddress.IPv4Address(address))
        taken = set(self.lost_sources.values())
        priority = next(p for p in range(1, 60_000, 2) if p not in taken)
        for at, protocol, offset in (
            (priority, protocols.ETH_P_IP, _IP_SOURCE),
            (priority + 1, protocols.ETH_P_ARP, _ARP_SENDER),
        ):
            self._netlink.tc(
                "add-filter", "u32", self.index, parent=_ROOT, prio=at, protocol=protocol, target=_LOST,
                keys=[f"0x{value:08x}/0xffffffff+{offset}"],
            )  # fmt: skip
        self.lost_sources[address] = priority

    def carry_from(self, address: str) -> None:
        priority = self.lost_sources.pop(address, None)
        if priority is None:
            return
        for at, protocol in ((priority, protocols.ETH_P_IP), (priority + 1, protocols.ETH_P_ARP)):
            self._netlink.tc(
                "del-filter", "u32", self.index, parent=_ROOT, prio=at, protocol=protocol, target=_LOST
            )

    def hold(self, queue_bytes: int) -> None:
        """Let the queue hold more for a while; `empty_queue` ends it."""
        self._netlink.tc("change", "bfifo", self.index, _QUEUE, parent=_OPEN, limit=queue_bytes)

    def empty_queue(self) -> None:
        """Forget what is queued and counted, and hold what the shape says."""
        self._renew_queue()
        self._gone = Counters(0, 0, 0, 0)

    def counters(self, dumped: Sequence[Any] | None = None) -> Counters:
        """`dumped` are the queues of the whole namespace, where someone has them at hand."""
        now = self._queue_counters(self._netlink.get_qdiscs(self.index) if dumped is None else dumped)
        gone = self._gone
        return Counters(
            gone.sent_bytes + now.sent_bytes,
            gone.sent_frames + now.sent_frames,
            gone.dropped_frames + now.dropped_frames,
            now.backlog_bytes,
        )

    def check(self, queues: Sequence[Any] | None = None, classes: Sequence[Any] | None = None) -> None:
        """Read back what the kernel made of our wishes, or take it from where it has been read."""
        rates = [
            message.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")["rate"]
            for message in (self._netlink.get_classes(self.index) if classes is None else classes)
            if message["handle"] == _OPEN
        ]
        limits = [
            message.get_attr("TCA_OPTIONS")["limit"]
            for message in (self._netlink.get_qdiscs(self.index) if queues is None else queues)
            if message.get_attr("TCA_KIND") == "bfifo"
        ]
        expected = min(self.shape.bytes_per_s, 2**32 - 1)
        if rates != [expected] or limits != [self.shape.queue_bytes]:
            raise FabricError(
                f"the kernel did not take the shape of {self.name}: asked for {expected} B/s and a queue of "
                f"{self.shape.queue_bytes} bytes, it has {rates} and {limits}"
            )

    def __repr__(self) -> str:
        state = "cut" if self.cut else format_rate(self.shape.rate_bps)
        return f"<LinkEnd {self.name} {state}>"

    def _class(self) -> dict[str, int]:
        burst = self.shape.burst_bytes
        return {
            "rate": self.shape.bytes_per_s,
            "burst": burst,
            "cburst": burst,
            "quantum": _QUANTUM,
        }

    def _renew_queue(self) -> None:
        if not self.cut:
            # A queue can't replace one of its own handle and kind; go by way of the blackhole.
            self._netlink.tc("replace", "blackhole", self.index, _CUT_QUEUE, parent=_OPEN)
        self._netlink.tc("replace", "bfifo", self.index, _QUEUE, parent=_OPEN, limit=self.shape.queue_bytes)

    def _keep_counts(self) -> None:
        now = self.counters()
        # What was queued is lost with the queue.
        self._gone = Counters(now.sent_bytes, now.sent_frames, now.dropped_frames, 0)

    def _queue_counters(self, messages: Iterable[Any]) -> Counters:
        for message in messages:
            if (
                message["index"] == self.index
                and message["parent"] == _OPEN
                and message.get_attr("TCA_KIND") == "bfifo"
            ):
                stats = message.get_attr("TCA_STATS2")
                basic, queue = stats.get_attr("TCA_STATS_BASIC"), stats.get_attr("TCA_STATS_QUEUE")
                return Counters(basic["bytes"], basic["packets"], queue["drops"], queue["backlog"])
        return Counters(0, 0, 0, 0)
