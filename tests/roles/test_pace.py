"""Steps that are bound to each other: who may take the model, and who waits."""

from __future__ import annotations

from mlfabric.messages import JobSettings, PullWanted
from mlfabric.roles.pace import Pace


def asked(pace: Pace, node: str, clock: int, version: int = 0, after: int = 0) -> list[str]:
    """Who is given the model when this worker asks."""
    pace.ask(node, PullWanted(f"{node}.{clock}", clock=clock, after=after))
    return [pull.pull for _, pull in pace.due(version)]


def test_a_worker_too_far_ahead_waits_for_the_slowest() -> None:
    pace = Pace(JobSettings(staleness=1))
    assert asked(pace, "a", 0) == ["a.0"]
    assert asked(pace, "b", 0) == ["b.0"]
    assert asked(pace, "a", 1) == ["a.1"]
    assert asked(pace, "a", 2) == []
    assert asked(pace, "b", 1) == ["a.2", "b.1"]


def test_with_no_staleness_workers_go_step_by_step() -> None:
    pace = Pace(JobSettings(staleness=0))
    for node in ("a", "b"):
        asked(pace, node, 0)
    assert asked(pace, "a", 1) == []
    assert asked(pace, "b", 1) == ["a.1", "b.1"]


def test_nobody_waits_for_who_is_gone_or_stands_aside() -> None:
    pace = Pace(JobSettings(staleness=0))
    for node in ("a", "b", "c"):
        asked(pace, node, 0)
    assert asked(pace, "a", 1) == []
    pace.lost("b")
    assert pace.due(0) == []
    assert asked(pace, "c", -1) == ["a.1", "c.-1"]


def test_a_checkpoint_neither_waits_nor_ends_a_workers_part() -> None:
    pace = Pace(JobSettings(staleness=0))
    for node in ("a", "b"):
        asked(pace, node, 0)
    pace.ask("b", PullWanted("check", with_state=True))
    assert [pull.pull for _, pull in pace.due(0)] == ["check"]
    assert asked(pace, "a", 1) == [], "b is still waited for"


def test_a_newcomer_begins_where_the_slowest_is() -> None:
    pace = Pace(JobSettings(staleness=1))
    for clock in range(10):
        asked(pace, "a", clock)
    assert asked(pace, "late", 0) == ["late.0"]
    assert asked(pace, "a", 10) == ["a.10"], "it is one step ahead of the newcomer, not ten"
    assert asked(pace, "a", 11) == []
    assert asked(pace, "late", 1) == ["a.11", "late.1"]


def test_the_next_step_begins_when_enough_gradients_are_in() -> None:
    pace = Pace(JobSettings(wait_for=2))
    for node in ("a", "b", "c"):
        assert asked(pace, node, 0) == [f"{node}.0"]
    assert asked(pace, "a", 1, version=1, after=2) == []
    assert asked(pace, "b", 1, version=2, after=2) == ["a.1", "b.1"]
    assert asked(pace, "c", 1, version=2, after=2) == ["c.1"]


def test_where_all_wait_for_a_gradient_that_was_lost_all_give_another() -> None:
    pace = Pace(JobSettings(wait_for=3))
    for node in ("a", "b", "c"):
        asked(pace, node, 0)
    assert asked(pace, "a", 1, version=1, after=3) == []
    assert asked(pace, "b", 1, version=2, after=3) == []
    pace.lost("c")
    assert [node for node, _ in pace.due(2)] == ["a", "b"]


def test_jobs_without_such_steps_are_not_bound() -> None:
    assert not Pace(JobSettings()).binds
