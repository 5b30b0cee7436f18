"""All-reduce shares against the closed bound and against independent linear programs."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from scipy.optimize import linprog

from mlfabric.plan.allreduce import (
    AllReducePlan,
    HostShare,
    choose_participants,
    link_loads,
    lower_bound,
    plan_all_reduce,
    plan_in_racks,
    rack_time,
    ring_time,
)
from mlfabric.topology import Host, Network, Rack

SIZE = 100_000_000
SHARES = (1.0, 0.5, 0.25, 0.125)


def random_hosts(draw: random.Random, count: int, prefix: str = "h") -> list[Host]:
    def rate() -> float:
        return 1e8 * (draw.choice(SHARES) if draw.random() < 0.5 else draw.uniform(0.1, 1.0))

    return [Host(f"{prefix}{i:02d}", rate(), rate()) for i in range(count)]


def flat_program(workers: list[Host], idle: list[Host]) -> float:
    """min T over shares x, y of workers and z of idle hosts, element flows counted one by one."""
    n, m = len(workers), len(idle)
    size = 2 * n + m + 1
    cost = np.zeros(size)
    cost[-1] = 1
    rows, limits = [], []
    for i, host in enumerate(workers):
        for rate, offset in ((host.down_bytes_per_s, 0), (host.up_bytes_per_s, n)):
            row = np.zeros(size)
            # In: N-1 pushes per share summed, and every result not summed here. Out: the mirror image.
            row[offset + i] = (n - 1) - 1
            row[-1] = -rate / SIZE
            rows.append(row)
            limits.append(-1.0)
    for j, host in enumerate(idle):
        for rate in (host.down_bytes_per_s, host.up_bytes_per_s):
            row = np.zeros(size)
            row[2 * n + j] = n
            row[-1] = -rate / SIZE
            rows.append(row)
            limits.append(0.0)
    sums = np.zeros((2, size))
    sums[0, :n] = sums[1, n : 2 * n] = 1
    sums[:, 2 * n : 2 * n + m] = 1
    solved = linprog(cost, np.array(rows), np.array(limits), sums, [1.0, 1.0], method="highs")
    assert solved.success
    return float(solved.fun)


def rack_program(members: list[list[float]], uplinks: list[float]) -> float:
    """min T over sub-root shares z and root shares x of every host."""
    racks = len(members)
    hosts = [(q, rate) for q, inside in enumerate(members) for rate in inside]
    size = 2 * len(hosts) + 1
    cost = np.zeros(size)
    cost[-1] = 1
    rows, limits = [], []
    for j, (q, rate) in enumerate(hosts):
        row = np.zeros(size)
        row[j] = len(members[q]) - 1
        row[len(hosts) + j] = racks - 2
        row[-1] = -rate / SIZE
        rows.append(row)
        limits.append(-1.0)
        within = np.zeros(size)  # a root is its element's sub-root
        within[len(hosts) + j], within[j] = 1, -1
        rows.append(within)
        limits.append(0.0)
    for q, uplink in enumerate(uplinks):
        row = np.zeros(size)
        for j, (rack, _) in enumerate(hosts):
            if rack == q:
                row[len(hosts) + j] = racks - 2
        row[-1] = -uplink / SIZE
        rows.append(row)
        limits.append(-1.0)
    sums = np.zeros((racks + 1, size))
    for j, (q, _) in enumerate(hosts):
        sums[q, j] = 1
        sums[racks, len(hosts) + j] = 1
    solved = linprog(cost, np.array(rows), np.array(limits), sums, np.ones(racks + 1), method="highs")
    assert solved.success
    return float(solved.fun)


def check(plan: AllReducePlan, network: Network) -> None:
    """Shares sum to one, none is negative, and the fullest link takes exactly the predicted time."""
    assert sum(share.reduces for share in plan.shares) == pytest.approx(1, abs=1e-9)
    assert sum(share.broadcasts for share in plan.shares) == pytest.approx(1, abs=1e-9)
    assert min(min(share.reduces, share.broadcasts) for share in plan.shares) >= 0
    busiest = max(
        load * SIZE / network.capacity(link)
        for link, load in link_loads(network, plan.form, plan.shares).items()
    )
    assert busiest == pytest.approx(plan.predicted_s, rel=1e-12)


def test_shares_reach_the_bound_on_unequal_up_and_down_links() -> None:
    for seed in range(1500):
        draw = random.Random(seed)
        hosts = random_hosts(draw, draw.randint(2, 12))
        network = Network.of(hosts)
        plan = plan_all_reduce(network, list(network.hosts), SIZE)
        bound = lower_bound([h.up_bytes_per_s for h in hosts], [h.down_bytes_per_s for h in hosts], SIZE)
        assert plan.predicted_s == pytest.approx(bound, rel=1e-9), seed
        assert plan.bound_s == pytest.approx(bound, rel=1e-12), seed
        check(plan, network)


def test_shares_are_alike_where_links_have_room_to_spare_whatever_is_believed_of_them() -> None:
    believed = [0.7, 1.2, 1.0, 0.8, 1.1, 0.9, 1.0]
    hosts = [Host(f"h{i}", 1e8 * share, 1e8 * share) for i, share in enumerate(believed)]
    network = Network.of([*hosts, Host("slow", 2.5e7, 2.5e7)])
    plan = plan_all_reduce(network, list(network.hosts), SIZE)
    assert plan.form == "shares"
    assert plan.predicted_s == pytest.approx(SIZE / 2.5e7)
    for host in hosts:
        share = plan.share(host.name)
        assert (share.reduces, share.broadcasts) == pytest.approx((1 / 7, 1 / 7))
    assert plan.share("slow").reduces == plan.share("slow").broadcasts == 0


def test_of_room_to_spare_each_share_leaves_half() -> None:
    """The four hosts of middling links sum less than the three of fast ones, and the slow one nothing."""
    hosts = [Host(f"h{i}", rate, rate) for i, rate in enumerate([1e8] * 3 + [4e7] * 4 + [2e7])]
    network = Network.of(hosts)
    plan = plan_all_reduce(network, list(network.hosts), SIZE)
    room = [(host.up_bytes_per_s / 2e7 - 1) / 6 for host in hosts]
    most = [each * (1 + 1 / sum(room)) / 2 for each in room]
    shares = [plan.share(host.name).broadcasts for host in hosts]
    assert sum(shares) == pytest.approx(1)
    level = max(shares)
    assert shares == pytest.approx([min(level, each) for each in most])
    assert level > most[4] > 0


def test_idle_hosts_bring_the_time_to_the_bound() -> None:
    for seed in range(1500):
        draw = random.Random(seed)
        workers = random_hosts(draw, draw.randint(2, 8))
        idle = [Host(h.name, h.up_bytes_per_s, h.up_bytes_per_s) for h in random_hosts(draw, 3, "idle")]
        network = Network.of([*workers, *idle])
        plan = plan_all_reduce(network, [h.name for h in workers], SIZE, idle=[h.name for h in idle])
        bound = lower_bound(
            [h.up_bytes_per_s for h in workers],
            [h.down_bytes_per_s for h in workers],
            SIZE,
            [(h.up_bytes_per_s, h.down_bytes_per_s) for h in idle],
        )
        assert plan.predicted_s == pytest.approx(bound, rel=1e-9), seed
        check(plan, network)


@pytest.mark.parametrize("idle_count", [0, 2])
def test_bound_equals_a_linear_program(idle_count: int) -> None:
    for seed in range(120):
        draw = random.Random(seed)
        workers = random_hosts(draw, draw.randint(2, 8))
        idle = [Host(h.name, h.up_bytes_per_s, h.up_bytes_per_s) for h in random_hosts(draw, idle_count, "i")]
        network = Network.of([*workers, *idle])
        plan = plan_all_reduce(network, [h.name for h in workers], SIZE, idle=[h.name for h in idle])
        assert plan.predicted_s == pytest.approx(flat_program(workers, idle), rel=1e-9), seed


def test_rack_form_equals_a_linear_program() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        members = [
            [1e8 * draw.choice(SHARES) for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(2, 5))
        ]
        uplinks = [sum(inside) / draw.choice((1, 2, 4, 8)) for inside in members]
        found = rack_time(members, uplinks, SIZE)
        assert found == pytest.approx(rack_program(members, uplinks), rel=1e-9), seed
        hosts = [
            Host(f"h{q}-{j}", rate, rate, f"r{q}")
            for q, inside in enumerate(members)
            for j, rate in enumerate(inside)
        ]
        network = Network.of(hosts, [Rack(f"r{q}", rate, rate) for q, rate in enumerate(uplinks)])
        plan = plan_in_racks(network, list(network.hosts), SIZE)
        assert plan is not None
        assert plan.predicted_s == pytest.approx(found, rel=1e-9), seed
        check(plan, network)


def test_two_equal_racks_have_a_closed_form() -> None:
    for inside, uplink in itertools.product((2, 4, 8), (0.5e8, 1e8, 4e8)):
        found = rack_time([[1e8] * inside] * 2, [uplink] * 2, SIZE)
        count = 2 * inside
        assert found == pytest.approx(max(2 * (count - 1) * SIZE / (count * 1e8), SIZE / uplink), rel=1e-12)


def test_rack_blind_shares_cost_several_times_as_much() -> None:
    hosts = [Host(f"h{i}", 1e8, 1e8, f"r{i % 2}") for i in range(16)]
    racks = [Rack(f"r{k}", 1e8, 1e8) for k in range(2)]
    network = Network.of(hosts, racks)
    plan = plan_all_reduce(network, list(network.hosts), SIZE)
    blind = link_loads(network, "plain", [HostShare(h.name, 1 / 16, 1 / 16) for h in hosts])
    blind_s = max(load * SIZE / network.capacity(link) for link, load in blind.items())
    assert plan.form == "racks"
    assert blind_s / plan.predicted_s > 2.5


def test_uniform_network_keeps_the_plain_form() -> None:
    for count in (1, 2, 3, 8, 64):
        network = Network.of([Host(f"h{i}", 1e8, 1e8) for i in range(count)])
        plan = plan_all_reduce(network, list(network.hosts), SIZE)
        assert plan.form == "plain"
        assert plan.predicted_s == pytest.approx(ring_time(network, list(network.hosts), SIZE))


def test_plan_is_never_slower_than_the_plain_form_or_a_ring() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        hosts = [
            Host(h.name, h.up_bytes_per_s, h.down_bytes_per_s, draw.choice(("a", "b", "c")))
            for h in random_hosts(draw, draw.randint(2, 9))
        ]
        network = Network.of(hosts, [Rack(name, 1e8 * draw.choice(SHARES), 1e8) for name in "abc"])
        names = list(network.hosts)
        plan = plan_all_reduce(network, names, SIZE)
        even = link_loads(network, "plain", [HostShare(n, 1 / len(names), 1 / len(names)) for n in names])
        plain_s = max(load * SIZE / network.capacity(link) for link, load in even.items() if load > 0)
        assert plan.predicted_s <= plain_s * (1 + 1e-9), seed
        assert plan.reason


def test_one_slow_host_costs_a_ring_far_more() -> None:
    hosts = [Host("slow", 0.25e8, 0.25e8), *(Host(f"h{i}", 1e8, 1e8) for i in range(7))]
    network = Network.of(hosts)
    plan = plan_all_reduce(network, list(network.hosts), SIZE)
    assert plan.predicted_s == pytest.approx(4.0)
    assert ring_time(network, list(network.hosts), SIZE) == pytest.approx(7.0)
    assert "instead of" in plan.reason


def test_slow_host_is_left_out_of_a_step_within_the_bound() -> None:
    hosts = [Host("slow", 0.125e8, 0.125e8), *(Host(f"h{i}", 1e8, 1e8) for i in range(7))]
    network = Network.of(hosts)
    names = list(network.hosts)
    chosen = choose_participants(network, names, SIZE)
    assert "slow" not in chosen.participants
    assert chosen.left_out[0][0] == "slow"
    assert "alone it takes 8 s" in chosen.left_out[0][1]
    forced = choose_participants(network, names, SIZE, steps_left_out={"slow": 1})
    assert "slow" in forced.participants


def test_straggler_is_not_waited_for() -> None:
    network = Network.of([Host(f"h{i}", 1e8, 1e8) for i in range(8)])
    chosen = choose_participants(network, list(network.hosts), SIZE, ready_s={"h3": 30.0})
    assert [name for name, _ in chosen.left_out] == ["h3"]
    even = choose_participants(network, list(network.hosts), SIZE)
    assert len(even.participants) == 8
    assert "gains nothing" in even.reason


def test_participants_are_near_the_best_subset() -> None:
    ratios = []
    for seed in range(150):
        draw = random.Random(seed)
        hosts = random_hosts(draw, draw.randint(2, 8))
        network = Network.of(hosts)
        ready = {h.name: draw.choice((0.0, 0.0, 2.0, 5.0)) for h in hosts}
        chosen = choose_participants(network, list(network.hosts), SIZE, ready, least=2)
        best = 0.0
        for count in range(2, len(hosts) + 1):
            for subset in itertools.combinations(hosts, count):
                bound = lower_bound(
                    [h.up_bytes_per_s for h in subset], [h.down_bytes_per_s for h in subset], SIZE
                )
                step_s = max(ready[h.name] for h in subset) + bound
                best = max(best, count / step_s)
        ratios.append(len(chosen.participants) / chosen.step_s / best)
    assert np.median(ratios) >= 0.99
    assert min(ratios) >= 0.6


def test_thousand_hosts_are_planned_in_milliseconds() -> None:
    hosts = [Host(f"h{i}", 1e8 * SHARES[i % 4], 1e8 * SHARES[i % 3], f"r{i % 32}") for i in range(1024)]
    network = Network.of(hosts, [Rack(f"r{k}", 4e8, 4e8) for k in range(32)])
    began = time.perf_counter()
    plan_all_reduce(network, list(network.hosts), SIZE)
    assert time.perf_counter() - began < 0.5
