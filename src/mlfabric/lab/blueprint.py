"""What the lab has to build, as plain data: which ports, addresses, rates and queues a scenario asks for.

Pure: nothing here touches the kernel. Every link has a near end, whose egress is the owner's uplink, and a
far end, whose egress is its downlink. A host's near end is `eth0` in the host's own namespace; everything
else lives in one namespace of the lab, the switch.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Final

from mlfabric.errors import FabricError
from mlfabric.scenario import Scenario
from mlfabric.units import FRAME_L2_BYTES, format_size

SWITCH: Final = "(switch)"  # the namespace of bridges; no host can have this name
CORE: Final = "core"
NETWORK: Final = ipaddress.IPv4Network("10.77.0.0/16")
# BR_MAX_PORTS of the Linux bridge is 1,024.
MAX_PORTS_PER_BRIDGE: Final = 1000
# What a link may send at once after idling. The kernel's timers come late by up to some 0.1 ms on a busy
# machine; a bucket smaller than what passes in that time would lose rate.
BURST_S: Final = 0.0005
MIN_BURST_BYTES: Final = 2 * FRAME_L2_BYTES
# Two processors carry some 100,000 plain frames a second through two queues and a bridge. Labs whose links
# could carry more than this budget let TCP hand over several frames as one piece.
PLAIN_FRAMES_PER_S: Final = 16_000
MAX_PIECE_FRAMES: Final = 16
DELAYED_COST: Final = 8  # a frame that passes the forwarder, against one that does not
MIN_PIECES_PER_QUEUE: Final = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """One direction of a link: wire bits per second, and the bytes its queue holds before it drops."""

    rate_bps: float
    queue_bytes: int

    @property
    def bytes_per_s(self) -> int:
        return max(1, round(self.rate_bps / 8))

    @property
    def burst_bytes(self) -> int:
        return max(MIN_BURST_BYTES, round(self.bytes_per_s * BURST_S))


@dataclass(frozen=True, slots=True)
class Port:
    """One link: of a host to its bridge, or of a rack's bridge to the core."""

    owner: str
    up: Shape
    down: Shape
    near: str  # device whose egress is the uplink
    far: str  # device whose egress is the downlink, in the switch
    bridge: str  # that the far end belongs to
    namespace: str  # where the near end lives
    address: str | None = None  # of a host
    mac: str | None = None
    near_bridge: str | None = None  # of a rack: the bridge the near end belongs to
    delay_s: float = 0.0  # one-way, each direction


@dataclass(frozen=True, slots=True)
class Blueprint:
    bridges: tuple[str, ...]
    hosts: tuple[Port, ...]
    racks: tuple[Port, ...]
    piece_frames: int  # frames of one TCP stream that may travel as one piece; 1: plain frames

    @property
    def ports(self) -> tuple[Port, ...]:
        return (*self.racks, *self.hosts)

    def host(self, name: str) -> Port:
        for port in self.hosts:
            if port.owner == name:
                return port
        known = ", ".join(port.owner for port in self.hosts[:8])
        more = f" and {len(self.hosts) - 8} more" if len(self.hosts) > 8 else ""
        raise FabricError(f"the lab has no host {name}; it has {known}{more}")

    def hosts_file(self) -> str:
        lines = ["127.0.0.1 localhost", *(f"{port.address} {port.owner}" for port in self.hosts)]
        # Sockets that speak both IP versions ask for the name of a mapped address; another name keeps
        # those addresses out of the answers to who looks a host up.
        lines += [f"::ffff:{port.address} {port.owner}.lab" for port in self.hosts]
        return "\n".join(lines) + "\n"


def draw(scenario: Scenario) -> Blueprint:
    """The blueprint of a scenario; a FabricError says what can't be built."""
    racks = tuple(
        Port(
            owner=rack.name,
            up=_shape(rack.name, rack.up_bps, rack.queue_bytes),
            down=_shape(rack.name, rack.down_bps, rack.queue_bytes),
            near=f"up{index}",
            far=f"down{index}",
            bridge=CORE,
            namespace=SWITCH,
            near_bridge=f"rack{index}",
        )
        for index, rack in enumerate(scenario.rack_links())
    )
    bridge_of = {rack.owner: rack.near_bridge for rack in racks}
    hosts = []
    for index, host in enumerate(scenario.host_links()):
        hosts.append(
            Port(
                owner=host.name,
                up=_shape(host.name, host.up_bps, host.queue_bytes),
                down=_shape(host.name, host.down_bps, host.queue_bytes),
                near="eth0",
                far=f"port{index}",
                bridge=(bridge_of[host.rack] if host.rack is not None else None) or CORE,
                namespace=host.name,
                address=str(NETWORK[index + 1]) if index < MAX_PORTS_PER_BRIDGE * 60 else None,
                mac=f"02:4d:4c:00:{(index + 1) >> 8:02x}:{(index + 1) & 0xFF:02x}",
                delay_s=host.delay_s,
            )
        )
    blueprint = Blueprint(
        (CORE, *(rack.near_bridge or "" for rack in racks)), tuple(hosts), racks, _piece_frames(hosts)
    )
    for bridge in blueprint.bridges:
        ports = sum(port.bridge == bridge for port in blueprint.ports)
        if ports > MAX_PORTS_PER_BRIDGE:
            raise FabricError(
                f"{ports} links meet in one bridge, and a bridge of the lab takes {MAX_PORTS_PER_BRIDGE}; "
                "spread the hosts over racks"
            )
    return blueprint


def _piece_frames(hosts: list[Port]) -> int:
    """As few as the machine can bear, and never so many that a queue holds but a handful of pieces."""
    frames_per_s = sum(
        min(port.up.rate_bps, port.down.rate_bps) / 8 / FRAME_L2_BYTES * (DELAYED_COST if port.delay_s else 1)
        for port in hosts
    )
    wanted = math.ceil(frames_per_s / PLAIN_FRAMES_PER_S)
    smallest_queue = min(min(port.up.queue_bytes, port.down.queue_bytes) for port in hosts)
    bearable = smallest_queue // (MIN_PIECES_PER_QUEUE * FRAME_L2_BYTES)
    return max(1, min(wanted, bearable, MAX_PIECE_FRAMES))


def _shape(owner: str, rate_bps: float, queue_bytes: int) -> Shape:
    if queue_bytes < FRAME_L2_BYTES:
        raise FabricError(
            f"a queue of {format_size(queue_bytes)} on the link of {owner} holds no frame of "
            f"{FRAME_L2_BYTES} bytes; give it at least that"
        )
    if rate_bps < 8_000:
        raise FabricError(f"the link of {owner} has {rate_bps:g} bit/s; the lab shapes from 8 kbit on")
    return Shape(rate_bps, queue_bytes)
