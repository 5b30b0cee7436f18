"""Where the engine runs if nobody said: a process where a thread would cost training more than it may."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.api import ALL_ROLES
from mlfabric.config import from_environment
from mlfabric.runtime import placement
from mlfabric.runtime.host import link_towards
from mlfabric.runtime.placement import Choice, Facts, choose, gather, place_engine

# A worker of a job of several hosts, on a machine with processors to spare, of whose link nobody knows.
USUAL = Facts(works=True, members=4, loopback=False, neighbours=0, processors=4.0)


def chosen(lag_s: float = 0.0, **changes: Any) -> Choice:
    return choose(replace(USUAL, **changes), lambda: lag_s)


def test_a_worker_of_an_unknown_or_fast_link_has_a_process_of_its_own() -> None:
    assert chosen().engine == "process"
    assert chosen(members=0).engine == "process"
    assert chosen(link_bps=200e6).engine == "process"
    assert chosen(link_bps=10e9).reason == "a link of 10 Gb/s would take much of the interpreter"


def test_a_slow_link_takes_little_unless_others_hold_the_interpreter() -> None:
    assert chosen(link_bps=50e6) == Choice(
        "thread", "a link of 50 Mb/s takes little of the interpreter", doubtful=True
    )
    assert chosen(lag_s=0.004, link_bps=50e6).engine == "process"


@pytest.mark.parametrize(
    "changes",
    [{"works": False}, {"members": 1}, {"loopback": True}, {"neighbours": 1}, {"processors": 0.25}],
    ids=lambda changes: next(iter(changes)),
)
def test_who_gains_nothing_by_a_process_keeps_a_thread_and_is_not_measured(changes: dict[str, Any]) -> None:
    def never() -> float:
        raise AssertionError("it takes time")

    for rate in (None, 10e9):
        choice = choose(replace(USUAL, link_bps=rate, **changes), never)
        assert (choice.engine, choice.doubtful, choice.forced) == ("thread", False, False)


def test_where_no_process_can_be_had_a_thread_is_taken_and_the_reason_said() -> None:
    choice = chosen(obstacle="memory can't be shared here (operation not permitted)")
    assert (choice.engine, choice.forced) == ("thread", True)
    assert choice.reason.startswith("memory can't be shared here (operation not permitted), though nobody")
    assert not chosen(obstacle="none", link_bps=1e6).forced


def test_facts_come_from_the_settings_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[tuple[str | None, float | None]] = [("eth0", 25e9)]
    monkeypatch.setattr(placement, "link_towards", lambda address: where[-1])

    def facts(address: str = "10.0.0.1:7070", roles: tuple[str, ...] = ALL_ROLES, **env: str) -> Facts:
        return gather(from_environment(address, environment=env), roles, 0)

    assert facts().link_bps == 25e9
    assert facts(MLFABRIC_UP="100mbit", MLFABRIC_DOWN="50mbit").link_bps == pytest.approx(100e6)
    assert facts("127.0.0.1:7070").loopback
    assert not facts(roles=("server", "aggregator")).works
    assert facts(MLFABRIC_PROCESSORS="0.25").processors == 0.25
    assert facts(LOCAL_WORLD_SIZE="4").processors == facts().processors / 4
    with pytest.raises(mf.FabricError, match="MLFABRIC_PROCESSORS is 'few'"):
        facts(MLFABRIC_PROCESSORS="few")
    where.append(("lo", None))
    assert facts("a-name-of-this-host").loopback


def test_the_way_to_an_address_is_found_without_sending_anything() -> None:
    assert link_towards(("127.0.0.1", 7070))[0] == "lo"
    assert link_towards(("0.0.0.0", 7070)) == (None, None)


def test_what_is_asked_for_is_done_and_what_is_chosen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = from_environment("10.0.0.1", engine="thread", environment={})
    with caplog.at_level(logging.INFO, "mlfabric"):
        assert place_engine(asked, ALL_ROLES, 0).engine == "thread"
        assert not caplog.records
        left = from_environment("127.0.0.1", name="a", environment={})
        assert place_engine(left, ALL_ROLES, 0).engine == "thread"
    assert caplog.messages == ["a serves the network from a thread: all members are on this host"]


def test_a_process_that_cannot_be_started_becomes_a_thread_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(placement, "choose", lambda facts, lag_s: Choice("process", "of a test"))
    with mf.join("127.0.0.1:0", name="a", scheduler=True) as fabric:
        assert fabric.engine == "thread"
        assert fabric.all_reduce(np.ones(3)).sum() == 3.0
    assert "Resource temporarily unavailable; a serves the network from a thread instead" in caplog.text
    with pytest.raises(mf.FabricError, match="can't start the engine's process"):
        mf.join("127.0.0.1:0", name="a", scheduler=True, engine="process")


def test_several_members_of_a_process_are_counted_until_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(facts: Facts, lag_s: Any) -> Choice:
        seen.append(facts.neighbours)
        return Choice("thread", "of a test")

    monkeypatch.setattr(placement, "choose", note)
    with mf.local(workers=3):
        pass
    with mf.local(workers=1):
        pass
    assert seen == [0, 1, 2, 0]


def test_memory_is_shared_without_dev_shm() -> None:
    """Containers have little of it by default."""
    used = Path("/dev/shm")
    before = sorted(used.iterdir()) if used.is_dir() else []
    with mf.join("127.0.0.1:0", name="a", scheduler=True, engine="process") as fabric:
        assert fabric.engine == "process"
        fabric.empty(1_000_000)[:] = 1.0
        assert (sorted(used.iterdir()) if used.is_dir() else []) == before
