"""Updates per second from 8 to 4,096 workers, simulated; each point is one policy at one size.

    python -m experiments.scale.run [--most 4096]

Points that results.json holds already are not simulated again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from mlfabric import scenario as scenarios
from mlfabric.scenario import Seconds
from mlfabric.sim.resizing import resize
from mlfabric.sim.results import simulate

HERE = Path(__file__).parent
SCENARIO = "dynamic-stragglers"
POLICIES = ("ring", "fcfs-1", "uniform-shards", "allreduce", "backup", "mlfabric-alongside")
TOO_LONG = {("backup", 4096)}  # over a quarter of an hour of a processor
# Virtual seconds: fewer where a second holds more updates.
SIZES = {8: 60.0, 16: 60.0, 32: 60.0, 64: 60.0, 256: 30.0, 1024: 20.0, 4096: 10.0}


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=4096)
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
    draw(results, wishes.out.with_suffix(".png"))
    show(results)


def show(results: dict[str, dict[str, Any]]) -> None:
    sizes = sorted({int(size) for points in results.values() for size in points})
    print("| policy | " + " | ".join(map(str, sizes)) + " |\n|" + "---|" * (len(sizes) + 1))
    for policy, points in results.items():
        cells = [f"{points[str(s)]['updates_per_s']:.3g}" if str(s) in points else "" for s in sizes]
        print(f"| {policy} | " + " | ".join(cells) + " |")


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for policy, points in results.items():
        axes.loglog(
            [int(s) for s in points], [p["updates_per_s"] for p in points.values()], "o-", ms=3, label=policy
        )
    axes.set_xlabel("workers")
    axes.set_ylabel("updates a second, simulated")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
