"""What one training run is: which contender, in which scenario, with which seed and step size."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from mlfabric.errors import FabricError
from mlfabric.scenario import Scenario, Seconds, Size, WireRate
from mlfabric.sim.resizing import resize, with_a_job
from mlfabric.units import goodput, parse_rate

# Gradients of the task's model: 1,269,706 float32 numbers (`task.make_model`, checked there).
MODEL_BYTES: Final = 5_078_824
# Of the fastest link, unless asked otherwise. A transfer of the model with its headers takes 0.085 s then, as
# one of the shipped scenarios' ResNet-50 (102 MB at 10 Gb/s) does: links that change every 5 s change as
# often per transfer as the scenario says.
DEFAULT_RATE: Final = "500mbit"
# Small, so that gradients of several workers are worth more than one's: of steps by 32 images one host needs
# hardly more to 0.85 than four hosts together do.
DEFAULT_BATCH: Final = 16
# Adam's second beta, for all. Its mean reaches back some 100 steps; with torch's 0.999 it would be 1,000,
# more than a contender of few large steps makes in a whole run.
SECOND_MOMENT: Final = 0.99
# Evaluations in a row at or above the target.
REACHED_IN_A_ROW: Final = 3
# What makes a run tell of the machine instead of the contender.
MOST_OVERRUN: Final = 0.01
MOST_CPU: Final = 0.75


class StepSize(msgspec.Struct, frozen=True):
    """Of Adam: what tuning chooses."""

    lr: float
    momentum: float  # its first beta


class RunSettings(msgspec.Struct, frozen=True):
    """All that a run depends on, beside the code and the machine."""

    contender: str
    scenario: str
    seed: int
    step_size: StepSize
    rate: str = DEFAULT_RATE  # of the fastest link; the scenario's others in proportion
    workers: int = 8
    batch: int = DEFAULT_BATCH
    compute: float = 1.75  # nominal compute time, in times a transfer of the model takes on the fastest link
    snapshot_s: float = 2.0  # more often, judging them takes as long as the run
    targets: tuple[float, ...] = (0.85,)
    limit_s: float = 240.0

    def folder(self, root: Path) -> Path:
        return root / self.scenario / self.contender / f"seed{self.seed}"


def fit(scenario: Scenario, settings: RunSettings) -> Scenario:
    """The scenario at this run's size: its hosts, rates in proportion, our model, our compute time and seed.

    Shares of traces and factors of stragglers are relative and stay as they are.
    """
    if len(scenario.host_names()) != settings.workers:
        scenario = resize(scenario, settings.workers)
    scenario = with_a_job(scenario)
    factor = _wire(settings.rate) / max(max(h.up_bps, h.down_bps) for h in scenario.host_links())

    def scaled(rate: WireRate | None) -> WireRate | None:
        return None if rate is None else WireRate(rate * factor)

    replace = msgspec.structs.replace
    network = replace(scenario.network, rate=WireRate(scenario.network.rate * factor))
    hosts = tuple(
        replace(h, rate=scaled(h.rate), up=scaled(h.up), down=scaled(h.down)) for h in scenario.hosts
    )
    racks = tuple(
        replace(r, rate=scaled(r.rate), up=scaled(r.up), down=scaled(r.down)) for r in scenario.racks
    )
    traces = tuple(
        replace(
            t,
            steps=tuple(
                replace(s, rate=scaled(s.rate), up=scaled(s.up), down=scaled(s.down)) for s in t.steps
            ),
        )
        for t in scenario.traces
    )
    background = tuple(replace(b, rate=WireRate(b.rate * factor)) for b in scenario.background)
    job = replace(
        scenario.jobs[0],
        model=None,
        size=Size(MODEL_BYTES),
        compute=None,
        compute_transfers=settings.compute,
        steps=None,
    )
    return replace(
        scenario,
        seed=settings.seed,
        network=network,
        hosts=hosts,
        racks=racks,
        traces=traces,
        background=background,
        jobs=(job,),
    )


def _wire(written: str) -> float:
    try:
        rate = parse_rate(written)
    except ValueError as error:
        raise FabricError(str(error)) from None
    if rate <= 0:
        raise FabricError(f"a link rate of {written!r} carries nothing; give one above zero")
    return rate


class Ceilings(msgspec.Struct, frozen=True):
    """What the links allow, whoever uses them: gradients a second over a stretch of the trace."""

    ring_per_s: float  # a ring step every 2 (n-1)/n S / (slowest link)
    servers_per_s: float  # one push and one pull of the model for each: sum of rates / 2 S
    compute_per_s: float  # all workers computing all the time, stragglers included
    compute_s: float  # nominal time of one step


def ceilings(scenario: Scenario, until_s: float) -> Ceilings:
    """Of a fitted scenario, over its first seconds."""
    scenario = msgspec.structs.replace(scenario, duration=Seconds(until_s))
    job = scenario.jobs[0]
    rates = {link.name: min(link.up_bps, link.down_bps) for link in scenario.host_links()}
    workers = len(rates)
    changes = scenario.rate_changes()
    moments = sorted({0.0, *(change.at_s for change in changes)})
    ring = servers = 0.0
    for begin, end in zip(moments, [*moments[1:], until_s], strict=True):
        for change in changes:
            if change.at_s == begin:
                rates[change.host] = min(change.up_bps, change.down_bps)
        share = (end - begin) / until_s
        ring += share * workers * goodput(min(rates.values())) / (2 * (workers - 1) / workers * MODEL_BYTES)
        servers += share * goodput(sum(rates.values())) / (2 * MODEL_BYTES)
    compute_s = scenario.compute_s(job)
    straggling = 1 + sum(s.probability * (s.delay[0] + s.delay[1]) / 2 for s in scenario.stragglers)
    return Ceilings(ring, servers, workers / (compute_s * straggling), compute_s)
