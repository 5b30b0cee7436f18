"""How a call in a process group begins, is followed and ends.

A call is checked, its tensors are taken as bytes, and the operation is handed to the engine's thread; what is
returned is a handle. A call that can't be carried out takes its turn all the same, so that a mistake of one
rank is heard of by all instead of leaving them waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlfabric.collective.arithmetic import combine_for
from mlfabric.collective.calls import Call
from mlfabric.errors import FabricError
from mlfabric.groupcalls import OperationCall
from mlfabric.torch.errors import CollectiveError
from mlfabric.torch.memory import Outputs, dtype_name
from mlfabric.torch.recorder import Record, spanned
from mlfabric.torch.session import Session
from mlfabric.torch.work import TIMED_OUT, FabricWork

Tensors = Sequence[torch.Tensor]

COMBINE = {
    kind: kind.name.lower()
    for kind in dist.ReduceOp.RedOpType.__members__.values()
    if kind.name != "PREMUL_SUM"
}


class Calls(dist.ProcessGroup):  # type: ignore[misc]
    """A group that calls can be made in; which calls there are is the subclass's matter."""

    def __init__(
        self,
        session: Session,
        owns_session: bool,
        name: str,
        global_ranks: Sequence[int],
        rank: int,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, len(global_ranks))
        self._session = session
        self._owns_session = owns_session
        self._label = name
        self._me = rank
        self._count = len(global_ranks)
        self._nodes = session.nodes(global_ranks)
        self._timeout_s = timeout.total_seconds()
        self._sequence = {False: 0, True: 0}
        self._coalescing: list[FabricWork] | None = None
        self._closed = ""
        self._torch_name = name
        self._description = ""

    def __repr__(self) -> str:
        return f"<FabricProcessGroup {self._label}: rank {self._me} of {self._count}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mlfabric"

    # torch keeps names with the backends of a group; a group in Python has to keep its own.

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's names
        self._torch_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._torch_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def getSize(self) -> int:  # noqa: N802
        return self._count

    def getRank(self) -> int:  # noqa: N802
        return self._me

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def form(self) -> None:
        """Have the group formed as soon as all have come; nobody waits for it before the first call."""
        self._session.groups.group(self._label, self._nodes)

    # --- beginning a call -------------------------------------------------------------------------------

    def _limit(self, opts: Any) -> float:
        given: timedelta | None = getattr(opts, "timeout", None)
        seconds = given.total_seconds() if given is not None else -1.0
        return seconds if seconds > 0 else self._timeout_s

    def _record(self, name: str, tensors: Tensors, limit: float, is_message: bool) -> Record:
        sequence = self._sequence[is_message]
        self._sequence[is_message] += 1
        return self._session.recorder.begin(
            self._label, self._me, self._count, sequence, name, tensors, limit, is_message
        )

    def _collective(
        self,
        name: str,
        tensors: Tensors,
        opts: Any,
        prepare: Callable[[Outputs], Call],
        results: Sequence[Any],
        root: int = -1,
        reduce_op: Any = None,
        finish: Callable[[], None] | None = None,
    ) -> FabricWork:
        """Begin an operation. `prepare` checks and makes it; what it raises, all ranks hear of."""
        self._check_open()
        limit = self._limit(opts)
        record = self._record(name, tensors, limit, False)
        outputs = Outputs()
        mistake: FabricError | None = None
        try:
            if not 0 <= root < self._count and root != -1:
                raise CollectiveError(f"there is no rank {root} in a group of {self._count}")
            wanted = prepare(outputs)
        except FabricError as error:
            mistake = error
            kind = dtype_name(tensors[0]) if tensors and isinstance(tensors[0], torch.Tensor) else "nothing"
            counts = tuple(each.numel() for each in tensors if isinstance(each, torch.Tensor))
            combine = "" if reduce_op is None else COMBINE.get(reduce_op.op, "")
            wanted = Call(name, kind, 1, combine, root, counts=counts, mistake=str(error))

        def begin() -> FabricWork:
            call = self._session.groups.collective(self._label, self._nodes, wanted, form_again=False)
            last = finish if finish is not None else (outputs.finish if outputs.pending else None)
            return self._follow(call, record, results, limit, last)

        work: FabricWork = spanned(name, begin)
        if mistake is not None:
            raise CollectiveError(f"{name} in group {self._label}: {mistake}")
        return work

    def _message(
        self, name: str, tensor: torch.Tensor, begin: Callable[[], OperationCall], finish: Any
    ) -> Any:
        record = self._record(name, [tensor], self._timeout_s, True)
        return spanned(name, lambda: self._follow(begin(), record, [tensor], self._timeout_s, finish))

    def _follow(
        self,
        call: OperationCall,
        record: Record,
        results: Sequence[Any],
        limit: float,
        finish: Callable[[], None] | None,
    ) -> FabricWork:
        """A handle on a call; `finish` runs when its bytes are there, before anybody hears of it."""
        session = self._session
        ended: Future[Any] = call.answer
        if finish is not None:
            ended = _then(call.answer, session, finish)

        def note(done: Future[Any]) -> None:
            error = done.exception()
            record.end(None if error is None else str(error))
            if error is not None and TIMED_OUT in str(error):
                session.later(session.recorder.dump, str(error))

        ended.add_done_callback(note)

        def words(waiting_for: str) -> str:
            return f"{record.title()} {TIMED_OUT} {limit:g} s on rank {self._me}: {waiting_for}"

        session.deadlines.watch(limit, call.answer, lambda: session.groups.give_up(call, words))
        work = FabricWork(
            ended, record.title, results, session.later, lambda: session.groups.waiting_for(call)
        )
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError(f"group {self._label} {self._closed}")

    def _combine(self, opts: Any, tensor: torch.Tensor) -> str:
        """What a reduction is called, if tensors of this type can be reduced by it."""
        name: str | None = COMBINE.get(opts.reduceOp.op)
        if name is None:
            raise CollectiveError("mlfabric knows no such reduction; use sum, avg, product, min, max or bits")
        combine_for(name, dtype_name(tensor), self._count)
        return name

    # --- several calls as one ---------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any = None) -> FabricWork:
        works, self._coalescing = self._coalescing or [], None
        ended: Future[Any] = Future()
        left = [len(works)]
        lock = self._session.coalescing_lock

        def one(done: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                last = not left[0]
            if done.exception() is not None and not ended.done():
                ended.set_exception(done.exception())
            elif last and not ended.done():
                ended.set_result(None)

        if not works:
            ended.set_result(None)
        for work in works:
            work._ended.add_done_callback(one)
        tensors = [tensor for work in works for tensor in work._tensors]
        return FabricWork(
            ended, lambda: f"{len(works)} calls", tensors, self._session.later, lambda: "one of them waits"
        )

    # --- the end ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End all that runs in this group, on every rank; with the group that made it, leave the fabric."""
        reason = f"group {self._label} was aborted by rank {self._me}"
        self._closed = self._closed or "was aborted"
        if self._session.closed:
            return
        self._session.groups.break_group(self._label, reason)
        if self._owns_session:
            self._session.close()

    def shutdown(self) -> None:
        """Leave the group; with the group that made it, the fabric."""
        self._closed = "was destroyed"
        if self._session.closed:
            return
        if self._owns_session:
            self._session.close()
        else:
            self._session.groups.leave_group(self._label)


def _then(answer: Future[Any], session: Session, finish: Callable[[], None]) -> Future[Any]:
    """Answered after `finish`, which must not hold up the engine's thread."""
    ended: Future[Any] = Future()

    def run(value: Any) -> None:
        try:
            finish()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(value)

    def arrived(done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            ended.set_exception(error)
        else:
            session.later(run, done.result())

    answer.add_done_callback(arrived)
    return ended
