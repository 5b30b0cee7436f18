"""All-reduce in virtual time: alike everywhere, and never a hang when somebody is gone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.errors import FabricError
from mlfabric.numerics import Vector
from mlfabric.sim.engine import Process, SimNode, Simulation
from mlfabric.topology import Host, Network


def reduce_everywhere(
    parts: list[Vector], lost_at_s: float | None = None, trouble: tuple[str, float] | None = None
) -> tuple[dict[int, Vector], dict[int, str]]:
    """What each rank holds afterwards, or the error it got; rank 1 may be killed or held up on the way."""
    count = len(parts)
    network = Network.of(Host(f"w{i}", 1e6, 1e6) for i in range(count))
    sim = Simulation(network)
    sim.add_scheduler("sched", "w0")
    nodes = [sim.add_node(f"w{i}", f"w{i}", "sched", expected=count) for i in range(count)]
    held: dict[int, Vector] = {}
    errors: dict[int, str] = {}

    def work(rank: int, node: SimNode) -> Process:
        assert node.joined is not None
        yield node.joined
        mine = parts[rank].copy()
        try:
            yield node.client.all_reduce(mine).answer
            held[rank] = mine
        except FabricError as error:
            errors[rank] = str(error)

    for rank, node in enumerate(nodes):
        sim.spawn(work(rank, node), node)
    if lost_at_s is not None:
        sim.at(lost_at_s, lambda: sim.kill("w1"))
    if trouble is not None:
        what, at_s = trouble
        sim.at(at_s, lambda: getattr(sim, what)("w1", 0.3))
    sim.run(60)
    return held, errors


@given(count=st.integers(1, 6), elements=st.integers(1, 50), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_all_ranks_hold_the_same_bits_of_the_sum(count: int, elements: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal(elements).astype(np.float32) for _ in range(count)]
    held, errors = reduce_everywhere(parts)
    assert not errors
    assert sorted(held) == list(range(count))
    for other in held.values():
        assert other.tobytes() == held[0].tobytes()
    np.testing.assert_allclose(held[0], np.sum(parts, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at_ms", [1, 5, 20, 60, 100, 140, 180, 220])
def test_a_lost_rank_is_an_error_for_those_who_needed_it(at_ms: int) -> None:
    parts = [np.full(40_000, float(rank), np.float32) for rank in range(4)]
    held, errors = reduce_everywhere(parts, lost_at_s=at_ms / 1000)
    survivors = {0, 2, 3}
    assert survivors <= held.keys() | errors.keys(), "somebody waits for ever"
    for rank in survivors & held.keys():
        assert (held[rank] == 6.0).all()
    assert errors, "the sum took longer than that"
    assert all("w1" in sentence for rank, sentence in errors.items() if rank in survivors)


@pytest.mark.parametrize("trouble", ["cut", "pause"])
def test_a_short_trouble_only_delays_the_sum(trouble: str) -> None:
    """TCP sends again what a pulled cable or a stopped process held up."""
    parts = [np.full(40_000, float(rank), np.float32) for rank in range(4)]
    held, errors = reduce_everywhere(parts, trouble=(trouble, 0.06))
    assert not errors
    assert all((array == 6.0).all() for array in held.values())
    assert len(held) == 4
