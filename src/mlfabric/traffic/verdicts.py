"""Does one application collide with itself? Per receiving host, from stamps taken at the senders.

Orchestrated sources take turns: the port's backlog is a few frames and lies far in the left tail of what
the same sources would do at random phases. Behind the bottleneck packets are already in a row, so a capture
taken at the receiver can't tell once the port has reached its rate; with one source the question does not
arise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.backlogs import Backlog
from mlfabric.traffic.bursts import find_bursts
from mlfabric.traffic.cycles import grained
from mlfabric.traffic.envelopes import envelope
from mlfabric.traffic.queueing import drop_tail
from mlfabric.traffic.trace import Trace

Side = Literal["sender", "receiver", "unknown"]
_SCALES_NS: Final = (100_000, 1_000_000, 5_000_000, 50_000_000)
_FEW_FRAMES: Final = 16
_MOST_GRAINS: Final = 20_000
_SMALL_SHARE: Final = 0.01  # sources below this share of a port's bytes are acknowledgements and the like


@dataclass(frozen=True)
class PortVerdict:
    """What was found about one receiving host."""

    host: str
    sources: int
    minor_sources: int  # left out: less than 1 % of the port's bytes
    bytes: int
    on_share: float | None  # of the span, at least one source sending
    overlap_share: float | None  # of the time anything is sent, two or more at once
    multiplexing: tuple[tuple[int, float], ...]  # (tau, E_port / sum of E_k)
    port_rate_bps: float
    backlog_bytes: float | None
    largest_frame: int
    p_value: float | None
    random_backlog_bytes: float | None  # median over random phases
    verdict: str
    reason: str


def orchestration(
    trace: Trace,
    port_rate_bps: float | None = None,
    side: Side = "unknown",
    shifts: int = 199,
    seed: int = 0,
    theta_ns: int | None = None,
) -> list[PortVerdict]:
    """A verdict per receiving host, most bytes first."""
    trace.needs_packets("judge")
    if trace.flows is None or trace.flow is None or not trace.flows.tells_hosts:
        raise FabricError("orchestration needs packets with addresses; this input has none")
    rate = port_rate_bps or _fastest_source(trace)
    generator = np.random.default_rng(seed)
    verdicts = []
    for host, port in trace.by("host", "in"):
        if host.startswith("not-ip"):
            continue
        verdicts.append(_judge(host, port, rate, side, shifts, generator, theta_ns))
    return verdicts


def _fastest_source(trace: Trace) -> float:
    """Without a port rate: the fastest any single host was seen sending over 100 us."""
    rates = [0.0]
    for _, part in trace.by("host", "out"):
        peak = envelope(part, min(100_000, max(part.span_ns, 1)))
        if peak is not None and part.span_ns >= 100_000:
            rates.append(peak.bytes * 8e9 / 100_000)
    if max(rates) <= 0:
        raise FabricError("the port's rate can't be guessed from this capture; pass --port-rate")
    return float(f"{max(rates):.3g}")


def _judge(
    host: str,
    port: Trace,
    rate_bps: float,
    side: Side,
    shifts: int,
    generator: np.random.Generator,
    theta_ns: int | None,
) -> PortVerdict:
    sources = [part for _, part in port.by("host", "out")]
    major = [part for part in sources if part.total_bytes >= _SMALL_SHARE * port.total_bytes]
    minor = len(sources) - len(major)
    frame = int(port.size.max())
    if len(major) < 2:
        return PortVerdict(
            host, len(major), minor, port.total_bytes, None, None, (), rate_bps, None, frame, None, None,
            "not applicable", "fan-in 1: a single source can't collide",
        )  # fmt: skip
    on_share, overlap = _overlap(major, port.span_ns, theta_ns)
    multiplexing = _multiplexing(port, major)
    saturated = _reaches(port, rate_bps)
    if side == "receiver" and saturated:
        return PortVerdict(
            host, len(major), minor, port.total_bytes, on_share, overlap, multiplexing, rate_bps, None, frame,
            None, None, "cannot tell",
            "captured behind the bottleneck, where packets already stand in a row, and the port "
            "reached its rate",
        )  # fmt: skip
    backlog = Backlog(port).at(rate_bps).bytes
    observed, random = _against_chance(major, port, rate_bps, shifts, generator)
    p_value = (1 + int((random <= observed * (1 + 1e-9)).sum())) / (len(random) + 1)
    median = float(np.median(random))
    verdict, reason = _verdict(backlog, frame, p_value, median)
    if side == "unknown" and saturated:
        reason += "; the capture's side is not stated and the port reached its rate: true only at the senders"
    return PortVerdict(
        host, len(major), minor, port.total_bytes, on_share, overlap, multiplexing, rate_bps, backlog, frame,
        p_value, median, verdict, reason,
    )  # fmt: skip


def _verdict(backlog: float, frame: int, p_value: float, median: float) -> tuple[str, str]:
    if p_value <= 0.05 and backlog <= _FEW_FRAMES * frame:
        return "orchestrated", "a few frames of backlog, far below what random phases give"
    if p_value <= 0.05:
        return "partly orchestrated", "less backlog than random phases give, yet more than a few frames"
    if median <= _FEW_FRAMES * frame and backlog <= _FEW_FRAMES * frame:
        return "no contention", "the port is so lightly used that even random phases hardly queue"
    if backlog <= _FEW_FRAMES * frame:
        return (
            "no collision",
            "a few frames of backlog, but so light a load misses itself by chance often enough",
        )
    if p_value >= 0.95:
        return "collides", "more backlog than nearly all random phases: the sources send at the same time"
    return "like chance", "the backlog is what unrelated sources would make"


def _reaches(port: Trace, rate_bps: float) -> bool:
    window = int(max(50_000, 20 * float(port.size.max()) * 8e9 / rate_bps))
    peak = envelope(port, window)
    return peak is not None and peak.bytes * 8e9 / window >= 0.9 * rate_bps


def _overlap(sources: Sequence[Trace], span_ns: int, theta_ns: int | None) -> tuple[float, float]:
    """Share of the span with a source ON, and the share of that with two or more."""
    edges: list[tuple[int, int]] = []
    for source in sources:
        found = find_bursts(source, theta_ns)
        edges += [(int(start), 1) for start in found.start_ns]
        edges += [(int(end), -1) for end in found.start_ns + found.duration_ns]
    edges.sort(key=lambda edge: (edge[0], -edge[1]))
    busy = shared = depth = before = 0
    for at, step in edges:
        busy += (at - before) * (depth >= 1)
        shared += (at - before) * (depth >= 2)
        depth += step
        before = at
    return busy / max(span_ns, 1), shared / max(busy, 1)


def _multiplexing(port: Trace, sources: Sequence[Trace]) -> tuple[tuple[int, float], ...]:
    result = []
    for tau in _SCALES_NS:
        whole = envelope(port, tau)
        if whole is None:
            continue
        alone = 0.0
        for source in sources:
            peak = envelope(source, min(tau, source.span_ns))
            alone += peak.bytes if peak else 0
        result.append((tau, whole.bytes / alone))
    return tuple(result)


def _against_chance(
    sources: Sequence[Trace], port: Trace, rate_bps: float, shifts: int, generator: np.random.Generator
) -> tuple[float, NDArray[np.float64]]:
    """Backlog as it was and at random phases, both from the same grains, so that they compare."""
    length = port.span_ns + 1
    first = int(port.time_ns[0])
    columns = [
        grained(source.time_ns - first, source.size.astype(np.int64), _MOST_GRAINS) for source in sources
    ]

    def backlog(by: Sequence[int]) -> float:
        turned = [
            np.sort((times + shift) % length, kind="stable")
            for (times, _), shift in zip(columns, by, strict=True)
        ]
        sizes = []
        for (times, size), shift in zip(columns, by, strict=True):
            wraps = int(np.searchsorted(times, length - shift % length))
            sizes.append(np.concatenate([size[wraps:], size[:wraps]]))
        together = np.concatenate(turned)
        order = np.argsort(together, kind="stable")
        return drop_tail(
            together[order], np.concatenate(sizes)[order], rate_bps, np.inf, np.inf, 0, length
        ).most_bytes

    observed = backlog([0] * len(columns))
    random = [backlog([int(generator.integers(0, length)) for _ in columns]) for _ in range(shifts)]
    return observed, np.array(random)
