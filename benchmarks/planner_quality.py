"""How near the planner comes to the optimum, median and worst, over many random small cases.

    python -m benchmarks.planner_quality [cases]

Ordering is compared with the assignment optimum, aggregation with every contiguous grouping (under a bound by
when updates can be applied), participation of an all-reduce step with every subset. The figures in
docs/planning.md are this program's.
"""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
from tests.plan.oracles import best_assignment, best_grouping, completions, grouping_case, ordering_case

from mlfabric.plan.aggregation import aggregate_updates
from mlfabric.plan.allreduce import choose_participants, lower_bound
from mlfabric.plan.numbering import plan_cost
from mlfabric.plan.ordering import order_updates
from mlfabric.topology import Host, Network

SIZE_BYTES = 100_000_000


def ordering_ratio(seed: int) -> float | None:
    offers, job, durations = ordering_case(seed, most=9)
    kept = order_updates(offers, job, durations).kept
    if not kept:
        return None
    return completions(kept, durations) / best_assignment(len(kept), offers, job, durations)


def grouping_ratio(seed: int) -> float:
    ledger, cargo = grouping_case(seed, workers=2 + seed % 4)
    mark = ledger.mark()
    layout = aggregate_updates(ledger, cargo, 0.0)
    ours = plan_cost(layout.nodes, layout.finishes, cargo, 0.0)
    ledger.undo(mark)
    return ours / best_grouping(ledger, cargo)


def bounded_grouping_ratio(seed: int) -> float:
    ledger, cargo = grouping_case(seed, workers=2 + seed % 4, deadlines=True)
    mark = ledger.mark()
    layout = aggregate_updates(ledger, cargo, 0.0)
    ours = plan_cost(layout.nodes, layout.finishes, cargo, 0.0)
    ledger.undo(mark)
    return ours / best_grouping(ledger, cargo)


def participation_ratio(seed: int) -> float:
    draw = random.Random(seed)
    hosts = [
        Host(f"h{i}", 1e8 * draw.choice((1, 0.5, 0.25, 0.125)), 1e8 * draw.choice((1, 0.5, 0.25, 0.125)))
        for i in range(draw.randint(2, 8))
    ]
    ready = {host.name: draw.choice((0.0, 0.0, 2.0, 5.0)) for host in hosts}
    chosen = choose_participants(Network.of(hosts), [h.name for h in hosts], SIZE_BYTES, ready, least=2)
    best = 0.0
    for count in range(2, len(hosts) + 1):
        for subset in itertools.combinations(hosts, count):
            up, down = [h.up_bytes_per_s for h in subset], [h.down_bytes_per_s for h in subset]
            step_s = max(ready[h.name] for h in subset) + lower_bound(up, down, SIZE_BYTES)
            best = max(best, count / step_s)
    return best / (len(chosen.participants) / chosen.step_s)


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for name, ratio in (
        ("kept set and order, against the assignment", ordering_ratio),
        ("groups, against every contiguous grouping", grouping_ratio),
        ("groups under a bound, the same by application", bounded_grouping_ratio),
        ("participants, against every subset", participation_ratio),
    ):
        ratios = np.array([value for value in map(ratio, range(cases)) if value is not None])
        worst = int(np.argmax(ratios))
        print(
            f"{name:<48} {len(ratios)} cases: median {np.median(ratios):.3f}, "
            f"95 % {np.percentile(ratios, 95):.3f}, worst {ratios[worst]:.3f}"
        )


if __name__ == "__main__":
    main()
