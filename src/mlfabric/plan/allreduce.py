"""Who sums and who distributes which share of a synchronous all-reduce, on unequal links.

Every worker i sums a share x_i of the elements and distributes a share y_i of the results. Where the two
differ for an element the summing host hands the result over once, which saves the distributor one copy. With
push and broadcast overlapped by chunks, host i sends S(1 + (N-2) y_i) and receives S(1 + (N-2) x_i), so no
schedule of this form beats

    T* = max(S / min u, S / min d, 2(N-1)S / sum u, 2(N-1)S / sum d)

and any shares within (T* u_i / S - 1)/(N - 2), and the same with d, reach it. An idle host may take a share
as well; it gets N copies in and sends N out for it. With racks the sum is formed inside each rack first
(`plan_in_racks`). Where none of this is predicted to gain, the plan is the plain sharded form: 1/N each.

`choose_participants` decides whom a step leaves out, so that one slow host doesn't bind all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlfabric.plan.staircase import INF
from mlfabric.topology import Link, Network
from mlfabric.units import format_time

# A form is preferred to a simpler one only if its predicted time is less by more than this.
GAIN_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class HostShare:
    """One host's part in an all-reduce."""

    host: str
    reduces: float  # share of the elements it sums for all
    broadcasts: float  # share of the results it distributes to all
    gathers: float = 0.0  # share it sums and distributes inside its rack, in the form with racks
    idle: bool = False  # has no gradient of its own


@dataclass(frozen=True, slots=True)
class AllReducePlan:
    """The shares of all hosts from one sequence number on, with the predicted time and why this form."""

    form: str  # "plain", "shares" or "racks"
    shares: tuple[HostShare, ...]  # by host name
    predicted_s: float
    bound_s: float  # no all-reduce of all these updates over these links takes less in this form
    chunk_bytes: int  # of the pipeline that overlaps push and broadcast
    reason: str
    first_sequence: int = 0  # the operation it holds from, once all have confirmed it

    def share(self, host: str) -> HostShare:
        return next(share for share in self.shares if share.host == host)


def lower_bound(
    up: Sequence[float],
    down: Sequence[float],
    size_bytes: float,
    idle: Sequence[tuple[float, float]] = (),
) -> float:
    """T* of workers with these rates; `idle` are the (up, down) rates of hosts that lend a hand."""
    if len(up) < 2:
        return 0.0
    return _least_time(len(up), min(*up, *down), sum(up), sum(down), size_bytes, sum(map(min, idle)))


def _least_time(
    count: int, slowest: float, up: float, down: float, size_bytes: float, idle: float = 0.0
) -> float:
    """The same from sums: `slowest` single link, all uplinks, all downlinks, all idle hosts."""
    if count < 2:
        return 0.0
    if slowest <= 0:
        return INF
    if count == 2:
        return size_bytes / slowest
    lent = (1 - 2 / count) * idle
    around = 2 * (count - 1) * size_bytes
    return max(size_bytes / slowest, around / (up + lent), around / (down + lent))


def plan_all_reduce(
    network: Network,
    workers: Sequence[str],
    size_bytes: int,
    idle: Sequence[str] = (),
    chunk_bytes: int = 256 * 1024,
    first_sequence: int = 0,
) -> AllReducePlan:
    """The fastest form for these workers: plain, unequal shares with idle hosts, or racks first."""
    names = sorted(set(workers))
    spare = sorted(set(idle).difference(names))
    plans = [plan_plain(network, names, size_bytes), _plan_shares(network, names, spare, size_bytes)]
    in_racks = plan_in_racks(network, names, size_bytes)
    if in_racks is not None:
        plans.append(in_racks)
    best = plans[0]
    for plan in plans[1:]:
        if plan.predicted_s < best.predicted_s * (1 - GAIN_TOLERANCE):
            best = plan
    plain_s = plans[0].predicted_s
    if best is plans[0]:
        reason = f"plain shards: no other shares are predicted to beat {format_time(plain_s)}"
    else:
        reason = (
            f"{best.reason}: {format_time(best.predicted_s)} instead of "
            f"{format_time(plain_s)} by plain shards"
        )
    return AllReducePlan(
        best.form, best.shares, best.predicted_s, best.bound_s, chunk_bytes, reason, first_sequence
    )


# -- one level


def plan_plain(network: Network, workers: Sequence[str], size_bytes: int) -> AllReducePlan:
    """Every worker sums and distributes the same share."""
    even = 1 / len(workers) if workers else 0.0
    shares = tuple(HostShare(name, even, even) for name in workers)
    return _with_prediction(network, "plain", shares, size_bytes, "plain shards")


def _plan_shares(
    network: Network, workers: Sequence[str], idle: Sequence[str], size_bytes: int
) -> AllReducePlan:
    """Shares by what each host's links leave once its own update is out and the result is in."""
    hosts = network.hosts
    up = [hosts[name].up_bytes_per_s for name in workers]
    down = [hosts[name].down_bytes_per_s for name in workers]
    helpers = [
        (name, min(hosts[name].up_bytes_per_s, hosts[name].down_bytes_per_s))
        for name in idle
        if min(hosts[name].up_bytes_per_s, hosts[name].down_bytes_per_s) > 0
    ]
    count = len(workers)
    if count < 3:
        return plan_plain(network, workers, size_bytes)
    time_s = lower_bound(up, down, size_bytes, [(rate, rate) for _, rate in helpers])
    if time_s == INF:
        return plan_plain(network, workers, size_bytes)
    lent = [time_s * rate / (count * size_bytes) for _, rate in helpers]
    room_up = [max(0.0, time_s * rate / size_bytes - 1) / (count - 2) for rate in up]
    room_down = [max(0.0, time_s * rate / size_bytes - 1) / (count - 2) for rate in down]
    # Workers first: an idle host moves N copies for a share, a worker N - 2.
    from_idle = max(0.0, 1 - sum(room_up), 1 - sum(room_down))
    lend = min(1.0, from_idle / sum(lent)) if sum(lent) > 0 else 0.0
    z = [share * lend for share in lent]
    y, x = _even(room_up, 1 - sum(z)), _even(room_down, 1 - sum(z))
    shares = [HostShare(name, x[i], y[i]) for i, name in enumerate(workers)]
    shares += [
        HostShare(name, share, share, idle=True)
        for (name, _), share in zip(helpers, z, strict=True)
        if share > 0
    ]
    helped = sum(1 for share in shares if share.idle)
    reason = "shares by bandwidth" + (f" with {helped} idle hosts" if helped else "")
    ordered = tuple(sorted(shares, key=lambda share: share.host))
    return _with_prediction(network, "shares", ordered, size_bytes, reason)


def _even(room: Sequence[float], total: float) -> list[float]:
    """Shares that sum to `total`, as like each other as the room allows: a slow host passes its bytes on
    soonest if all others take as much of them, and what is believed of links is never quite right. Of room to
    spare each share leaves half, for the same reason. Too small a room by rounding is stretched."""
    whole = math.fsum(room)
    if whole <= 0:
        return [total / len(room)] * len(room)
    needed = total / whole  # of each room, if all are used alike
    most = [r * max(needed, (1 + needed) / 2) for r in room]
    level, left = max(most), total
    for taken, share in enumerate(sorted(most)):
        even = left / (len(most) - taken)
        if share >= even:
            level = even
            break
        left -= share
    return [min(share, level) for share in most]


# -- racks


def plan_in_racks(network: Network, workers: Sequence[str], size_bytes: int) -> AllReducePlan | None:
    """Sum inside each rack, then between racks, then back; None if the workers are in one rack or in none.

    Host j of rack Q sums a share z_j of its rack's elements and is root of a share x_j of all, part of z_j:
    S(1 + (n_Q - 1) z_j + (K - 2) x_j) <= T m_j, and for the rack's uplink S(1 + (K - 2) X_Q) <= T U_Q. For a
    given T the most a rack can be root of follows from sums alone, so T is found by bisection.
    """
    racks: dict[str, list[str]] = {}
    for name in workers:
        rack = network.hosts[name].rack
        if rack is None:
            return None
        racks.setdefault(rack, []).append(name)
    if len(racks) < 2:
        return None
    names = sorted(racks)
    rates = {
        name: min(network.hosts[name].up_bytes_per_s, network.hosts[name].down_bytes_per_s)
        for name in workers
    }
    uplinks = [
        min(network.capacity(Link(rack, "up")), network.capacity(Link(rack, "down"))) for rack in names
    ]
    members = [[rates[name] for name in racks[rack]] for rack in names]
    time_s = rack_time(members, uplinks, size_bytes)
    if time_s == INF:
        return None
    rooms = [
        max(0.0, _root_room(inside, uplink, size_bytes, len(names), time_s))
        for inside, uplink in zip(members, uplinks, strict=True)
    ]
    roots = _even([min(1.0, room) for room in rooms], 1.0)
    shares = []
    for rack, root in zip(names, roots, strict=True):
        moved = len(racks[rack]) - 1 + (len(names) - 2) * root  # for a share of one
        left = [max(0.0, time_s * rates[name] / size_bytes - 1) for name in racks[rack]]
        room = [each / moved if moved else 1.0 for each in left]
        for name, z in zip(racks[rack], _even(room, 1.0), strict=True):
            shares.append(HostShare(name, z * root, z * root, gathers=z))
    ordered = tuple(sorted(shares, key=lambda share: share.host))
    return _with_prediction(network, "racks", ordered, size_bytes, "racks first, then between racks")


def rack_time(members: Sequence[Sequence[float]], uplinks: Sequence[float], size_bytes: float) -> float:
    """The least T at which all racks together can be root of everything; rates by rack and host."""
    count = len(members)
    slowest = min(min(inside) for inside in members)
    if slowest <= 0 or min(uplinks) <= 0:
        return INF
    low = size_bytes / min(slowest, *uplinks)
    for inside in members:
        low = max(low, (2 * len(inside) - 1) * size_bytes / sum(inside))
    if count == 2:
        return low

    def enough(time_s: float) -> bool:
        rooms = (_root_room(i, u, size_bytes, count, time_s) for i, u in zip(members, uplinks, strict=True))
        return sum(min(1.0, room) for room in rooms) >= 1

    if enough(low):
        return low
    high = 2 * low
    while not enough(high):
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _root_room(inside: Sequence[float], uplink: float, size_bytes: float, racks: int, time_s: float) -> float:
    """The share of all elements a rack can be root of within the time."""
    if racks == 2:
        return 1.0
    spare = sum(time_s * rate / size_bytes - 1 for rate in inside) - (len(inside) - 1)
    return min(spare, time_s * uplink / size_bytes - 1) / (racks - 2)


# -- what a plan costs


def link_loads(network: Network, plan_form: str, shares: Sequence[HostShare]) -> dict[Link, float]:
    """Bytes over each link, in units of one update, of a set of shares."""
    loads: dict[Link, float] = {}
    workers = [share for share in shares if not share.idle]
    count = len(workers)
    racks = {share.host: network.hosts[share.host].rack for share in shares}
    if plan_form == "racks":
        inside: dict[str | None, int] = {}
        for share in shares:
            inside[racks[share.host]] = inside.get(racks[share.host], 0) + 1
        for share in shares:
            moved = 1 + (inside[racks[share.host]] - 1) * share.gathers + (len(inside) - 2) * share.reduces
            loads[Link(share.host, "up")] = loads[Link(share.host, "down")] = moved
        for rack in inside:
            root = sum(share.reduces for share in shares if racks[share.host] == rack)
            if rack is not None:
                loads[Link(rack, "up")] = loads[Link(rack, "down")] = 1 + (len(inside) - 2) * root
        return loads
    for share in shares:
        if share.idle:
            loads[Link(share.host, "up")] = count * share.broadcasts
            loads[Link(share.host, "down")] = count * share.reduces
        elif count > 1:
            loads[Link(share.host, "up")] = 1 + (count - 2) * share.broadcasts
            loads[Link(share.host, "down")] = 1 + (count - 2) * share.reduces
    for rack in sorted({rack for rack in racks.values() if rack is not None}):
        here = sum(1 for share in workers if racks[share.host] == rack)
        x = sum(share.reduces for share in shares if racks[share.host] == rack)
        y = sum(share.broadcasts for share in shares if racks[share.host] == rack)
        # Pushes of those inside to roots outside, results from roots inside to those outside; each result
        # handed over across the border goes one way once and the other way once less.
        loads[Link(rack, "up")] = here * (1 - x) + (count - here) * y + x - y
        loads[Link(rack, "down")] = (count - here) * x + here * (1 - y) + y - x
    return loads


def longest_s(network: Network, form: str, shares: Sequence[HostShare], size_bytes: int) -> float:
    """What the fullest link takes."""
    takes_s = 0.0
    for link, load in link_loads(network, form, shares).items():
        if load > 0:
            rate = network.capacity(link)
            takes_s = max(takes_s, load * size_bytes / rate if rate > 0 else INF)
    return takes_s


def _with_prediction(
    network: Network, form: str, shares: tuple[HostShare, ...], size_bytes: int, reason: str
) -> AllReducePlan:
    """The plan with the time its fullest link takes."""
    predicted_s = longest_s(network, form, shares, size_bytes)
    bound_s = _bound(network, form, shares, size_bytes)
    return AllReducePlan(form, shares, predicted_s, bound_s, 0, reason)


def _bound(network: Network, form: str, shares: Sequence[HostShare], size_bytes: int) -> float:
    if form == "racks":
        return max(
            load * size_bytes / network.capacity(link)
            for link, load in link_loads(network, form, shares).items()
        )
    hosts = network.hosts
    workers = [hosts[share.host] for share in shares if not share.idle]
    idle = [hosts[share.host] for share in shares if share.idle]
    return lower_bound(
        [host.up_bytes_per_s for host in workers],
        [host.down_bytes_per_s for host in workers],
        size_bytes,
        [(host.up_bytes_per_s, host.down_bytes_per_s) for host in idle],
    )


def ring_time(network: Network, workers: Sequence[str], size_bytes: int) -> float:
    """What a ring takes: every host passes 2(N-1)/N of the update on at the pace of the slowest link."""
    count = len(workers)
    if count < 2:
        return 0.0
    slowest = min(
        min(network.hosts[name].up_bytes_per_s, network.hosts[name].down_bytes_per_s) for name in workers
    )
    return 2 * (count - 1) / count * size_bytes / slowest if slowest > 0 else INF


# -- whom a step waits for


@dataclass(frozen=True, slots=True)
class Participation:
    """Who takes part in a step, and for each host left out why."""

    participants: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]  # host, reason
    step_s: float  # until the sum is everywhere, from now
    reason: str
    pace: float = 0.0  # what was weighed: the worth of a step by the time it takes


def worth_of(updates: int, half_worth: float) -> float:
    """What a step of so many updates is worth, where one of `half_worth` counts half of infinitely many."""
    return updates / (updates + half_worth)


def choose_participants(
    network: Network,
    workers: Sequence[str],
    size_bytes: int,
    ready_s: Mapping[str, float] | None = None,
    steps_left_out: Mapping[str, int] | None = None,
    max_left_out: int = 1,
    compute_s: float = 0.0,
    least: int | None = None,
    half_worth: float | None = None,
    overlapped: bool = False,
) -> Participation:
    """Leave out the hosts that cost more than they bring: most updates per second of step time.

    `ready_s` says in how many seconds each host's update will be there (stragglers), `steps_left_out` how
    often each was left out just before; who reached `max_left_out` takes part, whatever it costs. A step also
    takes `compute_s` that no choice changes, before the exchange or, `overlapped`, beside it. At least
    `least` take part, half of the workers if not given. With `half_worth` updates count for less the more
    they are: a step of so many is worth half of what one of infinitely many would be.
    """
    ready = ready_s or {}
    missed = steps_left_out or {}
    hosts = network.hosts

    def alone_s(name: str) -> float:
        slow = min(hosts[name].up_bytes_per_s, hosts[name].down_bytes_per_s)
        return ready.get(name, 0.0) + (size_bytes / slow if slow > 0 else INF)

    must = sorted(name for name in set(workers) if missed.get(name, 0) >= max_left_out)
    free = sorted(set(workers).difference(must), key=lambda name: (alone_s(name), name))
    fewest = (len(must) + len(free) + 1) // 2 if least is None else least
    best: tuple[float, int, float] | None = None
    wait_s, slowest, up, down = 0.0, INF, 0.0, 0.0
    for count, name in enumerate([*must, *free], start=1):
        host = hosts[name]
        wait_s = max(wait_s, ready.get(name, 0.0))
        slowest = min(slowest, host.up_bytes_per_s, host.down_bytes_per_s)
        up, down = up + host.up_bytes_per_s, down + host.down_bytes_per_s
        if count < max(len(must), min(fewest, len(must) + len(free))):
            continue
        step_s = wait_s + _least_time(count, slowest, up, down, size_bytes)
        took_s = max(compute_s, step_s) if overlapped else compute_s + step_s
        worth = count if half_worth is None else worth_of(count, half_worth)
        pace = worth / took_s if took_s > 0 else INF
        if best is None or pace >= best[0]:
            best = (pace, count - len(must), step_s)
    pace, extra, step_s = best or (0.0, 0, 0.0)
    left_out = tuple(
        (name, f"alone it takes {format_time(alone_s(name))}, the step without it {format_time(step_s)}")
        for name in sorted(free[extra:])
    )
    inside = tuple(sorted([*must, *free[:extra]]))
    reason = (
        f"{len(inside)} of {len(set(workers))} hosts in {format_time(step_s)}: most updates per second"
        if left_out
        else f"all {len(inside)} hosts in {format_time(step_s)}: leaving any out gains nothing"
    )
    if must:
        reason += f"; {', '.join(must)} must take part, left out {max_left_out} times in a row or more"
    return Participation(inside, left_out, step_s, reason, pace)
