"""Senders tell how fast their flows go; the right link is believed to be slow, and nobody else."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mlfabric.roles.blame import DECIDE_S, LinkBeliefs

FAST, SLOW = 25e6, 6e6
REPORT_S = 0.05


@dataclass
class Cluster:
    """Links with true rates, and flows that share them max-min fairly; every sender reports what it sees."""

    up: dict[str, float]
    down: dict[str, float]
    beliefs: LinkBeliefs = field(default_factory=LinkBeliefs)
    now: float = 100.0
    before: set[tuple[str, str]] = field(default_factory=set)

    def run(self, seconds: float, *flows: tuple[str, str], pace: float = float("inf")) -> None:
        for ended in self.before - set(flows):
            self.beliefs.flow_seen(*ended, 0.0, False, self.now)
        self.before = set(flows)
        rates = self.share(flows, pace)
        for _ in range(round(seconds / REPORT_S)):
            self.now += REPORT_S
            for flow, rate in rates.items():
                self.beliefs.flow_seen(*flow, rate, rate < pace, self.now)

    def share(self, flows: tuple[tuple[str, str], ...], pace: float) -> dict[tuple[str, str], float]:
        left = {("up", h): r for h, r in self.up.items()} | {("down", h): r for h, r in self.down.items()}
        open_ = {flow: (("up", flow[0]), ("down", flow[1])) for flow in flows}
        rates: dict[tuple[str, str], float] = {}
        while open_:
            fair = {
                link: left[link] / sum(link in links for links in open_.values())
                for links in open_.values()
                for link in links
            }
            tightest = min(fair, key=lambda link: fair[link])
            for flow in [flow for flow, links in open_.items() if tightest in links]:
                rates[flow] = min(fair[tightest], pace)
                for link in open_.pop(flow):
                    left[link] -= rates[flow]
        return rates

    def believed(self, host: str) -> tuple[float | None, float | None]:
        return self.beliefs.rate(host, "up"), self.beliefs.rate(host, "down")


def equal(hosts: str) -> Cluster:
    return Cluster(dict.fromkeys(hosts, FAST), dict.fromkeys(hosts, FAST))


def settled(hosts: str) -> Cluster:
    """All links seen full, one pair after the other."""
    cluster = equal(hosts)
    for source, target in zip(hosts, hosts[1:] + hosts[0], strict=True):
        cluster.run(0.6, (source, target))
    assert all(cluster.believed(host) == (FAST, FAST) for host in hosts)
    return cluster


def test_a_lone_flow_tells_of_both_ends() -> None:
    cluster = equal("sw")
    cluster.run(0.6, ("w", "s"))
    assert cluster.believed("w") == (FAST, None)
    assert cluster.believed("s") == (None, FAST)


def test_flows_that_share_a_downlink_tell_of_that_downlink_only() -> None:
    cluster = equal("sabcd")
    cluster.run(0.6, *((worker, "s") for worker in "abcd"))
    assert cluster.believed("s")[1] == pytest.approx(FAST)
    assert all(cluster.believed(worker) == (None, None) for worker in "abcd")


def test_flows_that_share_an_uplink_tell_of_that_uplink_only() -> None:
    cluster = equal("sabcd")
    cluster.run(0.6, *(("s", worker) for worker in "abcd"))
    assert cluster.believed("s")[0] == pytest.approx(FAST)
    assert all(cluster.believed(worker) == (None, None) for worker in "abcd")


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_link_that_got_slow_is_blamed_within_half_a_second(way: str) -> None:
    cluster = settled("sabc")
    if way == "up":
        cluster.up["a"] = SLOW
        cluster.run(0.7, ("b", "s"))
        cluster.run(0.5, ("a", "s"))
        assert cluster.believed("a")[0] == SLOW
        assert cluster.believed("s") == (FAST, FAST)
    else:
        cluster.down["s"] = SLOW
        cluster.run(0.7, ("a", "b"))
        cluster.run(0.5, ("a", "s"))
        assert cluster.believed("s")[1] == SLOW
        assert cluster.believed("a") == (FAST, FAST)


def test_a_slow_sender_beside_others_is_not_the_servers_fault() -> None:
    cluster = settled("sab")
    cluster.up["a"] = SLOW
    cluster.run(1.0, ("a", "s"), ("b", "s"))
    assert cluster.believed("s")[1] == pytest.approx(FAST)
    assert cluster.believed("a")[0] == pytest.approx(SLOW)
    assert cluster.believed("b")[0] == pytest.approx(FAST)


def test_where_nobody_can_tell_both_are_doubted_and_the_wrong_one_recovers_with_its_next_transfer() -> None:
    cluster = equal("sab")
    cluster.run(0.6, ("a", "s"))  # both links proved themselves at the same time
    cluster.up["a"] = SLOW
    cluster.run(0.5, ("a", "s"))
    assert (cluster.believed("a")[0], cluster.believed("s")[1]) == (SLOW, SLOW)
    cluster.run(2 * REPORT_S, ("b", "s"))
    assert cluster.believed("s")[1] == FAST
    assert cluster.believed("a")[0] == SLOW


def test_a_link_that_got_faster_is_believed_at_once() -> None:
    cluster = settled("sab")
    cluster.up["a"] = cluster.down["s"] = 3 * FAST
    cluster.run(REPORT_S, ("a", "s"))
    assert (cluster.believed("a")[0], cluster.believed("s")[1]) == (3 * FAST, 3 * FAST)


def test_a_paced_flow_blames_nobody() -> None:
    cluster = settled("sab")
    cluster.run(1.0, ("a", "s"), pace=FAST / 5)
    assert cluster.believed("a") == cluster.believed("s") == (FAST, FAST)


def test_a_flow_whose_end_is_heard_late_does_not_make_a_link_seem_fast() -> None:
    cluster = settled("sab")
    cluster.beliefs.flow_seen("a", "s", FAST, True, cluster.now)
    cluster.beliefs.flow_seen("b", "s", FAST, True, cluster.now + 0.05)
    cluster.beliefs.flow_seen("a", "s", 0.0, False, cluster.now + 0.05 + DECIDE_S / 2)
    cluster.beliefs.flow_seen("b", "s", FAST, True, cluster.now + 0.1 + DECIDE_S)
    assert cluster.believed("s")[1] == FAST


def test_the_word_of_a_host_about_itself_counts_until_its_flows_differ() -> None:
    cluster = equal("sw")
    for host in "sw":
        for way in ("up", "down"):
            cluster.beliefs.assume(host, way, 4 * FAST)
    cluster.run(0.1, ("w", "s"))
    assert cluster.believed("w") == (4 * FAST, 4 * FAST)
    cluster.run(0.5, ("w", "s"))
    assert cluster.believed("w") == (FAST, 4 * FAST)
    assert cluster.believed("s") == (4 * FAST, FAST)


def test_a_host_that_left_is_forgotten() -> None:
    cluster = settled("sab")
    cluster.beliefs.forget("a")
    assert cluster.believed("a") == (None, None)


def totals(cluster: Cluster, *flows: tuple[str, str]) -> None:
    """Every host says what it sends and receives altogether."""
    rates = cluster.share(flows, float("inf"))
    for host in cluster.up:
        out = sum(rate for (source, _), rate in rates.items() if source == host)
        into = sum(rate for (_, target), rate in rates.items() if target == host)
        cluster.beliefs.total_seen(host, "up", out, cluster.now, host)
        cluster.beliefs.total_seen(host, "down", into, cluster.now, host)


def test_a_server_that_got_slow_is_found_though_no_flow_lasts() -> None:
    cluster = settled("sabcd")
    cluster.down["s"] = SLOW
    for turn in range(4):
        pair = ("a", "s"), ("bcd"[turn % 3], "s")
        for _ in range(2):
            totals(cluster, *pair)
            cluster.run(2 * REPORT_S, *pair)
    assert cluster.believed("s")[1] == pytest.approx(SLOW, rel=0.05)
    assert [cluster.believed(worker)[0] for worker in "abcd"] == [FAST] * 4


def test_a_sender_whose_part_of_a_downlink_is_far_smaller_than_others_is_held_back_by_itself() -> None:
    cluster = settled("sab")
    cluster.up["a"] = SLOW
    cluster.down["s"] = 0.8 * FAST  # less than believed, too, and not full by that
    cluster.run(0.5, ("a", "s"), ("b", "s"))
    assert cluster.believed("a")[0] == pytest.approx(SLOW)


def test_what_a_host_carries_it_can_carry_whoever_sent_it() -> None:
    cluster = settled("sab")
    cluster.beliefs.total_seen("s", "down", 3 * FAST, cluster.now, "s")
    assert cluster.believed("s")[1] == 3 * FAST


def test_both_directions_are_believed_to_change_together_until_one_shows_otherwise() -> None:
    cluster = settled("sabc")
    cluster.up["a"] = cluster.down["a"] = SLOW
    cluster.run(0.7, ("b", "s"))
    cluster.run(0.5, ("a", "s"))
    assert cluster.believed("a") == (SLOW, SLOW)
    cluster.down["a"] = FAST
    cluster.run(0.2, ("b", "a"))
    assert cluster.believed("a")[1] == FAST


def test_a_host_that_says_it_carries_nothing_is_not_believed_to_have_a_link_without_a_rate() -> None:
    """Its processor may be busy; a rate of zero would never be used again, and nothing is a part of it."""
    cluster = equal("sw")
    for _ in range(round(2 * DECIDE_S / REPORT_S) + 10):
        cluster.beliefs.total_seen("s", "down", 0.0, cluster.now, "s")
        cluster.run(REPORT_S, ("w", "s"))
    assert cluster.believed("s") == (None, None)
    cluster.run(2.0, ("s", "w"))
    assert cluster.believed("s") == (FAST, None)


def test_a_direction_seen_only_in_its_worst_moments_is_not_held_to_them() -> None:
    """A host whose link was slow when its downlink was seen full, and is slow now and then."""
    beliefs = LinkBeliefs()
    beliefs.learn("h", "up", 60.0, 0.0)
    beliefs.learn("h", "down", 60.0, 0.0)
    for number, rate in enumerate((480.0, 60.0, 240.0)):
        beliefs.learn("h", "up", rate, 5.0 * (number + 1))
        assert beliefs.rate("h", "down") == rate
