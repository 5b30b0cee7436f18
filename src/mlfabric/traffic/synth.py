"""Traffic made to order: periodic bursts, rings, parameter servers, Poisson, fractional noise.

Everything is a schedule of frames with sender and receiver, deterministic for a given seed, and can be
written as a pcap file. Made traffic is for tests, benchmarks and what-if questions; no figure about a real
system comes from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError
from mlfabric.traffic.capture.writer import Endpoints
from mlfabric.traffic.flows import FlowTable, address_words, pack_ports
from mlfabric.traffic.trace import NS_PER_S, Origin, Trace

FRAME_BYTES: Final = 1514
PAYLOAD_BYTES: Final = 1448
_WIRE_EXTRA: Final = 24
_EPOCH_NS: Final = 1_700_000_000 * NS_PER_S

Pattern = Literal["periodic", "ring", "ps-naive", "ps-staggered", "poisson", "fgn"]


@dataclass(frozen=True)
class SynthOptions:
    """What to make. Sizes are payload bytes per iteration, rates are wire rates."""

    pattern: Pattern = "periodic"
    hosts: int = 4
    size_bytes: int = 10_000_000
    period_s: float = 0.1
    iterations: int = 10
    rate_bps: float = 10e9
    mean_rate_bps: float = 1e9  # of the random patterns
    hurst: float = 0.8
    seed: int = 0
    jitter_s: float = 0.0  # standard deviation of each host's start in each iteration


@dataclass(frozen=True)
class Made:
    """Frames in time order with the flow each belongs to."""

    time_ns: NDArray[np.int64]  # since 1970
    length: NDArray[np.int64]
    flow: NDArray[np.int64]
    flows: tuple[Endpoints, ...]

    def trace(self) -> Trace:
        """The frames as the reader would give them, without a file in between."""
        keys = np.array(
            [
                (*address_words(each.source), *address_words(each.destination),
                 pack_ports(6 if each.protocol == "tcp" else 17, each.source_port, each.destination_port))
                for each in self.flows
            ],
            np.uint64,
        )  # fmt: skip
        count = len(self.flows)
        start = int(self.time_ns[0]) if len(self.time_ns) else 0
        relative = self.time_ns - start
        first = np.full(count, np.iinfo(np.int64).max)
        last = np.full(count, np.iinfo(np.int64).min)
        np.minimum.at(first, self.flow, relative)
        np.maximum.at(last, self.flow, relative)
        table = FlowTable(
            keys,
            np.bincount(self.flow, minlength=count).astype(np.int64),
            np.bincount(self.flow, weights=self.length, minlength=count).astype(np.int64),
            first,
            last,
        )
        return Trace.from_arrays(
            self.time_ns,
            self.length,
            flow=self.flow.astype(np.uint16),
            flows=table,
            origin=Origin(vantage="synthetic"),
        )


@dataclass(frozen=True)
class _Send:
    """One transfer: so many payload bytes from one host to another, starting then, at this rate."""

    start_s: float
    source: int
    target: int
    payload_bytes: int
    rate_bps: float


def synthesize(options: SynthOptions) -> Made:
    """Frames of the asked-for pattern, by their senders' clocks."""
    if options.hosts < 2 or options.iterations < 1 or options.rate_bps <= 0 or options.period_s <= 0:
        raise FabricError("made traffic needs at least 2 hosts, 1 iteration, a rate and a period above zero")
    if options.pattern == "poisson":
        return _poisson(options)
    if options.pattern == "fgn":
        return _noise_traffic(options)
    sends = {"periodic": _periodic, "ring": _ring, "ps-naive": _servers, "ps-staggered": _servers}
    return _framed(sends[options.pattern](options), options)


def _starts(options: SynthOptions) -> NDArray[np.float64]:
    """When each host starts each iteration: (iterations, hosts)."""
    generator = np.random.default_rng(options.seed)
    ideal = np.arange(options.iterations)[:, None] * options.period_s
    shape = (options.iterations, options.hosts)
    starts = ideal + np.abs(generator.normal(0, options.jitter_s, shape))
    return np.asarray(starts, np.float64)


def _periodic(options: SynthOptions) -> list[_Send]:
    """The first host sends one compact burst to the second in every period."""
    return [_Send(row[0], 0, 1, options.size_bytes, options.rate_bps) for row in _starts(options)]


def _ring(options: SynthOptions) -> list[_Send]:
    """Ring all-reduce: 2(N-1) steps of one N-th of the gradient from each host to the next."""
    hosts = options.hosts
    part = options.size_bytes // hosts
    sends = []
    for row in _starts(options):
        begin = float(row.max())
        step_s = _wire_time(part, options.rate_bps)
        for step in range(2 * (hosts - 1)):
            sends += [
                _Send(begin + step * step_s, host, (host + 1) % hosts, part, options.rate_bps)
                for host in range(hosts)
            ]
    return sends


def _servers(options: SynthOptions) -> list[_Send]:
    """Workers push to host 0, which answers each with the model: all at once, or one after the other."""
    workers = options.hosts - 1
    staggered = options.pattern == "ps-staggered"
    sends = []
    push_s = _wire_time(options.size_bytes, options.rate_bps)
    for row in _starts(options):
        begin = float(row.min())
        for worker in range(1, workers + 1):
            start = begin + (worker - 1) * push_s if staggered else float(row[worker])
            sends.append(_Send(start, worker, 0, options.size_bytes, options.rate_bps))
        # The server has one uplink: the model leaves it worker by worker once all updates are in.
        answered = begin + workers * push_s
        for worker in range(1, workers + 1):
            sends.append(
                _Send(answered + (worker - 1) * push_s, 0, worker, options.size_bytes, options.rate_bps)
            )
    return sends


def _wire_time(payload_bytes: int, rate_bps: float) -> float:
    frames = -(-payload_bytes // PAYLOAD_BYTES)
    headers = frames * (FRAME_BYTES - PAYLOAD_BYTES + _WIRE_EXTRA)
    return (payload_bytes + headers) * 8 / rate_bps


def _framed(sends: list[_Send], options: SynthOptions) -> Made:
    """Each transfer as frames back to back at its rate; a frame's stamp is when its last bit has left."""
    pairs = sorted({(send.source, send.target) for send in sends})
    number = {pair: index for index, pair in enumerate(pairs)}
    times, lengths, flows = [], [], []
    for send in sends:
        frames = -(-send.payload_bytes // PAYLOAD_BYTES)
        length = np.full(frames, FRAME_BYTES, np.int64)
        length[-1] = send.payload_bytes - (frames - 1) * PAYLOAD_BYTES + FRAME_BYTES - PAYLOAD_BYTES
        ends = np.cumsum(np.maximum(length, 60) + _WIRE_EXTRA) * (8e9 / send.rate_bps)
        times.append(np.rint(send.start_s * NS_PER_S + ends).astype(np.int64))
        lengths.append(length)
        flows.append(np.full(frames, number[send.source, send.target], np.int64))
    return _ordered(np.concatenate(times), np.concatenate(lengths), np.concatenate(flows), pairs)


def _ordered(
    time_ns: NDArray[np.int64],
    length: NDArray[np.int64],
    flow: NDArray[np.int64],
    pairs: list[tuple[int, int]],
) -> Made:
    order = np.argsort(time_ns, kind="stable")
    endpoints = tuple(
        Endpoints(f"10.77.{a // 250}.{a % 250 + 1}", f"10.77.{b // 250}.{b % 250 + 1}", 40_000 + a, 5_000 + b)
        for a, b in pairs
    )
    return Made(time_ns[order] + _EPOCH_NS, length[order], flow[order], endpoints)


def _poisson(options: SynthOptions) -> Made:
    """Equal frames at random: exponential gaps, every host to its neighbour."""
    generator = np.random.default_rng(options.seed)
    span_s = options.period_s * options.iterations
    expected = options.mean_rate_bps * span_s / 8 / FRAME_BYTES
    count = max(2, int(generator.poisson(expected)))
    times = np.sort(generator.integers(0, round(span_s * NS_PER_S), count))
    flow = generator.integers(0, options.hosts, count)
    pairs = [(host, (host + 1) % options.hosts) for host in range(options.hosts)]
    return _ordered(times, np.full(count, FRAME_BYTES, np.int64), flow, pairs)


def _noise_traffic(options: SynthOptions) -> Made:
    """Frames whose number per millisecond follows fractional Gaussian noise: long-range dependent traffic."""
    generator = np.random.default_rng(options.seed)
    slots = max(64, round(options.period_s * options.iterations * 1000))
    mean = options.mean_rate_bps / 8 / FRAME_BYTES / 1000
    wished = mean * (1 + 0.3 * fractional_noise(slots, options.hurst, generator))
    # Carried fractions keep the mean where rounding would not.
    counts = np.diff(np.floor(np.cumsum(np.maximum(wished, 0))), prepend=0).astype(np.int64)
    times = np.repeat(np.arange(slots) * 1_000_000, counts) + generator.integers(
        0, 1_000_000, int(counts.sum())
    )
    flow = generator.integers(0, options.hosts, len(times))
    pairs = [(host, (host + 1) % options.hosts) for host in range(options.hosts)]
    return _ordered(times, np.full(len(times), FRAME_BYTES, np.int64), flow, pairs)


def fractional_noise(count: int, hurst: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """Fractional Gaussian noise of unit variance, exactly, by circulant embedding (Davies and Harte)."""
    if not 0 < hurst < 1:
        raise FabricError(f"a Hurst exponent lies between 0 and 1, not at {hurst}")
    lag = np.arange(count + 1, dtype=np.float64)
    covariance = (
        np.abs(lag + 1) ** (2 * hurst) - 2 * lag ** (2 * hurst) + np.abs(lag - 1) ** (2 * hurst)
    ) / 2
    circle = np.concatenate([covariance, covariance[-2:0:-1]])
    power = np.maximum(np.fft.fft(circle).real, 0)
    size = len(circle)
    noise = generator.normal(size=size) + 1j * generator.normal(size=size)
    return np.asarray(np.fft.fft(np.sqrt(power / size) * noise).real[:count], np.float64)
