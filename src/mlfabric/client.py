"""The application's side of a node: turns calls into events and actions back into answers.

It is the same under both drivers; waiting is the caller's business (`mlfabric.api` blocks threads, the
simulator resumes generators). Every answer is a `concurrent.futures.Future`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mlfabric.codecs import ErrorFeedback, find_codec
from mlfabric.collective.arithmetic import numpy_combine
from mlfabric.collective.mailbox import Outgoing, Wanted
from mlfabric.collective.operations import Operation, all_reduce
from mlfabric.collective.switchboard import Switchboard
from mlfabric.data import WIRE_DTYPES
from mlfabric.errors import FabricError, ShapeMismatch
from mlfabric.events import (
    DrainRequested,
    DurabilityRequested,
    Event,
    GroupRequested,
    JoinRequested,
    LeaveRequested,
    PublishRequested,
    PullRequested,
    UpdateSubmitted,
)
from mlfabric.messages import JobSettings, RuleSpec, StepSettings, Version, update_id
from mlfabric.node import Node
from mlfabric.numerics import Layout, Vector
from mlfabric.roles.actions import (
    Action,
    FailJob,
    GroupWaits,
    JobBecameReady,
    RefuseNew,
    ResolveDurable,
    ResolveGroup,
    ResolveJoin,
    ResolvePublish,
    ResolvePull,
    ResolveUpdate,
)
from mlfabric.rules import Rounds, Rule, Sum


@dataclass(frozen=True, slots=True)
class Committed:
    """The update is in the model, exactly once."""

    version: int
    delay_updates: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The update was not applied; `late` after it had been granted."""

    reason: str
    late: bool = False


Outcome = Committed | Dropped


@dataclass(frozen=True, slots=True)
class Model:
    """A pulled model: its arrays, the version of every shard, and the lowest of them."""

    arrays: dict[str, Vector]
    versions: tuple[Version, ...]

    @property
    def version(self) -> int:
        return min(version.count for version in self.versions)


Answer = Future[Any]


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
        self.sequence = -1  # not yet in its group
        self.message: Outgoing | Wanted | None = None

    def end(self, error: str | None, value: Any = None) -> None:
        if self.answer.done():
            return  # it was given up
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(FabricError(error))


class Client:
    """Calls of one application thread or generator; `post` carries an event to the node's own thread."""

    def __init__(
        self,
        node: Node,
        post: Callable[[str, Event, Callable[[], None]], None],
        call: Callable[[Callable[[], None]], None],
        board: Switchboard,
    ) -> None:
        self._node = node
        self._post = post
        self._call = call  # have something done on the node's own thread
        self._board = board
        self._groups: dict[str, GroupHandle] = {}
        self._uses: dict[str, list[tuple[Callable[[GroupHandle], None], Answer]]] = {}
        self._missing: dict[str, tuple[str, ...]] = {}  # who a group waits for, by its name
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self._numbers = {"update": 0, "pull": 0}
        self.label = ""
        self.layout: Layout | None = None
        self.settings: JobSettings | None = None
        self.shard_ranges: tuple[tuple[int, int], ...] = ()
        self.failed: str | None = None
        self._feedback: ErrorFeedback | None = None
        self.refused: str | None = None  # new calls, while what is pending goes on
        self.gone = threading.Event()  # nothing more will come
        # Groups need no scheduler once they are formed; with this set they outlive it.
        self.groups_outlive_job = False
        self.lost: list[str] = []
        self.rule_spec = RuleSpec("Sum")

    # --- calls ------------------------------------------------------------------------------------------

    def join(self) -> Answer:
        return self._ask("join", "member", JoinRequested())

    def leave(self) -> None:
        self._post("member", LeaveRequested(), self._board.farewell)

    def drain(self) -> None:
        self._post("member", DrainRequested(), lambda: None)

    def publish(
        self,
        arrays: Mapping[str, Any],
        rule: Rule,
        settings: JobSettings,
        state: Mapping[str, Mapping[str, Any]] | None = None,
        version: int = 0,
    ) -> Answer:
        layout = Layout.of(arrays)
        if isinstance(rule, Sum | Rounds):
            settings = msgspec.structs.replace(settings, weigh=False)
        vectors = [layout.pack(arrays)]
        for name in sorted(state or {}):
            vectors.append(layout.pack((state or {})[name]))
        if state and len(state) != rule.vectors:
            raise FabricError(
                f"the checkpoint has {len(state)} optimizer vectors, the rule needs {rule.vectors}"
            )
        whole = np.concatenate(vectors) if len(vectors) > 1 else vectors[0]
        event = PublishRequested(
            "publish",
            layout.specs,
            rule.spec(),
            settings,
            layout.elements,
            str(layout.dtype),
            len(vectors) - 1,
            version,
        )
        return self._ask("publish", "worker", event, lambda: self._node.data.put("publish", whole))

    def push(
        self,
        update: Mapping[str, Any],
        copy: bool = False,
        bases: tuple[Version, ...] = (),
        settings: StepSettings | None = None,
    ) -> tuple[str, Answer]:
        layout = self._known_layout()
        vector = layout.pack(update, copy=copy)
        norm = float(np.linalg.norm(vector))
        if not np.isfinite(norm):
            raise FabricError("the update holds infinite or undefined numbers; it would spoil the model")
        name = update_id(self.label, self._next("update"))
        buffer = f"update/{name}"
        size_bytes = vector.nbytes
        if self._feedback is not None:
            with self._lock:
                vector = self._feedback.code(name, vector)
            norm = float(np.linalg.norm(vector))
            size_bytes = self._feedback.size_bytes
        event = UpdateSubmitted(name, buffer, size_bytes, norm, bases, settings)
        return name, self._ask(name, "worker", event, lambda: self._node.data.put(buffer, vector))

    def pull(self, with_state: bool = False, aside: bool = False) -> tuple[str, Answer]:
        name = f"{self.label}.pull{self._next('pull')}"
        return name, self._ask(name, "worker", PullRequested(name, with_state, aside or with_state))

    def durable(self, update: str) -> Answer:
        return self._ask(f"durable/{update}", "worker", DurabilityRequested(update))

    # --- groups -----------------------------------------------------------------------------------------

    def all_reduce(self, array: Vector, combine: str = "sum") -> OperationCall:
        """Reduce an array over all workers of the job."""
        if str(array.dtype) not in WIRE_DTYPES:
            raise FabricError(f"an array of {array.dtype} can't be reduced; use one of numpy's number types")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise FabricError("all_reduce works in place: it needs a writeable, contiguous array")
        view, kind = array.reshape(-1).view("u1").data, str(array.dtype)

        def make(rank: int, size: int) -> Operation:
            add = numpy_combine(combine, kind, size)
            return all_reduce(rank, size, view, array.itemsize, kind, combine, add)

        return self.collective("", (), make)

    def collective(
        self,
        group: str,
        nodes: tuple[str, ...],
        make: Callable[[int, int], Operation],
        form_again: bool = True,
    ) -> OperationCall:
        """Begin the operation `make(rank, size)` in a group, which is formed if it has to be.

        After an error the next call finds a new group, unless told not to.
        """
        call = OperationCall(group)

        def use(handle: GroupHandle) -> None:
            held = self._board.groups[handle.number]

            def done(error: str | None) -> None:
                if error is not None and form_again and self._groups.get(group) is handle:
                    del self._groups[group]
                call.end(error)

            try:
                operation = make(handle.rank, handle.size)
            except FabricError as error:
                call.answer.set_exception(error)
                return
            call.sequence = self._board.post(held, operation, done)

        self._in_group(group, nodes, use, call.answer)
        return call

    def send(
        self, group: str, nodes: tuple[str, ...], to: int, tag: int, payload: memoryview
    ) -> OperationCall:
        """Send a message to a rank of a group; over when the bytes are on their way."""
        call = OperationCall(group)

        def use(handle: GroupHandle) -> None:
            held = self._board.groups[handle.number]
            call.message = self._board.send(held, to, tag, payload, call.end)

        self._in_group(group, nodes, use, call.answer)
        return call

    def receive(
        self, group: str, nodes: tuple[str, ...], source: int, tag: int, place: memoryview
    ) -> OperationCall:
        """Receive a message from a rank of a group, or from any (-1); the answer is the sender's rank."""
        call = OperationCall(group)

        def use(handle: GroupHandle) -> None:
            held = self._board.groups[handle.number]
            call.message = self._board.receive(held, source, tag, place, call.end)

        self._in_group(group, nodes, use, call.answer)
        return call

    def give_up(self, call: OperationCall, words: Callable[[str], str]) -> None:
        """End a call that takes too long, and with it its group, everywhere; on the node's own thread."""
        if call.answer.done():
            return
        reason = words(self.waiting_for(call))
        self.break_group(call.group, reason)
        call.end(reason)

    def break_group(self, name: str, reason: str) -> None:
        """End all that runs or waits in a group, on every rank; on the node's own thread."""
        handle = self._groups.get(name)
        if handle is not None:
            self._board.groups[handle.number].fail(reason)
        else:
            self._group_formed(ResolveGroup(name, 0, (), reason))

    def leave_group(self, name: str) -> None:
        """Be in a group no more; on the node's own thread."""
        handle = self._groups.pop(name, None)
        if handle is not None:
            self._board.dissolve(handle.number, f"group {name} was left")

    def group(self, name: str, nodes: tuple[str, ...]) -> Answer:
        """Be in a group; the answer is its handle."""
        answer: Answer = Future()
        self._in_group(name, nodes, answer.set_result, answer)
        return answer

    def _in_group(
        self, name: str, nodes: tuple[str, ...], use: Callable[[GroupHandle], None], answer: Answer
    ) -> None:
        def do() -> None:
            if self.failed is not None and not (self.groups_outlive_job and name in self._groups):
                answer.set_exception(FabricError(self.failed))
            elif name in self._groups:
                use(self._groups[name])
            else:
                uses = self._uses.setdefault(name, [])
                uses.append((use, answer))
                if len(uses) == 1:
                    self._node.post("participant", GroupRequested(name, nodes))

        self._call(do)

    def _group_formed(self, action: ResolveGroup) -> None:
        self._missing.pop(action.name, None)
        uses = self._uses.pop(action.name, [])
        if action.error is not None:
            for _, answer in uses:
                if not answer.done():
                    answer.set_exception(FabricError(action.error))
            return
        rank = action.nodes.index(self._node.name)
        handle = GroupHandle(action.number, action.name, action.nodes, rank)
        self._groups[action.name] = handle
        for use, _ in uses:
            use(handle)

    def waiting_for(self, call: OperationCall) -> str:
        """Who or what an operation waits for; to be asked on the node's own thread."""
        handle = self._groups.get(call.group)
        if handle is None:
            missing = self._missing.get(call.group)
            return f"{', '.join(missing)} did not come" if missing else "its group is not formed yet"
        if call.message is not None:
            return self._board.groups[handle.number].mailbox.describe(call.message)
        return self._board.groups[handle.number].describe(call.sequence)

    def _known_layout(self) -> Layout:
        if self.failed is not None:
            raise FabricError(self.failed)
        if self.layout is None:
            raise FabricError("nothing is published in this job yet; call publish() first")
        return self.layout

    def _next(self, kind: str) -> int:
        with self._lock:
            number = self._numbers[kind]
            self._numbers[kind] += 1
            return number

    def _ask(self, key: str, role: str, event: Event, before: Callable[[], None] = lambda: None) -> Answer:
        answer: Answer = Future()
        if self.failed is not None or self.refused is not None:
            answer.set_exception(FabricError(self.failed or self.refused))
            return answer
        self._answers[key] = answer
        self._post(role, event, before)
        return answer

    # --- answers ----------------------------------------------------------------------------------------

    def resolve(self, action: Action) -> None:
        match action:
            case ResolveJoin(label=label, error=error):
                self.label = label
                self._answer("join", label, error)
            case JobBecameReady():
                self.layout = Layout(action.arrays)
                self.settings = action.settings
                self.shard_ranges = tuple((shard.start, shard.count) for shard in action.shards)
                self.rule_spec = action.rule
                if action.settings.codec != "float32":
                    self._feedback = ErrorFeedback(find_codec(action.settings.codec), self.shard_ranges)
            case ResolvePublish(error=error):
                self._answer("publish", None, error, ShapeMismatch)
            case ResolveUpdate(update=update, lost=True):
                self.lost.append(update)
            case ResolveUpdate(update=update, committed=True, version=version):
                assert version is not None
                self._settle(update, applied=True)
                self._answer(update, Committed(version.count, action.delay_updates))
            case ResolveUpdate(update=update, reason=reason, late=late):
                self._settle(update, applied=False)
                self._answer(update, Dropped(reason, late))
            case ResolveDurable(update=update, error=error):
                self._answer(f"durable/{update}", None, error)
            case ResolvePull(pull=pull, versions=versions, error=error):
                self._pulled(pull, versions, error)
            case ResolveGroup():
                self._group_formed(action)
            case GroupWaits(name=name, missing=missing):
                self._missing[name] = missing
            case RefuseNew(reason=reason):
                self.refused = reason
            case FailJob(reason=reason):
                self.failed = self.failed or reason
                self.gone.set()
                if not self.groups_outlive_job:
                    self.end_groups(reason)
                for name in list(self._uses):
                    self._group_formed(ResolveGroup(name, 0, (), reason))
                for key in list(self._answers):
                    self._answer(key, None, reason)

    def _settle(self, update: str, applied: bool) -> None:
        """What a dropped update would have brought goes with the next one, where codecs keep accounts."""
        if self._feedback is not None:
            with self._lock:
                self._feedback.settle(update, applied)

    def end_groups(self, reason: str) -> None:
        for group in self._board.groups.values():
            group.fail(reason, tell=False)

    def _pulled(self, pull: str, versions: tuple[Version, ...], error: str | None) -> None:
        if error is not None:
            self._answer(pull, None, error)
            return
        parts = [self._node.data.take(f"pull/{pull}/{index}") for index in range(len(versions))]
        self._answer(pull, (parts, versions))

    def unpack(self, parts: list[Vector], versions: tuple[Version, ...]) -> Model:
        """A pull's shards put together; the caller's thread does the copying."""
        layout = self._known_layout()
        return Model(layout.unpack(parts[0] if len(parts) == 1 else np.concatenate(parts)), versions)

    def unpack_state(self, parts: list[Vector]) -> list[dict[str, Vector]]:
        """The arrays of a pull with optimizer state: the weights first, then each state vector."""
        layout = self._known_layout()
        count = len(parts[0]) // self.shard_ranges[0][1]
        vectors = []
        for which in range(count):
            pieces = [
                part[which * size : (which + 1) * size]
                for part, (_, size) in zip(parts, self.shard_ranges, strict=True)
            ]
            vectors.append(layout.unpack(np.concatenate(pieces)))
        return vectors

    def _answer(
        self, key: str, value: Any, error: str | None = None, kind: type[FabricError] = FabricError
    ) -> None:
        answer = self._answers.pop(key, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(kind(error))
