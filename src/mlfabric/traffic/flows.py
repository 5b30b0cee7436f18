"""Who talks to whom: flows as five 64-bit words, their totals, their names, and how they group.

A flow is source, destination, protocol and ports; RoCEv2 flows also carry the destination queue pair, because
their source port is chosen for load balancing. Selection works on the table of flows, never on packets.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError

Words = NDArray[np.uint64]
GroupKind = Literal["flow", "pair", "host", "port"]

# Protocol number of frames that are not IP; 255 is reserved, so no packet carries it.
NOT_IP: Final = 255
PROTOCOL_NAMES: Final = {1: "icmp", 6: "tcp", 17: "udp", 47: "gre", 50: "esp", 58: "icmp6", 132: "sctp"}
ROCE_PORT: Final = 4791
_MAPPED_IPV4: Final = 0xFFFF << 32
_BETWEEN: Final = " > "  # sender and receiver of a flow that came by name
# Odd numbers without a pattern in their bits: keys are mixed with them.
MULTIPLIERS: Final = tuple(
    np.uint64(value)
    for value in (
        0x9E3779B97F4A7C15,
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
    )
)


def pack_ports(protocol: int, source: int, destination: int, queue_pair: int = 0) -> int:
    """The fifth word of a flow's key."""
    return protocol << 56 | source << 40 | destination << 24 | queue_pair


class FlowIndex:
    """Gives every distinct key a number, in order of first appearance, and keeps each flow's totals."""

    def __init__(self) -> None:
        self.keys = np.zeros((64, 5), np.uint64)
        self.count = 0
        self.slots = np.full(256, -1, np.int32)  # the compiled form's hash table; unused without it
        self.packets = np.zeros(64, np.int64)
        self.bytes = np.zeros(64, np.int64)
        self.first_ns = np.full(64, np.iinfo(np.int64).max, np.int64)
        self.last_ns = np.full(64, np.iinfo(np.int64).min, np.int64)
        self._sorted_hashes = np.zeros(0, np.uint64)
        self._sorted_ids = np.zeros(0, np.int32)

    def grow(self) -> None:
        """Doubles the room; numbers stay."""
        more = len(self.keys)
        self.keys = np.concatenate([self.keys, np.zeros((more, 5), np.uint64)])
        self.packets = np.concatenate([self.packets, np.zeros(more, np.int64)])
        self.bytes = np.concatenate([self.bytes, np.zeros(more, np.int64)])
        self.first_ns = np.concatenate([self.first_ns, np.full(more, np.iinfo(np.int64).max, np.int64)])
        self.last_ns = np.concatenate([self.last_ns, np.full(more, np.iinfo(np.int64).min, np.int64)])
        self.slots = np.full(4 * len(self.keys), -1, np.int32)

    def number(self, columns: tuple[Words, Words, Words, Words, Words]) -> NDArray[np.int32]:
        """The flow number of each packet, given the five words of its key."""
        hashes = columns[0] * MULTIPLIERS[0]
        for column, multiplier in zip(columns[1:], MULTIPLIERS[1:], strict=True):
            hashes ^= hashes >> np.uint64(29)
            hashes += column
            hashes *= multiplier
        numbers = self._known(hashes)
        strangers = np.flatnonzero(numbers < 0)
        if len(strangers):
            self._add(hashes, columns, strangers)
            numbers[strangers] = self._known(hashes[strangers])
        for word, column in enumerate(columns):
            if not np.array_equal(self.keys[:, word].take(numbers), column):
                # Two keys with one hash: about once in 10^19 pairs, and exact all the same.
                return self._number_one_by_one(columns)
        return numbers

    def _known(self, hashes: Words) -> NDArray[np.int32]:
        if not self.count:
            return np.full(len(hashes), -1, np.int32)
        place = np.searchsorted(self._sorted_hashes, hashes)
        np.minimum(place, len(self._sorted_hashes) - 1, out=place)
        numbers = self._sorted_ids.take(place)
        numbers[self._sorted_hashes.take(place) != hashes] = -1
        return numbers

    def _add(self, hashes: Words, columns: tuple[Words, ...], strangers: NDArray[np.intp]) -> None:
        _, first = np.unique(hashes[strangers], return_index=True)
        new = strangers[np.sort(first)]
        while self.count + len(new) > len(self.keys):
            self.grow()
        self.keys[self.count : self.count + len(new)] = np.stack([column[new] for column in columns], axis=1)
        all_hashes = np.concatenate([self._sorted_hashes, hashes[new]])
        all_ids = np.concatenate(
            [self._sorted_ids, np.arange(self.count, self.count + len(new), dtype=np.int32)]
        )
        order = np.argsort(all_hashes, kind="stable")
        self._sorted_hashes, self._sorted_ids = all_hashes[order], all_ids[order]
        self.count += len(new)

    def _number_one_by_one(self, columns: tuple[Words, ...]) -> NDArray[np.int32]:
        table = {
            tuple(int(word) for word in key): number for number, key in enumerate(self.keys[: self.count])
        }
        numbers = np.empty(len(columns[0]), np.int32)
        for index, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if key not in table:
                if self.count == len(self.keys):
                    self.grow()
                table[key] = self.count
                self.keys[self.count] = key
                self.count += 1
            numbers[index] = table[key]
        return numbers

    def add_totals(
        self, numbers: NDArray[np.int32], sizes: NDArray[np.uint32], time_ns: NDArray[np.int64]
    ) -> None:
        count = self.count
        self.packets[:count] += np.bincount(numbers, minlength=count)
        self.bytes[:count] += np.bincount(numbers, weights=sizes, minlength=count).astype(np.int64)
        # First and last by file order inside the batch is enough only if stamps ascend; they may not.
        if len(time_ns) and (time_ns[1:] >= time_ns[:-1]).all():
            seen, first = np.unique(numbers, return_index=True)
            self.first_ns[seen] = np.minimum(self.first_ns[seen], time_ns[first])
            _, last = np.unique(numbers[::-1], return_index=True)
            self.last_ns[seen] = np.maximum(self.last_ns[seen], time_ns[len(time_ns) - 1 - last])
        else:
            np.minimum.at(self.first_ns, numbers, time_ns)
            np.maximum.at(self.last_ns, numbers, time_ns)

    def table(self, origin_ns: int) -> FlowTable:
        count = self.count
        return FlowTable(
            self.keys[:count].copy(),
            self.packets[:count].copy(),
            self.bytes[:count].copy(),
            self.first_ns[:count] - origin_ns,
            self.last_ns[:count] - origin_ns,
        )


@dataclass(frozen=True)
class Flow:
    """One flow in words people read."""

    source: str
    destination: str
    protocol: str
    source_port: int
    destination_port: int
    queue_pair: int | None

    @property
    def label(self) -> str:
        if self.protocol.startswith("not-ip"):
            return self.protocol
        if not self.source_port and not self.destination_port:
            return f"{self.source} > {self.destination} {self.protocol}"
        sender = _with_port(self.source, self.source_port)
        text = f"{sender} > {_with_port(self.destination, self.destination_port)}"
        if self.queue_pair is not None:
            return f"{text} roce qp {self.queue_pair:#x}"
        return f"{text} {self.protocol}"


@dataclass(frozen=True)
class FlowTable:
    """The flows of a trace; row k describes packets whose flow number is k. Times count from the first
    packet."""

    keys: Words  # (flows, 5): source and destination as 128 bits each, then protocol, ports, queue pair
    packets: NDArray[np.int64]
    bytes: NDArray[np.int64]
    first_ns: NDArray[np.int64]
    last_ns: NDArray[np.int64]
    names: tuple[str, ...] | None = field(default=None)  # of flows that came by name, not by address

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def named(cls, names: list[str]) -> FlowTable:
        """Flows that are known by a name alone (tables, synthetic traces before packets)."""
        keys = np.zeros((len(names), 5), np.uint64)
        keys[:, 4] = np.arange(len(names), dtype=np.uint64) + np.uint64(NOT_IP << 56)
        zeros = np.zeros(len(names), np.int64)
        return cls(keys, zeros, zeros.copy(), zeros.copy(), zeros.copy(), tuple(names))

    @property
    def tells_hosts(self) -> bool:
        """Whether every flow has a sender and a receiver: by addresses, or by names like `a > b`."""
        return self.names is None or all(_BETWEEN in name for name in self.names)

    def flow(self, number: int) -> Flow:
        source_hi, source_lo, target_hi, target_lo, ports = (int(word) for word in self.keys[number])
        protocol = ports >> 56
        if self.names is not None:
            source, _, target = self.names[number].partition(_BETWEEN)
            return Flow(source, target, "not-ip", 0, 0, None)
        if protocol == NOT_IP:
            ethertype = ports >> 40 & 0xFFFF
            return Flow("", "", f"not-ip {ethertype:#06x}" if ethertype else "not-ip", 0, 0, None)
        target_port = ports >> 24 & 0xFFFF
        roce = protocol == 17 and target_port == ROCE_PORT
        return Flow(
            _address(source_hi, source_lo),
            _address(target_hi, target_lo),
            PROTOCOL_NAMES.get(protocol, f"proto {protocol}"),
            ports >> 40 & 0xFFFF,
            target_port,
            ports & 0xFFFFFF if roce else None,
        )

    def label(self, number: int) -> str:
        return self.names[number] if self.names is not None else self.flow(number).label

    def groups(self, kind: GroupKind, direction: str = "both") -> tuple[list[str], NDArray[np.int32]]:
        """Names of the groups and, per flow, which one it belongs to (-1: none).

        `host` groups by the sending host with direction "out", the receiving one with "in"; "port" by the
        well-known side's port number (the lower one).
        """
        names: dict[str, int] = {}
        member = np.full(len(self), -1, np.int32)
        for number in range(len(self)):
            flow = self.flow(number)
            if kind == "flow" or (self.names is not None and not self.tells_hosts):
                name = self.label(number)
            elif self.names is None and flow.protocol.startswith("not-ip"):
                name = flow.protocol
            elif kind == "pair":
                name = f"{flow.source}{_BETWEEN}{flow.destination}"
            elif kind == "host":
                name = flow.destination if direction == "in" else flow.source
            else:
                ports = [port for port in (flow.source_port, flow.destination_port) if port]
                name = f"{flow.protocol} {min(ports)}" if ports else flow.protocol
            member[number] = names.setdefault(name, len(names))
        return list(names), member


def _address(high: int, low: int) -> str:
    if high == 0 and low >> 32 == 0xFFFF:
        return str(ipaddress.IPv4Address(low & 0xFFFFFFFF))
    return str(ipaddress.IPv6Address(high << 64 | low))


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def address_words(address: str) -> tuple[int, int]:
    """The two words of an address as keys hold it; IPv4 as ::ffff:a.b.c.d."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv4Address):
        return 0, _MAPPED_IPV4 | int(parsed)
    return int(parsed) >> 64, int(parsed) & (2**64 - 1)


@dataclass(frozen=True)
class Selection:
    """Which flows to keep. Empty fields keep everything; all given ones must hold."""

    hosts: tuple[str, ...] = ()
    nets: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    protocol: str | None = None
    direction: Literal["both", "in", "out"] = "both"

    def __bool__(self) -> bool:
        return bool(self.hosts or self.nets or self.ports or self.protocol)

    def describe(self) -> str:
        parts = [f"host {host}" for host in self.hosts] + [f"net {net}" for net in self.nets]
        parts += [f"port {port}" for port in self.ports]
        if self.protocol:
            parts.append(self.protocol)
        if self.direction != "both":
            parts.append(f"direction {self.direction}")
        return ", ".join(parts)

    def mask(self, table: FlowTable) -> NDArray[np.bool_]:
        """Per flow: kept or not. With direction "out" host and net must match the source, with "in" the
        target."""
        kept = np.ones(len(table), bool)
        if self.hosts or self.nets:
            matches = self._address_test()
            ends = {"both": (0, 2), "out": (0,), "in": (2,)}[self.direction]
            either = np.zeros(len(table), bool)
            for end in ends:
                words = table.keys[:, end : end + 2].tolist()
                either |= np.array([matches(high, low) for high, low in words], bool)
            kept &= either & (table.keys[:, 4] >> np.uint64(56) != NOT_IP)
        packed = table.keys[:, 4]
        if self.ports:
            wanted = np.array(self.ports, np.uint64)
            sender = np.isin(packed >> np.uint64(40) & np.uint64(0xFFFF), wanted)
            target = np.isin(packed >> np.uint64(24) & np.uint64(0xFFFF), wanted)
            kept &= sender | target
        if self.protocol:
            kept &= packed >> np.uint64(56) == _protocol_number(self.protocol)
        return kept

    def _address_test(self) -> Callable[[int, int], bool]:
        try:
            hosts = {address_words(host) for host in self.hosts}
            nets = [ipaddress.ip_network(net, strict=False) for net in self.nets]
        except ValueError as error:
            raise FabricError(f"{error}; write an address like 10.0.0.1 or a net like 10.0.0.0/24") from None

        def matches(high: int, low: int) -> bool:
            if (high, low) in hosts:
                return True
            if not nets:
                return False
            address = ipaddress.ip_address(_address(high, low))
            return any(address in net for net in nets if net.version == address.version)

        return matches


def _protocol_number(name: str) -> int:
    numbers = {text: number for number, text in PROTOCOL_NAMES.items()}
    if name.isdigit():
        return int(name)
    if name not in numbers:
        raise FabricError(
            f"{name!r} is not a protocol known here; use one of {', '.join(numbers)} or its number"
        )
    return numbers[name]
