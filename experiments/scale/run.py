"""Updates per second from 8 to 4,096 workers, simulated; each point is one policy at one size.

    python -m experiments.scale.run [--most 4096] [--lab]

Points that results.json holds already are not simulated again. With `--lab` the smallest sizes are run in a
lab, too, on a machine that does nothing else; those points are in lab.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from experiments.points import table
from mlfabric import scenario as scenarios
from mlfabric.bench.train.settings import RunSettings, StepSize
from mlfabric.scenario import Seconds
from mlfabric.sim.resizing import resize
from mlfabric.sim.results import simulate

HERE = Path(__file__).parent
SCENARIO = "dynamic-stragglers"
POLICIES = ("ring", "fcfs-1", "uniform-shards", "allreduce", "backup", "mlfabric-alongside", "rolling")
TOO_LONG = {("backup", 4096)}  # over a quarter of an hour of a processor
# Virtual seconds: fewer where a second holds more updates.
SIZES = {8: 60.0, 16: 60.0, 32: 60.0, 64: 60.0, 256: 30.0, 1024: 20.0, 4096: 10.0}
# Who runs a policy in the lab, and at which sizes two processors are enough for it.
IN_THE_LAB = {
    "ring": ("gloo", (8, 16)),
    "fcfs-1": ("fcfs-1", (8, 16)),
    "uniform-shards": ("fcfs-sharded", (8, 16)),
    "allreduce": ("mlfabric-sync", (8, 16)),
    "backup": ("mlfabric-fastest", (8,)),
    "mlfabric-alongside": ("mlfabric-alongside", (8,)),
    "rolling": ("mlfabric-rolling", (8,)),
}
LAB_S = 60.0


class LabPoint(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    contender: str
    workers: int
    updates_per_s: float
    busy_share: float
    complaints: list[str]


def point(policy: str, workers: int) -> dict[str, Any]:
    written = resize(scenarios.load(scenarios.find(SCENARIO)), workers)
    written = msgspec.structs.replace(written, duration=Seconds(SIZES[workers]))
    began = time.process_time()
    (result,) = simulate(written, policy)
    return {
        "updates_per_s": result.updates_per_s,
        "delay_mean": result.delay_mean,
        "delay_p99": result.delay_p99,
        "dropped": result.dropped + result.dropped_late,
        "simulated_s": result.simulated_s,
        "cpu_s": time.process_time() - began,
    }


def lab_point(policy: str, contender: str, workers: int) -> LabPoint:
    """The scenario in its own proportion, at a rate that a lab carries; nobody asks how good the model is."""
    from mlfabric.bench.train.running import make_run
    from mlfabric.bench.train.task import find_data

    settings = RunSettings(
        contender, SCENARIO, 1, StepSize(0.0005, 0.0), workers=workers, limit_s=LAB_S, snapshot_s=2 * LAB_S
    )
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(settings, Path(folder) / "run", find_data(None))
    return LabPoint(
        policy=policy,
        contender=contender,
        workers=workers,
        updates_per_s=run.updates / run.seconds,
        busy_share=run.cpu_share,
        complaints=run.complaints(),
    )


def lab_points(file: Path, measure: bool) -> list[LabPoint]:
    """Those in the file, and with `measure` those it lacks."""
    points = msgspec.json.decode(file.read_bytes(), type=list[LabPoint]) if file.exists() else []
    made = {(each.policy, each.workers) for each in points}
    for policy, (contender, sizes) in IN_THE_LAB.items() if measure else ():
        for workers in sizes:
            if (policy, workers) not in made:
                points.append(lab_point(policy, contender, workers))
                print(points[-1], flush=True)
                file.write_bytes(msgspec.json.format(msgspec.json.encode(points), indent=1) + b"\n")
    return points


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=4096)
    parser.add_argument("--lab", action="store_true", help="run the smallest sizes in a lab, too")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    wishes = parser.parse_args()
    results: dict[str, dict[str, Any]] = json.loads(wishes.out.read_text()) if wishes.out.exists() else {}
    for workers in (size for size in SIZES if size <= wishes.most):
        for policy in POLICIES:
            points = results.setdefault(policy, {})
            if str(workers) not in points and (policy, workers) not in TOO_LONG:
                points[str(workers)] = point(policy, workers)
                print(policy, workers, points[str(workers)], flush=True)
                wishes.out.write_text(json.dumps(results, indent=1) + "\n")
    in_the_lab = lab_points(wishes.out.with_name("lab.json"), wishes.lab)
    draw(results, in_the_lab, wishes.out.with_suffix(".png"))
    show(results)
    show_lab(results, in_the_lab)


def show(results: dict[str, dict[str, Any]]) -> None:
    sizes = sorted({int(size) for points in results.values() for size in points})
    print("| policy | " + " | ".join(map(str, sizes)) + " |\n|" + "---|" * (len(sizes) + 1))
    for policy, points in results.items():
        cells = [f"{points[str(s)]['updates_per_s']:.3g}" if str(s) in points else "" for s in sizes]
        print(f"| {policy} | " + " | ".join(cells) + " |")


def show_lab(results: dict[str, dict[str, Any]], points: list[LabPoint]) -> None:
    rows = []
    for each in points:
        simulated = results[each.policy][str(each.workers)]["updates_per_s"]
        said = "; ".join(each.complaints) or "-"
        cells = [f"{each.updates_per_s:.2f}", f"{simulated:.2f}", f"{each.updates_per_s / simulated:.2f}"]
        rows.append([each.policy, each.contender, str(each.workers), *cells, f"{each.busy_share:.0%}", said])
    columns = ["policy", "in the lab", "workers", "lab, updates/s", "simulated", "lab / simulated"]
    print(table([*columns, "processors busy", "complaints"], rows))


def draw(results: dict[str, dict[str, Any]], in_the_lab: list[LabPoint], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for number, (policy, points) in enumerate(results.items()):
        rates = [p["updates_per_s"] for p in points.values()]
        axes.loglog([int(s) for s in points], rates, "o-", ms=3, color=f"C{number}", label=policy)
        mine = [each for each in in_the_lab if each.policy == policy and not each.complaints]
        at, found = [each.workers for each in mine], [each.updates_per_s for each in mine]
        axes.loglog(at, found, "x", ms=8, color=f"C{number}")
    axes.set_xlabel("workers")
    axes.set_ylabel("updates a second, simulated; crosses: in the lab")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
