"""Updates a second in the lab beside what the simulator says of the same scenario, seed and time.

    python -m experiments.prediction.run [--most 2]

Runs that results.json holds are not made again. Of our asynchronous mode the simulator says two things: what
planned policies would do at flow level, and what the fabric's own roles do in virtual time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from experiments.points import MOST_STOLEN, carry_out, table
from mlfabric import scenario as scenarios
from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.report import make_report
from mlfabric.bench.train.running import make_run
from mlfabric.bench.train.settings import RunSettings, StepSize, fit
from mlfabric.bench.train.task import find_data
from mlfabric.lab.manifest import MachineLoad
from mlfabric.sim.hosted import HostedRun

HERE = Path(__file__).parent
SCENARIOS = ("calm", "skewed", "racks-8to1")
CONTENDERS = ("gloo", "mlfabric-sync", "fcfs-1", "mlfabric-async")
RATES = ("200mbit", "500mbit")  # of the fastest link; with the faster ones two processors are the limit
SEED = 1
SECONDS = 40.0
BY_ROLES = "mlfabric-async"  # served by roles that the simulator hosts
# Of no account for speed, and small enough for every contender.
STEP_SIZE = StepSize(0.001, 0.0)
BAR = 0.15

Key = tuple[str, str, str]  # rate, scenario, contender


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    rate: str
    scenario: str
    contender: str
    measured_per_s: float
    simulated_per_s: float
    exchange_s: float
    compute_s: float
    busy_share: float
    nice_share: float | None = None  # others' work of low priority; None: not looked at
    stolen_share: float
    complaints: list[str]

    @property
    def ratio(self) -> float:
        return self.measured_per_s / self.simulated_per_s


def settings_of(key: Key) -> RunSettings:
    """Nobody asks how good the model is: no snapshots."""
    rate, scenario, contender = key
    return RunSettings(
        contender, scenario, SEED, STEP_SIZE, rate=rate, limit_s=SECONDS, snapshot_s=2 * SECONDS
    )


def by_roles(key: Key) -> float | None:
    """Updates a second of the fabric's own roles in virtual time, with what they learn of the links."""
    settings = settings_of(key)
    if settings.contender != BY_ROLES:
        return None
    scenario = fit(scenarios.load(scenarios.find(settings.scenario)), settings)
    return len(HostedRun(scenario).run(SECONDS).delays) / SECONDS


def measure(key: Key) -> Point:
    """Run it in a lab, and ask the simulator."""
    rate, scenario, contender = key
    settings = settings_of(key)
    load = MachineLoad()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(settings, Path(folder) / "run", find_data(None))
    load.update()
    complaints = run.complaints()
    if load.stolen_share() > MOST_STOLEN:
        complaints.append(f"{load.stolen_share():.1%} of the processors' time was stolen")
    return Point(
        rate=rate,
        scenario=scenario,
        contender=contender,
        measured_per_s=run.updates / run.seconds,
        simulated_per_s=make_report([run]).simulated[scenario][contender],
        exchange_s=run.exchange_s,
        compute_s=run.compute_s,
        busy_share=run.cpu_share,
        nice_share=load.nice_share(),
        stolen_share=load.stolen_share(),
        complaints=complaints,
    )


def main() -> None:
    wanted = [(rate, scenario, name) for rate in RATES for scenario in SCENARIOS for name in CONTENDERS]
    points, plot = carry_out(
        HERE / "results.json", Point, wanted, lambda p: (p.rate, p.scenario, p.contender), measure
    )
    draw(points, plot)
    show(points)


def show(points: list[Point]) -> None:
    rows = [
        [
            point.rate,
            point.scenario,
            point.contender,
            find_entry(point.contender).policy,
            f"{point.measured_per_s:.2f}",
            f"{point.simulated_per_s:.2f}",
            _judged(point.ratio),
            "-" if roles is None else f"{roles:.2f}",
            "-" if roles is None else _judged(point.measured_per_s / roles),
            f"{point.busy_share:.0%}",
            "?" if point.nice_share is None else f"{point.nice_share:.0%}",
            "; ".join(point.complaints) or "-",
        ]
        for point in sorted(points, key=lambda p: (RATES.index(p.rate), SCENARIOS.index(p.scenario)))
        for roles in [by_roles((point.rate, point.scenario, point.contender))]
    ]
    columns = ["links", "scenario", "contender", "policy", "lab, updates/s", "simulated", "lab / simulated"]
    columns += ["by its roles", "lab / by its roles", "processors busy", "of it at low priority"]
    print(table([*columns, "complaints"], rows))


def _judged(ratio: float) -> str:
    return f"{ratio:.2f}" if abs(ratio - 1) <= BAR else f"**{ratio:.2f}**"


def draw(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.axhspan(1 - BAR, 1 + BAR, color="#eee")
    axes.axhline(1.0, color="#888", linewidth=0.8)
    width = 0.8 / len(CONTENDERS)
    for number, contender in enumerate(CONTENDERS):
        shift = (number - (len(CONTENDERS) - 1) / 2) * width
        for rate, filled in zip(RATES, ("full", "none"), strict=True):
            mine = [point for point in points if (point.contender, point.rate) == (contender, rate)]
            axes.plot(
                [SCENARIOS.index(point.scenario) + shift for point in mine],
                [point.ratio for point in mine],
                "o",
                color=f"C{number}",
                fillstyle=filled,
                label=f"{contender}, {rate}",
            )
    axes.set_xticks(range(len(SCENARIOS)), SCENARIOS)
    axes.set_ylim(0, 1.4)
    axes.set_ylabel("updates a second, lab / simulated")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
