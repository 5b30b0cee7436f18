"""Plans of groups are of few pieces: what was learned of links is never quite right, and each piece costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlfabric.collective.routes import Shares, all_reduce_segments
from mlfabric.plan.allreduce import lower_bound
from mlfabric.plan.groups import (
    NOMINAL_BYTES,
    SMALL_SHARE_COST,
    SPLIT_COST,
    UNEVEN_COST,
    plan_group,
    predicted_time,
)
from mlfabric.topology import Host, Network

FULL = 62.5e6


def network_of(rates: list[tuple[float, float]]) -> Network:
    return Network.of([Host(f"w{number}", up, down) for number, (up, down) in enumerate(rates)])


def pieces(rates: list[tuple[float, float]]) -> int:
    """So many pieces an array of 159,000 numbers has, each with frames of its own between all ranks."""
    plan = plan_group(network_of(rates), [f"w{number}" for number in range(len(rates))])
    shares = Shares(1, plan.reduces, plan.broadcasts, chunk_bytes=plan.chunk_bytes)
    return len(all_reduce_segments(159_000, 4, shares, 0))


def test_two_directions_that_were_learned_nearly_alike_cut_no_more_pieces_than_there_are_hosts() -> None:
    shares = [1.0, 0.5, 0.25, 1.0, 0.125, 0.5, 1.0, 0.25]
    noise = [1.01, 0.97, 1.03, 0.99, 1.02, 0.98, 1.0, 1.04]
    rates = [
        (FULL * share * up, FULL * share * down)
        for share, up, down in zip(shares, noise, reversed(noise), strict=True)
    ]
    assert pieces(rates) <= 5


def test_directions_that_really_differ_have_shares_of_their_own() -> None:
    rates = [(FULL, FULL / 2), (FULL / 2, FULL)] * 3
    network, hosts = network_of(rates), [f"w{number}" for number in range(6)]
    plan = plan_group(network, hosts)
    assert plan.reduces != plan.broadcasts
    assert predicted_time(network, hosts, plan) < 1.01 * lower_bound(
        [up for up, _ in rates], [down for _, down in rates], NOMINAL_BYTES
    )


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)).map(lambda r: (FULL * r[0], FULL * r[1])),
        min_size=2,
        max_size=12,
    )
)
def test_few_pieces_take_hardly_longer_than_the_bound(rates: list[tuple[float, float]]) -> None:
    network, hosts = network_of(rates), [f"w{number}" for number in range(len(rates))]
    plan = plan_group(network, hosts)
    assert abs(sum(plan.reduces) - 1) < 1e-9
    assert abs(sum(plan.broadcasts) - 1) < 1e-9
    bound_s = lower_bound([up for up, _ in rates], [down for _, down in rates], NOMINAL_BYTES)
    most = SPLIT_COST * SMALL_SHARE_COST * UNEVEN_COST
    assert predicted_time(network, hosts, plan) <= most * bound_s * (1 + 1e-9)
