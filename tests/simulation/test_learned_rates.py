"""The scheduler plans with the rates that hosts have learned."""

from __future__ import annotations

import math

import pytest

from mlfabric.events import MessageReceived
from mlfabric.messages import Join, MemberInfo, RatesLearned
from mlfabric.roles.actions import SchedulerSettings
from mlfabric.roles.scheduler import Scheduler


@pytest.mark.parametrize(
    ("learned", "believed"),
    [
        (RatesLearned(5.0, 7.0), (5.0, 7.0)),
        (RatesLearned(0.0, 7.0), (10.0, 10.0)),
        (RatesLearned(5.0, math.nan), (10.0, 10.0)),
        (RatesLearned(5.0, math.inf), (10.0, 10.0)),
    ],
)
def test_scheduler_believes_learned_rates_but_no_nonsense(
    learned: RatesLearned, believed: tuple[float, float]
) -> None:
    scheduler = Scheduler(SchedulerSettings("sched"))
    member = MemberInfo("w0", "h0", "", ("worker",), 10.0, 10.0, "job", None)
    scheduler.handle(MessageReceived("w0", Join(member, 1)), 0.0)
    scheduler.handle(MessageReceived("w0", learned), 0.1)
    scheduler.handle(MessageReceived("stranger", RatesLearned(1.0, 1.0)), 0.2)
    host = scheduler._domain.network.hosts["h0"]
    assert (host.up_bytes_per_s, host.down_bytes_per_s) == believed
    scheduler.validate()
