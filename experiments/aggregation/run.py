"""Server-link time of n updates that are ready at once: planned, and between hosts of a lab.

    python -m experiments.aggregation.run           plans only, seconds
    python -m experiments.aggregation.run --lab     with the lab's points, two minutes

All links are equal and idle. The unit is the time of one transfer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlfabric.lab import Lab, RunOptions
from mlfabric.lab.testing import plain_scenario
from mlfabric.plan.planner import plan_updates
from mlfabric.plan.values import JobState, Offer, Shard
from mlfabric.topology import Host, Network
from mlfabric.units import goodput

HERE = Path(__file__).parent
UPDATES = (2, 4, 8, 15, 30, 64, 100, 256)
LAB_WORKERS = (4, 8, 12)
LAB_RATE = "100mbit"
SIZE_BYTES = 4_000_000
ROUNDS = 6


def planned(updates: int, **options: Any) -> dict[str, float]:
    """Transfer times until the last update, and the mean one, is at the server; time of planning."""
    rate = 100e6
    names = tuple(f"w{number}" for number in range(updates))
    network = Network.of([Host(name, rate, rate) for name in ("server", *names)], [])
    offers = [Offer(name, name, name, int(rate), 0, arrival=number) for number, name in enumerate(names)]
    aggregators = names if options.pop("sums", True) else ()
    job = JobState(shards=(Shard(0, "server"),), aggregators=aggregators, objective="last", **options)
    began = time.perf_counter()
    plan = plan_updates(network, [], job, offers, 0.0)
    finishes = [placed.finish_s for placed in plan.placed]
    return {
        "last": max(finishes),
        "mean": statistics.fmean(finishes),
        "messages": len({part.target for placed in plan.placed for part in placed.parts}) if not plan.groups
        else updates - sum(len(group.members) - 1 for group in plan.groups if group.parent is None),
        "planning_s": time.perf_counter() - began,
    }  # fmt: skip


FORMS = {
    "direct": {"sums": False},
    "one level": {},
    "two levels": {"levels": 2},
    "chains of chunks": {"chunk_bytes": 100_000_000 // 40},
}


def in_lab(workers: int, aggregate: bool) -> dict[str, Any]:
    """Transfer times from all workers' push until the last update is in; the server is on a host apart."""
    argv = [sys.executable, "-m", "experiments.aggregation.rank", str(SIZE_BYTES), str(ROUNDS)]
    argv.append("sums" if aggregate else "direct")
    with Lab(plain_scenario(workers + 1, rate=LAB_RATE)) as lab, tempfile.TemporaryDirectory() as folder:
        result = lab.run(argv, RunOptions(folder=Path(folder) / "run", timeout_s=120))
        said = [Path(rank.log).read_text() for rank in result.ranks]
        if not result.ok:
            raise SystemExit("\n".join(said))
        busy = json.loads((Path(folder) / "run" / "manifest.json").read_text())["busy_share"]
    found = next(line for line in said[0].splitlines() if line.startswith("{"))
    transfer_s = SIZE_BYTES / goodput(float(LAB_RATE.removesuffix("mbit")) * 1e6)
    rounds = [seconds / transfer_s for seconds in json.loads(found)["rounds_s"]]
    return {
        "last": statistics.median(rounds[1:]),  # in the first round rates are not known yet
        "rounds": rounds,
        "cpu_share": busy,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lab", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    wishes = parser.parse_args()
    results: dict[str, Any] = {
        "planned": {
            name: {str(n): planned(n, **options) for n in UPDATES} for name, options in FORMS.items()
        },
        "sqrt(2n)": {str(n): math.sqrt(2 * n) for n in UPDATES},
    }
    if wishes.lab:
        results["lab"] = {
            name: {str(n): in_lab(n, name == "sums") for n in LAB_WORKERS} for name in ("direct", "sums")
        }
    wishes.out.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, wishes.out.with_suffix(".png"))
    show(results)


def show(results: dict[str, Any]) -> None:
    print("| updates | sqrt(2n) | " + " | ".join(FORMS) + " |\n|" + "---|" * (len(FORMS) + 2))
    for n in UPDATES:
        cells = [f"{results['planned'][name][str(n)]['last']:.2f}" for name in FORMS]
        print(f"| {n} | {math.sqrt(2 * n):.1f} | " + " | ".join(cells) + " |")
    for name, points in results.get("lab", {}).items():
        told = ", ".join(
            f"{n}: {point['last']:.2f} ({point['cpu_share']:.0%} CPU)" for n, point in points.items()
        )
        print(f"lab, {name}: {told}")


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, points in results["planned"].items():
        last = [point["last"] for point in points.values()]
        axes.loglog([int(n) for n in points], last, "o-", ms=3, label=f"plan: {name}")
    axes.loglog(UPDATES, [math.sqrt(2 * n) for n in UPDATES], "k--", lw=0.8, label="sqrt(2n)")
    for marker, (name, points) in zip("sD", results.get("lab", {}).items(), strict=False):
        last = [point["last"] for point in points.values()]
        axes.loglog([int(n) for n in points], last, marker, mfc="none", color="k", label=f"lab: {name}")
    axes.set_xlabel("updates ready at once")
    axes.set_ylabel("transfer times until the last is in")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
