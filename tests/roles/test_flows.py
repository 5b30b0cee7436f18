"""A bulk flow says something of the network only while the network is what holds it back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from mlfabric.roles.flows import LATE_S, REPEAT_S, TICK_S, BulkState, FlowSample, FlowWatch

RATE = 25e6


@dataclass
class Node:
    """A node with one flow, to "s", whose bytes a test moves by hand."""

    now: float = 10.0
    state: BulkState = field(default_factory=lambda: BulkState(0, 0, 0, float("inf"), waiting=True))
    watch: FlowWatch = field(default_factory=FlowWatch)
    told: list[FlowSample] = field(default_factory=list)
    raised: int = 0

    def send(
        self,
        seconds: float,
        rate: float = RATE,
        busy: float = 1.0,
        window: float = 0.0,
        shared: bool = False,
        tick_s: float = TICK_S,
    ) -> None:
        for _ in range(round(seconds / tick_s)):
            self.now += tick_s
            self.state = replace(
                self.state,
                acked_bytes=self.state.acked_bytes + int(rate * tick_s),
                busy_us=self.state.busy_us + int(busy * tick_s * 1e6),
                window_us=self.state.window_us + int(window * tick_s * 1e6),
            )
            self.raised += len(self.watch.look(self.now, [("s", self.state)], shared))
            self.told += self.watch.news(self.now)

    def end(self) -> None:
        self.now += TICK_S
        self.watch.look(self.now, [], False)
        self.told += self.watch.news(self.now)


def test_a_flow_that_the_network_holds_back_is_told_with_its_rate() -> None:
    node = Node()
    node.send(0.4)
    assert node.told[-1].bytes_per_s == pytest.approx(RATE, rel=0.01)
    assert node.told[-1].limited


def test_the_same_is_not_said_again_and_again_but_repeated_while_it_lasts() -> None:
    node = Node()
    node.send(0.4)
    said = len(node.told)
    node.send(2 * REPEAT_S + 0.1)
    assert 1 <= len(node.told) - said <= 3


def test_the_end_of_a_flow_is_told_once() -> None:
    node = Node()
    node.send(0.4)
    node.end()
    assert node.told[-1] == FlowSample("s", 0.0, False)
    said = len(node.told)
    node.end()
    assert len(node.told) == said


@pytest.mark.parametrize(
    "how", [{"busy": 0.5}, {"window": 0.5}, {"shared": True}], ids=["nothing to send", "receiver", "shared"]
)
def test_what_else_held_it_back_is_no_limit_of_the_network(how: dict[str, float]) -> None:
    node = Node()
    node.send(0.5, **how)  # type: ignore[arg-type]
    assert node.told
    assert not any(sample.limited for sample in node.told)


def test_a_flow_at_its_pace_may_go_faster() -> None:
    node = Node(state=BulkState(0, 0, 0, RATE, waiting=True))
    node.send(0.4)
    assert node.raised > 0
    assert not any(sample.limited for sample in node.told)


def test_a_window_that_still_grows_says_nothing_of_the_link() -> None:
    node = Node()
    for doubling in range(6):
        node.send(2 * TICK_S, rate=6e6 * 2**doubling)
    assert node.told
    assert not any(sample.limited for sample in node.told)


def test_a_busy_processor_is_not_taken_for_a_slow_network() -> None:
    node = Node()
    node.send(2.0, tick_s=LATE_S + 0.05)
    assert node.told == [FlowSample("s", None, False)]


def test_all_that_goes_out_and_comes_in_is_told_once_two_samples_agree() -> None:
    watch = FlowWatch()
    told: list[tuple[float | None, float | None]] = []
    for look in range(1, 41):
        now = look * TICK_S
        moved = int(RATE * min(now, 0.5))
        watch.look(now, [], False, (moved, 2 * moved))
        told.append(watch.totals(now))
    ups, downs = ([each[way] for each in told if each[way] is not None] for way in (0, 1))
    assert ups[0] == pytest.approx(RATE, rel=0.01)
    assert downs[0] == pytest.approx(2 * RATE, rel=0.01)
    assert ups[-1] == downs[-1] == 0.0
    burst = FlowWatch()
    for look in range(1, 41):
        burst.look(look * TICK_S, [], False, (int(RATE) if look > 20 else 0, 0))
        assert burst.totals(look * TICK_S) == (None, None)  # what was read in one go is no rate
