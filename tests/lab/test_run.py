"""`lab run`: ranks in their places, everything of note in the folder, nothing left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mlfabric as mlfabric_package
from mlfabric.errors import FabricError
from mlfabric.lab import RunOptions
from mlfabric.lab.testing import MakeLab
from mlfabric.scenario import Scenario, parse
from tests.lab.test_leftovers import network_namespaces

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


# The package under test, wherever the command runs.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(mlfabric_package.__path__[0]).parent)}


def mlfabric(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from mlfabric.cli import main; main()", *words],
        capture_output=True, text=True, cwd=cwd, check=False, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip


def scenario_of(text: str) -> Scenario:
    return parse(text)


def test_every_rank_gets_torchruns_variables_and_the_secret(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(hosts=3, rate="50mbit")
    result = lab.run([sys.executable, "-c", SHOW], RunOptions(folder=tmp_path / "run", ranks_per_host=2))
    assert result.ok, result.complaints
    seen = [json.loads(Path(rank.log).read_text()) for rank in result.ranks]
    assert [(e["RANK"], e["LOCAL_RANK"], e["GROUP_RANK"], e["MLFABRIC_HOST"]) for e in seen] == [
        ("0", "0", "0", "w0"), ("1", "1", "0", "w0"), ("2", "0", "1", "w1"),
        ("3", "1", "1", "w1"), ("4", "0", "2", "w2"), ("5", "1", "2", "w2"),
    ]  # fmt: skip
    for variables in seen:
        assert variables["WORLD_SIZE"] == "6"
        assert variables["LOCAL_WORLD_SIZE"] == "2"
        assert variables["MASTER_ADDR"] == "10.77.0.1"
        assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
        assert float(variables["MLFABRIC_PROCESSORS"]) == pytest.approx(
            len(os.sched_getaffinity(0)) / 6, 0.01
        )
    assert len({variables["MLFABRIC_SECRET"] for variables in seen}) == 1
    assert len(seen[0]["MLFABRIC_SECRET"]) == 64


def test_run_folder_tells_the_whole_story(make_lab: MakeLab, tmp_path: Path) -> None:
    scenario = scenario_of("""
        name = "story"
        seed = 11
        hosts = [{ name = "w", count = 2, rate = "50mbit" }]
        traces = [{ steps = [{ at = "100ms", rate = "20mbit" }] }]
    """)
    lab = make_lab(scenario)
    busy = "import time; end = time.time() + 0.4\nwhile time.time() < end: pass"
    result = lab.run([sys.executable, "-c", busy], RunOptions(folder=tmp_path / "run", sample_s=0.1))
    folder = result.folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["state"] == "done"
    assert manifest["seed"] == 11
    assert manifest["versions"]["mlfabric"]
    assert manifest["versions"]["kernel"] == os.uname().release
    assert parse((folder / "scenario.toml").read_text()) == scenario
    assert all(rank["user_s"] > 0.1 for rank in manifest["ranks"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [(e["do"], e["detail"]["host"], e["detail"]["up_bps"]) for e in events] == [
        ("rate", "w0", 20e6),
        ("rate", "w1", 20e6),
    ]
    rows = (folder / "links.csv").read_text().splitlines()
    assert rows[0] == "time_s,link,sent_bytes,sent_frames,dropped_frames,backlog_bytes"
    assert {row.split(",")[1] for row in rows[1:]} == {"w0.up", "w0.down", "w1.up", "w1.down"}


def test_ranks_go_to_the_jobs_workers_or_where_asked(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(scenario_of('hosts = [{ name = "w", count = 3 }]\njobs = [{ workers = ["w1", "w2"] }]'))
    chosen = lab.run(["true"], RunOptions(folder=tmp_path / "a"))
    assert [rank.host for rank in chosen.ranks] == ["w1", "w2"]


def test_failing_rank_fails_the_run_and_ends_the_others(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(hosts=2)
    script = 'if [ "$RANK" = 1 ]; then exit 7; fi; sleep 60'
    began = time.monotonic()
    result = lab.run(["sh", "-c", script], RunOptions(folder=tmp_path / "run", grace_s=0.5))
    assert time.monotonic() - began < 20
    assert not result.ok
    assert "rank 1 on w1 ended with exit code 7" in result.complaints[0]


def test_killed_host_comes_back_and_the_run_goes_on(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(
        scenario_of("""
        hosts = [{ name = "w", count = 2 }]
        faults = [{ at = "300ms", do = "kill", host = "w1", lasts = "200ms" }]
    """)
    )
    script = 'echo "start $TORCHELASTIC_RESTART_COUNT"; if [ "$RANK" = 0 ]; then sleep 1; else sleep 0.6; fi'
    result = lab.run(["sh", "-c", script], RunOptions(folder=tmp_path / "run"))
    assert result.ok, result.complaints
    assert Path(result.ranks[1].log).read_text().split("\n")[:2] == ["start 0", "start 1"]
    assert Path(result.ranks[0].log).read_text().strip() == "start 0"


def test_host_killed_for_good_does_not_fail_the_run(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(
        scenario_of("""
        hosts = [{ name = "w", count = 2 }]
        faults = [{ at = "200ms", do = "kill", host = "w1" }]
    """)
    )
    result = lab.run(["sleep", "0.7"], RunOptions(folder=tmp_path / "run"))
    assert result.ok, result.complaints
    assert [rank.ended_by_fault for rank in result.ranks] == [False, True]


def test_run_that_takes_too_long_is_ended(make_lab: MakeLab, tmp_path: Path) -> None:
    result = make_lab(hosts=2).run(["sleep", "60"], RunOptions(folder=tmp_path / "run", timeout_s=0.5))
    assert "after 0.5 s these ranks still ran: 0, 1" in result.complaints[0]


def test_second_run_into_one_folder_is_refused(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(hosts=1)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    with pytest.raises(FabricError, match="holds a run already"):
        lab.run(["true"], RunOptions(folder=tmp_path / "run"))


SEND = """
import os, socket
here, peer = f"10.77.0.{int(os.environ['RANK']) + 1}", "10.77.0.1"
if os.environ["RANK"] == "0":
    server = socket.create_server((peer, 5000)); inward, _ = server.accept()
    while inward.recv(1 << 20): pass
else:
    import time
    for attempt in range(50):
        try:
            out = socket.create_connection((peer, 5000)); break
        except OSError: time.sleep(0.05)
    out.sendall(bytes(2_000_000)); out.close()
"""


def test_capture_holds_every_frame_in_plain_form(make_lab: MakeLab, tmp_path: Path) -> None:
    if not (shutil.which("tcpdump") if os.geteuid() == 0 else shutil.which("dumpcap")):
        pytest.skip("captures need tcpdump (dumpcap without root), and it is not installed")
    lab = make_lab(hosts=2, rate="200mbit")
    options = RunOptions(folder=tmp_path / "run", capture=tmp_path / "pcap")
    result = lab.run([sys.executable, "-c", SEND], options)
    assert result.ok, result.complaints
    assert [each.dropped for each in result.captures] == [0, 0]
    if os.geteuid() != 0:
        return
    payload, longest, count = read_pcap(tmp_path / "pcap" / "w1.pcap")
    assert count == result.captures[1].frames
    assert longest == 1514
    assert payload >= 2_000_000


def read_pcap(file: Path) -> tuple[int, int, int]:
    """TCP payload sent to port 5000, the longest frame, and how many frames; nanosecond stamps."""
    data = file.read_bytes()
    magic, snap = struct.unpack_from("<I", data)[0], struct.unpack_from("<I", data, 16)[0]
    assert magic == 0xA1B23C4D
    assert snap == 96
    at, payload, longest, count = 24, 0, 0, 0
    while at < len(data):
        _, _, kept, length = struct.unpack_from("<IIII", data, at)
        frame = data[at + 16 : at + 16 + kept]
        at += 16 + kept
        count += 1
        longest = max(longest, length)
        if frame[12:14] == b"\x08\x00" and frame[23] == 6:
            header = 14 + 4 * (frame[14] & 15)
            if struct.unpack_from(">H", frame, header + 2)[0] == 5000:
                payload += (
                    struct.unpack_from(">H", frame, 16)[0] - (header - 14) - 4 * (frame[header + 12] >> 4)
                )
    return payload, longest, count


TWO = 'name = "two-{pid}"\nhosts = [{{ name = "w", count = 2, rate = "100mbit" }}]\n'


@pytest.fixture
def two_hosts(tmp_path: Path, lab_is_possible: None) -> Path:
    file = tmp_path / "two.toml"
    file.write_text(TWO.format(pid=os.getpid()))
    return file


def test_command_line_runs_ranks_and_shows_their_lines(two_hosts: Path, tmp_path: Path) -> None:
    done = mlfabric(
        "lab", "run", "two.toml", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0 w0] rank 0 of 2", "[1 w1] rank 1 of 2"]
    assert "every link measured as asked" in done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_failed_run_exits_with_1(two_hosts: Path, tmp_path: Path) -> None:
    done = mlfabric("lab", "run", "two.toml", "--", "false", cwd=tmp_path)
    assert done.returncode == 1
    assert "ended with exit code 1" in done.stderr


def test_up_status_exec_and_down(two_hosts: Path, tmp_path: Path) -> None:
    name = f"two-{os.getpid()}"
    try:
        assert mlfabric("lab", "up", "two.toml", cwd=tmp_path).returncode == 0
        assert f"{name}: up, 2 hosts" in mlfabric("lab", "status", cwd=tmp_path).stdout
        shown = mlfabric("lab", "status", "two.toml", cwd=tmp_path).stdout
        assert "w1.down" in shown
        assert "100 Mb/s" in shown
        inside = mlfabric("lab", "exec", name, "w1", "--", "sh", "-c", "hostname; exit 3", cwd=tmp_path)
        assert (inside.stdout, inside.returncode) == ("w1\n", 3)
    finally:
        down = mlfabric("lab", "down", "two.toml", cwd=tmp_path)
    assert down.stdout == f"lab {name} is down\n"
    again = mlfabric("lab", "down", "two.toml", cwd=tmp_path)
    assert (again.stdout, again.returncode) == (f"lab {name} was not up\n", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_nothing_running(two_hosts: Path, tmp_path: Path, number: int) -> None:
    before = network_namespaces()
    with subprocess.Popen(
        [sys.executable, "-c", "from mlfabric.cli import main; main()", "lab", "run", "two.toml", "--",
         "sh", "-c", "echo on $$; sleep 300 & sleep 300"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path, env=ENVIRONMENT,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        ranks = [int(run.stdout.readline().split()[-1]) for _ in range(2)]
        run.send_signal(number)
        code = run.wait(20)
    assert code == (130 if number == signal.SIGINT else -9)
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up and (network_namespaces() - before or any(map(alive, ranks))):
        time.sleep(0.02)
    assert not network_namespaces() - before
    assert not any(map(alive, ranks))
    if number == signal.SIGINT:
        manifest = json.loads(next((tmp_path / "runs").iterdir()).joinpath("manifest.json").read_text())
        assert manifest["state"] == "failed"


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "missing.toml", "--", "true"], "can't read scenario missing.toml"),
        (["up", "no-such-scenario"], "no shipped scenario of that name"),
        (["run", "bad.toml", "--", "true"], "bad.toml:1: unknown key 'hotss'"),
        (["exec", "two.toml", "w0", "--", "true"], "is not up; make it with"),
        (["run", "two.toml", "--timeout", "soon", "--", "true"], "'soon' is not a time"),
        (["run", "two.toml", "--host", "x*", "--", "true"], r"no host matches x*"),
        (["run", "two.toml", "--ranks-per-host", "0", "--", "true"], "at least one rank"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    two_hosts: Path, tmp_path: Path, words: list[str], sentence: str
) -> None:
    (tmp_path / "bad.toml").write_text('hotss = [{ name = "w" }]\n')
    done = mlfabric("lab", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("mlfabric: ")]) == 1


TOGETHER = """
import os, time
from mlfabric.lab import inside
time.sleep(0.5 * int(os.environ["RANK"]))
began = inside().begin_together()
print(began, time.monotonic() >= began, flush=True)
time.sleep(60)
"""


def test_scenario_begins_when_all_are_ready_and_ends_when_asked(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(scenario_of('hosts = [{ name = "w", count = 2 }]'))

    def said() -> list[str]:
        return [log.read_text() for log in sorted((tmp_path / "run" / "logs").iterdir())]

    options = RunOptions(folder=tmp_path / "run", together=True, until=lambda seconds: all(said()))
    result = lab.run([sys.executable, "-c", TOGETHER], options)
    assert result.ok, result.complaints
    assert result.seconds < 30
    first, second = said()
    assert first == second
    assert first.endswith("True\n")


def test_rank_that_ends_before_it_is_ready_fails_the_run(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(scenario_of('hosts = [{ name = "w", count = 2 }]'))
    with pytest.raises(FabricError, match=r"before it was ready"):
        lab.run(["false"], RunOptions(folder=tmp_path / "run", together=True))
