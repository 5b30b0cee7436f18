"""This process's membership in a fabric, shared by all of its process groups."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

from mlfabric.api import Fabric
from mlfabric.config import torch_settings
from mlfabric.torch.recorder import Recorder
from mlfabric.torch.rendezvous import meet, node_name
from mlfabric.torch.work import Deadlines

# Callbacks on futures run here; one may wait for another call, so there have to be some to spare.
POOL_THREADS = 32


class Session:
    def __init__(self, fabric: Fabric, job: str, recorder: Recorder) -> None:
        self.fabric = fabric
        self.groups = fabric._client.groups
        self.groups.outlive_job()
        self._job = job
        self.recorder = recorder
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="mlfabric-torch")
        self.deadlines = Deadlines()
        self.coalescing_lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def closed(self) -> bool:
        return self._closed

    def nodes(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """What ranks are called in the fabric."""
        return tuple(node_name(self._job, rank) for rank in ranks)

    def later(self, do: Callable[..., Any], *arguments: Any) -> None:
        """Have something done off the engine's thread; not when the interpreter is about to end."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(do, *arguments)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a fork has our memory, not our threads; the fabric is its parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self.deadlines.close()
        self.fabric.close()
        self._pool.shutdown(wait=False)


_world: Session | None = None
_inits = itertools.count()


def session_for(
    store: Any,
    rank: int,
    size: int,
    global_ranks: Sequence[int],
    timeout: timedelta,
    engine: str | None = None,
    pace: bool | None = None,
) -> tuple[Session, bool]:
    """The session a new group belongs to, and whether it was made for it."""
    global _world
    if global_ranks and _world is not None and not _world.closed:
        return _world, False
    ranks = list(global_ranks) or list(range(size))
    # A store may be used for several inits of the world: each has keys of its own, as other groups have.
    keys = _Prefixed(store, "mlfabric/" if global_ranks else f"mlfabric/{next(_inits)}/")
    settings = replace(torch_settings(pace), engine=engine)
    fabric, job = meet(keys, rank, ranks, timeout, settings)
    recorder = Recorder(ranks[rank], settings.record_entries, settings.dump_prefix)
    session = Session(fabric, job, recorder)
    if not global_ranks:
        _world = session
    return session, True


class _Prefixed:
    """The part of a store that is ours."""

    def __init__(self, store: Any, prefix: str) -> None:
        self.underlying_store = store
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        self.underlying_store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.underlying_store.get(self._prefix + key)
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.underlying_store.wait([self._prefix + key for key in keys], timeout)
