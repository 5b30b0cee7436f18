"""The public calls: join a fabric, publish a model, push updates, pull the model, reduce arrays.

Every wait has a limit. What a user did wrong raises FabricError with one sentence; a wait that takes too
long raises TimeoutError and leaves the thing pending.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from mlfabric.client import Committed, Dropped, Model, Outcome
from mlfabric.codecs import find_codec
from mlfabric.config import Settings, format_address, from_environment
from mlfabric.errors import FabricError
from mlfabric.groupcalls import Answer
from mlfabric.messages import MEMBER_ROLES, ArraySpec, JobSettings, RulePiece, RuleSpec, StepSettings
from mlfabric.numerics import Vector
from mlfabric.rules import Rounds, Rule, make_rule
from mlfabric.runtime.counters import Traffic
from mlfabric.runtime.engine import Engine
from mlfabric.runtime.lag import EngineWatch
from mlfabric.runtime.placement import Choice, place_engine, start_engine
from mlfabric.runtime.remote import RemoteEngine

ALL_ROLES = MEMBER_ROLES
# How long calls wait where the caller does not say.
PATIENCE_S = 60.0
# How a name is refused that somebody has, and how soon a restarted process tries again.
TAKEN = "is taken by a living member"
AGAIN_S = 0.1

Result = TypeVar("Result")

# Of the members of this process that have not left.
_engines: weakref.WeakSet[Engine | RemoteEngine] = weakref.WeakSet()


class Ticket:
    """A pushed update; `result()` is its outcome."""

    def __init__(self, fabric: Fabric, update: str, answer: Answer) -> None:
        self._fabric = fabric
        self._answer = answer
        self.update = update

    def __repr__(self) -> str:
        state = repr(self._answer.result()) if self.done() and not self._answer.exception() else "pending"
        return f"<Ticket {self.update}: {state}>"

    def done(self) -> bool:
        return self._answer.done()

    @property
    def lost(self) -> bool:
        """Whether it was committed and then did not survive a fail-over."""
        return self.update in self._fabric.lost

    def result(self, timeout: float | None = PATIENCE_S) -> Outcome:
        """Committed or Dropped; TimeoutError leaves the update pending."""
        outcome: Outcome = _wait(self._answer, timeout, f"update {self.update} has no outcome yet")
        return outcome

    def durable(self, timeout: float | None = PATIENCE_S) -> None:
        """Return once the replica holds the update too."""
        outcome = self.result(timeout)
        if isinstance(outcome, Dropped):
            raise FabricError(
                f"update {self.update} was dropped, so no replica will hold it: {outcome.reason}"
            )
        if self.lost:
            raise FabricError(f"update {self.update} was lost in a fail-over, so no replica will hold it")
        answer = self._fabric._client.durable(self.update)
        _wait(answer, timeout, f"the replica does not hold update {self.update} yet")


class Pulling:
    """A model on its way; `result()` is the model."""

    def __init__(self, fabric: Fabric, name: str, answer: Answer) -> None:
        self._fabric = fabric
        self._name = name
        self._answer = answer

    def done(self) -> bool:
        return self._answer.done()

    def result(self, timeout: float | None = PATIENCE_S) -> Model:
        parts, versions = _wait(self._answer, timeout, f"the model asked for by {self._name} has not come")
        return self._fabric._client.unpack(parts, versions)


class Fabric:
    """A member's handle on the fabric. Use it as a context manager, or close() it."""

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        settings: Settings,
        roles: tuple[str, ...],
        watch: EngineWatch | None = None,
    ) -> None:
        self._engine = engine
        self._client = engine.client
        self._settings = settings
        self._watch = watch
        self._closed = False
        self.roles = roles
        self.workers: tuple[Fabric, ...] = (self,)

    def __repr__(self) -> str:
        return f"<Fabric {self.name} of job {self._settings.job}{', closed' if self._closed else ''}>"

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def address(self) -> str:
        """Where this member listens; the scheduler's address where it is embedded here."""
        return format_address(*self._engine.address)

    @property
    def engine(self) -> str:
        """Where the network is served: by a "thread" of this process or by a "process" of its own."""
        return "process" if isinstance(self._engine, RemoteEngine) else "thread"

    @property
    def expected(self) -> int:
        """Members the job was said to have; 0: unknown."""
        return self._settings.expected

    @property
    def worker_count(self) -> int:
        """Workers of the job that are here now, as far as this member has heard."""
        return len(self._engine.workers)

    @property
    def lost(self) -> list[str]:
        """Ids of own updates that were committed and did not survive a fail-over."""
        return list(self._client.lost)

    @property
    def traffic(self) -> Traffic:
        """Payload bytes sent to and received from each peer so far, those of collectives included."""
        return self._engine.traffic

    def publish(
        self,
        arrays: Mapping[str, Any],
        apply: Rule | None = None,
        *,
        max_delay: int | Literal["auto", "none"] = "auto",
        divergence: float | None = 0.05,
        shards: int | Literal["auto"] = "auto",
        aggregate: bool = True,
        codec: str = "float32",
        staleness: int | None = None,
        wait_for: int | None = None,
        way: str = "",
        parts: Mapping[str, tuple[int, ...]] | None = None,
        timeout: float = PATIENCE_S,
    ) -> None:
        """Give the job its model and the rule it is updated by. The first caller's count; others must agree
        in names and shapes. A checkpoint from `state_dict` is resumed.

        With `aggregate` members help each other: they sum updates on their way to the servers and pass the
        model on to others that want it at the same time.

        `codec` is how updates travel: float32, bfloat16, float16, int8 or topk. What it loses stays with the
        worker and goes with its next update.

        With `staleness` a worker that is more than so many updates ahead of the slowest waits for its next
        model. With `wait_for` one step is made of the mean of so many gradients, the first that are offered;
        the model for the next step comes when it is complete, and gradients that come later are dropped.

        `parts` are names and shapes of what the arrays consist of, in order; they have to agree as well.
        `way` is what workers tell each other of how they make updates.
        """
        self._check_open()
        state: Mapping[str, Mapping[str, Any]] | None = None
        version = 0
        rule = apply
        if _is_checkpoint(arrays):
            checkpoint = arrays
            arrays, state, version = checkpoint["weights"], checkpoint["state"], int(checkpoint["version"])
            if rule is None:
                rule = make_rule(_rule_spec(checkpoint["rule"]))
        if rule is None:
            raise FabricError(
                "publish() needs the rule to apply updates by, for example apply=mf.SGD(lr=0.1)"
            )
        settings = JobSettings(
            max_delay=max_delay if isinstance(max_delay, int) else None,
            unbounded=max_delay == "none",
            divergence=divergence,
            shards=0 if shards == "auto" else _positive(shards),
            aggregate=aggregate,
            codec=find_codec(codec).name,
            staleness=staleness,
            wait_for=wait_for or 0,
            way=way,
        )
        _check_settings(settings, max_delay, wait_for)
        if wait_for is not None:
            settings = msgspec.structs.replace(settings, max_delay=wait_for - 1, unbounded=False)
            if wait_for > 1 and not isinstance(rule, Rounds):
                rule = Rounds(wait_for, rule)
        answer = self._client.publish(arrays, rule, settings, state or None, version, _specs(parts))
        _wait(answer, timeout, self._who_is_here)

    def _who_is_here(self) -> str:
        here = sorted(self._engine.workers)
        wanted = f"{self.expected} members" if self.expected > len(here) else "by one of them more"
        come = f"{len(here)} workers have come ({', '.join(here)})"
        return f"the model is not in place: {come}, and {wanted} are expected"

    def pull(self, timeout: float | None = PATIENCE_S, aside: bool = False) -> Model:
        """The freshest model. A worker's first one, while others train, may come from a replica nearer by."""
        return self.pull_later(aside).result(timeout)

    def pull_later(self, aside: bool = False) -> Pulling:
        """Ask for the freshest model; returns at once. `aside`: not for a next step, so that nobody waits for
        this worker where steps are bound to each other."""
        self._check_open()
        return Pulling(self, *self._client.pull(aside=aside))

    def push(
        self,
        update: Mapping[str, Any],
        copy: bool = False,
        base: Model | None = None,
        settings: StepSettings | None = None,
    ) -> Ticket:
        """Offer an update; returns at once. The arrays are borrowed until its outcome, unless copied.

        `base` is the model it was computed from, where that is not the last one pulled; `settings` what it is
        to be applied by, where that is not what was published.
        """
        self._check_open()
        bases = base.versions if base is not None else ()
        return Ticket(self, *self._client.push(update, copy, bases, settings))

    def all_reduce(self, array: Vector, timeout: float | None = PATIENCE_S, combine: str = "sum") -> Vector:
        """Sum an array over all workers of the job, in place; bit-identical everywhere.

        `combine` may also be avg, product, min, max, band, bor or bxor.
        """
        self._check_open()
        call, groups = self._client.all_reduce(array, combine), self._client.groups
        _wait(call.answer, timeout, lambda: f"all-reduce is not complete: {groups.waiting_for(call)}")
        return array

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Vector:
        """An array for updates and reductions. With the engine in a process of its own it lies in memory that
        both share, so that its bytes are not copied on their way; otherwise it is like any other."""
        elements = int(np.prod(shape, dtype=np.int64))
        return self._client.empty(elements, dtype).reshape(shape)

    def rank_and_size(self, timeout: float | None = PATIENCE_S) -> tuple[int, int]:
        """This worker's number among the workers of the job, and how many they are."""
        self._check_open()
        handle = _wait(self._client.groups.group("", ()), timeout, "the workers of the job are not all here")
        return handle.rank, handle.size

    def state_dict(self, timeout: float | None = PATIENCE_S) -> dict[str, Any]:
        """A consistent checkpoint: weights, optimizer state, versions. `publish(state)` resumes it."""
        self._check_open()
        _, answer = self._client.pull(with_state=True)
        parts, versions = _wait(answer, timeout, "the checkpoint has not come")
        weights, *state = self._client.unpack_state(parts)
        spec = self._client.rule_spec
        return {
            "format": _CHECKPOINT,
            "weights": weights,
            "state": {f"vector{index}": arrays for index, arrays in enumerate(state)},
            "rule": {
                "name": spec.name,
                "settings": dict(spec.settings),
                "pieces": [(p.start, p.stop, p.name, dict(p.settings)) for p in spec.pieces],
                "every": spec.every,
            },
            "version": min(version.count for version in versions),
            "versions": [(version.epoch, version.count) for version in versions],
        }

    def close(self) -> None:
        """Leave the fabric. What still waits for an answer is told that we left."""
        if self._closed:
            return
        self._closed = True
        _engines.discard(self._engine)
        if self._watch is not None:
            self._watch.close()
        self._client.leave()
        self._engine.stop()

    @property
    def gone(self) -> bool:
        """Whether this member is one no more: it left, was drained, or its job failed."""
        return self._client.gone.is_set()

    def drain(self, timeout: float = PATIENCE_S) -> None:
        """Hand on what this member leads and wait until nothing needs it; `close` afterwards."""
        if self._closed or self.gone:
            return
        self._client.drain()
        self._client.gone.wait(timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise FabricError(f"{self.name} has left the fabric; join again")

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, work: Callable[[Fabric], Result], timeout: float | None = None) -> list[Result]:
        """Call `work(fabric)` once for every worker in this process, each in its own thread; the results."""
        results: list[Any] = [None] * len(self.workers)
        errors: list[BaseException] = []

        def one(index: int, fabric: Fabric) -> None:
            try:
                results[index] = work(fabric)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=one, args=(index, fabric), daemon=True)
            for index, fabric in enumerate(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"some workers are not done after {timeout:g} s")
        return results


_CHECKPOINT = "mlfabric checkpoint 1"


def _is_checkpoint(arrays: Mapping[str, Any]) -> bool:
    return isinstance(arrays, Mapping) and arrays.get("format") is not None and "weights" in arrays


def _rule_spec(written: Mapping[str, Any]) -> RuleSpec:
    pieces = tuple(
        RulePiece(int(start), int(stop), str(name), dict(settings))
        for start, stop, name, settings in written.get("pieces", ())
    )
    every = int(written.get("every", 1))
    return RuleSpec(str(written["name"]), dict(written["settings"]), pieces, every)


def _specs(parts: Mapping[str, tuple[int, ...]] | None) -> tuple[ArraySpec, ...]:
    return tuple(ArraySpec(name, tuple(shape), "float32") for name, shape in (parts or {}).items())


def _positive(shards: int) -> int:
    if shards < 1:
        raise FabricError(f"a model has at least one shard, not {shards}")
    return shards


def _check_settings(settings: JobSettings, max_delay: int | str, wait_for: int | None) -> None:
    if wait_for is not None and wait_for < 1:
        raise FabricError(f"a step waits for at least one gradient, so wait_for is not {wait_for}")
    if settings.staleness is not None and settings.staleness < 0:
        raise FabricError(f"staleness counts steps, so {settings.staleness} is too small; zero or more")
    if settings.wait_for and settings.staleness is not None:
        raise FabricError("steps are bound by staleness= or made of the first wait_for= gradients, not both")
    if settings.wait_for and max_delay != "auto":
        raise FabricError("wait_for= drops what is not of the current step; max_delay= has no say in it")
    if settings.max_delay is not None and settings.max_delay < 0:
        raise FabricError(f"max_delay counts updates, so {settings.max_delay} is too small; zero or more")
    if settings.divergence is not None and not 0 <= settings.divergence < np.inf:
        raise FabricError(
            f"divergence is a share of the model's norm, zero or more, not {settings.divergence}"
        )


def _wait(answer: Answer, timeout: float | None, what: str | Callable[[], str]) -> Any:
    try:
        return answer.result(timeout)
    except FutureTimeout:
        said = what() if callable(what) else what
        raise TimeoutError(f"{said} (after {timeout:g} s)") from None


def join(
    address: str | None = None,
    *,
    job: str | None = None,
    name: str | None = None,
    roles: tuple[str, ...] = ALL_ROLES,
    scheduler: bool | None = None,
    secret: str | bytes | None = None,
    expected: int | None = None,
    up: str | float | None = None,
    down: str | float | None = None,
    host: str | None = None,
    log: str | Path | None = None,
    insecure: bool | None = None,
    tls: str | Path | None = None,
    engine: str | None = None,
    max_rate: str | float | None = None,
    job_max_rate: str | float | None = None,
    pace: bool | None = None,
    timeout: float = 10.0,
) -> Fabric:
    """Become a member. `address` is the scheduler's; under torchrun none is needed and rank 0 embeds it.
    Several addresses, with commas between them, are asked by turns; any member's will do. Who listens at the
    first of them schedules if nobody does.

    `up` and `down` are the rates of this host's link ("200mbit"); `roles` what this member may be used for;
    `max_rate` is what this host may send, `job_max_rate` what the job may send from any one host;
    `scheduler=True` embeds the scheduler here and listens at `address`; `tls` is a folder made by
    `mlfabric certs`; `engine` is where the network is served: by a "thread" of this process, by a "process"
    of its own, or where that costs training least ("auto", the default); `pace=True` spreads the bytes of
    collectives over the time until they are needed.
    """
    settings = from_environment(
        address,
        job=job,
        name=name,
        embed_scheduler=scheduler,
        secret=secret,
        expected=expected,
        up=up,
        down=down,
        log=log,
        insecure=insecure,
        host=host,
        tls=tls,
        engine=engine,
        max_rate=max_rate,
        job_max_rate=job_max_rate,
        pace=pace,
    )
    return join_with(settings, roles, timeout)


def join_with(settings: Settings, roles: tuple[str, ...], timeout: float = 10.0) -> Fabric:
    """`join` with everything already decided."""
    for role in roles:
        if role not in ALL_ROLES:
            raise FabricError(f"unknown role {role!r}; roles are {', '.join(ALL_ROLES)}")
    choice = place_engine(settings, roles, len(_engines))
    until = time.monotonic() + timeout
    while True:
        try:
            fabric = _join_once(settings, roles, choice, max(until - time.monotonic(), AGAIN_S))
            _engines.add(fabric._engine)
            return fabric
        except FabricError as error:
            # The life before ours may hold our name until its end is noticed.
            if not settings.restarted or TAKEN not in str(error) or time.monotonic() + AGAIN_S >= until:
                raise
        time.sleep(AGAIN_S)


def _join_once(settings: Settings, roles: tuple[str, ...], choice: Choice, timeout: float) -> Fabric:
    engine, leader = start_engine(settings, roles, choice, timeout)
    watch = EngineWatch(engine.thread) if choice.doubtful and isinstance(engine, Engine) else None
    try:
        _wait(engine.client.join(), timeout, f"the scheduler {leader} did not let {settings.name} in")
    except BaseException:
        engine.stop(0.1)
        raise
    return Fabric(engine, settings, roles, watch)


def local(
    workers: int = 4,
    *,
    job: str = "local",
    log: str | Path | None = None,
    up: str | float | None = None,
    down: str | float | None = None,
    engine: str | None = None,
) -> Fabric:
    """A whole small fabric in this process, over TCP on loopback. What is returned is its first worker;
    `.workers` are all of them, `.run(work)` calls a function for each in a thread of its own."""
    if workers < 1:
        raise FabricError(f"a fabric has at least one worker, not {workers}")
    members: list[Fabric] = []
    try:
        for index in range(workers):
            address = members[0].address if members else "127.0.0.1:0"
            members.append(
                join(
                    address,
                    job=job,
                    name=f"w{index}",
                    host=f"w{index}",
                    scheduler=index == 0,
                    expected=workers,
                    up=up,
                    down=down,
                    log=log,
                    engine=engine,
                )
            )
    except BaseException:
        for member in reversed(members):
            member.close()
        raise
    return LocalFabric(members)


class LocalFabric(Fabric):
    """The first of several workers in this process; closing it closes all."""

    def __init__(self, members: list[Fabric]) -> None:
        first = members[0]
        super().__init__(first._engine, first._settings, first.roles, first._watch)
        self.workers = (self, *members[1:])

    def close(self) -> None:
        for member in reversed(self.workers[1:]):
            member.close()
        super().close()


__all__ = ["Committed", "Dropped", "Fabric", "LocalFabric", "Model", "Ticket", "join", "local"]
