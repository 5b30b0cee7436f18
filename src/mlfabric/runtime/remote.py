"""The training process's side of an engine that runs in a process of its own (`runtime.outpost`).

It offers what `runtime.engine` offers to the application. Arrays go over in shared memory: those that were
made by `empty` as they are, others are copied once in and, where results come back, once out. When either
process ends, the other notices at once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import numpy as np

import mlfabric
from mlfabric import errors
from mlfabric.client import Client
from mlfabric.config import Settings
from mlfabric.errors import FabricError
from mlfabric.events import Event
from mlfabric.groupcalls import WORD_S, GroupHandle, OperationCall
from mlfabric.numerics import Vector
from mlfabric.roles.actions import FailJob, ResolvePull
from mlfabric.runtime import orders
from mlfabric.runtime.arena import SharedMemory
from mlfabric.runtime.channel import Channel
from mlfabric.runtime.counters import Traffic
from mlfabric.runtime.remote_groups import PendingCall, RemoteGroups

logger = logging.getLogger("mlfabric")

# How long the new process may take to come up, besides what it takes to find the scheduler.
START_S = 30.0
# How long it may take to end, besides the time it lingers.
END_S = 5.0
CPUCLOCK_SCHED = 2  # in the number of a process's clock, see clock_getcpuclockid(3)


class NoProcessError(FabricError):
    """The engine's process could not be started."""


class RemoteEngine:
    def __init__(self, settings: Settings, roles: tuple[str, ...], timeout: float) -> None:
        self.name = settings.name
        self.leader = ""
        self._owner = os.getpid()
        self._ended: str | None = None  # why nothing more will come
        self._stopping = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, PendingCall] = {}
        self._questions: dict[int, Future[Any]] = {}
        self._begun: Future[tuple[str, int]] = Future()
        self.shared = SharedMemory(self._announce)
        self._channel, self._process = self._start()
        self.groups = RemoteGroups(self)
        self._courier = RemoteCourier(self)
        self.client = Client(self._courier, self.groups)
        self._thread = threading.Thread(target=self._read, name=f"mlfabric-{self.name}", daemon=True)
        self._thread.start()
        self._send(
            orders.Begin(
                orders.to_plain(settings),
                roles,
                timeout,
                logger.getEffectiveLevel(),
                os.getpid(),
                threading.current_thread() is threading.main_thread(),
            )
        )
        try:
            self.address = self._begun.result(timeout + START_S)
        except FutureTimeout:
            self.kill()
            raise NoProcessError(f"the engine's process of {self.name} did not come up in time") from None
        except FabricError:
            self.kill()
            raise

    def _start(self) -> tuple[Channel, subprocess.Popen[bytes]]:
        """A new program, not a copy of this process: its threads and locks would be copied half."""
        ours, theirs = socket.socketpair()
        package = str(Path(mlfabric.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "mlfabric.runtime.outpost", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)},
                )
            except OSError as error:
                ours.close()
                raise NoProcessError(f"can't start the engine's process: {error.strerror}") from None
        return Channel(ours, orders.ToApplication), process

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def own_processor_s(self) -> float:
        """Processor time of the engine's process, which this one's does not count."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | CPUCLOCK_SCHED)
        except OSError:
            return 0.0  # it has ended

    @property
    def traffic(self) -> Traffic:
        """Payload bytes sent to and received from each peer, as the engine counts them now."""
        counts = self._counts()
        return Traffic(counts.sent, counts.received) if counts is not None else Traffic()

    @property
    def noticed_s(self) -> list[float]:
        counts = self._counts()
        return counts.noticed_s if counts is not None else []

    @property
    def workers(self) -> tuple[str, ...]:
        """Of our job, as the scheduler last told."""
        counts = self._counts()
        return counts.workers if counts is not None else ()

    def stop(self, linger_s: float = 1.0) -> None:
        """Have it wait for the scheduler's good-bye, for a short while at most, and end."""
        if os.getpid() != self._owner:
            return  # a fork has our socket, not the engine
        self._stopping = True
        self._send(orders.Stop(linger_s))
        try:
            self._process.wait(linger_s + END_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine's process of %s did not end in time and was killed", self.name)
        self.kill()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        self._channel.close()

    # --- to it ------------------------------------------------------------------------------------------

    def _announce(self, number: int, descriptor: int, size: int) -> None:
        self._send(orders.SegmentMade(number, size), descriptor)

    def _send(self, record: orders.Record, *descriptors: int) -> None:
        if os.getpid() != self._owner:
            raise FabricError(f"{self.name} belongs to the process that joined; a fork of it can't use it")
        loans = self.shared.to_return()
        records = [record] if not loans else [orders.LoansReturned(loans), record]
        with contextlib.suppress(OSError):  # its end is noticed where it is read
            self._channel.send(*records, descriptors=descriptors)

    def post(self, role: str, event: Event, buffer: str, vector: Vector | None) -> None:
        region, dtype = None, ""
        if vector is not None:
            region, dtype = self.shared.lend(vector)[0], str(vector.dtype)
        self._send(orders.Tell(role, event, buffer, region, dtype))  # type: ignore[arg-type]

    def leave(self) -> None:
        if os.getpid() == self._owner:
            self._send(orders.Leave())

    def say(self, record: orders.Record) -> None:
        self._send(record)

    def begin(self, call: OperationCall, order: Callable[[int], orders.Record], pending: PendingCall) -> None:
        """Have a call run; it ends here, whatever happens there."""
        with self._lock:
            ended = self._ended
            call.number = next(self._numbers)
            if ended is None:
                self._calls[call.number] = pending
        if ended is not None:
            call.end(ended)
        else:
            self._send(order(call.number))

    def ask(self, question: Callable[[int], orders.Record], timeout_s: float = WORD_S) -> Any:
        """An answer of the engine; None: there was none in time."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                return None
            number = next(self._numbers)
            self._questions[number] = answer
        self._send(question(number))
        try:
            return answer.result(timeout_s)
        except FutureTimeout:
            return None
        finally:
            self._questions.pop(number, None)

    def _counts(self) -> orders.Counts | None:
        counts: orders.Counts | None = self.ask(orders.AskCounts)
        return counts

    # --- from it ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (records := self._channel.receive()) is not None:
                for record in records:
                    self._take(record)
        except Exception:  # the thread must not die silently: whoever waits would wait for ever
            logger.exception("what the engine's process of %s said can't be used", self.name)
            self._process.kill()
        self._end()

    def _take(self, record: Any) -> None:
        match record:
            case orders.Answered(action=action, regions=regions, dtypes=dtypes):
                if isinstance(action, ResolvePull):
                    for index, (region, dtype) in enumerate(zip(regions, dtypes, strict=True)):
                        self._courier.hold(f"pull/{action.pull}/{index}", self.shared.borrow(region, dtype))
                self.client.resolve(action)
            case orders.CallEnded(number=number):
                pending = self._calls.pop(number, None)
                if pending is not None:
                    self._finish(pending, record)
            case orders.GroupReady(number=number):
                pending = self._calls.pop(number, None)
                if pending is not None:
                    handle = GroupHandle(record.group, record.name, record.nodes, record.rank)
                    pending.call.end(None, handle)
            case orders.LoansReturned(loans=loans):
                self.shared.returned(loans)
            case orders.SegmentMade(number=number, size_bytes=size):
                self.shared.add_segment(number, self._channel.descriptor(), size)
            case orders.Why(question=question) | orders.Counts(question=question):
                asked = self._questions.get(question)
                if asked is not None:
                    asked.set_result(record)
            case orders.Logged(level=level, text=text):
                logger.log(level, "%s", text)
            case orders.Begun(host=host, port=port, leader=leader):
                self.leader = leader
                self._begun.set_result((host, port))
            case orders.NotBegun(kind=kind, reason=reason):
                self._begun.set_exception(getattr(errors, kind, FabricError)(reason))

    def _finish(self, pending: PendingCall, ended: orders.CallEnded) -> None:
        if ended.error is None:
            for target, source in pending.copies:
                np.copyto(target, source)
            for rank, region in ended.rooms:
                assert pending.room is not None
                np.copyto(
                    np.frombuffer(pending.room(rank, region.length), np.uint8), self.shared.borrow(region)
                )
        pending.call.end(ended.error, ended.value)

    def _end(self) -> None:
        """The other process is gone: whoever waits hears of it."""
        if self._stopping:
            reason = f"{self.name} has left the fabric"
        else:
            try:
                code = self._process.wait(END_S)
                how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            except subprocess.TimeoutExpired:
                how = "hung up"
            reason = f"the engine's process of {self.name} {how}; join again"
        with self._lock:
            self._ended = reason
            calls, self._calls = list(self._calls.values()), {}
        if not self._begun.done():
            self._begun.set_exception(NoProcessError(reason))
        for answer in list(self._questions.values()):
            answer.set_result(None)
        for pending in calls:
            pending.call.end(reason)
        self.client.resolve(FailJob(reason))


class RemoteCourier:
    """The client's way to the other process."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._pulled: dict[str, Vector] = {}

    def post(self, role: str, event: Event, buffer: str = "", vector: Vector | None = None) -> None:
        self._engine.post(role, event, buffer, vector)

    def leave(self) -> None:
        self._engine.leave()

    def hold(self, buffer: str, vector: Vector) -> None:
        self._pulled[buffer] = vector

    def take(self, buffer: str) -> Vector:
        return self._pulled.pop(buffer)

    def empty(self, elements: int, dtype: Any) -> Vector:
        return self._engine.shared.empty(elements, dtype)
