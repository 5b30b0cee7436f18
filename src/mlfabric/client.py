"""The application's side of a node: turns calls into events and actions back into answers.

It is the same under both drivers; waiting is the caller's business (`mlfabric.api` blocks threads, the
simulator resumes generators). Every answer is a `concurrent.futures.Future`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from mlfabric.codecs import ErrorFeedback, find_codec
from mlfabric.collective.calls import Call, changes
from mlfabric.data import WIRE_DTYPES
from mlfabric.errors import FabricError, ShapeMismatch
from mlfabric.events import (
    DrainRequested,
    DurabilityRequested,
    Event,
    JoinRequested,
    LeaveRequested,
    PublishRequested,
    PullRequested,
    StepCarriedOut,
    TrainingBegun,
    TrainingEnded,
    TrainingReported,
    UpdateSubmitted,
)
from mlfabric.groupcalls import Answer, GroupCalls, Groups, OperationCall
from mlfabric.messages import ArraySpec, JobSettings, RuleSpec, StepSettings, Version, update_id
from mlfabric.node import Node
from mlfabric.numerics import Layout, Vector
from mlfabric.roles.actions import (
    Action,
    CarryOutStep,
    FailJob,
    GiveUpStep,
    JobBecameReady,
    RefuseNew,
    ResolveDurable,
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


class Courier(Protocol):
    """Carries what the application wants to the node's own thread, with the vector it needs there."""

    def post(self, role: str, event: Event, buffer: str = "", vector: Vector | None = None) -> None: ...

    def leave(self) -> None:
        """Take leave of all groups, then of the fabric."""
        ...

    def take(self, buffer: str) -> Vector:
        """What a pull has brought."""
        ...

    def empty(self, elements: int, dtype: Any) -> Vector:
        """Memory that needs no copy on its way to the node."""
        ...


class NodeCourier:
    """The way to a node in this process: `call` has something done on the node's own thread."""

    def __init__(self, node: Node, call: Callable[[Callable[[], None]], None], groups: GroupCalls) -> None:
        self._node = node
        self._call = call
        self._groups = groups

    def post(self, role: str, event: Event, buffer: str = "", vector: Vector | None = None) -> None:
        def do() -> None:
            if vector is not None:
                self._node.data.put(buffer, vector)
            self._node.post(role, event)

        self._call(do)

    def leave(self) -> None:
        def do() -> None:
            self._groups.farewell()
            self._node.post("member", LeaveRequested())

        self._call(do)

    def take(self, buffer: str) -> Vector:
        return self._node.data.take(buffer)

    def empty(self, elements: int, dtype: Any) -> Vector:
        return np.empty(elements, dtype)


class Answers(Protocol):
    """Who hears what the node says to the application."""

    def resolve(self, action: Action) -> None: ...

    def end_groups(self, reason: str) -> None: ...


class Client:
    """Calls of one application thread or generator, and their answers."""

    def __init__(self, courier: Courier, groups: Groups) -> None:
        self._courier = courier
        self.groups = groups
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
        self.lost: list[str] = []
        self.rule_spec = RuleSpec("Sum")
        self.steps: Callable[[CarryOutStep | GiveUpStep | FailJob], None] | None = (
            None  # who carries out steps
        )

    # --- calls ------------------------------------------------------------------------------------------

    def join(self) -> Answer:
        return self._ask("join", "member", JoinRequested())

    def leave(self) -> None:
        self._courier.leave()

    def drain(self) -> None:
        self._courier.post("member", DrainRequested())

    def publish(
        self,
        arrays: Mapping[str, Any],
        rule: Rule,
        settings: JobSettings,
        state: Mapping[str, Mapping[str, Any]] | None = None,
        version: int = 0,
        parts: tuple[ArraySpec, ...] = (),
    ) -> Answer:
        layout = Layout.of(arrays)
        if isinstance(rule, Sum | Rounds):
            settings = msgspec.structs.replace(settings, weigh=False)
        vectors = [arrays, *((state or {})[name] for name in sorted(state or {}))]
        if state and len(state) != rule.vectors:
            raise FabricError(
                f"the checkpoint has {len(state)} optimizer vectors, the rule needs {rule.vectors}"
            )
        whole = self._courier.empty(layout.elements * len(vectors), layout.dtype)
        for index, vector in enumerate(vectors):
            layout.pack_into(vector, whole[index * layout.elements : (index + 1) * layout.elements])
        event = PublishRequested(
            "publish",
            layout.specs,
            rule.spec(),
            settings,
            layout.elements,
            str(layout.dtype),
            len(vectors) - 1,
            version,
            parts,
        )
        return self._ask("publish", "worker", event, "publish", whole)

    def push(
        self,
        update: Mapping[str, Any],
        copy: bool = False,
        bases: tuple[Version, ...] = (),
        settings: StepSettings | None = None,
    ) -> tuple[str, Answer]:
        layout = self._known_layout()
        vector = None if copy else layout.as_it_is(update)
        if vector is None:
            vector = self._courier.empty(layout.elements, layout.dtype)
            layout.pack_into(update, vector)
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
        return name, self._ask(name, "worker", event, buffer, vector)

    def pull(self, with_state: bool = False, aside: bool = False) -> tuple[str, Answer]:
        name = f"{self.label}.pull{self._next('pull')}"
        return name, self._ask(name, "worker", PullRequested(name, with_state, aside or with_state))

    def durable(self, update: str) -> Answer:
        return self._ask(f"durable/{update}", "worker", DurabilityRequested(update))

    def empty(self, elements: int, dtype: Any) -> Vector:
        return self._courier.empty(elements, dtype)

    def tell_stepper(self, event: TrainingBegun | TrainingReported | StepCarriedOut | TrainingEnded) -> None:
        self._courier.post("stepper", event)

    # --- groups -----------------------------------------------------------------------------------------

    def all_reduce(self, array: Vector, combine: str = "sum") -> OperationCall:
        """Reduce an array over all workers of the job."""
        if str(array.dtype) not in WIRE_DTYPES:
            raise FabricError(f"an array of {array.dtype} can't be reduced; use one of numpy's number types")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise FabricError("all_reduce works in place: it needs a writeable, contiguous array")
        view, kind = array.reshape(-1).view("u1").data, str(array.dtype)
        return self.groups.collective(
            "", (), Call("all_reduce", kind, array.itemsize, combine, blocks=(changes(view),))
        )

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

    def _ask(
        self, key: str, role: str, event: Event, buffer: str = "", vector: Vector | None = None
    ) -> Answer:
        answer: Answer = Future()
        if self.failed is not None or self.refused is not None:
            answer.set_exception(FabricError(self.failed or self.refused))
            return answer
        self._answers[key] = answer
        self._courier.post(role, event, buffer, vector)
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
            case ResolvePull():
                self._pulled(action)
            case CarryOutStep() | GiveUpStep():
                if self.steps is not None:
                    self.steps(action)
            case RefuseNew(reason=reason):
                self.refused = reason
            case FailJob(reason=reason):
                self.failed = self.failed or reason
                self.gone.set()
                for key in list(self._answers):
                    self._answer(key, None, reason)
                if self.steps is not None:
                    self.steps(action)

        self.groups.resolve(action)

    def end_groups(self, reason: str) -> None:
        self.groups.end(reason)

    def _settle(self, update: str, applied: bool) -> None:
        """What a dropped update would have brought goes with the next one, where codecs keep accounts."""
        if self._feedback is not None:
            with self._lock:
                self._feedback.settle(update, applied)

    def _pulled(self, action: ResolvePull) -> None:
        if action.error is not None:
            self._answer(action.pull, None, action.error)
            return
        count = len(action.versions)
        parts = [self._courier.take(f"pull/{action.pull}/{index}") for index in range(count)]
        if action.lent:
            parts = [part.view() for part in parts]
            for part in parts:
                part.flags.writeable = False
        self._answer(action.pull, (parts, action.versions))

    def unpack(self, parts: list[Vector], versions: tuple[Version, ...]) -> Model:
        """A pull's shards put together; the caller's thread does the copying."""
        layout = self._known_layout()
        ours = len(parts) == 1 and parts[0].flags.writeable
        return Model(layout.unpack(parts[0] if ours else np.concatenate(parts)), versions)

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
