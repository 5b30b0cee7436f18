"""The one scenario format: hosts, links, racks, jobs, traces, stragglers, faults, in a TOML file.

`plan`, `sim`, `lab` and `bench` all read this file, and everything random in it follows from its seed: the
same file gives the same trace of rates, the same stragglers and the same faults in every one of them. This
module reads, checks and unrolls scenarios; it plans nothing, runs nothing and opens no network.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from mlfabric.errors import ScenarioError
from mlfabric.toml_lines import KeyPath, key_lines
from mlfabric.topology import Host, Network, Rack
from mlfabric.units import goodput, parse_rate, parse_size, parse_time

# Parameters of well-known models; gradients are 4 bytes each.
MODEL_PARAMETERS: Final = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "transformer-1.3b": 1_300_000_000,
}


class WireRate(float):
    """Bits per second on the wire, written "200mbit"."""


class Size(int):
    """Bytes, written "16MB"."""


class Seconds(float):
    """Seconds, written "5ms"."""


def _decode(kind: type, written: Any) -> Any:
    if kind is WireRate:
        return WireRate(parse_rate(written))
    if kind is Size:
        return Size(parse_size(written))
    if kind is Seconds:
        return Seconds(parse_time(written))
    raise NotImplementedError(kind)


class NetworkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rate: WireRate = WireRate(1e9)  # of every host link that states none
    queue: Size = Size(256_000)  # bytes a link's queue holds before it drops


class HostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One host, or `count` of them called name0, name1, ..."""

    name: str
    count: int | None = None
    first: int = 0
    rate: WireRate | None = None  # both directions
    up: WireRate | None = None
    down: WireRate | None = None
    rack: str | tuple[str, ...] | None = None  # a name, a pattern, or a list: hosts are dealt over them
    deal: Literal["blocks", "round-robin"] = "blocks"
    queue: Size | None = None
    delay: Seconds = Seconds(0)  # one-way, each direction


class RackSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rack, or `count` of them. Its uplink is given, or follows from its hosts by oversubscription."""

    name: str
    count: int | None = None
    rate: WireRate | None = None
    up: WireRate | None = None
    down: WireRate | None = None
    oversubscription: float | None = None
    queue: Size | None = None


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training job. Places are host names or patterns; an empty list means none."""

    name: str = "job"
    mode: Literal["async", "sync", "backup", "ssp", "local"] = "async"
    policy: str = "mlfabric"
    workers: tuple[str, ...] = ("*",)
    servers: tuple[str, ...] | None = None  # default: the first worker
    replicas: tuple[str, ...] | None = None  # default: none
    aggregators: tuple[str, ...] = ("*",)
    scheduler: str | None = None  # default: the first worker
    model: str | None = None
    size: Size | None = None
    compute: Seconds | None = None  # of one step
    compute_transfers: float | None = None  # the same, in nominal transfer times of the model
    compute_jitter: float = 0.0  # sigma of a lognormal factor
    max_delay: int | Literal["auto", "none"] = "auto"
    divergence: float | None = None
    in_flight: int = 1
    weight: float = 1.0
    max_rate: WireRate | None = None
    steps: int | None = None  # of each worker
    start: Seconds = Seconds(0)
    learning_rate: float = 0.1
    momentum: float = 0.0


class RateStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    at: Seconds
    rate: WireRate | None = None
    up: WireRate | None = None
    down: WireRate | None = None


class TraceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How links change: redrawn from `choose` (shares of nominal) every `every`, or set by `steps`."""

    hosts: tuple[str, ...] = ("*",)
    every: Seconds | None = None
    choose: tuple[float, ...] = ()
    directions: Literal["together", "separately"] = "together"
    steps: tuple[RateStep, ...] = ()


class StragglerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Each step of these hosts is delayed with `probability` by `delay` (a range) nominal compute times."""

    hosts: tuple[str, ...] = ("*",)
    probability: float
    delay: tuple[float, float]


class FaultSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    at: Seconds
    do: Literal["kill", "restart", "pause", "resume", "cut", "heal", "drain"]
    host: str | None = None
    between: tuple[str, str] | None = None  # cut or heal one path only
    direction: Literal["both", "in", "out"] = "both"
    lasts: Seconds | None = None  # undone by itself after this time


class BackgroundSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traffic of others: a stream between two hosts."""

    source: str
    target: str
    rate: WireRate
    start: Seconds = Seconds(0)
    stop: Seconds | None = None


class OfferSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An update waiting for leave to be sent, for `mlfabric plan`."""

    worker: str
    version: int
    job: str | None = None
    size: Size | None = None
    norm: float = 1.0


class SituationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the job stands, for `mlfabric plan`."""

    version: int = 0
    pending_norm: float = 0.0  # movement of the model its replica has not seen, relative to the model


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole scenario file. `load` reads one."""

    name: str = ""
    seed: int = 1
    duration: Seconds = Seconds(60)
    network: NetworkSpec = NetworkSpec()
    hosts: tuple[HostSpec, ...]
    racks: tuple[RackSpec, ...] = ()
    jobs: tuple[JobSpec, ...] = ()
    traces: tuple[TraceSpec, ...] = ()
    stragglers: tuple[StragglerSpec, ...] = ()
    faults: tuple[FaultSpec, ...] = ()
    background: tuple[BackgroundSpec, ...] = ()
    offers: tuple[OfferSpec, ...] = ()
    situation: SituationSpec = SituationSpec()

    def host_names(self) -> list[str]:
        return [link.name for link in self.host_links()]

    def host_links(self) -> list[HostLink]:
        """Every host with its wire rates, in the order of the file."""
        rack_names = [name for spec in self.racks for name in _unroll(spec.name, spec.count, 0)]
        links = []
        for spec in self.hosts:
            names = list(_unroll(spec.name, spec.count, spec.first))
            racks = _match(_listed(spec.rack), rack_names)
            for index, name in enumerate(names):
                rack = None
                if racks:
                    at = (
                        index % len(racks) if spec.deal == "round-robin" else index * len(racks) // len(names)
                    )
                    rack = racks[at]
                rate = spec.rate if spec.rate is not None else self.network.rate
                links.append(
                    HostLink(
                        name=name,
                        up_bps=float(spec.up if spec.up is not None else rate),
                        down_bps=float(spec.down if spec.down is not None else rate),
                        rack=rack,
                        queue_bytes=int(spec.queue if spec.queue is not None else self.network.queue),
                        delay_s=float(spec.delay),
                    )
                )
        return links

    def rack_links(self) -> list[RackLink]:
        """Every rack with the wire rates of its uplink."""
        hosts = self.host_links()
        links = []
        for spec in self.racks:
            for name in _unroll(spec.name, spec.count, 0):
                inside = [host for host in hosts if host.rack == name]
                share = spec.oversubscription or 1.0
                up = sum(host.up_bps for host in inside) / share
                down = sum(host.down_bps for host in inside) / share
                if spec.rate is not None:
                    up = down = float(spec.rate)
                links.append(
                    RackLink(
                        name=name,
                        up_bps=float(spec.up if spec.up is not None else up),
                        down_bps=float(spec.down if spec.down is not None else down),
                        queue_bytes=int(spec.queue if spec.queue is not None else self.network.queue),
                    )
                )
        return links

    def planned_network(self) -> Network:
        """The nominal network in the planner's unit, payload bytes per second."""
        return Network.of(
            (Host(h.name, goodput(h.up_bps), goodput(h.down_bps), h.rack) for h in self.host_links()),
            (Rack(r.name, goodput(r.up_bps), goodput(r.down_bps)) for r in self.rack_links()),
        )

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Host names that match any of the patterns, in the order of the file."""
        return _match(patterns, self.host_names())

    def rate_changes(self) -> list[RateChange]:
        """The whole trace of link rates up to `duration`, by time then host; wire bits per second."""
        nominal = {host.name: host for host in self.host_links()}
        changes: list[RateChange] = []
        for number, trace in enumerate(self.traces):
            for name in self.matching(trace.hosts):
                host = nominal[name]
                changes.extend(_stepped(trace, host))
                changes.extend(self._redrawn(number, trace, host))
        return sorted(changes, key=lambda change: (change.at_s, change.host))

    def _redrawn(self, number: int, trace: TraceSpec, host: HostLink) -> Iterator[RateChange]:
        if trace.every is None:
            return
        index = 0
        while index * trace.every < self.duration:
            up = _choice(trace.choose, self.seed, "rate", number, host.name, "up", index)
            down = up
            if trace.directions == "separately":
                down = _choice(trace.choose, self.seed, "rate", number, host.name, "down", index)
            yield RateChange(index * float(trace.every), host.name, host.up_bps * up, host.down_bps * down)
            index += 1

    def straggler_delay(self, host: str, step: int) -> float:
        """How many nominal compute times the given step of a worker on this host is delayed by."""
        total = 0.0
        for number, spec in enumerate(self.stragglers):
            if not _match(spec.hosts, [host]):
                continue
            if uniform(self.seed, "straggle", number, host, step) < spec.probability:
                low, high = spec.delay
                total += low + (high - low) * uniform(self.seed, "straggle-by", number, host, step)
        return total

    def fault_events(self) -> list[FaultEvent]:
        """The whole fault plan by time, with what `lasts` undoes as an event of its own."""
        events = []
        for fault in self.faults:
            event = FaultEvent(float(fault.at), fault.do, fault.host, fault.between, fault.direction)
            events.append(event)
            if fault.lasts is not None and fault.do in UNDONE_BY:
                undo = UNDONE_BY[fault.do]
                events.append(replace(event, at_s=float(fault.at) + float(fault.lasts), do=undo))
        return sorted(events, key=lambda event: event.at_s)

    def job(self, name: str | None = None) -> JobSpec:
        """The job of that name, or the only one."""
        for spec in self.jobs:
            if name is None or spec.name == name:
                return spec
        raise ScenarioError(f"scenario {self.name or 'without a name'} has no job {name or 'at all'}")

    def size_bytes(self, job: JobSpec) -> int:
        """Bytes of one update of the job."""
        if job.size is not None:
            return int(job.size)
        if job.model is not None:
            return 4 * MODEL_PARAMETERS[job.model]
        return 4_000_000

    def compute_s(self, job: JobSpec) -> float:
        """Nominal seconds of one step: given, or in transfer times over the fastest nominal host link."""
        if job.compute is not None:
            return float(job.compute)
        if job.compute_transfers is None:
            return 0.0
        fastest = max(min(h.up_bps, h.down_bps) for h in self.host_links())
        return job.compute_transfers * self.size_bytes(job) / goodput(fastest)

    def places(self, job: JobSpec) -> Places:
        """Where the parts of a job live, with the defaults filled in."""
        workers = self.matching(job.workers)
        servers = self.matching(job.servers) if job.servers is not None else workers[:1]
        return Places(
            workers=tuple(workers),
            servers=tuple(servers),
            replicas=tuple(self.matching(job.replicas or ())),
            aggregators=tuple(self.matching(job.aggregators)),
            scheduler=job.scheduler or workers[0],
        )


@dataclass(frozen=True, slots=True)
class HostLink:
    """One host with the rates of its link in wire bits per second."""

    name: str
    up_bps: float
    down_bps: float
    rack: str | None
    queue_bytes: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class RackLink:
    name: str
    up_bps: float
    down_bps: float
    queue_bytes: int


@dataclass(frozen=True, slots=True)
class RateChange:
    """From `at_s` on, the host's link has these wire rates."""

    at_s: float
    host: str
    up_bps: float
    down_bps: float


# What undoes a fault that `lasts`.
UNDONE_BY: Final = {"kill": "restart", "drain": "restart", "pause": "resume", "cut": "heal"}


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """At `at_s` this happens to a host, or to the path between two.

    `direction` is seen from the host, or from the first of the two: "out", what it sends is lost; "in", what
    is sent to it is lost.
    """

    at_s: float
    do: str
    host: str | None
    between: tuple[str, str] | None
    direction: str


@dataclass(frozen=True, slots=True)
class Places:
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    replicas: tuple[str, ...]
    aggregators: tuple[str, ...]
    scheduler: str


SHIPPED: Final = Path(__file__).parent / "scenarios"


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def find(given: str | Path) -> Path:
    """The file a path or a shipped name means; a path that exists wins."""
    path = Path(given)
    if path.exists() or path.suffix == ".toml" or len(path.parts) > 1:
        return path
    shipped = SHIPPED / f"{given}.toml"
    if shipped.exists():
        return shipped
    near = difflib.get_close_matches(str(given), shipped_names(), 1)
    hint = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(shipped_names())}"
    raise ScenarioError(f"there is no file {given} and no shipped scenario of that name; {hint}")


def load(path: str | Path) -> Scenario:
    """Read and check a scenario file; a ScenarioError names file, line and key of what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError(f"can't read scenario {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"scenario {path} is not a text file in UTF-8") from None
    return parse(text, str(path))


def load_named(given: str | Path) -> Scenario:
    """The scenario of a file, or the shipped one of that name."""
    return load(find(given))


def parse(text: str, source: str = "scenario") -> Scenario:
    """The scenario that a TOML text describes; `source` names it in errors."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ScenarioError(f"{source}:{line.group(1) if line else '?'}: not valid TOML: {error}") from None
    try:
        scenario = msgspec.convert(raw, Scenario, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ScenarioError(_located(str(error), text, source)) from None
    for path, complaint in _complaints(scenario):
        raise ScenarioError(f"{source}:{_line_of(text, path)}: {complaint}")
    return scenario


def dump(scenario: Scenario) -> str:
    """The TOML text of a scenario; `parse` gives the same scenario back."""
    plain = msgspec.to_builtins(scenario, enc_hook=_undecode)
    lines = [
        f"{key} = {_toml(value)}" for key, value in plain.items() if isinstance(value, str | int | float)
    ]
    for key, value in plain.items():
        tables = (value,) if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
        for table in tables:
            lines.append(f"\n[{key}]" if isinstance(value, dict) else f"\n[[{key}]]")
            lines += [f"{name} = {_toml(item)}" for name, item in table.items() if item is not None]
    return "\n".join(lines) + "\n"


def _undecode(value: Any) -> Any:
    return float(value) if isinstance(value, float) else int(value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value)


def _complaints(scenario: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """What types alone can't check: (path of the key, sentence), in the order of the file."""
    names: set[str] = set()
    if not scenario.hosts:
        yield ("hosts",), "a scenario needs at least one host"
    if scenario.network.rate <= 0:
        yield ("network", "rate"), "rate of the network is zero; give one above zero"
    for i, host in enumerate(scenario.hosts):
        if host.count is not None and host.count < 1:
            yield ("hosts", i, "count"), f"count of hosts {host.name} is {host.count}; it is at least 1"
        if host.first < 0:
            yield ("hosts", i, "first"), f"first of hosts {host.name} is {host.first}; it is zero or more"
        for name in _unroll(host.name, host.count, host.first):
            if name in names:
                yield ("hosts", i, "name"), f"host {name} is described twice; give it another name or 'first'"
            names.add(name)
        for key in ("rate", "up", "down"):
            if getattr(host, key) == 0:
                yield (
                    ("hosts", i, key),
                    f"{key} of host {host.name} is zero; use a fault 'cut' to take a link away",
                )
    racks = [name for spec in scenario.racks for name in _unroll(spec.name, spec.count, 0)]
    for i, host in enumerate(scenario.hosts):
        for pattern in _listed(host.rack):
            if not _match([pattern], racks):
                yield (
                    ("hosts", i, "rack"),
                    f"no rack matches {pattern!r}; racks are {', '.join(racks) or 'not described'}",
                )
    rack_names: set[str] = set()
    for i, rack in enumerate(scenario.racks):
        if rack.count is not None and rack.count < 1:
            yield ("racks", i, "count"), f"count of racks {rack.name} is {rack.count}; it is at least 1"
        for name in _unroll(rack.name, rack.count, 0):
            if name in names:
                yield (
                    ("racks", i, "name"),
                    f"{name} is the name of a rack and of a host; give one of them another name",
                )
            if name in rack_names:
                yield ("racks", i, "name"), f"rack {name} is described twice; give it another name"
            rack_names.add(name)
        for key in ("rate", "up", "down"):
            if getattr(rack, key) == 0:
                yield ("racks", i, key), f"{key} of rack {rack.name} is zero; give one above zero"
        if rack.oversubscription is not None and rack.oversubscription <= 0:
            yield (
                ("racks", i, "oversubscription"),
                "oversubscription must be above zero, for example 4 for 4:1",
            )
    listed = sorted(names)
    yield from _job_complaints(scenario, listed)
    for i, trace in enumerate(scenario.traces):
        yield from _unknown_hosts(("traces", i, "hosts"), trace.hosts, listed)
        if (trace.every is None) == (not trace.steps):
            yield ("traces", i), "a trace needs either 'every' with 'choose', or 'steps'"
        if trace.every is not None and (trace.every <= 0 or not trace.choose):
            yield ("traces", i, "every"), "'every' must be above zero and needs a list 'choose' of shares"
        for share in trace.choose:
            if share <= 0:
                yield ("traces", i, "choose"), f"a link can't have {share} of its rate; shares are above zero"
        for j, step in enumerate(trace.steps):
            for key in ("rate", "up", "down"):
                if getattr(step, key) == 0:
                    yield (
                        ("traces", i, "steps", j, key),
                        f"{key} of a step is zero; use a fault 'cut' to take a link away",
                    )
    for i, straggler in enumerate(scenario.stragglers):
        yield from _unknown_hosts(("stragglers", i, "hosts"), straggler.hosts, listed)
        if not 0 <= straggler.probability <= 1:
            yield (
                ("stragglers", i, "probability"),
                f"probability {straggler.probability} is not within 0 and 1",
            )
        if not 0 <= straggler.delay[0] <= straggler.delay[1]:
            yield (
                ("stragglers", i, "delay"),
                "'delay' is a range [low, high] of compute times, for example [2, 5]",
            )
    for i, fault in enumerate(scenario.faults):
        if (fault.host is None) == (fault.between is None):
            yield ("faults", i), "a fault needs either 'host' or 'between'"
        if fault.between is not None and fault.do not in ("cut", "heal"):
            yield ("faults", i, "between"), f"'between' goes with cut and heal only, not with {fault.do}"
        for key, host_name in (("host", fault.host), *(("between", name) for name in fault.between or ())):
            if host_name is not None:
                yield from _unknown_hosts(("faults", i, key), [host_name], listed)
    for i, stream in enumerate(scenario.background):
        yield from _unknown_hosts(("background", i, "source"), [stream.source], listed)
        yield from _unknown_hosts(("background", i, "target"), [stream.target], listed)
        if stream.rate <= 0:
            yield ("background", i, "rate"), "rate of a stream is zero; give one above zero"
        if stream.stop is not None and stream.stop <= stream.start:
            yield ("background", i, "stop"), "a stream stops after its start"
    for key in ("version", "pending_norm"):
        if getattr(scenario.situation, key) < 0:
            yield ("situation", key), f"{key} of the situation is negative; it is zero or more"
    for i, offer in enumerate(scenario.offers):
        yield from _unknown_hosts(("offers", i, "worker"), [offer.worker], listed)
        if offer.job is not None and offer.job not in [job.name for job in scenario.jobs]:
            yield ("offers", i, "job"), f"no job is called {offer.job!r}"
        if offer.norm < 0:
            yield ("offers", i, "norm"), f"norm {offer.norm} is negative"
        if offer.version < 0 or offer.version > scenario.situation.version:
            yield (
                ("offers", i, "version"),
                f"version {offer.version} is not within 0 and the model's {scenario.situation.version}",
            )


def _job_complaints(scenario: Scenario, listed: list[str]) -> Iterator[tuple[KeyPath, str]]:
    seen: set[str] = set()
    for i, job in enumerate(scenario.jobs):
        if job.name in seen:
            yield ("jobs", i, "name"), f"job {job.name} is described twice"
        seen.add(job.name)
        if not job.workers:
            yield ("jobs", i, "workers"), f"job {job.name} has no workers; name at least one host"
        for key in ("workers", "servers", "replicas", "aggregators"):
            yield from _unknown_hosts(("jobs", i, key), getattr(job, key) or (), listed)
        if job.scheduler is not None:
            yield from _unknown_hosts(("jobs", i, "scheduler"), [job.scheduler], listed)
        if job.model is not None and job.model not in MODEL_PARAMETERS:
            yield (
                ("jobs", i, "model"),
                f"unknown model {job.model!r}; known are {', '.join(MODEL_PARAMETERS)}",
            )
        if isinstance(job.max_delay, int) and job.max_delay < 0:
            yield ("jobs", i, "max_delay"), '\'max_delay\' counts updates: zero or more, "auto" or "none"'
        if job.divergence is not None and job.divergence < 0:
            yield ("jobs", i, "divergence"), "'divergence' is a share of the model's norm: zero or more"
        for key in ("weight", "max_rate", "learning_rate"):
            if (value := getattr(job, key)) is not None and value <= 0:
                yield ("jobs", i, key), f"{key!r} must be above zero"
        for key in ("in_flight", "steps"):
            if (value := getattr(job, key)) is not None and value < 1:
                yield ("jobs", i, key), f"{key!r} must be at least 1"
        for key in ("compute_transfers", "compute_jitter"):
            if (value := getattr(job, key)) is not None and value < 0:
                yield ("jobs", i, key), f"{key!r} must be zero or more"
        if not 0 <= job.momentum < 1:
            yield ("jobs", i, "momentum"), "'momentum' is from 0 to below 1"


def _unknown_hosts(
    path: KeyPath, patterns: Sequence[str], listed: list[str]
) -> Iterator[tuple[KeyPath, str]]:
    for pattern in patterns:
        if not _match([pattern], listed):
            near = difflib.get_close_matches(pattern, listed, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; hosts are {_some(listed)}"
            yield path, f"no host matches {pattern!r}{hint}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _located(message: str, text: str, source: str) -> str:
    """msgspec's complaint with the line it is about, and a hint where a key is misspelt."""
    complaint, _, where = message.partition(" - at `$")
    path: list[str | int] = [
        int(index) if index else key
        for key, index in re.findall(r"\.?([A-Za-z_]+)|\[(\d+)\]", where.rstrip("`"))
    ]
    unknown = re.search(r"unknown field `(.+?)`", complaint)
    if unknown:
        key = unknown.group(1)
        table = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        near = difflib.get_close_matches(key, _known_keys(path), 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_known_keys(path))}"
        return f"{source}:{_line_of(text, (*path, key))}: unknown key {key!r} in {table or 'the file'}{hint}"
    named = ".".join(str(p) for p in path)
    complaint = complaint[0].lower() + complaint[1:]
    return f"{source}:{_line_of(text, tuple(path))}: {named + ': ' if named else ''}{complaint}"


def _known_keys(path: Sequence[str | int]) -> list[str]:
    here: Any = Scenario
    for step in path:
        if isinstance(step, str):
            here = next(f.type for f in msgspec.structs.fields(here) if f.name == step)
        if hasattr(here, "__args__"):
            here = here.__args__[0]
    return [field.name for field in msgspec.structs.fields(here)]


def _line_of(text: str, path: KeyPath) -> int:
    """The line where the key of this path stands, or the nearest enclosing one."""
    lines = key_lines(text)
    return next((lines[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in lines), 1)


def _unroll(name: str, count: int | None, first: int) -> Iterator[str]:
    if count is None:
        yield name
    else:
        yield from (f"{name}{index}" for index in range(first, first + count))


def _listed(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _match(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _stepped(trace: TraceSpec, host: HostLink) -> Iterator[RateChange]:
    up, down = host.up_bps, host.down_bps
    for step in sorted(trace.steps, key=lambda step: step.at):
        if step.rate is not None:
            up = down = float(step.rate)
        up = float(step.up) if step.up is not None else up
        down = float(step.down) if step.down is not None else down
        yield RateChange(float(step.at), host.name, up, down)


def uniform(seed: int, *key: object) -> float:
    """A number in [0, 1) that depends on the seed and the key alone, never on what was drawn before."""
    text = "\x1f".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


def _choice(options: Sequence[float], seed: int, *key: object) -> float:
    return options[int(uniform(seed, *key) * len(options))]
