"""The engine in a process of its own: the same answers, and an end on both sides when one of them dies."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.api import Fabric
from mlfabric.runtime import lag
from mlfabric.runtime.remote import RemoteEngine
from tests.test_imports import reached


def remote(fabric: Fabric) -> RemoteEngine:
    assert isinstance(fabric._engine, RemoteEngine)
    return fabric._engine


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with mf.local(workers=2, engine="process") as fabric:
        yield fabric


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- the same answers -------------------------------------------------------------------------------------


def test_arrays_of_both_kinds_of_memory_are_reduced_in_place(fabric: Fabric) -> None:
    def work(member: Fabric) -> None:
        shared = member.empty((300, 1000))
        assert remote(member).shared.arena.locate(shared) is not None
        for array in (shared, np.empty((300, 1000), np.float32)):
            array[:] = 2.0
            assert member.all_reduce(array, timeout=20) is array
            assert (array == 4.0).all()
        with pytest.raises(mf.FabricError, match="avg needs a fraction"):
            member.all_reduce(np.ones(4, np.int32), timeout=20, combine="avg")

    fabric.run(work, 60)


def test_shared_memory_is_used_again(fabric: Fabric) -> None:
    def work(member: Fabric) -> int:
        arena = remote(member).shared.arena
        for _ in range(30):
            member.all_reduce(np.ones(1_000_000, np.float32), timeout=20)
        gc.collect()
        member.all_reduce(np.ones(1), timeout=20)
        wait_for(lambda: arena.used_bytes < 2**20)
        return arena.size_bytes

    assert max(fabric.run(work, 60)) == 64 * 2**20


def test_a_model_is_trained_pulled_kept_and_checkpointed(fabric: Fabric) -> None:
    def work(member: Fabric) -> Any:
        model = {"w": np.zeros((100, 10), np.float32), "b": np.zeros(3, np.float32)}
        member.publish(model, apply=mf.SGD(lr=0.5, momentum=0.5))
        first = member.pull()
        for _ in range(4):
            member.pull()
            outcome = member.push({"w": np.ones((100, 10)), "b": np.full(3, 0.5)}).result(20)
            assert isinstance(outcome, mf.Committed)
        assert not first.arrays["w"].any()  # later pulls do not come over it
        with pytest.raises(mf.FabricError, match="infinite or undefined"):
            member.push({"w": np.full((100, 10), np.inf), "b": np.zeros(3)})
        with pytest.raises(mf.ShapeMismatch, match="shape"):
            member.push({"w": np.ones(3), "b": np.zeros(3)})
        return member.name

    fabric.run(work, 60)
    state = fabric.state_dict()
    assert state["version"] == 8
    model = fabric.pull()
    np.testing.assert_array_equal(model.arrays["w"], state["weights"]["w"])
    assert np.ptp(model.arrays["w"]) == 0
    assert model.arrays["w"][0, 0] < -2
    assert state["state"]["vector0"]["b"].shape == (3,)
    assert sum(fabric.traffic.sent.values()) > 0


def test_a_call_that_waits_names_who_did_not_come(fabric: Fabric) -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 \(w1\) did not come"):
        fabric.all_reduce(np.zeros(3), timeout=0.5)
    fabric.workers[1].all_reduce(np.zeros(3), timeout=20)


def test_what_the_process_logs_reaches_our_handlers(fabric: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    import socket

    host, _, port = fabric.address.rpartition(":")
    with caplog.at_level(logging.WARNING, "mlfabric"), socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_for(lambda: "closed a connection from 127.0.0.1" in caplog.text)


# --- the end ----------------------------------------------------------------------------------------------


def test_the_death_of_the_process_is_one_clear_error_at_once() -> None:
    with mf.local(workers=2, engine="process") as fabric:
        failed: list[str] = []

        def work() -> None:
            with pytest.raises(mf.FabricError) as caught:
                fabric.all_reduce(np.zeros(10), timeout=30)
            failed.append(str(caught.value))

        thread = threading.Thread(target=work)
        thread.start()
        os.kill(remote(fabric).process_id, signal.SIGKILL)
        thread.join(20)
        assert failed == ["the engine's process of w0 was ended by signal 9; join again"]
        assert fabric.gone
        with pytest.raises(mf.FabricError, match="ended by signal 9"):
            fabric.all_reduce(np.zeros(10))
        with pytest.raises(mf.FabricError, match="ended by signal 9"):
            fabric.publish({"w": np.zeros(3, np.float32)}, apply=mf.Sum())


def test_a_process_that_cannot_begin_says_why() -> None:
    with pytest.raises(mf.FabricError, match="without a secret"):
        mf.join("0.0.0.0:0", name="a", scheduler=True, engine="process")
    with pytest.raises(mf.FabricError, match="unknown engine 'thraed'"):
        mf.join("127.0.0.1:0", engine="thraed")


SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
import mlfabric as mf

def join():
    held.append(mf.join("127.0.0.1:0", name="a", scheduler=True, engine="process"))

held = []
if "in-thread" in sys.argv:
    thread = threading.Thread(target=join)
    thread.start()
    thread.join()
else:
    join()
if "forked" in sys.argv and not os.fork():  # as a data loader's worker is: it has a copy of our socket
    time.sleep(60)
    os._exit(0)
fabric = held[0]
fabric.all_reduce(np.ones(3))
try:
    print(fabric._engine.process_id, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    array = np.ones(3)
    fabric.all_reduce(array)
    print("still there", array.sum(), flush=True)
    fabric.close()
"""


def run_script(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *options], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize("how", ["", "in-thread", "forked in-thread"])
def test_the_process_ends_with_the_one_that_started_it(how: str) -> None:
    with run_script(*how.split()) as script:
        assert script.stdout is not None
        process = int(script.stdout.readline())
        assert is_alive(process)
        os.kill(script.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(process))
        os.killpg(script.pid, signal.SIGKILL)  # the fork


def test_control_c_is_for_the_script_alone() -> None:
    with run_script() as script:
        assert script.stdout is not None
        process = int(script.stdout.readline())
        os.killpg(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "still there 3.0\n"
        assert script.wait(20) == 0
        wait_for(lambda: not is_alive(process))


def test_nothing_on_the_way_imports_pickle() -> None:
    for module in ("mlfabric.runtime.remote", "mlfabric.runtime.outpost"):
        used = {name.split(".")[0] for name in reached(module)}
        assert not used & {"pickle", "multiprocessing", "marshal", "shelve"}


# --- what a thread costs ----------------------------------------------------------------------------------


def test_a_thread_that_holds_the_interpreter_shows() -> None:
    ended = threading.Event()

    def hold() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert lag.mean_lag(10, 0.005) > 0.0005
    finally:
        ended.set()
        thread.join()


def test_the_watch_says_what_it_saw_and_what_to_do() -> None:
    assert lag.verdict(0.0001, 0.01) == ""
    assert "4.0 ms late" in lag.verdict(0.004, 0.01)
    assert "12% of a processor" in lag.verdict(0.0001, 0.12)
    assert "engine='process'" in lag.verdict(0.0001, 0.12)
