"""The definitions, written as plainly as they read, in quadratic time: what the quick forms are compared
with."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

Packets = list[tuple[int, int]]  # (time ns, bytes), sorted


def envelope(packets: Packets, tau_ns: int) -> int:
    return max(sum(size for at, size in packets if start <= at <= start + tau_ns) for start, _ in packets)


def backlog(packets: Packets, bytes_per_ns: Fraction) -> Fraction:
    best = Fraction(0)
    for first in range(len(packets)):
        arrived = 0
        for last in range(first, len(packets)):
            arrived += packets[last][1]
            best = max(best, arrived - bytes_per_ns * (packets[last][0] - packets[first][0]))
    return best


def contents(packets: Packets, tau_ns: int) -> list[tuple[int, int, int]]:
    """(how long, bytes, packets) for window starts from the first packet to the last one less tau."""
    first, finish = packets[0][0], packets[-1][0] - tau_ns
    points = {first, finish}
    for at, _ in packets:
        points |= {point for point in (at, at - tau_ns) if first <= point <= finish}
    ordered = sorted(points)
    result = []
    for low, high in pairwise(ordered):
        # Twice the middle of the stretch, so that it stays a whole number.
        inside = [size for at, size in packets if low + high <= 2 * at <= low + high + 2 * tau_ns]
        result.append((high - low, sum(inside), len(inside)))
    return result


def quantile(pieces: list[tuple[int, int, int]], share: float) -> int:
    total = sum(lasting for lasting, _, _ in pieces)
    passed = 0
    for lasting, size, _ in sorted(pieces, key=lambda piece: piece[1]):
        passed += lasting
        if passed >= share * total:
            return size
    raise AssertionError("unreachable")


def moments(pieces: list[tuple[int, int, int]], column: int) -> tuple[Fraction, Fraction]:
    total = sum(piece[0] for piece in pieces)
    mean = Fraction(sum(piece[0] * piece[column] for piece in pieces), total)
    square = Fraction(sum(piece[0] * piece[column] ** 2 for piece in pieces), total)
    return mean, square - mean**2


def burst_count(packets: Packets, theta_ns: float) -> int:
    return 1 + sum(later[0] - earlier[0] > theta_ns for earlier, later in pairwise(packets))
