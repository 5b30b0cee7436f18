"""What benchmarks on several hosts share: the hosts of a lab as options describe them, and the run of one
program on each of them."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mlfabric.errors import FabricError
from mlfabric.plan.allreduce import lower_bound, rack_time
from mlfabric.scenario import Scenario, parse
from mlfabric.topology import Host, Network, Rack
from mlfabric.units import (
    FRAME_L2_BYTES,
    FRAME_PAYLOAD_BYTES,
    format_time,
    goodput,
    parse_rate,
    parse_size,
    parse_time,
)

DEFAULT_SIZES = ("8B", "1KiB", "64KiB", "1MB", "16MB")
UNSHAPED = "unshaped"
# No real limit: it is never reached, and never verified.
UNSHAPED_RATE = "100gbit"

ReportType = TypeVar("ReportType")


@dataclass(frozen=True, slots=True)
class LabWish:
    """The hosts of a lab, as the options describe them."""

    hosts: int
    rate: str
    slow: dict[int, str]
    racks: int = 0
    uplink: str = ""
    interleaved: bool = False
    delay: str = ""  # one way, of the first host's link

    @property
    def unshaped(self) -> bool:
        return self.rate == UNSHAPED

    def scenario(self) -> Scenario:
        rate = UNSHAPED_RATE if self.unshaped else self.rate
        lines = [f'name = "bench"\nnetwork = {{ rate = "{rate}" }}']
        for rack in range(self.racks):
            lines.append(f'[[racks]]\nname = "rack{rack}"\nrate = "{self.uplink}"')
        for index in range(self.hosts):
            own = f'\nrate = "{self.slow[index]}"' if index in self.slow else ""
            rack_line = f'\nrack = "rack{self.rack_of(index)}"' if self.racks else ""
            delay_line = f'\ndelay = "{self.delay}"' if self.delay and index == 0 else ""
            lines.append(f'[[hosts]]\nname = "h{index}"{own}{rack_line}{delay_line}')
        return parse("\n".join(lines))

    def rack_of(self, index: int) -> int:
        return index % self.racks if self.interleaved else index * self.racks // self.hosts

    def rates(self) -> list[float]:
        """Wire bits per second of each host's link."""
        return [parse_rate(self.slow.get(index, self.rate)) for index in range(self.hosts)]

    def network(self) -> Network | None:
        """The hosts as the planner would see them if it knew the truth; None: their rates have no limit."""
        if self.unshaped:
            return None
        rates = [goodput(rate) for rate in self.rates()]
        uplink = goodput(parse_rate(self.uplink)) if self.racks else 0.0
        return Network.of(
            [
                Host(f"h{index}", rate, rate, f"rack{self.rack_of(index)}" if self.racks else None)
                for index, rate in enumerate(rates)
            ],
            [Rack(f"rack{rack}", uplink, uplink) for rack in range(self.racks)],
        )

    def bound_s(self, size_bytes: int) -> float | None:
        """The least time of an all-reduce over these links, in wire bytes."""
        if self.unshaped:
            return None
        wire_bytes = size_bytes * FRAME_L2_BYTES / FRAME_PAYLOAD_BYTES
        rates = [rate / 8 for rate in self.rates()]
        bound = lower_bound(rates, rates, wire_bytes)
        if self.racks > 1:
            inside = [
                [rate for index, rate in enumerate(rates) if self.rack_of(index) == rack]
                for rack in range(self.racks)
            ]
            bound = max(bound, rack_time(inside, [parse_rate(self.uplink) / 8] * self.racks, wire_bytes))
        return bound


def make_wish(
    hosts: int,
    rate: str,
    slow: Sequence[str],
    racks: int = 0,
    uplink: str = "100mbit",
    interleaved: bool = False,
    delay: str = "",
) -> LabWish:
    """The hosts that the options ask for; a FabricError says what is wrong with them."""
    if not 2 <= hosts <= 64:
        raise FabricError(f"a lab for this has 2 to 64 hosts, not {hosts}")
    if racks and not 2 <= racks <= hosts:
        raise FabricError(f"{racks} racks for {hosts} hosts; give 2 to {hosts}")
    try:
        for written in (uplink, *([] if rate == UNSHAPED else [rate])):
            parse_rate(written)
        if delay:
            parse_time(delay)
    except ValueError as error:
        raise FabricError(str(error)) from None
    others = dict(read_assignment(one, hosts) for one in slow)
    return LabWish(hosts, rate, others, racks, uplink, interleaved, delay)


def read_size(written: str) -> int:
    try:
        value = parse_size(written)
    except ValueError as error:
        raise FabricError(str(error)) from None
    if not 4 <= value <= 4 * 10**9:
        raise FabricError(f"{written!r} is not between 4 bytes and 4 GB")
    return value


def read_assignment(written: str, hosts: int) -> tuple[int, str]:
    """(3, "50mbit") of "3=50mbit"."""
    index, _, rate = written.partition("=")
    try:
        parse_rate(rate)
        number = int(index)
    except ValueError:
        raise FabricError(
            f"{written!r} is not like 3=50mbit: a host's number, from 0, and its rate"
        ) from None
    if not 0 <= number < hosts:
        raise FabricError(f"{written!r} names host {number}; the lab has hosts 0 to {hosts - 1}")
    return number, rate


def run_in_lab(
    lab: Any,
    module: str,
    order: msgspec.Struct,
    report_type: type[ReportType],
    on_line: Callable[[int, str, str], None] | None = None,
) -> list[ReportType]:
    """Run a module on every host with this order; the reports of all ranks."""
    from mlfabric.lab import RunOptions

    with tempfile.TemporaryDirectory(prefix="mlfabric-bench-") as folder:
        argv = [sys.executable, "-m", module, msgspec.json.encode(order).decode()]
        result = lab.run(argv, RunOptions(folder=Path(folder) / "run", timeout_s=3600, on_line=on_line))
        said = [Path(rank.log).read_text(errors="replace").splitlines() for rank in result.ranks]
        reports = [next((line for line in lines if line.startswith("{")), None) for lines in said]
        if not result.ok or None in reports:
            failed = next((lines for lines, report in zip(said, reports, strict=True) if report is None), [])
            raise FabricError(f"the ranks failed: {failed[-1] if failed else '; '.join(result.complaints)}")
        return [msgspec.json.decode(report or "", type=report_type) for report in reports]


# --- figures ----------------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return {"median_s": statistics.median(ordered), "p10_s": at(0.1), "p90_s": at(0.9)}


def shown(time_s: float | None) -> str:
    return format_time(time_s) if time_s is not None else "-"
