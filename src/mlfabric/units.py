"""Sizes, rates and times as people write them, turned into plain numbers and back.

MB = 10^6 bytes, MiB = 2^20 bytes, mbit = 10^6 bit/s. What is written down (scenario files, link settings)
counts *wire* bits; the planner counts *payload* bytes. `goodput` is the one place where the two meet.
Decimal times become integers without passing through floats wherever nanoseconds matter.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

# A full Ethernet frame carries 1448 bytes of TCP payload (timestamps on) in 1514 bytes of L2.
FRAME_L2_BYTES: Final = 1514
FRAME_PAYLOAD_BYTES: Final = 1448

_NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
_WRITTEN: Final = re.compile(rf"^\s*{_NUMBER}\s*([A-Za-zµ/]*)\s*$")

# Beyond this it is a slip of the pen; an integer of 1e999999 would take minutes to write down.
_LARGEST: Final = Decimal(10) ** 30

_SIZE_UNITS: Final = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "kiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_RATE_UNITS: Final = {
    "": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12,
    "bit/s": 1, "kbit/s": 10**3, "mbit/s": 10**6, "gbit/s": 10**9, "tbit/s": 10**12,
    "bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9, "tbps": 10**12,
}  # fmt: skip
_TIME_UNITS_NS: Final = {
    "": 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "µs": 10**3, "ns": 1,
    "min": 60 * 10**9, "h": 3600 * 10**9,
}  # fmt: skip


def _scaled(written: str | float, units: dict[str, int], what: str, example: str) -> Decimal:
    if isinstance(written, bool) or not isinstance(written, str | int | float):
        raise ValueError(f"{written!r} is not a {what}; write it like {example}")
    match = _WRITTEN.match(str(written))
    if match is None:
        raise ValueError(f"{written!r} is not a {what}; write it like {example}")
    number, unit = match.groups()
    scale = units.get(unit, units.get(unit.lower()) if units is _RATE_UNITS else None)
    if scale is None:
        known = ", ".join(name for name in units if name)
        raise ValueError(f"{written!r} has the unknown unit {unit!r}; a {what} takes {known}")
    value = Decimal(number)
    if value < 0:
        raise ValueError(f"{written!r} is negative; a {what} is zero or more")
    if value > _LARGEST:
        raise ValueError(f"{written!r} is larger than any {what}")
    return value * scale


def parse_size(written: str | float) -> int:
    """Bytes of "16MB", "256KiB" or a bare number; a fraction of a byte is rounded up."""
    return math.ceil(_scaled(written, _SIZE_UNITS, "size", "16MB or 256KiB"))


def parse_rate(written: str | float) -> float:
    """Bits per second of "200mbit", "2.5gbit/s" or a bare number."""
    return float(_scaled(written, _RATE_UNITS, "rate", "200mbit or 1gbit"))


def parse_time_ns(written: str | float) -> int:
    """Nanoseconds of "5ms", "10us", "1.5s" or a bare number of seconds; exact for decimal input."""
    return round(_scaled(written, _TIME_UNITS_NS, "time", "5ms or 1.5s"))


def parse_time(written: str | float) -> float:
    """Seconds of "5ms", "10us", "1.5s" or a bare number of seconds."""
    return float(_scaled(written, _TIME_UNITS_NS, "time", "5ms or 1.5s") / 10**9)


def goodput(wire_bps: float) -> float:
    """Payload bytes per second that full TCP frames carry over a link of `wire_bps` bits per second."""
    return wire_bps / 8 * FRAME_PAYLOAD_BYTES / FRAME_L2_BYTES


def wire_rate(payload_bytes_per_s: float) -> float:
    """The inverse of `goodput`: bits per second on the wire for a payload rate."""
    return payload_bytes_per_s * 8 * FRAME_L2_BYTES / FRAME_PAYLOAD_BYTES


def _scaled_text(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for scale, unit in steps:
        if abs(value) >= scale * 0.9995:
            return (
                f"{value / scale:.3g} {unit}" if abs(value) < scale * 999.5 else f"{value / scale:.0f} {unit}"
            )
    scale, unit = steps[-1]
    return f"{value / scale:.3g} {unit}"


def format_size(size_bytes: float) -> str:
    return _scaled_text(size_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def format_rate(rate_bps: float) -> str:
    return _scaled_text(rate_bps, ((1e12, "Tb/s"), (1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"), (1, "b/s")))


def format_time(time_s: float) -> str:
    if time_s == 0:
        return "0 s"
    if abs(time_s) >= 120:
        return f"{time_s / 60:.3g} min"
    return _scaled_text(time_s, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))
