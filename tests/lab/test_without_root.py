"""Without root a lab lives in a user namespace; where the kernel forbids that, one sentence says so."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import mlfabric

NOBODY = 65534
WORK = """
import os, sys
from mlfabric.lab import Lab
from mlfabric.lab.testing import plain_scenario
assert os.geteuid() != 0
with Lab(plain_scenario(2, rate="100mbit")) as lab:
    assert lab.describe()["in_user_namespace"]
    print([round(m["measured_bps"] / 1e7) for m in lab.describe()["measured"]])
    done = lab.host("w1").run(["sh", "-c", "hostname"], capture_output=True, text=True, check=True)
    print(done.stdout.strip())
    lab.cut("w0", "w1")
    folder = lab.record.folder
print(folder.exists())
"""
FORBIDDEN = """
import ctypes
from mlfabric.lab import anchor, kernel
def refuse(flags): raise PermissionError(1, "Operation not permitted")
kernel.unshare = refuse
try:
    anchor._gain_privileges()
except Exception as error:
    print(type(error).__name__, error)
"""


def interpreter_for_nobody() -> str:
    """A Python of our version that a user without rights may run."""
    paths = (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    for path in paths:
        try:
            subprocess.run([path, "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[], check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    pytest.skip("no Python of this version can be run by another user")


def run_as_nobody(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(mlfabric.__path__[0]).parent), sysconfig.get_paths()["purelib"]]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "HOME": "/tmp"}
    if os.geteuid() != 0:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return subprocess.run(
        [interpreter_for_nobody(), "-c", code], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_user_without_rights_gets_a_lab_where_the_kernel_allows(tmp_path: Path) -> None:
    done = run_as_nobody(WORK, tmp_path)
    if "here is neither" in done.stderr:
        pytest.skip("this kernel forbids user namespaces without root")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[10, 10, 10, 10]", "w1", "False"]


def test_where_neither_is_possible_one_sentence_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "FabricError a lab needs root, or a kernel that lets users make user namespaces"
    )
    assert len(done.stdout.splitlines()) == 1
