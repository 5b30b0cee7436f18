"""The traffic commands beyond one capture's figures: extrapolation, orchestration, made and live traffic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mlfabric.cli_plain import PlainCommand
from mlfabric.errors import FabricError
from mlfabric.traffic.cli_options import (
    Direction,
    Files,
    Hosts,
    Json,
    LayerOption,
    Mtu,
    Nets,
    Ports,
    Protocol,
    choice,
    print_json,
    read_trace,
)
from mlfabric.traffic.scales import one_rate, one_size, one_time_ns


def register(app: typer.Typer) -> None:
    """Adds these commands to the group."""
    for command in (extrapolate, orchestration, synth, capture):
        app.command(cls=PlainCommand)(command)


def extrapolate(
    files: Files,
    jobs: Annotated[
        int, typer.Option(help="how many jobs share the link; files are dealt to them in turn")
    ] = 2,
    link: Annotated[str, typer.Option(help="rate of the shared link")] = "10gbit",
    buffer: Annotated[str, typer.Option(help="its buffer")] = "16MB",
    ecn: Annotated[
        str | None, typer.Option(help="queue at which it marks; otherwise a twentieth of it")
    ] = None,
    draws: Annotated[int, typer.Option(help="random phases to try")] = 100,
    seed: Annotated[int, typer.Option(help="seed of the random phases")] = 0,
    control: Annotated[str, typer.Option(help="also closed loop: none, dctcp, dcqcn or pfc")] = "none",
    rtt: Annotated[str, typer.Option(help="round trip of the closed loop")] = "50us",
    as_json: Json = False,
    layer: LayerOption = "wire",
    host: Hosts = None,
    net: Nets = None,
    port: Ports = None,
    protocol: Protocol = None,
    direction: Direction = "both",
    mtu: Mtu = 1500,
) -> None:
    """Lay several such jobs over one link: queue, loss, marks, and how many fit."""
    from mlfabric.traffic.capture.tabular import is_table
    from mlfabric.traffic.control import CONTROLS, schedules, simulate
    from mlfabric.traffic.extrapolation import Law, Link
    from mlfabric.traffic.extrapolation import extrapolate as extrapolate_traces
    from mlfabric.traffic.jobs_json import extrapolation_json

    choice(control, CONTROLS, "--control")
    buffer_bytes = one_size(buffer)
    shared = Link(one_rate(link), buffer_bytes, one_size(ecn) if ecn else buffer_bytes / 20)
    traces = [
        read_trace(
            [name], layer="l2" if is_table(name) else layer, hosts=host, nets=net, ports=port,
            protocol=protocol, direction=direction, mtu=mtu, flows=False, quiet=as_json,
        )
        for name in files
    ]  # fmt: skip
    result = extrapolate_traces(traces, jobs, shared, draws, seed)
    closed = []
    laws: tuple[Law, ...] = ("aligned", "random", "best")
    for law in laws:
        shifts = result.law(law).draws[0].shifts_ns
        plans = schedules(result.cycles, shifts)
        for each in dict.fromkeys(("none", control)):
            closed.append((law, simulate(plans, shared, each, one_time_ns(rtt) / 1e9)))  # type: ignore[arg-type]
    if as_json:
        print_json(extrapolation_json(result, closed, traces))
        return
    from mlfabric.traffic.tables_jobs import print_extrapolation

    print_extrapolation(result, closed, traces)


def orchestration(
    files: Files,
    port_rate: Annotated[
        str | None, typer.Option(help="rate of the receiving ports; else the fastest sender's")
    ] = None,
    side: Annotated[str, typer.Option(help="where it was captured: sender, receiver or unknown")] = "unknown",
    shifts: Annotated[int, typer.Option(help="random phases for the p-value")] = 199,
    seed: Annotated[int, typer.Option(help="seed of the random phases")] = 0,
    theta: Annotated[
        str | None, typer.Option(help="pause that ends a source's burst; otherwise found")
    ] = None,
    as_json: Json = False,
    layer: LayerOption = "l2",
    host: Hosts = None,
    net: Nets = None,
    port: Ports = None,
    protocol: Protocol = None,
    direction: Direction = "both",
    mtu: Mtu = 1500,
) -> None:
    """Does one application collide with itself? A verdict per receiving host."""
    from mlfabric.traffic.verdicts import orchestration as judge

    choice(side, ("sender", "receiver", "unknown"), "--side")
    trace = read_trace(
        files, layer=layer, hosts=host, nets=net, ports=port, protocol=protocol, direction=direction, mtu=mtu,
        vantage=side, quiet=as_json,
    )  # fmt: skip
    verdicts = judge(
        trace,
        one_rate(port_rate) if port_rate else None,
        side,  # type: ignore[arg-type]
        shifts,
        seed,
        one_time_ns(theta) if theta else None,
    )
    if as_json:
        from mlfabric.traffic.jobs_json import orchestration_json

        print_json(orchestration_json(verdicts, trace))
        return
    from mlfabric.traffic.tables_jobs import print_orchestration

    print_orchestration(verdicts, trace)


def synth(
    out: Annotated[Path, typer.Argument(help="pcap file to write")],
    pattern: Annotated[
        str, typer.Option(help="periodic, ring, ps-naive, ps-staggered, poisson or fgn")
    ] = "periodic",
    hosts: Annotated[int, typer.Option(help="how many hosts")] = 4,
    size: Annotated[
        str, typer.Option(help="payload per iteration (of each worker, or the ring's gradient)")
    ] = "10MB",
    period: Annotated[str, typer.Option(help="time from one iteration to the next")] = "100ms",
    iterations: Annotated[int, typer.Option(help="how many iterations")] = 10,
    rate: Annotated[str, typer.Option(help="line rate of the hosts")] = "10gbit",
    mean_rate: Annotated[str, typer.Option(help="mean rate of the random patterns")] = "1gbit",
    hurst: Annotated[float, typer.Option(help="Hurst exponent of fgn")] = 0.8,
    jitter: Annotated[str, typer.Option(help="standard deviation of each host's start")] = "0s",
    seed: Annotated[int, typer.Option(help="equal seeds give equal files")] = 0,
    snaplen: Annotated[int, typer.Option(help="bytes kept of each frame")] = 96,
) -> None:
    """Write made traffic as a pcap file."""
    from mlfabric.traffic.capture.writer import write_pcap
    from mlfabric.traffic.synth import SynthOptions, synthesize

    known = ("periodic", "ring", "ps-naive", "ps-staggered", "poisson", "fgn")
    made = synthesize(
        SynthOptions(
            pattern=choice(pattern, known, "--pattern"),
            hosts=hosts,
            size_bytes=one_size(size),
            period_s=one_time_ns(period) / 1e9,
            iterations=iterations,
            rate_bps=one_rate(rate),
            mean_rate_bps=one_rate(mean_rate),
            hurst=hurst,
            seed=seed,
            jitter_s=one_time_ns(jitter) / 1e9,
        )
    )
    try:
        write_pcap(out, made.time_ns, made.length, made.flow, made.flows, snaplen)
    except OSError as error:
        raise FabricError(f"{out} can't be written: {error.strerror}") from None
    sys.stderr.write(f"{len(made.time_ns):,} packets written to {out}\n")


def capture(
    interface: Annotated[str, typer.Option("-i", "--interface", help="interface to listen on")],
    interval: Annotated[str, typer.Option(help="one line per interval")] = "1s",
    duration: Annotated[str | None, typer.Option(help="stop after this long; otherwise on Ctrl-C")] = None,
    write: Annotated[Path | None, typer.Option(help="also write what is seen to this pcap file")] = None,
    direction: Annotated[str, typer.Option(help="in, out or both")] = "both",
    as_json: Json = False,
) -> None:
    """A live meter: rate and peak-to-mean of an interface, every interval. Needs root."""
    from mlfabric.traffic.jobs_json import reading_json
    from mlfabric.traffic.meter import Meter

    choice(direction, ("both", "in", "out"), "--direction")
    interval_s = one_time_ns(interval) / 1e9
    if interval_s <= 0:
        raise FabricError("--interval must be longer than zero")
    duration_s = one_time_ns(duration) / 1e9 if duration else None
    meter = Meter(interface, direction, write)
    try:
        for reading in meter.readings(interval_s, duration_s):
            if as_json:
                print_json(reading_json(reading))
                sys.stdout.flush()
            else:
                from mlfabric.traffic.tables_jobs import print_reading

                print_reading(reading)
    finally:
        meter.close()
