"""Limits of hosts and jobs, the parts of their processes, and who may set them."""

from __future__ import annotations

from mlfabric.messages import LimitRate, LimitWanted, MemberInfo
from mlfabric.roles.actions import Send
from mlfabric.roles.limits import Limits
from mlfabric.topology import Host, Network


def member(node: str, host: str, job: str = "job", **limits: float) -> MemberInfo:
    return MemberInfo(node, host, "", ("worker",), 100.0, 100.0, job, **limits)  # type: ignore[arg-type]


def limits_of(*members: MemberInfo) -> tuple[Limits, dict[str, MemberInfo]]:
    limits = Limits()
    for each in members:
        limits.joined(each)
    return limits, {each.node: each for each in members}


def told(limits: Limits, members: dict[str, MemberInfo]) -> dict[str, float | None]:
    parts = {}
    for action in limits.news(members):
        assert isinstance(action, Send)
        assert isinstance(action.message, LimitRate)
        parts[action.node] = action.message.bytes_per_s
    return parts


def test_without_limits_nobody_hears_anything() -> None:
    assert told(*limits_of(member("a", "h0"), member("b", "h1"))) == {}


def test_processes_of_a_host_share_its_limit_and_the_stricter_limit_counts() -> None:
    limits, members = limits_of(member("a", "h0"), member("b", "h0"), member("c", "h1"))
    assert limits.set(LimitWanted("h0", 30.0), members)
    assert told(limits, members) == {"a": 15.0, "b": 15.0}
    assert limits.set(LimitWanted("job", 20.0), members)
    assert told(limits, members) == {"a": 10.0, "b": 10.0, "c": 20.0}
    assert limits.set(LimitWanted("job", None), members)
    assert told(limits, members) == {"a": 15.0, "b": 15.0, "c": None}


def test_who_stays_gets_the_part_of_who_left() -> None:
    limits, members = limits_of(member("a", "h0"), member("b", "h0"))
    limits.set(LimitWanted("h0", 30.0), members)
    told(limits, members)
    limits.left("b")
    del members["b"]
    assert told(limits, members) == {"a": 30.0}


def test_limits_that_members_bring_along_count_where_they_are_stricter() -> None:
    limits, members = limits_of(
        member("a", "h0", max_rate_bytes_per_s=50.0, job_max_rate_bytes_per_s=40.0),
        member("b", "h1", job_max_rate_bytes_per_s=60.0),
    )
    assert told(limits, members) == {"a": 40.0, "b": 40.0}


def test_the_planner_sees_hosts_as_they_may_send() -> None:
    limits, members = limits_of(member("a", "h0"), member("b", "h1"))
    limits.set(LimitWanted("h0", 30.0), members)
    network = limits.limit_hosts(Network.of([Host("h0", 100.0, 100.0), Host("h1", 100.0, 100.0)]))
    assert {name: host.up_bytes_per_s for name, host in network.hosts.items()} == {"h0": 30.0, "h1": 100.0}
    assert all(host.down_bytes_per_s == 100.0 for host in network.hosts.values())


def test_a_wish_that_fits_nothing_is_refused_with_a_sentence() -> None:
    limits, members = limits_of(member("a", "h0", "red"), member("b", "h1", "blue"), member("c", "h1", "red"))
    assert "no job or host is called h9" in limits.answer(LimitWanted("h9", 1.0), members).error
    assert limits.answer(LimitWanted("red", 1.0), members, only="red").kind == "job"
    assert "does not open job blue" in limits.answer(LimitWanted("blue", 1.0), members, only="red").error
    assert "does not open host h1" in limits.answer(LimitWanted("h1", 1.0), members, only="red").error
    both = limits_of(member("a", "x", "x"))[1]
    assert "both a host and a job" in limits.answer(LimitWanted("x", 1.0), both).error
    assert limits.answer(LimitWanted("x", 1.0, "host"), both).kind == "host"
