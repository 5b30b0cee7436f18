"""Paths and rates between hosts, with and without racks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlfabric.topology import Host, Link, Network, Rack


@st.composite
def networks(draw: st.DrawFn) -> Network:
    rates = st.floats(1.0, 1e9)
    racks = [f"r{i}" for i in range(draw(st.integers(0, 3)))]
    places = st.sampled_from([None, *racks])
    hosts = [Host(f"h{i}", draw(rates), draw(rates), draw(places)) for i in range(draw(st.integers(1, 6)))]
    return Network.of(hosts, (Rack(name, draw(rates), draw(rates)) for name in racks))


@given(networks())
def test_a_path_leaves_by_the_source_and_enters_by_the_target(network: Network) -> None:
    for source, target in itertools.permutations(network.hosts, 2):
        path = network.path(source, target)
        assert path[0] == Link(source, "up")
        assert path[-1] == Link(target, "down")
        assert len(set(path)) == len(path)
        crossed = [link for link in path if link.owner in network.racks]
        here, there = network.hosts[source].rack, network.hosts[target].rack
        expected = [] if here == there else [r for r in ((here, "up"), (there, "down")) if r[0] is not None]
        assert crossed == expected


@given(networks())
def test_a_lone_transfer_gets_the_least_of_the_links_it_crosses(network: Network) -> None:
    for source, target in itertools.permutations(network.hosts, 2):
        capacities = [network.capacity(link) for link in network.path(source, target)]
        assert network.rate(source, target) == min(capacities)
    for name in network.hosts:
        assert network.path(name, name) == ()
        assert network.rate(name, name) == float("inf")


@given(networks())
def test_every_link_is_listed_once_and_has_a_capacity(network: Network) -> None:
    links = network.links()
    assert len(set(links)) == len(links) == 2 * (len(network.hosts) + len(network.racks))
    assert all(network.capacity(link) > 0 for link in links)


def test_a_changed_copy_leaves_the_network_as_it_was() -> None:
    network = Network.of([Host("a", 1.0, 2.0), Host("b", 3.0, 4.0)])
    faster = network.with_host(Host("a", 10.0, 20.0))
    smaller = network.without_host("b")
    assert network.capacity(Link("a", "up")) == 1.0
    assert faster.capacity(Link("a", "up")) == 10.0
    assert list(network.hosts) == ["a", "b"]
    assert list(smaller.hosts) == ["a"]
    with pytest.raises(TypeError):
        network.hosts["c"] = Host("c", 1.0, 1.0)  # type: ignore[index]


def test_a_link_is_called_by_owner_and_direction() -> None:
    assert str(Link("w3", "up")) == "w3.up"
