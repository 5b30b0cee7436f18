"""Server-link time of n updates that are ready at once, as planned.

    python -m experiments.aggregation.run

All links are equal and idle. The unit is the time of one transfer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from mlfabric.plan.planner import plan_updates
from mlfabric.plan.values import JobState, Offer, Shard
from mlfabric.topology import Host, Network

HERE = Path(__file__).parent
UPDATES = (2, 4, 8, 15, 30, 64, 100, 256)


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


FORMS: dict[str, dict[str, Any]] = {
    "direct": {"sums": False},
    "one level": {},
    "two levels": {"levels": 2},
    "chains of chunks": {"chunk_bytes": 100_000_000 // 40},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    wishes = parser.parse_args()
    results: dict[str, Any] = {
        "planned": {
            name: {str(n): planned(n, **options) for n in UPDATES} for name, options in FORMS.items()
        },
        "sqrt(2n)": {str(n): math.sqrt(2 * n) for n in UPDATES},
    }
    wishes.out.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, wishes.out.with_suffix(".png"))
    show(results)


def show(results: dict[str, Any]) -> None:
    print("| updates | sqrt(2n) | " + " | ".join(FORMS) + " |\n|" + "---|" * (len(FORMS) + 2))
    for n in UPDATES:
        cells = [f"{results['planned'][name][str(n)]['last']:.2f}" for name in FORMS]
        print(f"| {n} | {math.sqrt(2 * n):.1f} | " + " | ".join(cells) + " |")


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, points in results["planned"].items():
        last = [point["last"] for point in points.values()]
        axes.loglog([int(n) for n in points], last, "o-", ms=3, label=f"plan: {name}")
    axes.loglog(UPDATES, [math.sqrt(2 * n) for n in UPDATES], "k--", lw=0.8, label="sqrt(2n)")
    axes.set_xlabel("updates ready at once")
    axes.set_ylabel("transfer times until the last is in")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
