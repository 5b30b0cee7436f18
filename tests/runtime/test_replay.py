"""A recorded run replays exactly, and a run without races has the same order in both drivers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.eventlog import MemoryLog, read_log
from mlfabric.events import LogRecord
from mlfabric.messages import JobSettings
from mlfabric.replay import replay
from mlfabric.rules import Sum
from mlfabric.sim.engine import Process, SimNode, Simulation
from mlfabric.story import tell_story, updates_in
from mlfabric.topology import Host, Network
from tests.simulation.ledger import LedgerRun


def recorded_run(path: Path) -> list[LogRecord]:
    """Two workers that take turns; each update is committed before the next is made."""
    with mf.local(workers=2, log=path) as fabric:
        fabric.publish({"w": np.zeros(5000, np.float32)}, apply=mf.Sum(), divergence=0.5)
        for _ in range(4):
            for member in fabric.workers:
                member.pull()
                member.push({"w": np.ones(5000, np.float32)}).result(20)
        fabric.run(lambda member: member.all_reduce(np.ones(100), timeout=20), 30)
    return read_log(path)


def test_a_log_of_the_runtime_replays_to_the_same_actions(tmp_path: Path) -> None:
    records = recorded_run(tmp_path / "run.jsonl")
    assert len(records) > 200
    assert replay(records) == []


def test_a_log_that_was_tampered_with_does_not_replay(tmp_path: Path) -> None:
    records = recorded_run(tmp_path / "run.jsonl")
    index = next(i for i, r in enumerate(records) if r.type == "Send" and r.role == "scheduler")
    del records[index]
    assert replay(records)


@pytest.mark.parametrize("faults", [(), ((0.2, "kill", "s0"),), ((0.1, "stall", "a0"), (0.3, "kill", "w1"))])
def test_a_log_of_the_simulator_replays_to_the_same_actions(
    faults: tuple[tuple[float, str, str], ...],
) -> None:
    run = LedgerRun(faults=faults).run()
    assert replay(run.log.records) == []


def order_of_application(records: list[LogRecord]) -> list[tuple[str, int]]:
    """(update, version) in the order in which servers acknowledged them."""
    applied = []
    for record in sorted(records, key=lambda r: r.at_s):
        plain = record.record if isinstance(record.record, dict) else None
        if record.type == "ResolveUpdate" and record.kind == "action":
            update = plain["update"] if plain else record.record.update
            version = plain["version"][1] if plain else record.record.version.count
            applied.append((update, version))
    return applied


def test_a_run_without_races_has_the_same_order_in_both_drivers(tmp_path: Path) -> None:
    real = order_of_application(recorded_run(tmp_path / "run.jsonl"))
    log = MemoryLog()
    network = Network.of(Host(f"w{i}", 1e9, 1e9) for i in range(2))
    sim = Simulation(network, log=log)
    sim.add_scheduler("w0", "w0")
    nodes = [sim.add_node(f"w{i}", f"w{i}", "w0", job="local", expected=2) for i in range(2)]

    def work() -> Process:
        settings = JobSettings(divergence=0.5)
        yield nodes[0].client.publish({"w": np.zeros(5000, np.float32)}, Sum(), settings)
        for _ in range(4):
            for node in nodes:
                yield node.client.pull()[1]
                yield node.client.push({"w": np.ones(5000, np.float32)})[1]

    def after(joined: list[SimNode]) -> Process:
        for node in joined:
            assert node.joined is not None
            yield node.joined
        yield from work()

    sim.spawn(after(nodes))
    sim.run(20)
    assert real == order_of_application(log.records)
    assert real == [(f"w{i % 2}#{i // 2}", i + 1) for i in range(8)]


def test_a_story_tells_an_update_from_its_making_to_its_outcome(tmp_path: Path) -> None:
    records = recorded_run(tmp_path / "run.jsonl")
    assert list(updates_in(records))[:2] == ["w0#0", "w1#0"]
    chapters = tell_story(records, "w1#2")
    text = "\n".join(chapter.text for chapter in chapters)
    assert chapters[0].text.startswith("computed: 20 kB")
    assert "offered to the scheduler" in text
    assert "placed: number 5" in text
    assert "sends its bytes to" in text
    assert "applied to shard 0 as version 6" in text
    assert chapters[-1].text == "outcome: committed, delay 0"
    assert [c.at_s for c in chapters] == sorted(c.at_s for c in chapters)


def test_the_story_of_an_aggregated_update_names_its_group() -> None:
    run = LedgerRun(workers=8, compute_s=0.0, rates=(1e6,)).run()
    grouped = run.notes("grouped")[0].updates[0]
    text = "\n".join(chapter.text for chapter in tell_story(run.log.records, grouped))
    assert "added to the sum of group" in text
    assert "forwarded" in text


def test_an_unknown_update_is_said_to_be_unknown(tmp_path: Path) -> None:
    with pytest.raises(mf.FabricError, match="nothing about update w9#9"):
        tell_story(recorded_run(tmp_path / "run.jsonl"), "w9#9")
