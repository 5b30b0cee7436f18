"""Limits on what hosts and jobs may send, set by people: who may send how much of it. Pure.

A host's limit is for all its processes together, a job's limit for all its processes on any one host; each
process gets an even part. The planner sees hosts as no faster than they may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlfabric.messages import LimitAnswered, LimitRate, LimitWanted, MemberInfo
from mlfabric.roles.actions import Action, Send
from mlfabric.topology import Network


class Limits:
    def __init__(self) -> None:
        self.hosts: dict[str, float] = {}  # payload bytes per second, by host
        self.jobs: dict[str, float] = {}
        self._told: dict[str, LimitRate] = {}  # by node
        self._changed = False

    def joined(self, member: MemberInfo) -> None:
        """What a member brings along counts where it is stricter."""
        self._changed = True
        self._told.pop(member.node, None)
        for limits, name, rate in (
            (self.hosts, member.host, member.max_rate_bytes_per_s),
            (self.jobs, member.job, member.job_max_rate_bytes_per_s),
        ):
            if rate is not None:
                limits[name] = min(limits.get(name, rate), rate)

    def left(self, node: str) -> None:
        self._changed = True
        self._told.pop(node, None)

    def answer(
        self, wanted: LimitWanted, members: Mapping[str, MemberInfo], only: str | None = None
    ) -> LimitAnswered:
        """What a wish would do; `only`: whoever wishes knows this job's secret and no other."""
        name = wanted.target
        hosts = {member.host for member in members.values()}
        jobs = {member.job for member in members.values()}
        if name in hosts and name in jobs and not wanted.kind:
            return LimitAnswered("", f"{name} is both a host and a job; write host:{name} or job:{name}")
        kind = wanted.kind or ("job" if name in jobs else "host")
        if name not in (jobs if kind == "job" else hosts):
            return LimitAnswered("", f"no {wanted.kind or 'job or host'} is called {name}")
        touched = {m.job for m in members.values() if name == (m.job if kind == "job" else m.host)}
        if only is not None and touched != {only}:
            return LimitAnswered("", f"the secret of job {only} does not open {kind} {name}")
        return LimitAnswered(kind)

    def set(self, wanted: LimitWanted, members: Mapping[str, MemberInfo]) -> bool:
        answer = self.answer(wanted, members)
        if answer.error:
            return False
        limits = self.jobs if answer.kind == "job" else self.hosts
        if wanted.bytes_per_s is None:
            limits.pop(wanted.target, None)
        else:
            limits[wanted.target] = wanted.bytes_per_s
        self._changed = True
        return True

    def of(self, node: str, members: Mapping[str, MemberInfo]) -> LimitRate:
        """The part of a node, and the limits it is a part of."""
        member = members[node]
        beside = [other for other in members.values() if other.host == member.host]
        host, job = self.hosts.get(member.host), self.jobs.get(member.job)
        parts = []
        if host is not None:
            parts.append(host / len(beside))
        if job is not None:
            parts.append(job / sum(other.job == member.job for other in beside))
        return LimitRate(min(parts, default=None), host, job)

    def news(self, members: Mapping[str, MemberInfo]) -> list[Action]:
        """Tell those whose part has changed."""
        if not self._changed:
            return []
        self._changed = False
        actions: list[Action] = []
        for node in sorted(members):
            part = self.of(node, members)
            if part != self._told.get(node, LimitRate(None, None, None)):
                self._told[node] = part
                actions.append(Send(node, "member", part))
        return actions

    def limit_hosts(self, network: Network) -> Network:
        """The network as hosts may use it."""
        for name, limit in self.hosts.items():
            host = network.hosts.get(name)
            if host is not None and host.up_bytes_per_s > limit:
                network = network.with_host(replace(host, up_bytes_per_s=limit))
        return network
