"""Calls in groups that an engine in another process runs: their arrays go over in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mlfabric.collective.calls import Block, Call, Room, changes, reads
from mlfabric.groupcalls import Answer, OperationCall
from mlfabric.numerics import Vector
from mlfabric.roles.actions import Action
from mlfabric.runtime import orders
from mlfabric.runtime.arena import SharedMemory


@dataclass(slots=True)
class PendingCall:
    call: OperationCall
    # Where results belong, and where the other process puts them.
    copies: list[tuple[Vector, Vector]] = field(default_factory=list)
    room: Room | None = None


class Caller(Protocol):
    """The way to the other process."""

    @property
    def shared(self) -> SharedMemory: ...

    def begin(
        self, call: OperationCall, order: Callable[[int], orders.Record], pending: PendingCall
    ) -> None: ...

    def say(self, record: orders.Record) -> None: ...

    def ask(self, question: Callable[[int], orders.Record]) -> Any: ...


class RemoteGroups:
    """Calls in groups that the other process runs."""

    def __init__(self, engine: Caller) -> None:
        self._engine = engine

    def collective(
        self, group: str, nodes: tuple[str, ...], wanted: Call, form_again: bool = True
    ) -> OperationCall:
        pending = PendingCall(OperationCall(group), room=wanted.room)
        blocks = tuple(self._lend(pending, block) for block in wanted.blocks)

        def order(number: int) -> orders.Record:
            return orders.RunCollective(
                number,
                group,
                nodes,
                form_again,
                wanted.operation,
                wanted.dtype,
                wanted.itemsize,
                wanted.combine,
                wanted.root,
                blocks,
                wanted.counts,
                wanted.mistake,
                wanted.follows,
            )

        self._engine.begin(pending.call, order, pending)
        return pending.call

    def _lend(self, pending: PendingCall, block: Block) -> orders.BlockSpec:
        array = np.frombuffer(block.view, np.uint8)
        region, copied = self._engine.shared.lend(array, copy=block.read)
        if block.written and copied is not None:
            pending.copies.append((array, copied))
        return orders.BlockSpec(region, block.read, block.written, block.rank)

    def send(
        self, group: str, nodes: tuple[str, ...], to: int, tag: int, payload: memoryview
    ) -> OperationCall:
        pending = PendingCall(OperationCall(group))
        region = self._lend(pending, reads(payload)).region
        self._engine.begin(
            pending.call, lambda number: orders.RunSend(number, group, nodes, to, tag, region), pending
        )
        return pending.call

    def receive(
        self, group: str, nodes: tuple[str, ...], source: int, tag: int, place: memoryview
    ) -> OperationCall:
        pending = PendingCall(OperationCall(group))
        region = self._lend(pending, changes(place)).region  # a message may fill only a part of it
        self._engine.begin(
            pending.call, lambda number: orders.RunReceive(number, group, nodes, source, tag, region), pending
        )
        return pending.call

    def group(self, name: str, nodes: tuple[str, ...]) -> Answer:
        pending = PendingCall(OperationCall(name))
        self._engine.begin(pending.call, lambda number: orders.WantGroup(number, name, nodes), pending)
        return pending.call.answer

    def give_up(self, call: OperationCall, words: Callable[[str], str]) -> None:
        if not call.answer.done():
            reason = words(self.waiting_for(call))
            self._engine.say(orders.GiveUp(call.number, reason))

    def break_group(self, name: str, reason: str) -> None:
        self._engine.say(orders.BreakGroup(name, reason))

    def leave_group(self, name: str) -> None:
        self._engine.say(orders.LeaveGroup(name))

    def waiting_for(self, call: OperationCall) -> str:
        why = self._engine.ask(lambda question: orders.AskWhy(question, call.number))
        return why.words if why is not None else "the engine is busy"

    def outlive_job(self) -> None:
        self._engine.say(orders.OutliveJob())

    def resolve(self, action: Action) -> None:
        """The other process has done what is to be done."""

    def end(self, reason: str) -> None:
        """The other process has ended them."""
