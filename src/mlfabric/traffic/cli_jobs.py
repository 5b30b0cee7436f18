"""The traffic commands beyond one capture's figures: extrapolation, orchestration, made and live traffic."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlfabric.errors import FabricError
from mlfabric.option_records import Command, argument, option, required
from mlfabric.traffic.cli_options import CountedFiles, CountedRun, choice, print_json
from mlfabric.traffic.scales import one_rate, one_size, one_time_ns

_SIDES: Final = ("sender", "receiver", "unknown")


@dataclass(frozen=True, kw_only=True)
class ExtrapolateWords(CountedFiles):
    """What `extrapolate` is asked."""

    layer: str = option("wire", "which bytes count: l2, ip, payload or wire")
    jobs: int = option(2, "how many jobs share the link; files are dealt to them in turn")
    link: str = option("10gbit", "rate of the shared link")
    buffer: str = option("16MB", "its buffer")
    ecn: str | None = option(None, "queue at which it marks; otherwise a twentieth of the buffer")
    draws: int = option(100, "random phases to try")
    seed: int = option(0, "seed of the random phases")
    control: str = option("none", "also closed loop: none, dctcp, dcqcn or pfc")
    rtt: str = option("50us", "round trip of the closed loop")


def extrapolate(words: ExtrapolateWords) -> None:
    """Lay several such jobs over one link: queue, loss, marks, and how many fit."""
    from mlfabric.traffic.control import CONTROLS, schedules, simulate
    from mlfabric.traffic.extrapolation import Law, Link
    from mlfabric.traffic.extrapolation import extrapolate as extrapolate_traces
    from mlfabric.traffic.reading import input_kind

    control = choice(words.control, CONTROLS, "--control")
    buffer_bytes = one_size(words.buffer)
    shared = Link(one_rate(words.link), buffer_bytes, one_size(words.ecn) if words.ecn else buffer_bytes / 20)
    traces = [
        words.trace([name], layer=None if input_kind(name) == "capture" else "l2", flows=False)
        for name in words.files
    ]
    result = extrapolate_traces(traces, words.jobs, shared, words.draws, words.seed)
    closed = []
    laws: tuple[Law, ...] = ("aligned", "random", "best")
    for law in laws:
        plans = schedules(result.cycles, result.law(law).draws[0].shifts_ns)
        for each in dict.fromkeys(("none", control)):
            closed.append((law, simulate(plans, shared, each, one_time_ns(words.rtt) / 1e9)))
    if words.as_json:
        from mlfabric.traffic.jobs_json import extrapolation_json

        print_json(extrapolation_json(result, closed, traces))
        return
    from mlfabric.traffic.tables_jobs import print_extrapolation

    print_extrapolation(result, closed, traces)


@dataclass(frozen=True, kw_only=True)
class OrchestrationWords(CountedRun):
    """What `orchestration` is asked."""

    port_rate: str | None = option(None, "rate of the receiving ports; else the fastest sender's")
    side: str = option("unknown", "where it was captured: sender, receiver or unknown")
    shifts: int = option(199, "random phases for the p-value")
    seed: int = option(0, "seed of the random phases")
    theta: str | None = option(None, "pause that ends a source's burst; otherwise found")


def orchestration(words: OrchestrationWords) -> None:
    """Does one application collide with itself? A verdict per receiving host."""
    from mlfabric.traffic.verdicts import orchestration as judge

    side = choice(words.side, _SIDES, "--side")
    trace = words.merged(vantage=side)
    verdicts = judge(
        trace,
        one_rate(words.port_rate) if words.port_rate else None,
        side,
        words.shifts,
        words.seed,
        one_time_ns(words.theta) if words.theta else None,
    )
    if words.as_json:
        from mlfabric.traffic.jobs_json import orchestration_json

        print_json(orchestration_json(verdicts, trace))
        return
    from mlfabric.traffic.tables_jobs import print_orchestration

    print_orchestration(verdicts, trace)


@dataclass(frozen=True, kw_only=True)
class SynthWords:
    """What `synth` is asked."""

    out: Path = argument("pcap file to write", kind=Path)
    pattern: str = option("periodic", "periodic, ring, ps-naive, ps-staggered, poisson or fgn")
    hosts: int = option(4, "how many hosts")
    size: str = option("10MB", "payload per iteration (of each worker, or the ring's gradient)")
    period: str = option("100ms", "time from one iteration to the next")
    iterations: int = option(10, "how many iterations")
    rate: str = option("10gbit", "line rate of the hosts")
    mean_rate: str = option("1gbit", "mean rate of the random patterns")
    hurst: float = option(0.8, "Hurst exponent of fgn")
    jitter: str = option("0s", "standard deviation of each host's start")
    seed: int = option(0, "equal seeds give equal files")
    snaplen: int = option(96, "bytes kept of each frame")


def synth(words: SynthWords) -> None:
    """Write made traffic as a pcap file."""
    from mlfabric.traffic.capture.writer import write_pcap
    from mlfabric.traffic.synth import SynthOptions, synthesize

    known = ("periodic", "ring", "ps-naive", "ps-staggered", "poisson", "fgn")
    made = synthesize(
        SynthOptions(
            pattern=choice(words.pattern, known, "--pattern"),
            hosts=words.hosts,
            size_bytes=one_size(words.size),
            period_s=one_time_ns(words.period) / 1e9,
            iterations=words.iterations,
            rate_bps=one_rate(words.rate),
            mean_rate_bps=one_rate(words.mean_rate),
            hurst=words.hurst,
            seed=words.seed,
            jitter_s=one_time_ns(words.jitter) / 1e9,
        )
    )
    try:
        write_pcap(words.out, made.time_ns, made.length, made.flow, made.flows, words.snaplen)
    except OSError as error:
        raise FabricError(f"{words.out} can't be written: {error.strerror}") from None
    sys.stderr.write(f"{len(made.time_ns):,} packets written to {words.out}\n")


@dataclass(frozen=True, kw_only=True)
class CaptureWords:
    """What `capture` is asked."""

    interface: str = required("interface to listen on", short="-i")
    interval: str = option("1s", "one line per interval")
    duration: str | None = option(None, "stop after this long; otherwise on Ctrl-C")
    write: Path | None = option(None, "also write what is seen to this pcap file", kind=Path)
    direction: str = option("both", "in, out or both")
    as_json: bool = option(False, "print JSON (documented in docs/traffic.md)", name="json")


def capture(words: CaptureWords) -> None:
    """A live meter: rate and peak-to-mean of an interface, every interval. Needs root."""
    from mlfabric.traffic.jobs_json import reading_json
    from mlfabric.traffic.meter import Meter

    direction = choice(words.direction, ("both", "in", "out"), "--direction")
    interval_s = one_time_ns(words.interval) / 1e9
    if interval_s <= 0:
        raise FabricError("--interval must be longer than zero")
    duration_s = one_time_ns(words.duration) / 1e9 if words.duration else None
    meter = Meter(words.interface, direction, words.write)
    try:
        for reading in meter.readings(interval_s, duration_s):
            if words.as_json:
                print_json(reading_json(reading))
                sys.stdout.flush()
            else:
                from mlfabric.traffic.tables_jobs import print_reading

                print_reading(reading)
    finally:
        meter.close()


JOB_COMMANDS: Final = (
    Command(ExtrapolateWords, extrapolate),
    Command(OrchestrationWords, orchestration),
    Command(SynthWords, synth),
    Command(CaptureWords, capture),
)
