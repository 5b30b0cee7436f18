"""What the scheduler believes of links it knows little of."""

from __future__ import annotations

from mlfabric.messages import MemberInfo, RatesLearned
from mlfabric.roles.bandwidth import BandwidthView


def view_of(*hosts: str, guessed: bool = True) -> BandwidthView:
    view = BandwidthView()
    for index, host in enumerate(hosts):
        view.add(MemberInfo(f"n{index}", host, "", ("worker",), 100.0, 100.0, rates_guessed=guessed))
    return view


def rates(view: BandwidthView) -> dict[str, tuple[float, float]]:
    return {name: (h.up_bytes_per_s, h.down_bytes_per_s) for name, h in view.network().hosts.items()}


def test_hosts_never_seen_full_are_taken_to_be_twice_as_fast_as_the_fastest_known() -> None:
    view = view_of("a", "b", "c")
    assert view.learn("n0", RatesLearned(20.0, None), 0.0)
    assert view.learn("n1", RatesLearned(5.0, None), 0.0)
    assert rates(view) == {"a": (20.0, 20.0), "b": (5.0, 5.0), "c": (40.0, 40.0)}


def test_figures_that_members_gave_are_kept_until_something_is_learned() -> None:
    view = view_of("a", "b", guessed=False)
    view.learn("n0", RatesLearned(20.0, None), 0.0)
    assert rates(view) == {"a": (20.0, 100.0), "b": (100.0, 100.0)}


def test_processes_of_one_host_add_up() -> None:
    view = view_of("a", "a", "b")
    view.learn("n0", RatesLearned(10.0, 4.0), 0.0)
    assert rates(view)["a"] == (20.0, 8.0)
    view.learn("n1", RatesLearned(14.0, 6.0), 0.0)
    assert rates(view)["a"] == (24.0, 10.0)


def test_the_same_rates_again_are_no_news() -> None:
    view = view_of("a")
    assert view.learn("n0", RatesLearned(10.0, 4.0), 0.0)
    assert not view.learn("n0", RatesLearned(10.0, 4.0), 0.0)
    assert not view.learn("stranger", RatesLearned(10.0, 4.0), 0.0)


def test_a_direction_not_said_again_follows_the_one_that_was() -> None:
    view = view_of("a")
    view.learn("n0", RatesLearned(8.0, 8.0), 0.0)
    view.learn("n0", RatesLearned(2.0, None), 5.0)
    assert rates(view)["a"] == (2.0, 2.0)
    view.learn("n0", RatesLearned(8.0, None), 10.0)
    assert rates(view)["a"] == (8.0, 8.0)
