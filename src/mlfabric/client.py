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
    ReduceRequested,
    UpdateSubmitted,
)
from mlfabric.messages import JobSettings, RuleSpec, Version, update_id
from mlfabric.node import Node
from mlfabric.numerics import Layout, Rule, Sum, Vector
from mlfabric.roles.actions import (
    Action,
    FailJob,
    JobBecameReady,
    ReduceWaits,
    RefuseNew,
    ResolveDurable,
    ResolveJoin,
    ResolvePublish,
    ResolvePull,
    ResolveReduce,
    ResolveUpdate,
)


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


class Client:
    """Calls of one application thread or generator; `post` carries an event to the node's own thread."""

    def __init__(self, node: Node, post: Callable[[str, Event, Callable[[], None]], None]) -> None:
        self._node = node
        self._post = post
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self._numbers = {"update": 0, "pull": 0, "reduce": 0}
        self.label = ""
        self.layout: Layout | None = None
        self.settings: JobSettings | None = None
        self.shard_ranges: tuple[tuple[int, int], ...] = ()
        self.failed: str | None = None
        self.refused: str | None = None  # new calls, while what is pending goes on
        self.gone = threading.Event()  # nothing more will come
        self.lost: list[str] = []
        self.rule_spec = RuleSpec("Sum")
        self._pending_reduces: dict[int, tuple[str, ...]] = {}

    # --- calls ------------------------------------------------------------------------------------------

    def join(self) -> Answer:
        return self._ask("join", "member", JoinRequested())

    def leave(self) -> None:
        self._post("member", LeaveRequested(), lambda: None)

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
        if isinstance(rule, Sum):
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

    def push(self, update: Mapping[str, Any], copy: bool = False) -> tuple[str, Answer]:
        layout = self._known_layout()
        vector = layout.pack(update, copy=copy)
        norm = float(np.linalg.norm(vector))
        if not np.isfinite(norm):
            raise FabricError("the update holds infinite or undefined numbers; it would spoil the model")
        name = update_id(self.label, self._next("update"))
        buffer = f"update/{name}"
        event = UpdateSubmitted(name, buffer, vector.nbytes, norm)
        return name, self._ask(name, "worker", event, lambda: self._node.data.put(buffer, vector))

    def pull(self, with_state: bool = False) -> tuple[str, Answer]:
        name = f"{self.label}.pull{self._next('pull')}"
        return name, self._ask(name, "worker", PullRequested(name, with_state))

    def durable(self, update: str) -> Answer:
        return self._ask(f"durable/{update}", "worker", DurabilityRequested(update))

    def all_reduce(self, array: Vector) -> tuple[int, Answer]:
        if str(array.dtype) not in WIRE_DTYPES:
            raise FabricError(f"an array of {array.dtype} can't be reduced; use one of numpy's number types")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise FabricError("all_reduce works in place: it needs a writeable, contiguous array")
        number = self._next("reduce")
        buffer = f"reduce/{number}"
        flat = array.reshape(-1)
        event = ReduceRequested(number, buffer, flat.size, str(flat.dtype), flat.itemsize)
        return number, self._ask(buffer, "reducer", event, lambda: self._node.data.put(buffer, flat))

    def waiting_for(self, operation: int) -> str:
        """Who has not come to an all-reduce, as far as the scheduler said."""
        missing = self._pending_reduces.get(operation)
        return f"{', '.join(missing)} did not come" if missing else "its transfers are still under way"

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
            case ResolvePublish(error=error):
                self._answer("publish", None, error, ShapeMismatch)
            case ResolveUpdate(update=update, lost=True):
                self.lost.append(update)
            case ResolveUpdate(update=update, committed=True, version=version):
                assert version is not None
                self._answer(update, Committed(version.count, action.delay_updates))
            case ResolveUpdate(update=update, reason=reason, late=late):
                self._answer(update, Dropped(reason, late))
            case ResolveDurable(update=update, error=error):
                self._answer(f"durable/{update}", None, error)
            case ResolvePull(pull=pull, versions=versions, error=error):
                self._pulled(pull, versions, error)
            case ResolveReduce(operation=operation, error=error):
                self._node.data.free(f"reduce/{operation}")
                self._answer(f"reduce/{operation}", None, error)
            case ReduceWaits(operation=operation, missing=missing):
                self._pending_reduces[operation] = missing
            case RefuseNew(reason=reason):
                self.refused = reason
            case FailJob(reason=reason):
                self.failed = self.failed or reason
                self.gone.set()
                for key in list(self._answers):
                    self._answer(key, None, reason)

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
