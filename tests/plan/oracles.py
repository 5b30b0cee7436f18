"""Optima found without any of the planner's own reasoning: by trying everything, or by an assignment."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from mlfabric.plan.forest import Cargo, Gather, Node, lay_out
from mlfabric.plan.numbering import plan_cost
from mlfabric.plan.ordering import position_deadline
from mlfabric.plan.reservation import Ledger
from mlfabric.plan.staircase import INF
from mlfabric.plan.values import JobState, Offer
from tests.plan.cases import random_network

# -- ordering

Case = tuple[list[Offer], JobState, dict[str, float]]


def ordering_case(seed: int, most: int = 6) -> Case:
    draw = random.Random(seed)
    count = draw.randint(1, most)
    job = JobState(placed_version=20, max_delay=draw.randint(0, 12))
    offers = [
        Offer(f"u-w{i}", f"w{i}", f"w{i}", 100, 20 - draw.randint(0, 12), arrival=i) for i in range(count)
    ]
    if draw.random() < 0.5:
        durations = {o.update: float(draw.randint(1, 4)) for o in offers}
    else:
        durations = {o.update: draw.uniform(0.1, 4.0) for o in offers}
    return offers, job, durations


def completions(order: tuple[Offer, ...], durations: dict[str, float]) -> float:
    return sum(itertools.accumulate(durations[o.update] for o in order))


def feasible(order: tuple[Offer, ...], job: JobState) -> bool:
    return all(position_deadline(o, job) >= p for p, o in enumerate(order))


def best_assignment(kept: int, offers: list[Offer], job: JobState, durations: dict[str, float]) -> float:
    """The least sum of completions of any `kept` offers in any feasible order: an assignment to positions."""
    forbidden = 1e9
    cost = np.full((len(offers), kept), forbidden)
    for row, o in enumerate(offers):
        for position in range(min(kept, position_deadline(o, job) + 1)):
            cost[row, position] = durations[o.update] * (kept - position)
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].sum())


# -- aggregation


def grouping_case(seed: int, workers: int, idle: int = 1, deadlines: bool = False) -> tuple[Ledger, Cargo]:
    """One server, workers in an order fast first, idle hosts; some links taken for a while.

    With deadlines any update may have to stay where it is in the order, or little behind.
    """
    draw = random.Random(seed)
    network = random_network(draw, 1 + workers + idle)
    server, *names = list(network.hosts)
    senders = sorted(
        names[:workers],
        key=lambda name: (-network.rate(name, server), name),
    )
    ledger = Ledger(network)
    for _ in range(draw.randint(0, 2)):
        source, target = draw.sample(list(network.hosts), 2)
        ledger.reserve(ledger.path(source, target), draw.randint(10**6, 2 * 10**7), 0.0)
    cargo = Cargo(
        hosts=senders,
        parts=[[10_000_000]] * workers,
        servers=[server],
        aggregators=frozenset(names),
        last_counts=draw.random() < 0.3,
    )
    if deadlines:
        latest = [place + draw.choice((0, 0, 1, workers)) for place in range(workers)]
        draw.shuffle(senders)
        cargo = cargo._replace(hosts=senders, deadlines=latest, last_counts=False)
    return ledger, cargo


def groupings(cargo: Cargo) -> Iterator[list[Node]]:
    """Every way to cut the order into runs, each direct or gathered at any host that may sum."""
    count = len(cargo.hosts)
    hosts = sorted(cargo.aggregators.difference(cargo.servers))
    for marks in itertools.product((False, True), repeat=count - 1):
        borders = [0, *(k + 1 for k, mark in enumerate(marks) if mark), count]
        runs = [range(first, end) for first, end in itertools.pairwise(borders)]
        choices = [[None] if len(run) == 1 else [None, *hosts] for run in runs]
        for chosen in itertools.product(*choices):
            nodes: list[Node] = []
            for run, host in zip(runs, chosen, strict=True):
                nodes.extend(run if host is None else [Gather(tuple(run), (host,))])
            if not any(a is None and b is None for a, b in itertools.pairwise(chosen)):
                yield nodes


def cost_of(ledger: Ledger, cargo: Cargo, nodes: Sequence[Node]) -> float:
    mark = ledger.mark()
    cost = plan_cost(nodes, lay_out(ledger, cargo, nodes, 0.0).finishes, cargo, 0.0)
    ledger.undo(mark)
    return cost


def best_grouping(ledger: Ledger, cargo: Cargo) -> float:
    best = INF
    for nodes in groupings(cargo):
        if cargo.meets_deadlines(nodes):
            best = min(best, cost_of(ledger, cargo, nodes))
    return best
