"""The engine in a process of its own, beside the training process that started it.

    python -m mlfabric.runtime.outpost DESCRIPTOR

The descriptor is one end of a socket pair; the first record that comes says who to be. It ends with the
process that started it: when the socket closes, or when that process is not its parent any more. It takes no
signal of a terminal.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mlfabric.collective.calls import GATHER_ANY, Block, Call
from mlfabric.data import ArrayData
from mlfabric.errors import FabricError
from mlfabric.eventlog import LogSink
from mlfabric.events import LeaveRequested
from mlfabric.groupcalls import GroupCalls, GroupHandle, OperationCall
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Action, ResolvePull
from mlfabric.runtime import orders
from mlfabric.runtime.arena import Region, SharedMemory
from mlfabric.runtime.channel import Channel
from mlfabric.runtime.engine import Engine
from mlfabric.runtime.membership import prepare_engine
from mlfabric.runtime.tls import Tls

logger = logging.getLogger("mlfabric")

PR_SET_PDEATHSIG = 1  # see prctl(2)
# How often it is looked whether our parent is still there, should a copy of its socket have survived it.
ORPHAN_S = 1.0
HEARD = get_args(orders.Heard)


class SharedData(ArrayData):
    """Arrays of the application's pulls arrive in shared memory; all others are private."""

    def __init__(self, shared: SharedMemory, mirror: Path | None) -> None:
        super().__init__(mirror=mirror)
        self._shared = shared

    def room(self, buffer: str, count: int, kind: Any) -> Vector:
        if buffer.startswith("pull/"):
            return self._shared.empty(count, kind)
        return super().room(buffer, count, kind)


class Relay:
    """Tells the application what its node says."""

    def __init__(self, engine: Engine, shared: SharedMemory, say: Callable[..., None]) -> None:
        self._engine = engine
        self._shared = shared
        self._say = say

    def resolve(self, action: Action) -> None:
        if isinstance(action, ResolvePull) and action.error is None:
            data = self._engine.node.data
            vectors = [data.take(f"pull/{action.pull}/{index}") for index in range(len(action.versions))]
            regions = tuple(self._shared.lend(vector)[0] for vector in vectors)
            self._say(orders.Answered(action, regions, tuple(str(vector.dtype) for vector in vectors)))
        elif isinstance(action, HEARD):
            self._say(orders.Answered(action))
        self._engine.groups.resolve(action)

    def end_groups(self, reason: str) -> None:
        self._engine.groups.end(reason)


class OutpostEngine(Engine):
    """Wakes up for the application's records in the place of calls from other threads: there are none."""

    def __init__(
        self,
        channel: Channel,
        shared: SharedMemory,
        parent: int,
        name: str,
        data: ArrayData,
        log: LogSink,
        listen: tuple[str, int],
        secret: bytes,
        insecure: bool,
        tls: Tls | None,
        pace: bool,
    ) -> None:
        super().__init__(name, data, log, listen, secret, insecure, tls=tls, pace=pace)
        self._channel = channel
        self._shared = shared
        self._parent = parent
        self._orphan_at = 0.0
        self._running: dict[int, OperationCall] = {}
        # Records come on the engine's own thread, and what they ask for is done in their order.
        self.groups = GroupCalls(name, self.mesh.board, lambda do: do(), self._request_group)
        self.answers = Relay(self, shared, self.say)
        self._selector.unregister(self._wake_in)
        self._wake_in.close()
        self._wake_out.close()
        self._wake_in = channel.sock
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    def run(self) -> None:
        self._main()

    def call(self, do: Callable[[], None]) -> None:
        self._calls.append(do)

    def say(self, record: orders.Record) -> None:
        try:
            self._channel.send(record)
        except OSError:
            self._stopping = True

    def _turn(self) -> None:
        super()._turn()
        loans = self._shared.to_return()
        if loans:
            self.say(orders.LoansReturned(loans))

    def _expire(self) -> None:
        super()._expire()
        now = time.monotonic()
        if now >= self._orphan_at:
            self._orphan_at = now + ORPHAN_S
            if os.getppid() != self._parent:
                self._stopping = True

    def _drain_wake(self) -> None:
        records = self._channel.receive(wait=False)
        if records is None:
            self._stopping = True  # whoever started us is gone
            return
        for record in records:
            self._take(record)

    # --- records ----------------------------------------------------------------------------------------

    def _take(self, record: Any) -> None:
        shared, groups = self._shared, self.groups
        match record:
            case orders.SegmentMade(number=number, size_bytes=size):
                shared.add_segment(number, self._channel.descriptor(), size)
            case orders.LoansReturned(loans=loans):
                shared.returned(loans)
            case orders.Tell(role=role, event=event, buffer=buffer, region=region, dtype=dtype):
                if region is not None:
                    self.node.data.put(buffer, shared.borrow(region, dtype))
                self.node.post(role, event)
            case orders.Leave():
                groups.farewell()
                self.node.post("member", LeaveRequested())
            case orders.RunCollective():
                self._collective(record)
            case orders.RunSend(group=group, nodes=nodes, to=to, tag=tag, region=region):
                view = shared.borrow(region).data
                self._follow(record.number, groups.send(group, nodes, to, tag, view))
            case orders.RunReceive(group=group, nodes=nodes, source=source, tag=tag, region=region):
                view = shared.borrow(region).data
                self._follow(record.number, groups.receive(group, nodes, source, tag, view))
            case orders.WantGroup(number=number, name=name, nodes=nodes):
                groups.group(name, nodes).add_done_callback(partial(self._formed, number))
            case orders.AskWhy(question=question, number=number):
                call = self._running.get(number)
                words = "it is over" if call is None else groups.describe(call)
                self.say(orders.Why(question, words))
            case orders.GiveUp(number=number, reason=reason):
                if number in self._running:
                    groups.give_up(self._running[number], lambda _: reason)
            case orders.BreakGroup(name=name, reason=reason):
                groups.break_group(name, reason)
            case orders.LeaveGroup(name=name):
                groups.leave_group(name)
            case orders.OutliveJob():
                groups.outlive_job()
            case orders.AskCounts(question=question):
                sent, received = self.traffic.sent, self.traffic.received
                noticed = list(self.mesh.rates.noticed)
                self.say(orders.Counts(question, sent, received, noticed, self.workers))
            case orders.Stop(linger_s=linger):
                self._begin_stop(linger)

    def _collective(self, record: orders.RunCollective) -> None:
        blocks = tuple(
            Block(self._shared.borrow(block.region).data, block.read, block.written, block.rank)
            for block in record.blocks
        )
        rooms: dict[int, Vector] = {}

        def room(rank: int, length: int) -> memoryview:
            rooms[rank] = self._shared.empty(length, np.uint8)
            return rooms[rank].data

        wanted = Call(
            record.operation,
            record.dtype,
            record.itemsize,
            record.combine,
            record.root,
            blocks,
            record.counts,
            record.mistake,
            room if record.operation == GATHER_ANY else None,
            record.follows,
        )
        call = self.groups.collective(record.group, record.nodes, wanted, record.form_again)
        self._follow(record.number, call, rooms)

    def _follow(self, number: int, call: OperationCall, rooms: dict[int, Vector] | None = None) -> None:
        self._running[number] = call

        def ended(answer: Future[Any]) -> None:
            self._running.pop(number, None)
            error = answer.exception()
            if error is not None:
                self.say(orders.CallEnded(number, str(error)))
                return
            lent: tuple[tuple[int, Region], ...] = ()
            if rooms:
                lent = tuple((rank, self._shared.lend(array)[0]) for rank, array in rooms.items())
            self.say(orders.CallEnded(number, None, answer.result(), lent))

        call.answer.add_done_callback(ended)

    def _formed(self, number: int, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is not None:
            self.say(orders.CallEnded(number, str(error)))
            return
        handle: GroupHandle = answer.result()
        self.say(orders.GroupReady(number, handle.number, handle.name, handle.nodes, handle.rank))


class Forwarder(logging.Handler):
    """What this process logs, the training process logs."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # it ends anyway
            self._channel.send(orders.Logged(record.levelno, self.format(record)))


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor), orders.ToEngine)
    first: list[Any] = []
    while not first:
        records = channel.receive()
        if records is None:
            return
        first += records
    begin: orders.Begin = first.pop(0)
    if begin.from_main_thread:  # the kernel would take the end of any other thread for our parent's
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != begin.parent:
        return
    logger.setLevel(begin.log_level)
    logger.addHandler(Forwarder(channel))
    shared = SharedMemory(
        lambda number, held, size: channel.send(orders.SegmentMade(number, size), descriptors=[held])
    )
    settings = orders.from_plain(begin.settings)
    try:
        engine, leader = prepare_engine(
            settings,
            begin.roles,
            begin.timeout_s,
            SharedData(shared, settings.mirror),
            partial(OutpostEngine, channel, shared, begin.parent),
        )
    except FabricError as error:
        channel.send(orders.NotBegun(type(error).__name__, str(error)))
        return
    channel.send(orders.Begun(*engine.address, leader))
    for record in first:
        engine._take(record)
    engine.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
