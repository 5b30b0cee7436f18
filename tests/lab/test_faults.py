"""Cuts, kills and pauses strike what they should and nothing else."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from mlfabric.errors import FabricError
from mlfabric.lab import Lab
from mlfabric.lab.testing import MakeLab
from mlfabric.scenario import parse
from tests.lab.streams import can_reach


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, wanted: str) -> bool:
    give_up = time.monotonic() + 3
    while time.monotonic() < give_up:
        if state_of(pid) in wanted:
            return True
        time.sleep(0.005)
    return False


def started(lab: Lab, host: str, script: str) -> subprocess.Popen[bytes]:
    """A shell on the host that has come as far as running the script."""
    process = lab.host(host).popen(["sh", "-c", f"echo; {script}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_cut_host_is_silent_until_healed(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=3)
    lab.host("w1").cut()
    assert not can_reach(lab, "w0", "w1")
    assert not can_reach(lab, "w1", "w0")
    assert can_reach(lab, "w0", "w2")
    lab.host("w1").heal()
    assert can_reach(lab, "w0", "w1")
    assert can_reach(lab, "w1", "w0")


def test_cut_one_way_loses_one_way_only(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2)
    assert can_reach(lab, "w0", "w1")  # both know the other's hardware address
    lab.cut("w0", direction="out")
    assert not can_reach(lab, "w0", "w1")
    assert can_reach(lab, "w1", "w0")
    lab.heal("w0")
    lab.cut("w0", direction="in")
    assert can_reach(lab, "w0", "w1")
    assert not can_reach(lab, "w1", "w0")


def test_cut_path_leaves_other_paths_alone(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=3)
    lab.cut("w0", "w1")
    assert not can_reach(lab, "w0", "w1")
    assert not can_reach(lab, "w1", "w0")
    assert can_reach(lab, "w0", "w2")
    assert can_reach(lab, "w2", "w1")
    lab.heal("w0", "w1")
    assert can_reach(lab, "w0", "w1")


def test_cut_path_one_way(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2)
    assert can_reach(lab, "w0", "w1")
    lab.cut("w0", "w1", direction="in")
    assert can_reach(lab, "w0", "w1")
    assert not can_reach(lab, "w1", "w0")


def test_kill_pause_and_resume_strike_one_host(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2)
    with started(lab, "w0", "sleep 60 & sleep 60") as victim, started(lab, "w1", "sleep 60") as other:
        assert victim.pid in lab.host("w0").pause()
        assert wait_for_state(victim.pid, "T")
        assert state_of(other.pid) in "SRD"
        lab.host("w0").resume()
        assert wait_for_state(victim.pid, "SR")
        lab.host("w0").kill()
        assert victim.wait(3) == -9
        assert other.poll() is None
        lab.host("w1").kill()


def test_fault_plan_and_trace_are_played_on_time(make_lab: MakeLab) -> None:
    scenario = parse("""
        seed = 5
        duration = "600ms"
        hosts = [{ name = "w", count = 3, rate = "50mbit" }]
        traces = [{ every = "100ms", choose = [1, 0.5, 0.25] }]
        faults = [
          { at = "150ms", do = "cut", between = ["w0", "w1"], lasts = "200ms" },
          { at = "250ms", do = "pause", host = "w2" },
        ]
    """)
    lab = make_lab(scenario)
    lab.play()
    time.sleep(0.7)
    done = [entry for entry in lab.done() if entry["at_s"] < 0.6]
    rates = [(e["detail"]["host"], e["detail"]["up_bps"]) for e in done if e["do"] == "rate"]
    assert rates == [(change.host, change.up_bps) for change in scenario.rate_changes()]
    faults = [(e["do"], round(e["at_s"], 1)) for e in done if e["do"] != "rate"]
    assert [do for do, _ in faults] == ["cut", "pause", "heal"]
    planned = [c.at_s for c in scenario.rate_changes()]
    happened = [e["at_s"] for e in done if e["do"] == "rate"]
    assert all(0 <= late - due < 0.1 for due, late in zip(planned, happened, strict=True))
    assert can_reach(lab, "w0", "w1")


def test_unknown_host_and_direction_are_said_in_a_sentence(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2)
    with pytest.raises(FabricError, match="no host w7"):
        lab.cut("w7")
    with pytest.raises(FabricError, match="not 'up'"):
        lab.cut("w0", direction="up")


def test_background_traffic_keeps_its_rate_and_its_times(make_lab: MakeLab) -> None:
    scenario = parse("""
        hosts = [{ name = "w", count = 2, rate = "100mbit" }]
        background = [{ source = "w0", target = "w1", rate = "40mbit", stop = "2s" }]
    """)
    lab = make_lab(scenario)
    lab.play()
    time.sleep(0.9)
    before, began = lab.counters()["w1.down"]["sent_bytes"], time.monotonic()
    time.sleep(0.8)
    after, ended = lab.counters()["w1.down"]["sent_bytes"], time.monotonic()
    assert 8 * (after - before) / (ended - began) == pytest.approx(40e6, rel=0.06)
    time.sleep(0.6)
    quiet = lab.counters()["w1.down"]["sent_bytes"]
    time.sleep(0.2)
    assert lab.counters()["w1.down"]["sent_bytes"] - quiet < 2000


def test_command_on_a_host_knows_its_name_and_its_peers(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=2)
    done = lab.host("w1").run(
        ["sh", "-c", "hostname; getent hosts w0"], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.split() == ["w1", "10.77.0.1", "w0"]
