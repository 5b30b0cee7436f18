"""Updates a second in the lab beside what the simulator says of the same scenario, seed and time.

    python -m experiments.prediction.run [--most 2]

Runs that results.json holds are not made again.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import msgspec

from experiments.points import MOST_STOLEN, carry_out, table
from mlfabric.bench.train.entries import find_entry
from mlfabric.bench.train.report import make_report
from mlfabric.bench.train.running import make_run
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.bench.train.task import find_data
from mlfabric.lab.manifest import MachineLoad

HERE = Path(__file__).parent
SCENARIOS = ("calm", "skewed", "racks-8to1")
CONTENDERS = ("gloo", "mlfabric-sync", "fcfs-1", "mlfabric-async")
SEEDS = (1, 2)
RATE = "500mbit"
SECONDS = 45.0
# Of no account for speed, and small enough for every contender.
STEP_SIZE = StepSize(0.001, 0.0)
BAR = 0.15

Key = tuple[str, str, int]  # scenario, contender, seed


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    scenario: str
    contender: str
    seed: int
    measured_per_s: float
    simulated_per_s: float
    exchange_s: float
    compute_s: float
    busy_share: float
    stolen_share: float
    complaints: list[str]

    @property
    def ratio(self) -> float:
        return self.measured_per_s / self.simulated_per_s


def measure(key: Key) -> Point:
    """Run it in a lab, and ask the simulator."""
    scenario, contender, seed = key
    # Nobody asks how good the model is: no snapshots.
    settings = RunSettings(
        contender, scenario, seed, STEP_SIZE, rate=RATE, limit_s=SECONDS, snapshot_s=2 * SECONDS
    )
    load = MachineLoad()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(settings, Path(folder) / "run", find_data(None))
    load.update()
    complaints = run.complaints()
    if load.stolen_share() > MOST_STOLEN:
        complaints.append(f"{load.stolen_share():.1%} of the processors' time was stolen")
    return Point(
        scenario=scenario,
        contender=contender,
        seed=seed,
        measured_per_s=run.updates / run.seconds,
        simulated_per_s=make_report([run]).simulated[scenario][contender],
        exchange_s=run.exchange_s,
        compute_s=run.compute_s,
        busy_share=run.cpu_share,
        stolen_share=load.stolen_share(),
        complaints=complaints,
    )


def main() -> None:
    wanted = [(s, c, seed) for seed in SEEDS for s in SCENARIOS for c in CONTENDERS]
    points, plot = carry_out(
        HERE / "results.json",
        Point,
        wanted,
        lambda point: (point.scenario, point.contender, point.seed),
        measure,
    )
    draw(points, plot)
    show(points)


def by_kind(points: list[Point]) -> dict[tuple[str, str], list[Point]]:
    """By scenario and contender: the runs that count, or all if none does."""
    found = {}
    for scenario in SCENARIOS:
        for contender in CONTENDERS:
            mine = [p for p in points if (p.scenario, p.contender) == (scenario, contender)]
            if mine:
                found[scenario, contender] = [p for p in mine if not p.complaints] or mine
    return found


def show(points: list[Point]) -> None:
    rows = []
    for (scenario, contender), mine in by_kind(points).items():
        ratio = statistics.fmean(point.ratio for point in mine)
        rows.append(
            [
                scenario,
                contender,
                find_entry(contender).policy,
                ", ".join(f"{point.measured_per_s:.2f}" for point in mine),
                ", ".join(f"{point.simulated_per_s:.2f}" for point in mine),
                f"{ratio:.2f}",
                "yes" if abs(ratio - 1) <= BAR else "no",
                ", ".join(f"{point.busy_share:.0%}" for point in mine),
                "; ".join(complaint for point in mine for complaint in point.complaints) or "-",
            ]
        )
    columns = ["scenario", "contender", "policy", "lab, updates/s", "simulated", "lab / simulated"]
    print(table([*columns, "within 15 %", "processors busy", "does not count because"], rows))


def draw(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.axhspan(1 - BAR, 1 + BAR, color="#eee")
    axes.axhline(1.0, color="#888", linewidth=0.8)
    width = 0.8 / len(CONTENDERS)
    found = by_kind(points)
    for number, contender in enumerate(CONTENDERS):
        at, ratios = [], []
        for place, scenario in enumerate(SCENARIOS):
            for point in found.get((scenario, contender), []):
                at.append(place + (number - (len(CONTENDERS) - 1) / 2) * width)
                ratios.append(point.ratio)
        axes.plot(at, ratios, "o", label=contender)
    axes.set_xticks(range(len(SCENARIOS)), SCENARIOS)
    axes.set_ylim(0, 1.4)
    axes.set_ylabel("updates a second, lab / simulated")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
