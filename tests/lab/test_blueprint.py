"""What the lab builds is decided by plain data, before the kernel is asked for anything."""

from __future__ import annotations

import pytest

from mlfabric.errors import FabricError
from mlfabric.lab.blueprint import CORE, MIN_BURST_BYTES, Shape, draw
from mlfabric.scenario import load_named, parse, shipped_names

RACKS = """
[network]
rate = "100mbit"
[[hosts]]
name = "w"
count = 8
rack = "r*"
[[hosts]]
name = "lone"
up = "20mbit"
down = "30mbit"
queue = "64kB"
delay = "10ms"
[[racks]]
name = "r"
count = 2
oversubscription = 4
"""


def test_hosts_of_a_rack_meet_in_its_bridge_and_others_in_the_core() -> None:
    blueprint = draw(parse(RACKS))
    assert blueprint.bridges == (CORE, "rack0", "rack1")
    assert [port.bridge for port in blueprint.hosts] == ["rack0"] * 4 + ["rack1"] * 4 + [CORE]
    assert {port.bridge for port in blueprint.racks} == {CORE}


def test_uplink_of_a_rack_follows_from_oversubscription() -> None:
    assert [port.up.rate_bps for port in draw(parse(RACKS)).racks] == [100e6, 100e6]


def test_host_keeps_its_own_rates_queue_and_delay() -> None:
    lone = draw(parse(RACKS)).host("lone")
    assert lone.up == Shape(20e6, 64_000)
    assert lone.down == Shape(30e6, 64_000)
    assert lone.delay_s == 0.01


def test_names_and_addresses_are_unique_also_beyond_256_hosts() -> None:
    hosts = draw(parse('hosts = [{ name = "w", count = 600, rate = "1mbit" }]')).hosts
    for attribute in ("address", "mac", "far"):
        assert len({getattr(port, attribute) for port in hosts}) == 600


def test_device_names_fit_the_kernel_whatever_hosts_are_called() -> None:
    blueprint = draw(parse('hosts = [{ name = "a-host-with-a-very-long-name-" , count = 3 }]'))
    assert all(len(port.far) <= 15 for port in blueprint.hosts)


def test_slow_links_get_a_bucket_of_two_frames_and_fast_ones_of_half_a_millisecond() -> None:
    assert Shape(1e6, 256_000).burst_bytes == MIN_BURST_BYTES
    assert Shape(2e9, 256_000).burst_bytes == 125_000


def test_few_frames_travel_plain_and_many_in_pieces() -> None:
    assert draw(parse('hosts = [{ name = "w", count = 8, rate = "20mbit" }]')).piece_frames == 1
    assert draw(parse('hosts = [{ name = "w", count = 8, rate = "200mbit" }]')).piece_frames > 4


def test_pieces_stay_small_beside_the_smallest_queue() -> None:
    text = 'network = { queue = "30kB" }\nhosts = [{ name = "w", count = 8, rate = "1gbit" }]'
    assert draw(parse(text)).piece_frames == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('hosts = [{ name = "w", queue = "1kB" }]', "holds no frame"),
        ('hosts = [{ name = "w", rate = "100bit" }]', "from 8 kbit on"),
        ('hosts = [{ name = "w", count = 1200 }]', "spread the hosts over racks"),
    ],
)
def test_what_cannot_be_built_is_said_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(FabricError, match=sentence):
        draw(parse(text))


@pytest.mark.parametrize("name", [name for name in shipped_names() if name.startswith("lab-")])
def test_shipped_scenarios_of_the_lab_can_be_built(name: str) -> None:
    assert draw(load_named(name)).hosts


def test_unknown_host_is_named_with_those_there_are() -> None:
    with pytest.raises(FabricError, match="no host w9; it has w0, w1"):
        draw(parse('hosts = [{ name = "w", count = 2 }]')).host("w9")
