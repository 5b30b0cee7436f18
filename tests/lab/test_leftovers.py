"""A lab removes all it made, after every kind of end, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlfabric.errors import FabricError
from mlfabric.lab import Lab
from mlfabric.lab.manifest import MachineLoad
from mlfabric.lab.record import find, labs_folder, records
from mlfabric.lab.session import take_down
from mlfabric.lab.testing import MakeLab, plain_scenario
from tests.lab.streams import MUCH_STOLEN, can_reach

UNSHARE = (
    "import ctypes, time; assert ctypes.CDLL(None).unshare(0x40000000) == 0; print('in'); time.sleep(60)"
)


def network_namespaces() -> set[int]:
    """Inodes of all namespaces that any process is in or holds open."""
    found = set()
    for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("net:["):
                        found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    return found


def namespaces_of(lab: Lab) -> set[int]:
    return {entry["inode"] for entry in lab.record.read()["namespaces"].values()}


def wait_until_gone(inodes: set[int], pids: list[int]) -> None:
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        if not inodes & network_namespaces() and not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.01)
    raise AssertionError(f"left behind: {inodes & network_namespaces()}, {pids}")


@pytest.fixture
def foreign_namespace() -> Iterator[subprocess.Popen[str]]:
    """A namespace of someone else with a process in it."""
    if os.geteuid() != 0:
        pytest.skip("making a namespace outside a lab needs root")
    with subprocess.Popen([sys.executable, "-c", UNSHARE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_nothing_of_a_lab_shows_in_the_machines_own_namespace(make_lab: MakeLab) -> None:
    before = sorted(os.listdir("/sys/class/net"))
    lab = make_lab(hosts=4)
    assert sorted(os.listdir("/sys/class/net")) == before
    assert can_reach(lab, "w0", "w3")


def test_down_leaves_nothing_behind_and_may_be_repeated(make_lab: MakeLab) -> None:
    lab = make_lab(hosts=3)
    inodes, folder = namespaces_of(lab), lab.record.folder
    with lab.host("w1").popen(["sh", "-c", "echo; sleep 60"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        lab.down()
        assert process.wait(5) == -signal.SIGKILL
    lab.down()
    wait_until_gone(inodes, [])
    assert not folder.exists()


def test_two_labs_of_one_scenario_do_not_collide(make_lab: MakeLab) -> None:
    one, two = make_lab(hosts=2, rate="20mbit"), make_lab(hosts=2, rate="20mbit")
    assert not namespaces_of(one) & namespaces_of(two)
    one.cut("w0")
    assert not can_reach(one, "w0", "w1")
    assert can_reach(two, "w0", "w1")
    one.down()
    assert can_reach(two, "w1", "w0")


@pytest.mark.usefixtures("lab_is_possible")
def test_second_lab_of_one_name_is_refused_while_the_first_is_up() -> None:
    first = Lab(plain_scenario(1), name=f"only-{os.getpid()}", verify=False)
    first.up(attached=False)
    try:
        with pytest.raises(FabricError, match="already up; take it down with"):
            Lab(plain_scenario(1), name=first.name).up(attached=False)
        before = {record.folder for record in records()}
        with Lab.attach(first.name) as again:
            assert again.describe()["hosts"] == {"w0": "10.77.0.1"}
            assert {record.folder for record in records()} == before
        assert first.describe()["hosts"]
    finally:
        first.leave()
        assert take_down(first.name)
    assert not take_down(first.name)


MAKER = """
import sys, time
from mlfabric.lab import Lab
from mlfabric.lab.testing import plain_scenario
lab = Lab(plain_scenario(2), verify=False)
lab.up()
child = lab.host("w0").popen(["sleep", "60"])
record = lab.record.read()
print(record["anchor"], child.pid, *[n["inode"] for n in record["namespaces"].values()], flush=True)
time.sleep(60)
"""


def started_maker() -> tuple[subprocess.Popen[str], int, int, set[int]]:
    """A process that has made a lab with a command running in it: itself, anchor, command, namespaces."""
    process = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    anchor, command, *inodes = map(int, process.stdout.readline().split())
    return process, anchor, command, set(inodes)


@pytest.mark.usefixtures("lab_is_possible")
def test_kill_9_of_the_maker_takes_the_lab_with_it(foreign_namespace: subprocess.Popen[str]) -> None:
    before = {record.folder for record in records()}
    process, anchor, command, inodes = started_maker()
    with process:
        process.kill()
    wait_until_gone(inodes, [anchor, command])
    assert {record.folder for record in records()} <= before
    assert foreign_namespace.poll() is None


@pytest.mark.usefixtures("lab_is_possible")
def test_down_cleans_up_after_kill_9_of_maker_and_anchor(foreign_namespace: subprocess.Popen[str]) -> None:
    process, anchor, command, inodes = started_maker()
    with process:
        process.kill()
        os.kill(anchor, signal.SIGKILL)
    assert Path(f"/proc/{command}").exists()
    dead = [r for r in records() if r.read().get("anchor") == anchor]
    assert len(dead) == 1
    dead[0].remove()
    dead[0].remove()
    wait_until_gone(inodes, [anchor, command])
    assert not dead[0].folder.exists()
    assert foreign_namespace.poll() is None


def test_recorded_number_used_again_by_a_foreign_namespace_is_left_alone(
    make_lab: MakeLab, foreign_namespace: subprocess.Popen[str]
) -> None:
    lab = make_lab(hosts=1)
    content = lab.record.read()
    # As if our namespace had died and the kernel had given its inode to someone else's.
    foreign_inode = os.stat(f"/proc/{foreign_namespace.pid}/ns/net").st_ino
    content["namespaces"]["w0"]["inode"] = foreign_inode
    lab.record.write(content)
    lab.down()
    assert foreign_namespace.poll() is None


def test_32_hosts_are_up_in_under_10_seconds(make_lab: MakeLab) -> None:
    began, load = time.monotonic(), MachineLoad()
    lab = make_lab(hosts=32, rate="100mbit", verify=True)
    took_s = time.monotonic() - began
    load.update()
    if took_s >= 10 and load.stolen_share() > MUCH_STOLEN:
        pytest.skip(f"{load.stolen_share():.0%} of the processors' time went to other machines")
    assert took_s < 10
    inodes = namespaces_of(lab)
    assert len(inodes) == 33
    lab.down()
    wait_until_gone(inodes, [])


def test_folder_of_records_goes_with_the_last_lab(make_lab: MakeLab) -> None:
    others = list(records())
    make_lab(hosts=1).down()
    if not others:
        assert not labs_folder().exists()
    assert find("no-such-lab") is None
