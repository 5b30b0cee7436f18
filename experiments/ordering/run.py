"""What the order of updates at a server does to their delays, and to learning.

    python -m experiments.ordering.run

Twenty workers, one server whose link carries one update at a time; who goes next is decided by the planner's
own `order_updates`. The order does not depend on what is learned, so each is made once and then replayed with
real gradients: of a quadratic, and of the classifier of digits.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlfabric.demo.classifier import Arrays, Digits, first_weights, gradient
from mlfabric.plan.ordering import order_updates
from mlfabric.plan.values import JobState, Offer
from mlfabric.sim.training import read_digits

HERE = Path(__file__).parent
WORKERS = 20
UPDATES = 4000  # applied, of which delays are counted
LEARNED = 800  # replayed with gradients
COMPUTE = 10.0  # in the time an update takes on a fast link
POLICIES: dict[str, tuple[str, int | None]] = {
    "arrival": ("arrival", None),
    "oldest first": ("oldest", None),
    "round robin": ("round-robin", None),
    "mlfabric, bound 2n": ("mlfabric", 2 * WORKERS),
    "mlfabric, bound 1.25n": ("mlfabric", WORKERS + WORKERS // 4),
    "shortest first": ("shortest", None),
}
# By worker: how long its update takes, how long it computes; both relative.
SETTINGS = {
    "two slow computers": ([1.0] * WORKERS, [4.0 if w < 2 else 1.0 for w in range(WORKERS)]),
    "unequal links": ([(0.5, 1.0, 2.0, 4.0)[w % 4] for w in range(WORKERS)], [1.0] * WORKERS),
}


@dataclass(frozen=True)
class Order:
    """Applied updates in order: whose, and the version each was computed from."""

    workers: list[int]
    bases: list[int]
    dropped: int
    seconds: float

    @property
    def delays(self) -> list[int]:
        return [version - base for version, base in enumerate(self.bases)]


def make_order(
    policy: str, bound: int | None, sends: list[float], computes: list[float], seed: int = 1
) -> Order:
    """Run the queue until so many updates are applied."""
    rng = np.random.default_rng(seed)
    n = len(sends)
    now, version, arrival, dropped = 0.0, 0, 0, 0
    base = [0] * n
    drops_in_row = [0] * n
    waiting: dict[int, Offer] = {}
    ready: list[tuple[float, int]] = []
    last_served = ""
    order = Order([], [], 0, 0.0)

    def compute(worker: int) -> None:
        took = COMPUTE * computes[worker] * float(rng.lognormal(0.0, 0.3))
        heapq.heappush(ready, (now + took, worker))

    for worker in range(n):
        compute(worker)
    while len(order.workers) < UPDATES:
        while ready and (ready[0][0] <= now or not waiting):
            at, worker = heapq.heappop(ready)
            now = max(now, at)
            name = f"w{worker:02d}"
            waiting[worker] = Offer(f"{name}.{arrival}", name, name, 1, base[worker], arrival=arrival,
                                    drops_in_row=drops_in_row[worker])  # fmt: skip
            arrival += 1
        job = JobState(
            placed_version=version, max_delay=bound, concurrency=n, policy=policy, last_served=last_served
        )
        durations = {offer.update: sends[worker] for worker, offer in waiting.items()}
        chosen = order_updates(list(waiting.values()), job, durations)
        for drop in chosen.drops:
            worker = next(w for w, offer in waiting.items() if offer.update == drop.update)
            del waiting[worker]
            dropped += 1
            drops_in_row[worker] += 1
            base[worker] = version  # it takes the newest model and computes again
            compute(worker)
        if not chosen.kept:
            continue
        offer = chosen.kept[0]
        worker = int(offer.worker[1:])
        del waiting[worker]
        now += sends[worker]
        order.workers.append(worker)
        order.bases.append(offer.base_version)
        version += 1
        base[worker], drops_in_row[worker], last_served = version, 0, offer.worker
        compute(worker)
    return Order(order.workers, order.bases, dropped, now)


def delay_identity(order: Order) -> tuple[int, int]:
    """(sum of delays, what it must be when nothing is dropped and each worker pulls at its own commit)."""
    total = len(order.workers)
    last = {worker: place + 1 for place, worker in enumerate(order.workers)}
    return sum(order.delays), sum(last.values()) - total


def largest_stable_on_quadratic(order: Order) -> float:
    """The largest step for which gradient descent on w^2/2 in this order shrinks w; by bisection."""

    def shrinks(step: float) -> bool:
        history = np.empty(LEARNED + 1)
        history[0] = 1.0
        for version in range(LEARNED):
            history[version + 1] = history[version] - step * history[order.bases[version]]
            if abs(history[version + 1]) > 1e6:
                return False
        return float(np.abs(history[-100:]).max()) < 1.0

    low, high = 0.0, 2.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if shrinks(middle) else (low, middle)
    return low


def learn(order: Order, digits: Digits, step: float, batch: int, updates: int) -> list[float]:
    """Training loss after every fiftieth update; the same batches by worker whatever the order."""
    draws = [np.random.default_rng((7, worker)) for worker in range(WORKERS)]
    models: dict[int, Arrays] = {0: first_weights()}
    current = models[0]
    needed = [0] * (updates + 1)  # how many updates still refer to a version
    for base in order.bases[:updates]:
        needed[base] += 1
    losses = []
    with np.errstate(all="ignore"):
        for version in range(updates):
            worker, base = order.workers[version], order.bases[version]
            rows = draws[worker].integers(0, len(digits.labels), batch)
            got, _ = gradient(models[base], digits.images[rows], digits.labels[rows])
            current = {name: part - np.float32(step) * got[name] for name, part in current.items()}
            needed[base] -= 1
            if not needed[base]:
                del models[base]
            if version + 1 <= updates and needed[version + 1]:
                models[version + 1] = current
            if (version + 1) % 50 == 0:
                _, loss = gradient(current, digits.images, digits.labels)
                losses.append(loss if math.isfinite(loss) else math.inf)
                if losses[-1] > 20:
                    break
    return losses


def largest_stable_on_digits(order: Order, digits: Digits, batch: int = 128) -> float:
    """The largest step, to 20 %, with which 300 updates lower the loss and never raise it above its first."""

    def works(step: float) -> bool:
        losses = learn(order, digits, step, batch, 300)
        return len(losses) == 6 and max(losses) < math.log(10) and losses[-1] < losses[0]

    low, high = math.log(0.005), math.log(2.0)
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (middle, high) if works(math.exp(middle)) else (low, middle)
    return math.exp(low)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    wishes = parser.parse_args()
    digits = read_digits()
    results: dict[str, Any] = {}
    for setting, (sends, computes) in SETTINGS.items():
        for name, (policy, bound) in POLICIES.items():
            order = make_order(policy, bound, sends, computes)
            delays = np.array(order.delays)
            got, must = delay_identity(order)
            results.setdefault(setting, {})[name] = found = {
                "updates_per_transfer_time": len(order.workers) / order.seconds,
                "delay": {"mean": float(delays.mean()), "std": float(delays.std()),
                          "p99": float(np.percentile(delays, 99)), "max": int(delays.max())},
                "dropped_share": order.dropped / (order.dropped + len(order.workers)),
                "identity": {"sum": got, "must": must, "holds": got == must},
                "histogram": np.bincount(np.minimum(delays, 120)).tolist(),
                "stable_quadratic": largest_stable_on_quadratic(order),
                "stable_digits": largest_stable_on_digits(order, digits),
                "loss": {f"batch {batch}, step {step}": learn(order, digits, step, batch, LEARNED)
                         for batch, step in ((16, 0.02), (128, 0.02))},
            }  # fmt: skip
            print(
                setting, name, {k: v for k, v in found.items() if k not in ("histogram", "loss")}, flush=True
            )
    wishes.out.write_text(json.dumps(results) + "\n")
    draw(results, wishes.out.with_suffix(".png"))
    show(results)


def show(results: dict[str, Any]) -> None:
    columns = ["order", "updates per transfer time", "delay mean", "std", "p99", "max", "dropped", "identity"]
    columns += ["stable step, quadratic", "stable step, digits"]
    for setting, rows in results.items():
        losses = list(next(iter(rows.values()))["loss"])
        header = [*columns, *(f"loss, {each}" for each in losses)]
        print(f"\n{setting}\n\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
        for name, row in rows.items():
            print(f"| {name} | " + " | ".join(_cells(row)) + " |")


def _cells(row: dict[str, Any]) -> list[str]:
    delay = row["delay"]
    whole = LEARNED // 50
    return [
        f"{row['updates_per_transfer_time']:.2f}",
        *(f"{delay[key]:.1f}" for key in ("mean", "std")),
        *(f"{delay[key]:.0f}" for key in ("p99", "max")),
        f"{row['dropped_share']:.1%}",
        "exact" if row["identity"]["holds"] else "drops" if row["dropped_share"] else "BROKEN",
        f"{row['stable_quadratic']:.3f}",
        f"{row['stable_digits']:.3f}",
        *(f"{each[-1]:.3f}" if len(each) == whole else "diverged" for each in row["loss"].values()),
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(10, 4), layout="constrained", sharey=True)
    for place, (setting, rows) in zip(axes, results.items(), strict=True):
        for name, row in rows.items():
            shares = np.array(row["histogram"]) / sum(row["histogram"])
            place.semilogy(1 - np.cumsum(shares) + 1e-12, label=name)
        place.set_ylim(1e-4, 1)
        place.set_title(setting, loc="left")
        place.set_xlabel("delay in updates")
    axes[0].set_ylabel("share of updates that are older")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
