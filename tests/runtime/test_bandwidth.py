"""A host learns its own link rates from its flows, and blames nobody wrongly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from mlfabric.runtime.bandwidth import (
    BACKLOG_BYTES,
    BEGINNING_S,
    SAMPLE_S,
    SAMPLES_S,
    TICK_S,
    TRY,
    USED_UP,
    FlowState,
    HostRates,
)

FAST, SLOW = 25e6, 6.25e6


@dataclass
class Host:
    """Seven flows whose bytes a test moves by hand."""

    now: float = 0.0
    flows: list[FlowState] = field(default_factory=lambda: [FlowState(0, 0, 0, 0) for _ in range(7)])
    rates: HostRates[int] = field(default_factory=HostRates)
    pressed: set[int] = field(default_factory=set)
    held_back: bool = False

    def look(self) -> None:
        flows = {index: replace(flow) for index, flow in enumerate(self.flows)}
        self.pressed = self.rates.look(self.now, flows, self.held_back)

    def use(self, *indices: int) -> None:
        """Operations are among us and these peers from now on."""
        for index, flow in enumerate(self.flows):
            flow.used = index in indices

    def send(self, seconds: float, rate: float, backlogged: int, jitter: bool = False) -> float:
        """Send at a rate with so many flows held back; when the scheduler would have been told."""
        told = float("nan")
        began = self.now
        for tick in range(round(seconds / TICK_S)):
            self.now += TICK_S
            factor = (0.6, 1.0, 1.0, 1.0)[tick % 4] if jitter else 1.0
            for index, flow in enumerate(self.flows):
                waits = index < backlogged
                flow.busy_us += round(TICK_S * 1e6) if waits else 0
                flow.waiting_bytes = 2 * BACKLOG_BYTES if waits else 0
                if waits:
                    flow.acked_bytes += int(rate * factor * TICK_S / backlogged)
            self.look()
            if self.rates.news(self.now) is not None and math.isnan(told):
                told = self.now - began
        return told

    def carry(self, looks: int, rate: float, flows: int, past_s: float = TICK_S, busy: float = 1.0) -> None:
        """Have so many flows carry a rate together, with as much waiting to be sent as before."""
        for _ in range(looks):
            self.now += past_s
            for flow in self.flows[:flows]:
                flow.busy_us += round(busy * past_s * 1e6)
                flow.acked_bytes += int(rate * past_s / flows)
            self.look()

    def receive(self, seconds: float, rate: float, pressing: int) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for index, flow in enumerate(self.flows):
                flow.received_bytes += int(rate * TICK_S / 7)
                flow.pressed_by_peer = index < pressing
                flow.waiting_bytes = 0
            self.look()


def test_a_full_uplink_is_learned() -> None:
    host = Host()
    host.send(0.5, FAST, backlogged=7)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    assert host.rates.down.rate is None


def test_what_we_hold_back_ourselves_says_nothing_about_links() -> None:
    host = Host(held_back=True)
    host.send(1.0, SLOW, backlogged=7)
    assert host.rates.up.rate is None
    host.held_back = False
    host.send(0.5, FAST, backlogged=7)
    host.held_back = True
    host.send(5.0, SLOW, backlogged=7)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    host.send(1.0, SLOW, backlogged=2)
    assert not host.pressed


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_change_by_four_is_noticed_within_a_fifth_of_a_second(factor: float) -> None:
    host = Host()
    host.send(1.0, FAST, backlogged=7)
    assert host.send(0.5, factor * FAST, backlogged=7) <= 0.2 + TICK_S
    assert host.rates.up.rate == pytest.approx(factor * FAST, rel=0.05)


def test_hiccups_do_not_make_a_link_slow() -> None:
    host = Host()
    host.send(3.0, FAST, backlogged=7, jitter=True)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.12)


def test_one_slow_receiver_is_not_our_uplinks_fault() -> None:
    host = Host()
    host.send(0.5, FAST, backlogged=7)
    host.send(1.0, SLOW, backlogged=1)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    assert host.pressed == {0}, "it is told, and nobody else"


def test_a_receiver_most_are_pressed_by_knows_its_downlink() -> None:
    host = Host()
    host.receive(1.0, SLOW, pressing=6)
    assert host.rates.down.rate == pytest.approx(SLOW, rel=0.01)


def test_a_receiver_few_are_pressed_by_learns_nothing() -> None:
    host = Host()
    host.receive(1.0, SLOW, pressing=2)
    assert host.rates.down.rate is None


def test_a_first_rate_takes_more_than_a_moment() -> None:
    host = Host()
    host.receive(0.1, 1000.0, pressing=7)
    assert host.rates.down.rate is None
    host.send(0.1, 1000.0, backlogged=7)
    assert host.rates.up.rate is None


def test_flows_held_back_by_a_racks_uplink_say_nothing_of_the_host() -> None:
    host = Host()
    for flow in host.flows[:4]:
        flow.far = True
    host.send(1.0, SLOW, backlogged=4)
    assert host.rates.up.rate is None
    host.receive(1.0, SLOW, pressing=4)
    assert host.rates.down.rate is None
    host.send(1.0, FAST, backlogged=7)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


def test_small_differences_are_not_told() -> None:
    host = Host()
    host.send(1.0, FAST, backlogged=7)
    assert math.isnan(host.send(1.0, 1.03 * FAST, backlogged=7)), "it was told"


def test_a_direction_that_was_not_seen_of_late_is_not_told_again() -> None:
    host = Host()
    host.receive(1.0, SLOW, pressing=6)
    news = host.rates.news(host.now)
    assert news is not None
    assert news[0] is None
    assert news[1] == pytest.approx(SLOW, rel=0.01)
    host.receive(0.1, SLOW, pressing=0)
    host.rates.news(host.now)
    host.send(0.4, FAST, backlogged=7)
    assert host.rates.news(host.now) is None, "it was told on the way"
    host.rates.up.rate = 2 * FAST
    assert host.rates.news(host.now) == (2 * FAST, None)


def test_what_a_link_carries_it_can_carry() -> None:
    host = Host()
    host.send(1.0, SLOW, backlogged=7)
    host.send(0.3, FAST, backlogged=1)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


def test_a_starved_process_blames_no_link() -> None:
    """Bytes wait at both looks, but in between the kernel had nothing to send."""
    host = Host()
    host.send(1.0, FAST, backlogged=7)
    host.carry(40, SLOW, flows=7, busy=0.5)
    host.carry(40, SLOW, flows=7, past_s=0.1)  # looks come late
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


# --- operations among a few of the hosts ------------------------------------------------------------------


@pytest.mark.parametrize("peers", [2, 3])
def test_a_small_groups_flows_tell_of_the_uplink_though_other_links_are_idle(peers: int) -> None:
    host = Host()
    host.use(*range(peers))
    host.send(1.0, FAST, backlogged=peers)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    assert host.send(0.5, SLOW, backlogged=peers) <= 0.2 + TICK_S
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.05)


@pytest.mark.parametrize("peers", [2, 3])
def test_a_small_groups_peers_tell_of_the_downlink_if_all_are_pressed(peers: int) -> None:
    host = Host()
    host.use(*range(peers))
    host.receive(1.0, SLOW, pressing=peers - 1)
    assert host.rates.down.rate is None
    host.receive(1.0, SLOW, pressing=peers)
    assert host.rates.down.rate == pytest.approx(SLOW, rel=0.01)


def test_one_slow_peer_of_two_is_told_and_our_uplink_not_blamed() -> None:
    host = Host()
    host.use(0, 1)
    host.send(1.0, FAST, backlogged=2)
    host.send(1.0, SLOW, backlogged=1)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    assert host.pressed == {0}


def test_between_two_hosts_nobody_is_blamed() -> None:
    host = Host()
    host.send(1.0, FAST, backlogged=7)
    host.use(0)
    host.send(1.0, SLOW, backlogged=1)
    host.receive(1.0, SLOW, pressing=1)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    assert host.rates.down.rate is None


def test_between_two_hosts_what_a_link_carries_it_can_carry() -> None:
    host = Host()
    host.send(1.0, SLOW, backlogged=7)
    host.use(0)
    host.send(0.3, FAST, backlogged=1)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


def test_flows_no_operation_uses_do_not_count() -> None:
    """Messages wait for three peers, operations for none."""
    host = Host()
    host.use(3, 4, 5, 6)
    host.send(1.0, SLOW, backlogged=3)
    assert host.rates.up.rate is None


def test_another_groups_flows_begin_a_sample_of_their_own() -> None:
    host = Host()
    host.send(1.0, FAST, backlogged=7)
    for turn in range(40):  # groups follow each other faster than a sample takes
        host.use(*((0, 1) if turn % 2 else (0, 1, 2)))
        host.send(2 * TICK_S, SLOW, backlogged=2)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    host.use(0, 1)
    host.send(0.5, SLOW, backlogged=2)
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.05)


def test_a_link_that_comes_or_goes_is_no_jump_of_the_rate() -> None:
    host = Host()
    host.send(1.0, FAST, backlogged=7)
    host.flows[6] = FlowState(10**10, 10**10, 0, 0)  # a new one in its place has carried much before
    lost = host.flows.pop()
    host.send(1.0, FAST, backlogged=6)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)
    host.flows.append(lost)
    host.send(1.0, FAST, backlogged=7)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


# --- probes -----------------------------------------------------------------------------------------------


def probe(rates: HostRates[int], now: float, *seen: float) -> float:
    for rate in seen:
        now += 0.25
        rates.probed(now, rate, None)
    return now


def test_probes_of_busy_peers_read_low_so_the_best_of_three_counts() -> None:
    rates: HostRates[int] = HostRates()
    now = probe(rates, 0.0, FAST / 3, FAST)
    assert rates.news(now) is None, "two are not enough to begin with"
    now = probe(rates, now, FAST / 2)
    assert rates.news(now) == (FAST, None)
    probe(rates, now, FAST / 3, FAST / 2, FAST, FAST / 3, FAST / 3, FAST)
    assert rates.up.rate == FAST
    assert rates.down.rate is None


def test_a_probe_that_comes_through_faster_is_believed_at_once_and_told() -> None:
    rates: HostRates[int] = HostRates()
    now = probe(rates, 0.0, SLOW, SLOW, SLOW)
    assert rates.news(now) == (SLOW, None)
    now = probe(rates, now, FAST)
    assert rates.news(now) == (FAST, None)


def test_a_fall_takes_three_probes_in_a_row() -> None:
    rates: HostRates[int] = HostRates()
    now = probe(rates, 0.0, FAST, FAST, FAST, SLOW, SLOW)
    assert rates.up.rate == FAST
    now = probe(rates, now, SLOW)
    assert rates.up.rate == SLOW
    assert rates.news(now) == (SLOW, None)


def test_probes_from_before_a_pause_do_not_count() -> None:
    rates: HostRates[int] = HostRates()
    now = probe(rates, 0.0, FAST, FAST, FAST, SLOW, SLOW)
    probe(rates, now + 3, SLOW)
    assert rates.up.rate == FAST


def test_small_differences_of_probes_are_noise() -> None:
    rates: HostRates[int] = HostRates()
    probe(rates, 0.0, FAST, FAST, FAST, 1.1 * FAST, 0.9 * FAST, 0.9 * FAST, 0.9 * FAST)
    assert rates.up.rate == FAST


def known_as_fast(queued_us: Sequence[int]) -> Host:
    """A host whose uplink was learned, and whose packets wait as long as said from now on."""
    host = Host()
    host.send(0.5, FAST, backlogged=7)
    for flow, waits_us in zip(host.flows, queued_us, strict=True):
        flow.queued_us = waits_us
    return host


def test_a_sender_most_of_whose_receivers_are_slow_is_not_taken_for_slow() -> None:
    host = known_as_fast([30_000] * 5 + [200] * 2)
    for _ in range(20):  # the bytes of five wait on their way, those of two get through at once
        for flow in host.flows[5:]:
            flow.acked_bytes += 20_000
        host.send(TICK_S, SLOW, backlogged=5)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


def test_an_uplink_in_whose_queue_all_wait_is_slow() -> None:
    host = known_as_fast([30_000] * 7)
    host.send(0.5, SLOW, backlogged=5)
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.01)


def small_operations(host: Host, seconds: float) -> None:
    """All flows send at a slow rate, bytes wait for two peers at a time."""
    for tick in range(round(seconds / TICK_S)):
        host.now += TICK_S
        for index, flow in enumerate(host.flows):
            flow.busy_us += round(TICK_S * 1e6)
            flow.waiting_bytes = 2 * BACKLOG_BYTES if (index + tick) % 7 < 2 else 0
            flow.acked_bytes += int(SLOW * TICK_S / 7)
        host.look()


def test_small_operations_tell_of_an_uplink_in_whose_queue_all_wait() -> None:
    host = known_as_fast([30_000, 31_000, 42_000, 28_000, 35_000, 55_000, 30_000])
    small_operations(host, 0.5)
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.01)


def test_packets_that_wait_in_queues_of_their_own_do_not_blame_our_uplink() -> None:
    host = known_as_fast([30_000, 31_000, 42_000, 3_000, 35_000, 55_000, 30_000])
    small_operations(host, 0.5)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


def test_one_high_sample_raises_nothing() -> None:
    host = Host()
    host.send(0.5, SLOW, backlogged=7)
    host.send(0.05, 1.6 * SLOW, backlogged=7)
    host.send(0.5, SLOW, backlogged=7)
    assert host.rates.up.rate is not None
    assert host.rates.up.rate < 1.2 * SLOW


def unhindered(host: Host, seconds: float, rate: float) -> None:
    """Send at a rate that is somebody else's, with nothing waiting here."""
    for _ in range(round(seconds / TICK_S)):
        host.now += TICK_S
        for flow in host.flows:
            flow.busy_us += round(TICK_S * 1e6)
            flow.waiting_bytes = 0
            flow.acked_bytes += int(rate * TICK_S / 7)
        host.look()


def test_an_uplink_that_carries_what_is_believed_of_it_without_a_queue_is_believed_more_of() -> None:
    host = Host()
    host.send(1.0, SLOW, backlogged=7)
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.02)
    unhindered(host, 0.9, SLOW)
    assert host.rates.up.rate == pytest.approx(SLOW * TRY**2, rel=0.05)


def test_no_more_is_believed_of_an_uplink_than_a_little_beyond_what_it_carries() -> None:
    host = Host()
    host.send(1.0, SLOW, backlogged=7)
    unhindered(host, 10.0, SLOW)
    assert host.rates.up.rate is not None
    assert host.rates.up.rate <= SLOW * TRY / USED_UP
    host.send(1.0, SLOW, backlogged=7)  # it was full after all
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.02)


def test_nothing_is_tried_while_bytes_wait_or_links_are_hardly_used() -> None:
    full, idle = Host(), Host()
    full.send(5.0, SLOW, backlogged=7)
    assert full.rates.up.rate == pytest.approx(SLOW, rel=0.02)
    idle.send(1.0, FAST, backlogged=7)
    unhindered(idle, 5.0, USED_UP * FAST / 2)
    assert idle.rates.up.rate == pytest.approx(FAST, rel=0.02)


def test_a_full_uplink_is_seen_by_its_queue_though_nothing_waits_to_be_sent() -> None:
    host = Host()
    for flow in host.flows[:4]:
        flow.queued_us = 20_000
    host.carry(20, SLOW, flows=4)
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.01)


def in_bursts(host: Host, looks: int, all_along: Sequence[int], rate: float) -> None:
    """All flows send at a rate together, those that are named all along, the others for half of the time."""
    for _ in range(looks):
        host.now += TICK_S
        for index, flow in enumerate(host.flows):
            flow.busy_us += round((1.0 if index in all_along else 0.5) * TICK_S * 1e6)
            flow.acked_bytes += int(rate * TICK_S / 7)
        host.look()


@pytest.mark.parametrize("all_along", [(2,), (3,), (2, 3)])
def test_an_uplink_is_not_slow_where_only_few_flows_have_bytes_to_send_all_along(
    all_along: tuple[int, ...],
) -> None:
    host = known_as_fast([12_000] * 3 + [45_000] + [12_000] * 3)  # that one waits at a slow receiver, too
    in_bursts(host, 40, all_along, 0.4 * FAST)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.01)


def test_an_uplink_is_slow_where_enough_flows_have_bytes_to_send_all_along() -> None:
    host = known_as_fast([12_000] * 7)
    in_bursts(host, 40, (0, 2, 5), 0.6 * FAST)
    assert host.rates.up.rate == pytest.approx(0.6 * FAST, rel=0.01)


@pytest.mark.parametrize(("waits_us", "more"), [(35_000, False), (200, True)])
def test_no_more_is_believed_of_an_uplink_where_the_last_bytes_of_an_operation_wait(
    waits_us: int, more: bool
) -> None:
    host = Host()
    host.send(1.0, SLOW, backlogged=7)
    for flow in host.flows[:2]:
        flow.queued_us = waits_us
    host.carry(40, SLOW, flows=2)
    assert host.rates.up.rate is not None
    assert (host.rates.up.rate > 1.1 * SLOW) is more


def test_samples_from_before_a_pause_do_not_count() -> None:
    host = Host()
    host.send(2.5 * SAMPLE_S + BEGINNING_S, FAST, backlogged=7)
    assert host.rates.up.rate is None, "two samples are too few"
    host.send(2 * SAMPLES_S, 0.0, backlogged=0)
    host.send(0.5, SLOW, backlogged=7)
    assert host.rates.up.rate == pytest.approx(SLOW, rel=0.05)


def test_what_has_just_begun_to_be_sent_is_no_slow_link() -> None:
    host = Host()
    host.send(1.0, FAST, backlogged=7)
    for _ in range(20):
        host.send(2 * TICK_S, 0.0, backlogged=7)  # on its way, and not acknowledged yet
        host.send(2 * TICK_S, FAST, backlogged=7)
    assert host.rates.up.rate == pytest.approx(FAST, rel=0.05)
