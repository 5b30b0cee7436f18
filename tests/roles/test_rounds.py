"""Steps of the first gradients: who is granted, who waits, who is dropped unsent."""

from __future__ import annotations

from typing import Any

from mlfabric.events import PeerLost
from mlfabric.messages import DropUpdate, Grant, PullWanted, RatesLearned, ServePull, SlotWithdrawn
from tests.roles.feeding import sent
from tests.roles.test_scheduler import Fabric


def of_three(**settings: Any) -> Fabric:
    return Fabric("w0", "w1", "w2", "s0").ready(**{"wait_for": 2, "max_delay": 1, **settings})


def granted(actions: list[Any]) -> list[str]:
    return sorted(grant.update for grant in sent(Grant, actions))


def test_the_first_gradients_are_granted_and_the_rest_waits() -> None:
    fabric = of_three()
    assert granted(fabric.granted("w0#0", "w1#0")) == ["w0#0", "w1#0"]
    late = fabric.granted("w2#0")
    assert not sent(Grant, late)
    assert not sent(DropUpdate, late)
    fabric.report("w0#0", version=1)
    actions = [*fabric.report("w1#0", version=2), *fabric.wait(0.01)]
    assert [drop.update for drop in sent(DropUpdate, actions)] == ["w2#0"]


def test_who_waits_takes_the_place_of_a_worker_that_dies() -> None:
    fabric = of_three()
    fabric.granted("w0#0", "w1#0")
    fabric.granted("w2#0")
    fabric.report("w0#0", version=1)
    fabric(PeerLost("w1", "closed", True))
    # Its slot is asked back first: its bytes may be there already.
    actions = fabric.tell(SlotWithdrawn(0, 0, 1, True), "s0")
    assert granted([*actions, *fabric.wait(0.05)]) == ["w2#0"]


def test_a_slow_sender_waits_for_faster_ones_as_long_as_it_would_take_longer() -> None:
    fabric = of_three()
    fabric.tell(RatesLearned(1e5, 1e5), "w2")  # ten times slower: 40 ms instead of 4
    assert not granted(fabric.granted("w2#0"))
    assert granted(fabric.granted("w0#0")) == ["w0#0"]
    assert granted(fabric.wait(0.05)) == ["w2#0"], "nobody faster came"


def test_faster_ones_go_first() -> None:
    fabric = of_three()
    fabric.tell(RatesLearned(1e5, 1e5), "w2")
    assert granted(fabric.granted("w2#0", "w1#0", "w0#0")) == ["w0#0", "w1#0"]


def test_the_next_model_comes_when_the_step_is_complete() -> None:
    fabric = of_three()
    for name in ("w0", "w1", "w2"):
        assert sent(ServePull, fabric.tell(PullWanted(f"{name}.0", clock=0), name))
    fabric.granted("w0#0", "w1#0")
    fabric.report("w0#0", version=1)
    assert not sent(ServePull, fabric.tell(PullWanted("w0.1", clock=1, after=2), "w0"))
    assert [order.pull for order in sent(ServePull, fabric.report("w1#0", version=2))] == ["w0.1"]


def test_who_is_far_ahead_waits_until_the_slow_one_is_lost() -> None:
    fabric = Fabric("w0", "w1", "s0").ready(staleness=0)
    for name in ("w0", "w1"):
        fabric.tell(PullWanted(f"{name}.0", clock=0), name)
    assert not sent(ServePull, fabric.tell(PullWanted("w0.1", clock=1), "w0"))
    assert [order.pull for order in sent(ServePull, fabric(PeerLost("w1", "closed", True)))] == ["w0.1"]
