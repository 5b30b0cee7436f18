"""`mlfabric bench plan`: how long planning takes, and how that grows.

The instance follows from a seed: link rates from {1, 1/2, 1/4, 1/8} of nominal, up and down separately, racks
of 32 hosts oversubscribed 4:1, two jobs with four shards each placed by bandwidth, the offers spread over the
hosts, every tenth past its bound, aggregation and replication on. `full` plans all offers of both jobs from
nothing; `incremental-offer` adds one offer to a standing plan, `incremental-rate` changes one worker's rate.

Times are medians of interleaved repeats. `median_ms` is processor time: planning is one thread without input
or output, so on an idle machine that is the time on the wall (`median_wall_ms`), and on a shared one it
leaves out what others used.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from mlfabric.plan.incremental import StandingPlan
from mlfabric.plan.jobs import plan_jobs
from mlfabric.plan.placement import place_shards
from mlfabric.plan.reservation import Ledger
from mlfabric.plan.values import JobState, Offer
from mlfabric.scenario import uniform
from mlfabric.topology import Host, Network, Rack

NOMINAL_BYTES_PER_S = 1.25e9 * 1448 / 1514  # 10 Gb/s Ethernet
SHARES = (1.0, 0.5, 0.25, 0.125)
RACK_HOSTS = 32
OVERSUBSCRIPTION = 4
SHARDS = 4
JOBS = 2
UPDATE_BYTES = 100_000_000
LATE_SHARE = 0.1
SINGLE_CASES = [
    (1000, 1000, "full"),
    (10_000, 4096, "full"),
    (1000, 1000, "incremental-offer"),
    (1000, 1000, "incremental-rate"),
]
GROWTH_OFFERS = (250, 500, 1000, 2000, 4000, 8000)


@dataclass(frozen=True, slots=True)
class Instance:
    network: Network
    jobs: list[tuple[JobState, list[Offer]]]


def make_instance(offers: int, hosts: int, seed: int = 1) -> Instance:
    """The benchmark's cluster with its waiting offers."""
    names = [f"h{i:05d}" for i in range(hosts)]

    def rate(name: str, way: str) -> float:
        return NOMINAL_BYTES_PER_S * SHARES[int(uniform(seed, "rate", name, way) * len(SHARES))]

    made = [
        Host(name, rate(name, "up"), rate(name, "down"), f"rack{i // RACK_HOSTS}")
        for i, name in enumerate(names)
    ]
    racks = []
    for first in range(0, hosts, RACK_HOSTS):
        inside = made[first : first + RACK_HOSTS]
        up = sum(host.up_bytes_per_s for host in inside) / OVERSUBSCRIPTION
        down = sum(host.down_bytes_per_s for host in inside) / OVERSUBSCRIPTION
        racks.append(Rack(f"rack{first // RACK_HOSTS}", up, down))
    network = Network.of(made, racks)
    jobs = []
    for number in range(JOBS):
        name = f"job{number}"
        own = names[number::JOBS]
        count = len(range(number, offers, JOBS))
        bound = 2 * count
        placed = 10 * count
        waiting = []
        for k in range(count):
            key = (seed, "offer", name, k)
            late = uniform(*key, "late") < LATE_SHARE
            behind = (
                bound + 1 + int(uniform(*key, "by") * count) if late else int(uniform(*key, "age") * count)
            )
            host = own[k % len(own)]
            waiting.append(
                Offer(
                    f"{name}-u{k:05d}",
                    f"{name}-w{k:05d}",
                    host,
                    UPDATE_BYTES,
                    placed - behind,
                    norm=uniform(*key, "norm"),
                    arrival=k,
                    job=name,
                )
            )
        job = JobState(
            name=name,
            placed_version=placed,
            max_delay=bound,
            concurrency=count,
            shards=place_shards(network, own, SHARDS, replicas=True),
            aggregators=tuple(own),
            weight=1.0 + number,
            divergence=0.1 * count,
        )
        jobs.append((job, waiting))
    return Instance(network, jobs)


# -- measuring


@dataclass(frozen=True, slots=True)
class Case:
    offers: int
    hosts: int
    kind: str  # "full", "incremental-offer" or "incremental-rate"
    median_ms: float  # processor time
    median_wall_ms: float


Round = Callable[[], None]


def _full_round(offers: int, hosts: int, seed: int) -> Round:
    instance = make_instance(offers, hosts, seed)

    def run() -> None:
        plan_jobs(instance.network, [], instance.jobs, 0.0)

    return run


def _standing(offers: int, hosts: int, seed: int) -> tuple[Instance, list[StandingPlan]]:
    instance = make_instance(offers, hosts, seed)
    ledger = Ledger(instance.network, 0.0)
    return instance, [StandingPlan(ledger, job, waiting, 0.0) for job, waiting in instance.jobs]


def _offer_round(offers: int, hosts: int, seed: int) -> Round:
    """One more offer, each time from another host, while the first transfers are under way."""
    instance, standing = _standing(offers, hosts, seed)
    names = list(instance.network.hosts)
    counter = itertools.count()

    def run() -> None:
        k = next(counter)
        plan = standing[k % JOBS]
        host = names[int(uniform(seed, "more", k) * len(names))]
        more = Offer(f"more{k}", f"more{k}", host, UPDATE_BYTES, plan.job.placed_version, job=plan.job.name)
        plan.add_offer(more, 1e-3)

    return run


def _rate_round(offers: int, hosts: int, seed: int) -> Round:
    """One worker's rate redrawn."""
    instance, standing = _standing(offers, hosts, seed)
    servers = {s.server for job, _ in instance.jobs for s in job.shards}
    names = [name for name in instance.network.hosts if name not in servers]
    counter = itertools.count()

    def run() -> None:
        k = next(counter)
        host = names[int(uniform(seed, "who", k) * len(names))]
        rates = [
            NOMINAL_BYTES_PER_S * SHARES[int(uniform(seed, "to", k, way) * len(SHARES))]
            for way in ("up", "down")
        ]
        for plan in standing:
            plan.change_rate(host, rates[0], rates[1], 1e-3)

    return run


ROUNDS: dict[str, Callable[[int, int, int], Round]] = {
    "full": _full_round,
    "incremental-offer": _offer_round,
    "incremental-rate": _rate_round,
}


def measure(cases: Sequence[tuple[int, int, str]], repeats: int, seed: int) -> list[Case]:
    """Medians of the cases, their repeats taken in turn so that a noisy spell hits all alike."""
    rounds = [ROUNDS[kind](offers, hosts, seed) for offers, hosts, kind in cases]
    taken: list[list[tuple[float, float]]] = [[] for _ in cases]
    for repeat in range(repeats + 1):
        for run, times in zip(rounds, taken, strict=True):
            gc.collect()
            wall, busy = time.perf_counter(), time.process_time()
            run()
            spent = (time.process_time() - busy, time.perf_counter() - wall)
            if repeat:  # the first is for warming up
                times.append(spent)
    return [
        Case(
            offers,
            hosts,
            kind,
            round(1e3 * statistics.median(busy for busy, _ in times), 3),
            round(1e3 * statistics.median(wall for _, wall in times), 3),
        )
        for (offers, hosts, kind), times in zip(cases, taken, strict=True)
    ]


def fit_exponent(cases: Sequence[Case]) -> float:
    """The slope of log time over log offers, by least squares."""
    points = [(math.log(case.offers), math.log(case.median_ms)) for case in cases]
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return rise / sum((x - mean_x) ** 2 for x, _ in points)


def run_benchmark(repeats: int, seed: int) -> dict[str, object]:
    """All cases of the command, and how the full plan grows."""
    single = measure(SINGLE_CASES, repeats, seed)
    growth = measure([(offers, offers, "full") for offers in GROWTH_OFFERS], repeats, seed)
    return {
        "cases": [asdict(case) for case in (*single, *growth)],
        "growth_exponent": round(fit_exponent(growth), 3),
    }


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each case; the median counts.")] = 15,
    seed: Annotated[int, typer.Option(help="Of the instance.")] = 1,
) -> None:
    """How long planning takes: full plans, one more offer, one changed rate; and how it grows."""
    result = run_benchmark(repeats, seed)
    if as_json:
        typer.echo(json.dumps(result))
        return
    cases: list[dict[str, Any]] = result["cases"]  # type: ignore[assignment]
    typer.echo(f"{'offers':>7} {'hosts':>6}  {'kind':<18} {'ms':>9} {'on the wall':>12}")
    for case in cases:
        typer.echo(
            f"{case['offers']:>7} {case['hosts']:>6}  {case['kind']:<18} "
            f"{case['median_ms']:>9.3f} {case['median_wall_ms']:>12.3f}"
        )
    typer.echo(f"time grows with offers to the power of {result['growth_exponent']}")
