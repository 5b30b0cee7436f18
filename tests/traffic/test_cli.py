"""The commands as people and scripts call them: output, exit codes, one sentence for every mistake."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlfabric.errors import FabricError
from mlfabric.traffic.cli import group
from tests.traffic import capture_bytes as made


def run(*words: object) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        group([str(word) for word in words])
    return shown.getvalue()


def run_json(*words: object) -> Any:
    return json.loads(run(*words, "--json"))


def refused(*words: object) -> str:
    with pytest.raises(FabricError) as caught:
        run(*words)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "servers.pcap"
    run("synth", path, "--pattern", "ps-naive", "--size", "500kB", "--period", "20ms", "--iterations", 8)
    return path


def test_analyze_json_has_the_promised_names(servers: Path) -> None:
    found = run_json("analyze", servers, "--by", "host", "--line-rate", "10gbit", "--rates", "1gbit,2.5e9")
    for name in (
        "packets", "bytes", "span_s", "mean_rate_bps", "conventions", "scales", "observation_s", "backlog",
        "bursts", "period_s", "warnings",
    ):  # fmt: skip
        assert name in found
    for name in (
        "tau_s", "envelope_bytes", "peak_to_mean", "peak_start_s", "p99_bytes", "idc", "idc_bytes",
        "binned_bytes",
    ):  # fmt: skip
        assert name in found["scales"][0]
    assert len(found["scales"]) == 19
    assert found["scales"][-1]["envelope_bytes"] is None  # 10 s exceed the span
    assert [row["rate_bps"] for row in found["backlog"]] == [1e9, 2.5e9]
    assert found["period_s"] == pytest.approx(0.02, rel=1e-3)
    assert found["bursts"]["count"] >= 8
    assert {group["name"] for group in found["groups"]} >= {"10.77.0.1 in", "10.77.0.1 out"}
    assert sum(flow["bytes"] for flow in found["flows"]) == found["bytes"]
    by_flow = run_json("analyze", servers, "--by", "flow", "--quick", "--scales", "5ms")
    assert len(by_flow["groups"]) == 6
    assert by_flow["scales"][0]["p99_bytes"] is None


def test_analyze_speaks_to_people_and_states_its_conventions(servers: Path) -> None:
    shown = run(
        "analyze", servers, "--layer", "wire", "--model", "fluid", "--line-rate", "10gbit", "--by", "pair"
    )
    for words in (
        "bytes: wire",
        "arrivals: fluid",
        "mean over: 7 whole",
        "peak:mean",
        "period 20 ms",
        "by pair",
    ):
        assert words in shown


def test_bursts_and_series_add_up(servers: Path) -> None:
    bursts = run_json("bursts", servers, "--theta", "1ms")
    series = run_json("series", servers, "--bin", "5ms")
    assert sum(row["bytes"] for row in bursts["list"]) == series["bytes"] == sum(series["bytes_per_bin"])
    assert bursts["theta_from"] == "given"
    assert "bursts after pauses" in run("bursts", servers)
    lines = run("series", servers, "--bin", "5ms").splitlines()
    assert lines[0] == "time_s,bytes"
    assert lines[2].startswith("0.005000000,")


def test_a_written_series_reads_back_as_a_table(servers: Path, tmp_path: Path) -> None:
    table = tmp_path / "series.csv"
    table.write_text(run("series", servers, "--bin", "1ms"))
    assert run_json("analyze", table)["bytes"] == run_json("series", servers)["bytes"]


def test_extrapolate_orchestration_and_compare(servers: Path) -> None:
    words = ("--link", "40gbit", "--buffer", "4MB", "--ecn", "200kB", "--draws", 5)
    found = run_json("extrapolate", servers, "--jobs", 3, *words, "--control", "dctcp")
    assert found["jobs"] == 3
    assert set(found["laws"]) == {"aligned", "random", "best", "drift"}
    assert {row["control"] for row in found["closed_loop"]} == {"none", "dctcp"}
    assert found["jobs_that_fit"]["worst_case"] <= found["jobs_that_fit"]["by_mean_rate"]
    assert "jobs that fit without loss" in run("extrapolate", servers, "--jobs", 2, *words)
    verdicts = run_json("orchestration", servers, "--side", "sender", "--port-rate", "10gbit", "--shifts", 19)
    assert verdicts["hosts"][0]["verdict"] in ("collides", "like chance")
    assert "receiving host" in run("orchestration", servers, "--shifts", 9)
    both = run_json("compare", servers, servers, "--scales", "1ms,5ms")
    assert [row["times_lower"] for row in both["scales"]] == pytest.approx([1, 1])
    assert "times lower" in run("compare", servers, servers)


def test_the_report_is_one_file_that_loads_nothing(servers: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    run(
        "analyze",
        servers,
        "--scales",
        "1ms,5ms",
        "--html",
        page,
        "--line-rate",
        "10gbit",
        "--vantage",
        "<h1> eth0",
    )
    text = page.read_text()
    own = text.replace(__import__("plotly.offline", fromlist=["x"]).get_plotlyjs(), "")
    assert "src=" not in own
    assert "href=" not in own
    assert "http" not in own
    assert "&lt;h1&gt; eth0" in own
    for chart in ("time", "peak", "ptm", "envelope", "backlog", "bursts", "sending", "receiving", "jobs"):
        assert f'"id": "{chart}"' in own
    assert "collide with itself" in own


def test_charts_are_written_as_png(servers: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("analyze", servers, "--scales", "1ms,5ms", "--png", tmp_path / "charts")
    names = {path.name for path in (tmp_path / "charts").iterdir()}
    assert names == {"time.png", "peak-to-mean.png", "envelope.png", "backlog.png", "jobs.png"}
    assert all((tmp_path / "charts" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_every_mistake_is_one_sentence(servers: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pcap"
    empty.write_bytes(made.pcap([]))
    assert "does not exist" in refused("analyze", tmp_path / "none.pcap")
    assert "is a directory" in refused("analyze", tmp_path)
    assert "no packet to analyse" in refused("analyze", empty)
    assert "unknown unit" in refused("analyze", servers, "--scales", "5 parsecs")
    assert "unknown unit" in refused("analyze", servers, "--rates", "1furlong")
    assert "--layer" in refused("analyze", servers, "--layer", "l7")
    assert "--by" in refused("analyze", servers, "--by", "colour")
    assert "--line-rate" in refused("analyze", servers, "--model", "fluid")
    assert "none with host 1.2.3.4" in refused("analyze", servers, "--host", "1.2.3.4")
    assert "can't be written" in refused("synth", tmp_path / "no" / "such.pcap")
    assert "--list" in refused("bursts", servers, "--list", "-1")
    assert "did you mean --quick" in refused("analyze", servers, "--quik")
    bad = tmp_path / "bad.csv"
    bad.write_text("time_s,bytes\n1.5,many\n")
    assert "line 2: 'many' is not a whole number of bytes" in refused("analyze", bad)
    assert "--control" in refused("extrapolate", servers, "--control", "hope")
    assert (
        "no interface 'nonesuch'" in refused("capture", "-i", "nonesuch", "--duration", "1s")
        or os.getuid() != 0
    )


def test_without_root_the_meter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(socket, "socket", forbidden)
    assert "needs root" in refused("capture", "-i", "lo", "--duration", "1s")


def test_a_whole_process_ends_with_code_two_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from mlfabric.cli import main; main()", "traffic", "analyze"]
    missing = str(tmp_path / "nowhere.pcap")
    ended = subprocess.run([*command, missing], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"mlfabric: {missing} does not exist\n"


def test_a_reader_that_goes_away_is_no_error(servers: Path) -> None:
    command = f"{sys.executable} -c 'from mlfabric.cli import main; main()' traffic analyze {servers}"
    ended = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0
    assert ended.stderr == ""


def test_a_capture_without_pictures_imports_nothing_slow(servers: Path) -> None:
    script = (
        "import sys; sys.argv.insert(1, 'traffic'); from mlfabric.cli import main; main();"
        "slow = {'plotly', 'matplotlib', 'pyarrow', 'pywt', 'rich', 'scipy', 'pydantic', 'typer'} & "
        "set(sys.modules);"
        "sys.stderr.write(repr(sorted(slow)))"
    )
    words = ["analyze", str(servers), "--quick", "--json"]
    ended = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert ended.stderr == "[]"
