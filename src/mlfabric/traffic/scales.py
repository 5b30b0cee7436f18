"""Time scales and rates as people ask for them: "10us:10s", "1ms,5ms", "1gbit,2.5e9"."""

from __future__ import annotations

from typing import Final

import numpy as np

from mlfabric.errors import FabricError
from mlfabric.units import parse_rate, parse_size, parse_time_ns

DEFAULT_SCALES: Final = "10us:10s"
_STEPS: Final = (1, 2, 5)


def parse_scales(written: str) -> tuple[int, ...]:
    """Nanoseconds, ascending. A range takes 1-2-5 steps, both ends included."""
    try:
        if ":" in written:
            low_text, high_text = written.split(":", 1)
            low, high = parse_time_ns(low_text), parse_time_ns(high_text)
            if not 0 < low <= high:
                raise ValueError(f"{written!r} is not a range; write it like 10us:10s")
            steps = (step * 10**power for power in range(20) for step in _STEPS)
            found = {low, high, *(step for step in steps if low <= step <= high)}
        else:
            found = {parse_time_ns(each) for each in written.split(",") if each.strip()}
    except ValueError as error:
        raise FabricError(str(error)) from None
    if not found or min(found) <= 0:
        raise FabricError(f"{written!r} names no time scale above zero; write 10us:10s or 1ms,5ms")
    return tuple(sorted(found))


def parse_rates(written: str) -> tuple[float, ...]:
    """Bits per second, ascending. "100mbit:100gbit:50" is a range with that many steps."""
    try:
        parts = written.split(":")
        if len(parts) in (2, 3):
            low, high = parse_rate(parts[0]), parse_rate(parts[1])
            count = int(parts[2]) if len(parts) == 3 else 20
            if not 0 < low <= high or count < 1:
                raise ValueError(f"{written!r} is not a range of rates; write it like 100mbit:100gbit:50")
            return tuple(float(rate) for rate in np.geomspace(low, high, count))
        found = {parse_rate(each) for each in written.split(",") if each.strip()}
    except ValueError as error:
        raise FabricError(str(error)) from None
    if not found or min(found) <= 0:
        raise FabricError(f"{written!r} names no rate above zero; write 1gbit,2.5e9")
    return tuple(sorted(found))


def one_rate(written: str) -> float:
    try:
        rate = parse_rate(written)
    except ValueError as error:
        raise FabricError(str(error)) from None
    if rate <= 0:
        raise FabricError(f"{written!r} is no rate above zero")
    return rate


def one_size(written: str) -> int:
    try:
        return parse_size(written)
    except ValueError as error:
        raise FabricError(str(error)) from None


def one_time_ns(written: str) -> int:
    try:
        return parse_time_ns(written)
    except ValueError as error:
        raise FabricError(str(error)) from None


def default_rates(mean_bps: float, highest_bps: float, count: int = 20) -> tuple[float, ...]:
    """From the mean rate to the highest one seen, three digits each."""
    if mean_bps <= 0:
        return ()
    high = max(highest_bps, mean_bps * 1.01)
    return tuple(sorted({float(f"{rate:.3g}") for rate in np.geomspace(mean_bps * 1.001, high, count)}))
