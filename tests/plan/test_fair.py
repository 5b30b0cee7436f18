"""Max-min fair sharing: feasible, and nobody can get more without someone no better off getting less."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.plan.fair import share_rates
from mlfabric.plan.reservation import Ledger
from tests.plan.cases import random_network


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_every_transfer_has_a_full_link_on_which_nobody_gets_more(seed: int) -> None:
    draw = random.Random(seed)
    network = random_network(draw, draw.randint(2, 8), racks=draw.choice((0, 2)))
    ledger = Ledger(network)
    names = list(network.hosts)
    paths = [ledger.path(*draw.sample(names, 2)) for _ in range(draw.randint(1, 12))]
    links = {id(stairs): stairs for path in paths for stairs in path}
    rates = share_rates(paths, {key: stairs.capacity for key, stairs in links.items()})
    used = {
        key: sum(rate for rate, path in zip(rates, paths, strict=True) if any(id(s) == key for s in path))
        for key in links
    }
    for key, stairs in links.items():
        assert used[key] <= stairs.capacity
    for rate, path in zip(rates, paths, strict=True):
        assert any(
            used[id(stairs)] >= stairs.capacity * (1 - 1e-9)
            and all(
                other <= rate * (1 + 1e-9)
                for other, way in zip(rates, paths, strict=True)
                if any(s is stairs for s in way)
            )
            for stairs in path
        )
