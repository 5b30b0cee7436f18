"""The command line: results with --json, and one sentence with exit code 2 for bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlfabric as mf

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "plan.toml"


def mlfabric(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "mlfabric", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )


def refused(*words: str) -> str:
    """The one sentence a refused command prints."""
    done = mlfabric(*words)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_version_is_that_of_the_package() -> None:
    assert mlfabric("--version").stdout == f"mlfabric {mf.__version__}\n"


def test_plan_explains_every_entry() -> None:
    done = mlfabric("plan", "--explain", str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    assert "delay would be" in done.stdout
    assert "█" in done.stdout
    for worker in range(8):
        assert f"w{worker}#{worker}" in done.stdout


def test_plan_passes_sums_on_in_chunks_if_asked_to() -> None:
    done = mlfabric("plan", "--json", "--chunk", "100kB", "calm")
    assert done.returncode == 0, done.stderr
    assert "chunk by chunk" in done.stdout
    assert refused("plan", "--chunk", "much", "calm").startswith("mlfabric: --chunk: 'much' is not a size")
    assert "no bytes" in refused("plan", "--chunk", "0", "calm")


def test_plan_shows_what_goes_to_the_replica(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace(
        "max_delay = 9", 'max_delay = 9\ndivergence = 2.5\nreplicas = ["idle"]'
    )
    path = tmp_path / "replica.toml"
    path.write_text(text)
    done = mlfabric("plan", "--explain", str(path))
    assert done.returncode == 0, done.stderr
    assert "server to replica idle" in done.stdout


def test_plan_lets_jobs_take_turns() -> None:
    done = mlfabric("plan", "--together", "interleave", "many-jobs")
    assert done.returncode == 0, done.stderr
    turns = [line for line in done.stdout.splitlines() if line.startswith("Turn")]
    assert len(turns) == 3
    assert "Turn 1 on what they share: job late, its burst of" in turns[0]
    assert sum(line.startswith("Job ") for line in done.stdout.splitlines()) == 3
    plans = json.loads(mlfabric("plan", "--together", "weights", "--json", "many-jobs").stdout)
    assert sorted(plans) == ["large", "late", "vision"]
    assert "known are interleave, weights" in refused("plan", "--together", "luck", "many-jobs")


def test_plan_prints_json_with_a_reason_for_every_entry() -> None:
    done = mlfabric("plan", "--json", str(EXAMPLE))
    planned: dict[str, Any] = json.loads(done.stdout)
    entries = planned["placed"] + planned["drops"] + planned["groups"]
    assert len(planned["placed"]) + len(planned["drops"]) == 8
    assert all(entry["reason"] for entry in entries)
    assert [entry["position"] for entry in planned["placed"]] == list(range(len(planned["placed"])))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("rate = ", "rat = "), "unknown key 'rat' in network; did you mean 'rate'?"),
        (('"50mbit"', '"-50mbit"'), "'-50mbit' is negative"),
        (('"50mbit"', '"50mb"'), "unknown unit 'mb'"),
        (('worker = "w7"', 'worker = "w70"'), "no host matches 'w70'; did you mean w7?"),
        (("version = 2", 'version = "two"'), "expected `int`"),
        (("[[offers]]", "[[offers]"), "not valid TOML"),
    ],
)
def test_a_wrong_scenario_is_refused_with_line_and_key(
    tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    text = EXAMPLE.read_text()
    assert change[0] in text
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace(*change, 1))
    said = refused("plan", str(path))
    assert sentence in said
    number = int(said.split(":")[2])
    expected = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if change[1] in line)
    assert number == expected


def test_a_missing_file_is_named() -> None:
    assert "can't read scenario nowhere.toml: No such file" in refused("plan", "nowhere.toml")
    assert "can't read the event log nowhere.jsonl" in refused("story", "w0#0", "--log", "nowhere.jsonl")


def test_a_file_that_is_no_log_is_named() -> None:
    assert "plan.toml:1: not a line of an event log" in refused("story", "w0#0", "--log", str(EXAMPLE))


def test_a_story_is_told_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with mf.local(workers=2, log=log) as fabric:
        fabric.publish({"w": np.zeros(100)}, apply=mf.Sum())
        fabric.push({"w": np.ones(100)}).result(20)
    done = mlfabric("story", "w0#0", "--log", str(log))
    assert "outcome: committed, delay 0" in done.stdout
    chapters = json.loads(mlfabric("story", "w0#0", "--log", str(log), "--json").stdout)
    assert chapters[-1]["text"] == "outcome: committed, delay 0"
    assert "which update?" in refused("story", "--log", str(log))
    assert "nothing about update w5#0" in refused("story", "w5#0", "--log", str(log))


def test_a_node_without_a_scheduler_is_told_how_to_start_one() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        # Bound but not listening: connections are refused, and nobody else can take the port meanwhile.
        said = refused("node", address, "--name", "n0", "--wait", "0.3")
    assert f"mlfabric scheduler --listen {address}" in said


def test_unknown_roles_and_rates_are_named() -> None:
    assert "unknown role 'boss'" in refused("node", "127.0.0.1:1", "--roles", "boss")
    assert "unknown unit" in refused("node", "127.0.0.1:1", "--up", "5parsec")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        assert f"can't listen on {address}" in refused("scheduler", "--listen", address)


def test_a_scheduler_and_a_node_of_their_own_serve_a_job() -> None:
    command = [sys.executable, "-u", "-c", "from mlfabric.cli import main; main()"]
    with subprocess.Popen(
        [*command, "scheduler", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as s:
        assert s.stdout is not None
        address = s.stdout.readline().split("listens on ")[1].split(";")[0]
        with subprocess.Popen(
            [*command, "node", address, "--name", "n0", "--job", "j"], stdout=subprocess.PIPE, text=True
        ) as node:
            assert node.stdout is not None
            assert "n0 joined job j" in node.stdout.readline()
            with mf.join(address, job="j", name="w0", roles=("worker",)) as fabric:
                fabric.publish({"w": np.zeros(10)}, apply=mf.Sum())
                assert isinstance(fabric.push({"w": np.ones(10)}).result(20), mf.Committed)
            node.send_signal(signal.SIGTERM)
            assert node.wait(20) == 0
        s.send_signal(signal.SIGTERM)
        assert s.wait(20) == 0


def test_the_demo_kills_its_server_and_goes_on(tmp_path: Path) -> None:
    done = mlfabric("demo", "--updates", "60", "--folder", str(tmp_path / "run"), "--json", timeout=110)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["committed"] >= 55
    assert result["accuracy"] > 0.5
    assert result["divergence_at_fail_over"] <= result["divergence_bound"]
    assert result["recovery_s"] < 10
    assert result["delay_max"] <= 8
    assert Path(result["event_log"]).exists()
