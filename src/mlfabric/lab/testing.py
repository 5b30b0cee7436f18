"""For tests that want a network: a pytest fixture that makes labs in about a second and removes them.

    pytest_plugins = ["mlfabric.lab.testing"]

    def test_two_hosts_talk(make_lab):
        lab = make_lab(hosts=2, rate="100mbit")
        with lab.host("w0").socket() as out: ...

Where the machine allows no namespaces, the test is skipped with the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mlfabric.errors import FabricError
from mlfabric.lab.session import Lab
from mlfabric.scenario import HostSpec, NetworkSpec, Scenario, Size, WireRate
from mlfabric.units import parse_rate, parse_size

MakeLab = Callable[..., Lab]


def plain_scenario(hosts: int = 2, rate: str = "200mbit", queue: str = "256kB") -> Scenario:
    """Equal hosts w0, w1, ... on one switch."""
    network = NetworkSpec(rate=WireRate(parse_rate(rate)), queue=Size(parse_size(queue)))
    return Scenario(name="test", network=network, hosts=(HostSpec(name="w", count=hosts),))


def reason_for_no_lab() -> str | None:
    """Why no lab can be made here, or None."""
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 is not installed"
    try:
        with Lab(plain_scenario(1), verify=False):
            return None
    except FabricError as error:
        return str(error)


@pytest.fixture(scope="session")
def lab_is_possible() -> None:
    reason = reason_for_no_lab()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def make_lab(lab_is_possible: None) -> Iterator[MakeLab]:
    """make_lab(scenario), or make_lab(hosts=8, rate="200mbit"); all labs go down with the test."""
    with ExitStack() as stack:

        def make(scenario: Scenario | None = None, *, verify: bool = False, **plain: object) -> Lab:
            chosen = scenario if scenario is not None else plain_scenario(**plain)  # type: ignore[arg-type]
            return stack.enter_context(Lab(chosen, verify=verify))

        yield make
