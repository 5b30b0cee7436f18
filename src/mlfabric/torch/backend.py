"""The process group: torch's collective calls on CPU tensors, carried out by the fabric.

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

from mlfabric.client import OperationCall
from mlfabric.collective import movements, operations
from mlfabric.collective.operations import Operation
from mlfabric.errors import FabricError
from mlfabric.torch import memory
from mlfabric.torch.arithmetic import combine_for
from mlfabric.torch.errors import CollectiveError
from mlfabric.torch.memory import Outputs, dtype_name, plain, view
from mlfabric.torch.recorder import Record, spanned
from mlfabric.torch.session import Session, session_for
from mlfabric.torch.sparse import SparseSum
from mlfabric.torch.work import TIMED_OUT, FabricWork

Tensors = Sequence[torch.Tensor]
Make = Callable[[int, int], Operation]

_COMBINE = {
    kind: kind.name.lower()
    for kind in dist.ReduceOp.RedOpType.__members__.values()
    if kind.name != "PREMUL_SUM"
}
MAX_TAG = 2**32 - 1


def create(options: Any, backend_options: Any) -> FabricProcessGroup:
    """What torch calls for a new group."""
    del backend_options  # there are none
    session, owned = session_for(
        options.store,
        options.group_rank,
        options.group_size,
        options.global_ranks_in_group,
        options.timeout,
    )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = str(options.group_id) if options.global_ranks_in_group else "world"
    group = FabricProcessGroup(session, owned, name, ranks, options.group_rank, options.timeout)
    if owned:
        try:
            group.barrier().wait()  # everybody is here, and has links to all
        except BaseException:
            group.shutdown()
            raise
    return group


class FabricProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
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
        self._nodes = tuple(f"rank{each}" for each in global_ranks)
        self._timeout_s = timeout.total_seconds()
        self._sequence = {False: 0, True: 0}
        self._coalescing: list[FabricWork] | None = None
        self._closed = ""

    def __repr__(self) -> str:
        return f"<FabricProcessGroup {self._label}: rank {self._me} of {self._count}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mlfabric"

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

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
        prepare: Callable[[Outputs], Make],
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
            make = prepare(outputs)
        except FabricError as error:
            mistake = error
            kind = dtype_name(tensors[0]) if tensors and isinstance(tensors[0], torch.Tensor) else "nothing"
            counts = tuple(each.numel() for each in tensors if isinstance(each, torch.Tensor))
            combine = "" if reduce_op is None else _COMBINE.get(reduce_op.op, "")
            said = str(error)

            def make(rank: int, size: int) -> Operation:
                return operations.refused(name, kind, combine, root, counts, said)

        def begin() -> FabricWork:
            call = self._session.client.collective(self._label, self._nodes, make, form_again=False)
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
                session.pool.submit(session.recorder.dump, str(error))

        ended.add_done_callback(note)

        def words(waiting_for: str) -> str:
            return f"{record.title()} {TIMED_OUT} {limit:g} s on rank {self._me}: {waiting_for}"

        session.deadlines.watch(limit, call.answer, lambda: session.give_up(call, words))
        work = FabricWork(
            ended, record.title, results, session.pool, lambda: session.engine.waiting_for(call)
        )
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError(f"group {self._label} {self._closed}")

    def _combine(self, opts: Any, tensor: torch.Tensor) -> tuple[str, Any]:
        name = _COMBINE.get(opts.reduceOp.op)
        if name is None:
            raise CollectiveError("mlfabric knows no such reduction; use sum, avg, product, min, max or bits")
        return name, combine_for(name, dtype_name(tensor), self._count)

    # --- reductions -------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        opts = opts or dist.AllreduceOptions()
        if len(tensors) == 1 and getattr(tensors[0], "layout", None) is torch.sparse_coo:
            return self._sparse_sum(tensors[0], opts)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)

        def prepare(outputs: Outputs) -> Make:
            memory.require(memory.check(tensors[0]))
            data = outputs.inout(tensors[0])
            combine, add = self._combine(opts, data)
            size, kind, array = data.element_size(), dtype_name(data), view(data)
            return lambda rank, count: operations.all_reduce(rank, count, array, size, kind, combine, add)

        return self._collective("all_reduce", tensors, opts, prepare, tensors, reduce_op=opts.reduceOp)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        opts = opts or dist.AllreduceCoalescedOptions()

        def prepare(outputs: Outputs) -> Make:
            memory.require(*(memory.check(each) for each in tensors), memory.same(tensors, "the tensors"))
            if not tensors:
                raise CollectiveError("there is no tensor to reduce")
            data = outputs.packed(tensors, filled=True)
            combine, add = self._combine(opts, data)
            size, kind, array = data.element_size(), dtype_name(data), view(data)
            return lambda rank, count: operations.all_reduce(rank, count, array, size, kind, combine, add)

        return self._collective("all_reduce", tensors, opts, prepare, tensors, reduce_op=opts.reduceOp)

    def _sparse_sum(self, tensor: torch.Tensor, opts: Any) -> FabricWork:
        held: list[SparseSum] = []

        def prepare(outputs: Outputs) -> Make:
            memory.require(memory.check(tensor, sparse=True))
            if opts.reduceOp.op != dist.ReduceOp.RedOpType.SUM:
                raise CollectiveError("all_reduce of sparse tensors only works with ReduceOp.SUM")
            held.append(SparseSum(tensor, self._me, self._count))
            return held[0].operation

        return self._collective(
            "all_reduce",
            [tensor],
            opts,
            prepare,
            [tensor],
            reduce_op=opts.reduceOp,
            finish=lambda: held[0].finish(),
        )

    def reduce(self, tensors: Tensors, opts: Any) -> FabricWork:
        root = opts.rootRank

        def prepare(outputs: Outputs) -> Make:
            memory.require(_one(tensors), memory.check(tensors[0]))
            data = outputs.inout(tensors[0]) if root == self._me else plain(tensors[0])
            combine, add = self._combine(opts, data)
            size, kind, array = data.element_size(), dtype_name(data), view(data)
            return lambda rank, count: operations.reduce(rank, count, root, array, size, kind, combine, add)

        return self._collective("reduce", tensors, opts, prepare, tensors, root, opts.reduceOp)

    def reduce_scatter(self, outputs_: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> FabricWork:
        opts = opts or dist.ReduceScatterOptions()

        def prepare(outputs: Outputs) -> Make:
            memory.require(_one(outputs_), _one(inputs))
            output, parts = outputs_[0], list(inputs[0])
            memory.require(
                *(memory.check(each) for each in (output, *parts)),
                memory.same([output, *parts], "input and output"),
                _counted(parts, self._count, "inputs"),
            )
            if output.numel() != parts[self._me].numel():
                raise CollectiveError(
                    f"the output has room for {output.numel()} elements, its input has "
                    f"{parts[self._me].numel()}"
                )
            return self._reduce_scatter(outputs.place(output), [plain(each) for each in parts], opts)

        return self._collective("reduce_scatter", outputs_, opts, prepare, outputs_, reduce_op=opts.reduceOp)

    def _reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> Make:
        combine, add = self._combine(opts, output)
        size, kind, place = output.element_size(), dtype_name(output), view(output)
        arrays = [view(each) for each in parts]
        return lambda rank, count: operations.reduce_scatter(
            rank, count, arrays, place, size, kind, combine, add
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None
    ) -> FabricWork:
        return self.reduce_scatter_single_coalesced([output], [input_], opts)

    def reduce_scatter_single_coalesced(
        self, outputs_: Tensors, inputs: Tensors, opts: Any = None
    ) -> FabricWork:
        opts = opts or dist.ReduceScatterOptions()

        def prepare(outputs: Outputs) -> Make:
            memory.require(_pairs(outputs_, inputs, self._count, scatter=True))
            if len(outputs_) == 1:
                cut = plain(inputs[0]).view(-1).chunk(self._count) if inputs[0].numel() else None
                parts = list(cut) if cut is not None else [plain(inputs[0]).view(-1)] * self._count
                return self._reduce_scatter(outputs.place(outputs_[0]), parts, opts)
            rows = [plain(each).view(self._count, -1) for each in inputs]
            parts = [torch.cat([each[rank] for each in rows]) for rank in range(self._count)]
            return self._reduce_scatter(outputs.packed(outputs_, filled=False), parts, opts)

        return self._collective("reduce_scatter", outputs_, opts, prepare, outputs_, reduce_op=opts.reduceOp)

    # --- movements --------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        opts = opts or dist.BroadcastOptions()
        root = opts.rootRank

        def prepare(outputs: Outputs) -> Make:
            memory.require(_one(tensors), memory.check(tensors[0]))
            data = plain(tensors[0]) if root == self._me else outputs.place(tensors[0])
            size, kind, array = data.element_size(), dtype_name(data), view(data)
            return lambda rank, count: movements.broadcast(rank, count, root, array, size, kind)

        return self._collective("broadcast", tensors, opts, prepare, tensors, root)

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> FabricWork:
        def prepare(outputs: Outputs) -> Make:
            memory.require(_one(inputs), _one(output_lists))
            places = list(output_lists[0])
            memory.require(
                *(memory.check(each) for each in (inputs[0], *places)),
                memory.same([inputs[0], *places], "input and outputs"),
                _counted(places, self._count, "outputs"),
            )
            if places[self._me].numel() != inputs[0].numel():
                raise CollectiveError(
                    f"the output for our own rank has room for {places[self._me].numel()} elements, "
                    f"the input has {inputs[0].numel()}"
                )
            return self._all_gather(inputs[0], [outputs.place(each) for each in places])

        return self._collective("all_gather", inputs, opts, prepare, output_lists)

    def _all_gather(self, mine: torch.Tensor, places: Sequence[torch.Tensor]) -> Make:
        with torch.no_grad():
            places[self._me].view(-1).copy_(mine.detach().reshape(-1))
        size, kind = mine.element_size(), dtype_name(mine)
        views = [view(each) for each in places]
        others = {rank: place for rank, place in enumerate(views) if rank != self._me}
        own = views[self._me]
        return lambda rank, count: movements.all_gather(rank, count, own, others, size, kind)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> FabricWork:
        """Each rank's list of tensors goes to all: `output_lists[rank][i]` is its i-th."""

        def prepare(outputs: Outputs) -> Make:
            rows = [list(each) for each in output_lists]
            every = [*inputs, *(tensor for row in rows for tensor in row)]
            memory.require(
                *(memory.check(each) for each in every),
                memory.same(every, "inputs and outputs"),
                _counted(rows, self._count, "lists of outputs"),
                *(_counted(row, len(inputs), "outputs in a list") for row in rows),
            )
            places = [outputs.packed(row, filled=False) for row in rows]
            flat = torch.cat([each.detach().reshape(-1) for each in inputs])
            if any(place.numel() != flat.numel() for place in places):
                raise CollectiveError("the lists of outputs differ in size from the inputs")
            return self._all_gather(flat, places)

        return self._collective("all_gather", inputs, opts, prepare, output_lists)

    def all_gather_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> FabricWork:
        return self.all_gather_single_coalesced([output], [input_], opts)

    def all_gather_single_coalesced(self, outputs_: Tensors, inputs: Tensors, opts: Any = None) -> FabricWork:
        def prepare(outputs: Outputs) -> Make:
            memory.require(_pairs(outputs_, inputs, self._count, scatter=False))
            if len(outputs_) == 1:
                rows = outputs.place(outputs_[0]).view(self._count, inputs[0].numel())
                return self._all_gather(inputs[0], list(rows))
            flat = torch.cat([each.detach().reshape(-1) for each in inputs])
            places: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
            for output, mine in zip(outputs_, inputs, strict=True):
                target = output.detach()
                if not memory.is_plain(output):
                    target = outputs.place(output)
                for rank, row in enumerate(target.view(self._count, mine.numel())):
                    places[rank].append(row)
            return self._all_gather(flat, [outputs.packed(row, filled=False) for row in places])

        return self._collective("all_gather", inputs, opts, prepare, outputs_)

    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> FabricWork:
        root = opts.rootRank
        at_root = root == self._me

        def prepare(outputs: Outputs) -> Make:
            memory.require(_one(inputs), memory.check(inputs[0]))
            mine = plain(inputs[0])
            places = self._rows(output_lists, at_root, inputs[0], outputs.place, "outputs")
            if at_root:
                with torch.no_grad():
                    places[self._me].copy_(mine.view(places[self._me].shape))
            others = {rank: view(each) for rank, each in enumerate(places) if rank != self._me}
            size, kind, own = mine.element_size(), dtype_name(mine), view(mine)
            return lambda rank, count: movements.gather(rank, count, root, own, others, size, kind)

        results = output_lists if at_root else []
        return self._collective("gather", inputs, opts, prepare, results, root)

    def scatter(self, outputs_: Tensors, input_lists: Sequence[Tensors], opts: Any) -> FabricWork:
        root = opts.rootRank
        at_root = root == self._me

        def prepare(outputs: Outputs) -> Make:
            memory.require(_one(outputs_), memory.check(outputs_[0]))
            parts = self._rows(input_lists, at_root, outputs_[0], plain, "inputs")
            place = outputs.place(outputs_[0])
            if at_root:
                with torch.no_grad():
                    place.copy_(parts[self._me].view(place.shape))
            others = {rank: view(each) for rank, each in enumerate(parts) if rank != self._me}
            size, kind, own = place.element_size(), dtype_name(place), view(place)
            return lambda rank, count: movements.scatter(rank, count, root, own, others, size, kind)

        return self._collective("scatter", outputs_, opts, prepare, outputs_, root)

    def _rows(
        self,
        lists: Sequence[Tensors],
        at_root: bool,
        like: torch.Tensor,
        take: Callable[[torch.Tensor], torch.Tensor],
        what: str,
    ) -> list[torch.Tensor]:
        """The root's tensors for all ranks; the others have none."""
        if not at_root:
            if lists and any(len(each) for each in lists):
                raise CollectiveError(f"only the root gives a list of {what}")
            return []
        memory.require(_one(lists))
        held = list(lists[0])
        memory.require(
            *(memory.check(each) for each in held),
            memory.same([like, *held], f"the tensor and the {what}"),
            _counted(held, self._count, what),
        )
        for rank, each in enumerate(held):
            if each.numel() != like.numel():
                raise CollectiveError(
                    f"the {what} for rank {rank} have {each.numel()} elements, not {like.numel()}"
                )
        return [take(each) for each in held]

    def alltoall(self, outputs_: Tensors, inputs: Tensors, opts: Any = None) -> FabricWork:
        def prepare(outputs: Outputs) -> Make:
            every = [*outputs_, *inputs]
            memory.require(
                *(memory.check(each) for each in every),
                memory.same(every, "inputs and outputs"),
                _counted(outputs_, self._count, "outputs"),
                _counted(inputs, self._count, "inputs"),
            )
            return self._all_to_all(
                [outputs.place(each) for each in outputs_], [plain(each) for each in inputs]
            )

        return self._collective("all_to_all", inputs, opts, prepare, outputs_)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> FabricWork:
        def prepare(outputs: Outputs) -> Make:
            memory.require(
                memory.check(output),
                memory.check(input_),
                memory.same([output, input_], "input and output"),
                _splits(output, output_splits, self._count, "output"),
                _splits(input_, input_splits, self._count, "input"),
            )
            return self._all_to_all(
                _cut(outputs.place(output), output_splits, self._count),
                _cut(plain(input_), input_splits, self._count),
            )

        return self._collective("all_to_all", [input_], opts, prepare, [output])

    def _all_to_all(self, places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Make:
        if places[self._me].numel() != parts[self._me].numel():
            raise CollectiveError(
                f"what goes to our own rank has {parts[self._me].numel()} elements, its place "
                f"{places[self._me].numel()}"
            )
        with torch.no_grad():
            places[self._me].view(-1).copy_(parts[self._me].view(-1))
        size, kind = parts[0].element_size(), dtype_name(parts[0])
        there, back = [view(each) for each in parts], [view(each) for each in places]
        return lambda rank, count: movements.all_to_all(rank, count, there, back, size, kind)

    def barrier(self, opts: Any = None) -> FabricWork:
        return self._collective(
            "barrier", [], opts, lambda outputs: lambda rank, count: movements.barrier(), []
        )

    # torch calls some of these by an older name as well.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ---------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> FabricWork:
        self._check_message(tensors, to, tag)
        data = view(plain(tensors[0]))
        client = self._session.client
        work: FabricWork = self._message(
            "send", tensors[0], lambda: client.send(self._label, self._nodes, to, tag, data), None
        )
        return work

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> FabricWork:
        self._check_message(tensors, source, tag)
        return self._receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> FabricWork:
        self._check_message(tensors, None, tag)
        return self._receive(tensors[0], -1, tag)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> FabricWork:
        outputs = Outputs()
        place = view(outputs.inout(tensor))  # a message may fill only a part of it
        client = self._session.client
        work: FabricWork = self._message(
            "recv",
            tensor,
            lambda: client.receive(self._label, self._nodes, source, tag, place),
            outputs.finish if outputs.pending else None,
        )
        return work

    def _check_message(self, tensors: Tensors, peer: int | None, tag: int) -> None:
        self._check_open()
        memory.require(_one(tensors), memory.check(tensors[0]))
        if peer is not None and (not 0 <= peer < self._count or peer == self._me):
            raise CollectiveError(
                f"rank {self._me} can't exchange messages with rank {peer} in a group of {self._count}"
            )
        if not 0 <= tag <= MAX_TAG:
            raise CollectiveError(f"a tag is a number from 0 to {MAX_TAG}, not {tag}")

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
            ended, lambda: f"{len(works)} calls", tensors, self._session.pool, lambda: "one of them waits"
        )

    # --- the end ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End all that runs in this group, on every rank."""
        reason = f"group {self._label} was aborted by rank {self._me}"
        self._closed = self._closed or "was aborted"
        if not self._session.closed:
            self._session.engine.call(lambda: self._session.client.break_group(self._label, reason))

    def shutdown(self) -> None:
        """Leave the group; with the group that made it, the fabric."""
        self._closed = "was destroyed"
        if self._session.closed:
            return
        if self._owns_session:
            self._session.close()
        else:
            self._session.engine.call(lambda: self._session.client.leave_group(self._label))


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
            session.pool.submit(run, done.result())

    answer.add_done_callback(arrived)
    return ended


def _one(held: Sequence[Any]) -> str:
    return "" if len(held) == 1 else f"one tensor (or list) is expected, not {len(held)}"


def _counted(held: Sequence[Any], count: int, what: str) -> str:
    return "" if len(held) == count else f"{len(held)} {what} are given, {count} are needed"


def _pairs(outputs: Tensors, inputs: Tensors, count: int, scatter: bool) -> str:
    """What is wrong with pairs of a tensor of all ranks and a tensor of one."""
    every = [*outputs, *inputs]
    reasons = [_counted(outputs, len(inputs), "outputs")] + [memory.check(each) for each in every]
    if any(reasons) or not every:
        return next(filter(None, reasons), "there is no tensor")
    if memory.same(every, "inputs and outputs"):
        return memory.same(every, "inputs and outputs")
    for output, mine in zip(outputs, inputs, strict=True):
        small, large = (output, mine) if scatter else (mine, output)
        if large.numel() != small.numel() * count:
            names = ("input", "output") if scatter else ("output", "input")
            return (
                f"the {names[0]} has {large.numel()} elements, not {count} times the "
                f"{small.numel()} of the {names[1]}"
            )
    return ""


def _splits(tensor: torch.Tensor, splits: Sequence[int], count: int, what: str) -> str:
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % count:
            return f"the {what} has {rows} rows, which {count} ranks can't share evenly"
        return ""
    if len(splits) != count:
        return f"{len(splits)} splits of the {what} are given for {count} ranks"
    if min(splits) < 0 or sum(splits) != rows:
        return f"the splits of the {what} add up to {sum(splits)}, it has {rows} rows"
    return ""


def _cut(tensor: torch.Tensor, splits: Sequence[int], count: int) -> list[torch.Tensor]:
    return list(tensor.split(list(splits) or [tensor.shape[0] // count] * count))
