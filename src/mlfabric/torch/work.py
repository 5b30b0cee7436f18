"""Handles on calls that run: torch's Work and Future over the fabric's answers, and limits on waiting.

A torch Future that Python gives an exception holds it as a value, which C++ then reads as tensors and
crashes. So futures here always get a result, and what is handed out is a child that raises.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlfabric.torch.errors import CollectiveError, CollectiveTimeoutError

# How an error of a call that took too long reads, here and on the ranks that are told of it.
TIMED_OUT = "timed out after"


def error_of(ended: Future[Any]) -> CollectiveError | None:
    """What a call that is over has to raise."""
    error = ended.exception()
    if error is None or isinstance(error, CollectiveError):
        return error
    kind = CollectiveTimeoutError if TIMED_OUT in str(error) else CollectiveError
    return kind(str(error))


class FabricWork(dist.Work):  # type: ignore[misc]
    """A call that runs. `ended` is answered when its results are in place, with the sender of a message."""

    def __init__(
        self,
        ended: Future[Any],
        title: Callable[[], str],
        tensors: Sequence[Any],
        later: Callable[..., Any],
        waiting_for: Callable[[], str],
    ) -> None:
        super().__init__()
        self._ended = ended
        self._title = title
        self._tensors = list(tensors)
        self._later = later
        self._waiting_for = waiting_for
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until the results are in place. A limit given here leaves the call running when it is reached."""
        limit = timeout.total_seconds()
        try:
            self._ended.exception(limit if limit > 0 else None)
        except FutureTimeout:
            raise CollectiveTimeoutError(
                f"{self._title()} is not complete after {limit:g} s: {self._waiting_for()}"
            ) from None
        error = error_of(self._ended)
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        return self._ended.done()

    def is_success(self) -> bool:
        return self._ended.done() and self._ended.exception() is None

    def exception(self) -> BaseException | None:
        return error_of(self._ended) if self._ended.done() else None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Who sent the message that a receive has got."""
        self.wait()
        return int(self._ended.result())

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> torch.futures.Future[Any]:
        raw: torch.futures.Future[Any] = torch.futures.Future()

        def outcome(done: torch.futures.Future[Any]) -> Any:
            error = error_of(self._ended)
            if error is not None:
                raise error
            return done.value()

        child = raw.then(outcome)

        def ended(_: Future[Any]) -> None:
            # What hangs on the future may take long, or wait for another call: not on the engine's thread.
            self._later(raw.set_result, self._tensors)

        if self._ended.done():
            raw.set_result(self._tensors)
        else:
            self._ended.add_done_callback(ended)
        return child


class Deadlines:
    """Ends calls that take too long, whether anybody waits for them or not."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Future[Any], Callable[[], None]]] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._sleeps_until = 0.0
        self._thread: threading.Thread | None = None

    def watch(self, timeout_s: float, ended: Future[Any], expire: Callable[[], None]) -> None:
        at = time.monotonic() + timeout_s
        with self._wake:
            while self._heap and self._heap[0][2].done():
                heapq.heappop(self._heap)
            heapq.heappush(self._heap, (at, next(self._count), ended, expire))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="mlfabric-deadlines", daemon=True)
                self._thread.start()
            elif at < self._sleeps_until:  # waking a thread for every call would cost more than the call
                self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._closed:
                    return
                now = time.monotonic()
                due = []
                while self._heap and (self._heap[0][0] <= now or self._heap[0][2].done()):
                    _, _, ended, expire = heapq.heappop(self._heap)
                    if not ended.done():
                        due.append(expire)
                if not due:
                    self._sleeps_until = self._heap[0][0] if self._heap else math.inf
                    self._wake.wait(self._sleeps_until - now if self._heap else None)
                    self._sleeps_until = 0.0
            for expire in due:
                expire()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._heap.clear()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
