"""Calls in groups: collective operations and messages, from the application to the switchboard and back.

`Groups` is what the application's side uses; `GroupCalls` runs them on the node's own thread. Every method of
it may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol

from mlfabric.collective.calls import Call, make_operation
from mlfabric.collective.mailbox import Outgoing, Wanted
from mlfabric.collective.switchboard import Switchboard
from mlfabric.errors import FabricError
from mlfabric.roles.actions import Action, FailJob, GroupWaits, ResolveGroup

Answer = Future[Any]

# How long it is waited for a word on what a call waits for.
WORD_S = 1.0


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """A group this node is in."""

    number: int
    name: str
    nodes: tuple[str, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.nodes)


class OperationCall:
    """A call in a group: its answer, and whom it waits for."""

    def __init__(self, group: str = "") -> None:
        self.answer: Answer = Future()
        self.group = group
        self.number = -1  # among the calls of an engine in a process of its own
        self.sequence = -1  # not yet in its group
        self.message: Outgoing | Wanted | None = None

    def end(self, error: str | None, value: Any = None) -> None:
        if self.answer.done():
            return  # it was given up
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(FabricError(error))


class Groups(Protocol):
    """What the application can do with groups, wherever they are run."""

    def collective(
        self, group: str, nodes: tuple[str, ...], wanted: Call, form_again: bool = True
    ) -> OperationCall:
        """Begin an operation in a group, which is formed if it has to be.

        After an error the next call finds a new group, unless told not to.
        """
        ...

    def send(
        self, group: str, nodes: tuple[str, ...], to: int, tag: int, payload: memoryview
    ) -> OperationCall:
        """Send a message to a rank of a group; over when the bytes are on their way."""
        ...

    def receive(
        self, group: str, nodes: tuple[str, ...], source: int, tag: int, place: memoryview
    ) -> OperationCall:
        """Receive a message from a rank of a group, or from any (-1); the answer is the sender's rank."""
        ...

    def group(self, name: str, nodes: tuple[str, ...]) -> Answer:
        """Be in a group; the answer is its handle."""
        ...

    def give_up(self, call: OperationCall, words: Callable[[str], str]) -> None:
        """End a call that takes too long, and with it its group, everywhere; `words` make the reason."""
        ...

    def break_group(self, name: str, reason: str) -> None:
        """End all that runs or waits in a group, on every rank."""
        ...

    def leave_group(self, name: str) -> None:
        """Be in a group no more."""
        ...

    def waiting_for(self, call: OperationCall) -> str:
        """Who or what an operation waits for, in words."""
        ...

    def outlive_job(self) -> None:
        """Groups need no scheduler once they are formed: let them go on when the job has failed."""
        ...

    def resolve(self, action: Action) -> None:
        """The node's word on groups, on its own thread."""
        ...

    def end(self, reason: str) -> None:
        """End all groups here, on the node's own thread."""
        ...


class GroupCalls:
    """`call` has something done on the node's own thread, `request` asks for a group there."""

    def __init__(
        self,
        node: str,
        board: Switchboard,
        call: Callable[[Callable[[], None]], None],
        request: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self._node = node
        self._board = board
        self._call = call
        self._request = request
        self._outlive_job = False
        self._failed: str | None = None
        self._groups: dict[str, GroupHandle] = {}
        self._uses: dict[str, list[tuple[Callable[[GroupHandle], None], Answer]]] = {}
        self._missing: dict[str, tuple[str, ...]] = {}  # who a group waits for, by its name

    # --- calls ------------------------------------------------------------------------------------------

    def collective(
        self, group: str, nodes: tuple[str, ...], wanted: Call, form_again: bool = True
    ) -> OperationCall:
        call = OperationCall(group)

        def use(handle: GroupHandle) -> None:
            held = self._board.groups[handle.number]

            def done(error: str | None) -> None:
                if error is not None and form_again and self._groups.get(group) is handle:
                    del self._groups[group]
                call.end(error)

            try:
                operation = make_operation(wanted, handle.rank, handle.size)
            except FabricError as error:
                call.answer.set_exception(error)
                return
            call.sequence = self._board.post(held, operation, done)

        self._in_group(group, nodes, use, call.answer)
        return call

    def send(
        self, group: str, nodes: tuple[str, ...], to: int, tag: int, payload: memoryview
    ) -> OperationCall:
        call = OperationCall(group)

        def use(handle: GroupHandle) -> None:
            held = self._board.groups[handle.number]
            call.message = self._board.send(held, to, tag, payload, call.end)

        self._in_group(group, nodes, use, call.answer)
        return call

    def receive(
        self, group: str, nodes: tuple[str, ...], source: int, tag: int, place: memoryview
    ) -> OperationCall:
        call = OperationCall(group)

        def use(handle: GroupHandle) -> None:
            held = self._board.groups[handle.number]
            call.message = self._board.receive(held, source, tag, place, call.end)

        self._in_group(group, nodes, use, call.answer)
        return call

    def group(self, name: str, nodes: tuple[str, ...]) -> Answer:
        answer: Answer = Future()
        self._in_group(name, nodes, answer.set_result, answer)
        return answer

    def give_up(self, call: OperationCall, words: Callable[[str], str]) -> None:
        def do() -> None:
            if not call.answer.done():
                reason = words(self.describe(call))
                self._break(call.group, reason)
                call.end(reason)

        self._call(do)

    def break_group(self, name: str, reason: str) -> None:
        self._call(lambda: self._break(name, reason))

    def leave_group(self, name: str) -> None:
        def do() -> None:
            handle = self._groups.pop(name, None)
            if handle is not None:
                self._board.dissolve(handle.number, f"group {name} was left")

        self._call(do)

    def waiting_for(self, call: OperationCall) -> str:
        answer: Future[str] = Future()
        self._call(lambda: answer.set_result(self.describe(call)))
        try:
            return answer.result(WORD_S)
        except FutureTimeout:
            return "the engine is busy"

    def outlive_job(self) -> None:
        self._outlive_job = True

    # --- on the node's own thread -----------------------------------------------------------------------

    def _in_group(
        self, name: str, nodes: tuple[str, ...], use: Callable[[GroupHandle], None], answer: Answer
    ) -> None:
        def do() -> None:
            if self._failed is not None and not (self._outlive_job and name in self._groups):
                answer.set_exception(FabricError(self._failed))
            elif name in self._groups:
                use(self._groups[name])
            else:
                uses = self._uses.setdefault(name, [])
                uses.append((use, answer))
                if len(uses) == 1:
                    self._request(name, nodes)

        self._call(do)

    def resolve(self, action: Action) -> None:
        match action:
            case ResolveGroup(name=name, number=number, nodes=nodes, error=error):
                self._formed(name, number, nodes, error)
            case GroupWaits(name=name, missing=missing):
                self._missing[name] = missing
            case FailJob(reason=reason):
                self._failed = self._failed or reason
                if not self._outlive_job:
                    self.end(reason)
                for name in list(self._uses):
                    self._formed(name, 0, (), reason)

    def _formed(self, name: str, number: int, nodes: tuple[str, ...], error: str | None) -> None:
        """A group that was asked for is there, or will not be."""
        self._missing.pop(name, None)
        uses = self._uses.pop(name, [])
        if error is not None:
            for _, answer in uses:
                if not answer.done():
                    answer.set_exception(FabricError(error))
            return
        handle = GroupHandle(number, name, nodes, nodes.index(self._node))
        self._groups[name] = handle
        for use, _ in uses:
            use(handle)

    def end(self, reason: str) -> None:
        for group in self._board.groups.values():
            group.fail(reason, tell=False)

    def farewell(self) -> None:
        self._board.farewell()

    def _break(self, name: str, reason: str) -> None:
        handle = self._groups.get(name)
        if handle is not None:
            self._board.groups[handle.number].fail(reason)
        else:
            self._formed(name, 0, (), reason)

    def describe(self, call: OperationCall) -> str:
        handle = self._groups.get(call.group)
        if handle is None:
            missing = self._missing.get(call.group)
            return f"{', '.join(missing)} did not come" if missing else "its group is not formed yet"
        if call.message is not None:
            return self._board.groups[handle.number].mailbox.describe(call.message)
        return self._board.groups[handle.number].describe(call.sequence)
