"""What people do with a running fabric: look at it, drain hosts, end processes, serve several jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import mlfabric as mf
from mlfabric.commands.root import app
from mlfabric.config import from_environment, parse_address, read_secrets
from mlfabric.data import ArrayData
from mlfabric.eventlog import NoLog
from mlfabric.messages import StatusReport, StatusWanted
from mlfabric.roles.actions import SchedulerSettings
from mlfabric.runtime.engine import Engine
from mlfabric.runtime.probe import ask_scheduler

ROOT = Path(__file__).parents[2]


def status_of(fabric: mf.Fabric) -> StatusReport:
    report = ask_scheduler(parse_address(fabric.address), b"", StatusWanted(), 10.0)
    assert isinstance(report, StatusReport)
    return report


@contextmanager
def trained() -> Iterator[tuple[mf.Fabric, mf.Fabric, mf.Fabric]]:
    """A worker that schedules, a server, and somebody who follows; one update is in the model."""
    with mf.join(
        "127.0.0.1:0", job="j", name="w0", host="w0", roles=("worker",), scheduler=True, expected=3
    ) as worker:
        server = mf.join(worker.address, job="j", name="s0", host="s0", roles=("server",), expected=3)
        replica = mf.join(worker.address, job="j", name="r0", host="r0", roles=("replica",), expected=3)
        worker.publish({"w": np.zeros(10)}, apply=mf.Sum(), divergence=0.5)
        worker.push({"w": np.ones(10)}).result(20)
        try:
            yield worker, server, replica
        finally:
            replica.close()
            server.close()


def test_any_member_tells_the_status_and_it_is_printed_for_people_and_programs() -> None:
    with trained() as (_, server, _):
        printed = CliRunner().invoke(app, ["status", "--at", server.address])
        assert printed.exit_code == 0, printed.output
        assert "scheduler w0, term 0" in printed.output
        assert "1 updates applied" in printed.output
        told = json.loads(CliRunner().invoke(app, ["status", "--at", server.address, "--json"]).output)
        assert [m["node"] for m in told["members"]] == ["r0", "s0", "w0"]
        assert told["jobs"][0]["shards"][0]["leader"] == "s0"
        assert all(1.0 <= m["lease_s"] <= 3.0 for m in told["members"])


def test_a_drained_host_hands_on_its_shard_and_leaves_and_training_goes_on() -> None:
    with trained() as (worker, server, _):
        done = CliRunner().invoke(app, ["drain", "s0", "--at", worker.address, "--wait", "30"])
        assert done.exit_code == 0, done.output
        assert "s0 left" in done.output
        assert server.gone
        with pytest.raises(mf.FabricError, match="drained"):
            server.pull()
        assert isinstance(worker.push({"w": np.ones(10)}).result(20), mf.Committed)
        assert worker.pull().arrays["w"].tolist() == [2.0] * 10
        assert not worker.lost
        report = status_of(worker)
        assert (report.jobs[0].shards[0].leader, report.jobs[0].shards[0].epoch) == ("r0", 1)


def test_what_cannot_be_drained_is_said_in_one_sentence() -> None:
    with trained() as (worker, _, _):
        said = CliRunner().invoke(app, ["drain", "nowhere", "--at", worker.address])
        assert isinstance(said.exception, mf.FabricError)
        assert "no member is called nowhere" in str(said.exception)


def test_a_late_joiner_pulls_the_model_without_publishing() -> None:
    with (
        trained() as (worker, _, _),
        mf.join(worker.address, job="j", name="late", roles=("worker",)) as late,
    ):
        assert late.pull().arrays["w"].tolist() == [1.0] * 10


def test_a_node_told_to_end_hands_on_what_it_leads_and_exits_with_zero() -> None:
    with mf.join("127.0.0.1:0", job="j", name="w0", host="w0", roles=("worker",), scheduler=True) as worker:
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        command = [sys.executable, "-c", "from mlfabric.cli import main; main()", "node", worker.address]
        command += ["--job", "j", "--name", "s0", "--roles", "server", "--log-format", "json"]
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            until = time.monotonic() + 30
            while "s0" not in {member.node for member in status_of(worker).members}:
                assert time.monotonic() < until, "the node does not join"
                time.sleep(0.05)
            worker.publish({"w": np.zeros(10)}, apply=mf.Sum(), divergence=None)
            with mf.join(worker.address, job="j", name="r0", host="r0", roles=("replica",)):
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=40)
                assert process.returncode == 0, said
                lines = [json.loads(line) for line in said.decode().splitlines()]
                assert any("draining" in line["message"] for line in lines)
                assert isinstance(worker.push({"w": np.ones(10)}).result(20), mf.Committed)
        finally:
            process.kill()
            process.wait()


@contextmanager
def serving(secrets: dict[str, bytes]) -> Iterator[Engine]:
    """A scheduler of its own for several jobs."""
    engine = Engine("sched", ArrayData(), NoLog(), ("127.0.0.1", 0), job_secrets=secrets)
    engine.node.start_role("scheduler", SchedulerSettings("sched"))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0.0)


def test_one_scheduler_serves_several_jobs_each_with_its_own_secret() -> None:
    with serving({"a": b"one", "b": b"two"}) as engine:
        address = f"127.0.0.1:{engine.address[1]}"
        join: Any = mf.join
        with (
            join(address, job="a", name="a0", secret="one") as first,
            join(address, job="b", name="b0", secret="two") as second,
        ):
            for fabric, value in ((first, 1.0), (second, 2.0)):
                fabric.publish({"w": np.full(4, value)}, apply=mf.Sum(), divergence=None)
                fabric.push({"w": np.ones(4)}).result(20)
                assert fabric.pull().arrays["w"].tolist() == [value + 1] * 4
            for job, secret in (("a", "two"), ("c", "one")):
                with pytest.raises(mf.ConnectError, match="the secrets differ"):
                    join(address, job=job, name="x", secret=secret, timeout=1.0)
            with pytest.raises(mf.ConnectError, match="taken"):
                join(address, job="a", name="b0", secret="one", timeout=1.0)
            shown = ask_scheduler(engine.address, b"one", StatusWanted(), 10.0, "a")
            assert isinstance(shown, StatusReport)
            assert [member.node for member in shown.members] == ["a0"]
            assert [job.name for job in shown.jobs] == ["a"]


def test_a_file_of_secrets_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_text("# jobs\na one\n\nb two\n")
    assert read_secrets(path) == {"a": b"one", "b": b"two"}
    for text, line in (("a", 1), ("a one\na two", 2)):
        path.write_text(text)
        with pytest.raises(mf.FabricError, match=f"line {line}"):
            read_secrets(path)
    path.write_text("")
    with pytest.raises(mf.FabricError, match="no secret"):
        read_secrets(path)
    with pytest.raises(mf.FabricError, match="can't read"):
        read_secrets(tmp_path / "none")


def test_everything_works_over_ipv6() -> None:
    with mf.join("[::1]:0", job="j", name="w0", host="w0", scheduler=True, expected=2) as first:
        assert first.address.startswith("[::1]:")
        with mf.join(first.address, job="j", name="w1", host="w1", expected=2) as second:
            assert second.address.startswith("[::1]:")
            first.publish({"w": np.zeros(10)}, apply=mf.Sum(), divergence=0.5)
            second.publish({"w": np.zeros(10)}, apply=mf.Sum(), divergence=0.5)
            second.push({"w": np.ones(10)}).result(20)
            assert first.pull().arrays["w"].tolist() == [1.0] * 10
            assert CliRunner().invoke(app, ["status", "--at", second.address]).exit_code == 0


def test_where_to_listen_is_configurable() -> None:
    assert from_environment("h:1", environment={}).listen is None
    assert from_environment("h:1", listen="10.0.0.1:80", environment={}).listen == ("10.0.0.1", 80)
    assert from_environment("h:1", environment={"MLFABRIC_LISTEN": "[::1]"}).listen == ("::1", 0)


def test_another_form_of_log_is_named() -> None:
    said = CliRunner().invoke(app, ["scheduler", "--log-format", "xml"])
    assert "text or json" in str(said.exception)
